"""Bad batches and bad decodes: a clear error, and neither the buffers nor the keys have changed after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from bad_values import ARRAYS, NUMBERS
from mlaplan import _core
from mlaplan.device import HostDevice
from planning import assert_holds, batch, ints, planner, starts

TOP = 2**31 - 1
GOOD = batch([1, 2], [9, 40], 4, on_device=True)
EXACT = mlaplan.Exact(ints(9, 40))


def change(**changes: Any) -> mlaplan.Batch:
    return dataclasses.replace(GOOD, **changes)


class Guarded:
    """A planner that holds a plan, and what must not change."""

    def __init__(self, **settings: Any) -> None:
        self.planner = planner(max_requests=4, max_rows=16, **settings)
        self.plan = self.planner.plan(GOOD)
        self.before = self.state()

    def state(self) -> tuple[Any, ...]:
        constants = [array.tobytes() for group in self.planner._constants for array in group]
        return self.planner._arena.tobytes(), constants, self.planner.stats

    def check(self) -> None:
        """Everything is as it was, and the planner still knows what it holds."""
        assert self.state() == self.before
        assert self.planner.plan(GOOD).decision.action == "nothing"
        assert_holds(self.plan, [1, 2], [9, 40])
        launches = self.planner.stats.launches
        self.planner.refresh(self.plan)
        assert self.planner.stats.launches == launches
        self.before = self.state()


# What is wrong, the batch, its error and words of the message, and whether a deferred plan refuses it as well.
BATCHES: list[tuple[str, Any, type[Exception], str]] = [
    ("None", None, TypeError, "batch must be a Batch, not NoneType"),
    ("tuple", (ints(0, 1), ints(3)), TypeError, "batch must be a Batch, not tuple"),
    ("class", mlaplan.Batch, TypeError, "batch must be a Batch, not type"),
    ("array as lengths", change(lengths=ints(9, 40)), TypeError, "lengths must be Exact, .* not ndarray"),
    ("Exact of None", change(lengths=mlaplan.Exact(None)), TypeError, "seq_lens must be"),  # type: ignore[arg-type]
    ("Exact of a bound", change(lengths=mlaplan.Exact(EXACT)), TypeError, "seq_lens must be.* not Exact"),  # type: ignore[arg-type]
    ("bound of None", change(lengths=mlaplan.UpperBound(None, 1)), TypeError, "seq_lens_bound must be"),  # type: ignore[arg-type]
    ("rejects None", change(lengths=mlaplan.UpperBound(ints(9, 40), None)), TypeError, "max_rejects"),  # type: ignore[arg-type]
    ("rejects array", change(lengths=mlaplan.UpperBound(ints(9, 40), ints(1, 1))), TypeError, "max_rejects.* ndarray"),  # type: ignore[arg-type]
    ("rejects -1", change(lengths=mlaplan.UpperBound(ints(9, 40), -1)), ValueError, "max_rejects is -1"),
    ("rejects 2^31", change(lengths=mlaplan.UpperBound(ints(9, 40), 2**31)), ValueError, "max_rejects is 2147483648"),
    ("no boundaries", change(query_start_loc=ints()), ValueError, "query_start_loc has 0 entries"),
    ("falling", change(query_start_loc=ints(0, 2, 1)), ValueError, r"query_start_loc\[2\] is 1.* 2"),
    ("late start", change(query_start_loc=ints(1, 2, 3)), ValueError, r"query_start_loc\[0\] is 1"),
    ("few lengths", change(lengths=mlaplan.Exact(ints(9))), ValueError, "seq_lens has 1 entries, expected 2"),
    ("short bound", change(lengths=mlaplan.UpperBound(ints(9), 1)), ValueError, "seq_lens_bound has 1 entries"),
    ("short length", change(lengths=mlaplan.Exact(ints(9, 1))), ValueError, r"seq_lens\[1\] is 1.* 2 query tokens"),
    ("negative bound", change(lengths=mlaplan.UpperBound(ints(-1, 9), 1)), ValueError, r"seq_lens_bound\[0\] is -1"),
    ("few padded rows", change(padded_rows=2), ValueError, "padded_rows is 2, must be at least 3"),
    ("negative padded rows", change(padded_rows=-1), ValueError, "padded_rows is -1"),
    ("many padded rows", change(padded_rows=17), mlaplan.PlanError, "max_rows.* 17.* 16"),
    ("huge padded rows", change(padded_rows=2**63 - 1), mlaplan.PlanError, "max_rows.* 9223372036854775807.* 16"),
    ("padded rows 64 bits", change(padded_rows=2**64), ValueError, "padded_rows is 18446744073709551616"),
    ("padded rows float", change(padded_rows=4.0), TypeError, "padded_rows.* float"),
    ("padded rows bool", change(padded_rows=True), TypeError, "padded_rows.* bool"),
    ("padded rows array", change(padded_rows=ints(4)), TypeError, "padded_rows.* ndarray"),
    ("exactness None", change(boundaries_exact=None), TypeError, "boundaries_exact"),
    ("exactness 1", change(boundaries_exact=1), TypeError, "boundaries_exact"),
    ("many rows", batch([17], [40], on_device=True), mlaplan.PlanError, "max_rows.* 17.* 16"),
    ("very many rows", batch([TOP], [TOP], on_device=True), mlaplan.PlanError, f"max_rows.* {TOP}.* 16"),
    ("many requests", batch([1] * 5, [9] * 5, on_device=True), mlaplan.PlanError, "max_requests.* 5.* 4"),
    ("many idle requests", batch([0] * 5, [9] * 5, on_device=True), mlaplan.PlanError, "max_requests.* 5.* 4"),
    ("one device array", change(device_seq_lens=None), mlaplan.PlanError, "device_seq_lens is needed"),
    ("the other", change(device_query_start_loc=None), mlaplan.PlanError, "device_query_start_loc is needed"),
    ("device list", change(device_seq_lens=[9, 40]), TypeError, "device_seq_lens must be .*not list"),
    ("device int64", change(device_seq_lens=np.array([9, 40])), TypeError, "device_seq_lens .* int64"),
    ("device float", change(device_query_start_loc=np.zeros(3)), TypeError, "device_query_start_loc .* float64"),
    ("device 2-D", change(device_seq_lens=np.zeros((1, 2), np.int32)), TypeError, "device_seq_lens .* 2 dimensions"),
    ("device strided", change(device_seq_lens=np.zeros(4, np.int32)[::2]), ValueError, "device_seq_lens .*contiguous"),
    ("device short", change(device_seq_lens=ints(9)), ValueError, "device_seq_lens has 1 entries, expected 2"),
    ("device long", change(device_query_start_loc=ints(0, 1, 2, 3)), ValueError, "device_query_start_loc has 4"),
    ("device big-endian", change(device_seq_lens=np.zeros(2, ">i4")), TypeError, "device_seq_lens"),
]  # fmt: skip


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("bad", "error", "words"), [row[1:] for row in BATCHES], ids=[row[0] for row in BATCHES])
def test_a_refused_batch_changes_nothing(bad: Any, error: type[Exception], words: str, deferred: bool) -> None:
    guarded = Guarded()
    with pytest.raises(error, match=words):
        guarded.planner.plan(bad, deferred=deferred)
    guarded.check()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("value", "error", "words"), ARRAYS, ids=range(len(ARRAYS)))
def test_wrong_arrays_of_a_batch_are_named(value: Any, error: type[Exception], words: str, deferred: bool) -> None:
    guarded = Guarded()
    for name, bad in (
        ("query_start_loc", change(query_start_loc=value)),
        ("seq_lens", change(lengths=mlaplan.Exact(value))),
        ("seq_lens_bound", change(lengths=mlaplan.UpperBound(value, 1))),
    ):
        with pytest.raises(error, match=f"^{name} .*{words}"):
            guarded.planner.plan(bad, deferred=deferred)
    if value is not None:
        for name in ("device_query_start_loc", "device_seq_lens"):
            if words == "aligned" or (words == "contiguous" and not value.flags.writeable):
                continue  # only the host's arrays are borrowed by Rust
            with pytest.raises((TypeError, ValueError), match=f"^{name} "):
                guarded.planner.plan(change(**{name: value}), deferred=deferred)
    guarded.check()


@pytest.mark.parametrize(("value", "error", "words"), NUMBERS, ids=range(len(NUMBERS)))
def test_wrong_numbers_of_a_batch_are_named(value: Any, error: type[Exception], words: str) -> None:
    guarded = Guarded()
    for name, bad in (
        ("padded_rows", change(padded_rows=value)),
        ("max_rejects", change(lengths=mlaplan.UpperBound(ints(9, 40), value))),
    ):
        for deferred in (False, True):
            with pytest.raises(error, match=f"^{name} .*{words}"):
                guarded.planner.plan(bad, deferred=deferred)
    guarded.check()


@pytest.mark.parametrize(
    "bad",
    [
        change(device_query_start_loc=None, device_seq_lens=None, lengths=None),
        change(device_query_start_loc=None, device_seq_lens=None, lengths=mlaplan.UpperBound(ints(9, 40), 3)),
        change(device_query_start_loc=None, device_seq_lens=None, boundaries_exact=False),
    ],
)
def test_a_batch_that_the_host_does_not_know_needs_device_arrays(bad: mlaplan.Batch) -> None:
    guarded = Guarded()
    with pytest.raises(mlaplan.PlanError, match="device_query_start_loc and device_seq_lens are needed"):
        guarded.planner.plan(bad)
    with pytest.raises(mlaplan.PlanError, match="device_query_start_loc is needed"):
        guarded.planner.plan(bad, deferred=True)
    guarded.check()


def test_a_copy_into_a_graph_is_refused() -> None:
    device = HostDevice()
    made = planner(device)
    made.plan(batch([1], [9]))
    before = made._arena.tobytes()
    with device.record() as graph, pytest.raises(mlaplan.PlanError, match="deferred=True"):
        made.plan(batch([1], [5]))
    assert not graph.ops
    assert made._arena.tobytes() == before
    assert made.plan(batch([1], [9])).decision.action == "nothing"
    plan = made.plan(batch([1], [5]))
    assert_holds(plan, [1], [5])


@pytest.mark.parametrize("call", ["refresh", "quality", "decode"])
@pytest.mark.parametrize("bad", [None, 7, GOOD, mlaplan.Plan])
def test_what_is_no_plan_is_refused(call: str, bad: Any) -> None:
    guarded = Guarded()
    arguments = [None] * 4 if call == "decode" else []
    more = {"block_size": 1} if call == "decode" else {}
    with pytest.raises(TypeError, match="plan must be a Plan"):
        getattr(guarded.planner, call)(bad, *arguments, **more)
    with pytest.raises(ValueError, match="another planner"):
        getattr(guarded.planner, call)(Guarded().plan, *arguments, **more)
    guarded.check()


def decode_arguments() -> dict[str, Any]:
    """A right call for 4 padded rows, 2 heads of 8 values (4 of them V), topk 16."""
    return {"q": np.ones((4, 2, 8)), "kv_cache": np.ones((64, 8)), "topk_indices": np.zeros((4, 16), np.int32),
            "block_table": np.zeros((2, 4), np.int32), "block_size": 16}  # fmt: skip


DECODES: list[tuple[str, Any, type[Exception], str]] = [
    *[(name, value, TypeError, f"{name} must be a numpy.ndarray, not {kind}") for name in
      ("q", "kv_cache", "topk_indices", "block_table")
      for value, kind in ((None, "NoneType"), ([1.0], "list"), (3, "int"))],
    *[(name, value, TypeError, f"{name} must be of a floating-point dtype, not {value.dtype}") for name, shape in
      (("q", (4, 2, 8)), ("kv_cache", (64, 8)))
      for value in (np.ones(shape, np.int32), np.ones(shape, bool), np.ones(shape, complex))],
    *[(name, value, TypeError, f"{name} must be int32, not {value.dtype}") for name, shape in
      (("topk_indices", (4, 16)), ("block_table", (2, 4))) for value in
      (np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, ">i4"), np.zeros(shape, np.uint32))],
    ("q", np.ones((3, 2, 8)), ValueError, r"q has shape \(3, 2, 8\), expected .*\(4, 2, 8\)"),
    ("q", np.ones((4, 1, 8)), ValueError, r"q has shape \(4, 1, 8\)"),
    ("q", np.ones((4, 16)), ValueError, r"q has shape \(4, 16\), expected 3 dimensions"),
    ("kv_cache", np.ones((64, 9)), ValueError, r"kv_cache has shape \(64, 9\)"),
    ("kv_cache", np.ones((0, 8)), ValueError, r"kv_cache has shape \(0, 8\)"),
    ("kv_cache", np.ones((8, 8, 8)), ValueError, "kv_cache has shape .* 2 dimensions"),
    ("topk_indices", np.zeros((3, 16), np.int32), ValueError, r"topk_indices has shape \(3, 16\)"),
    ("topk_indices", np.zeros((4, 15), np.int32), ValueError, r"topk_indices has shape \(4, 15\)"),
    ("topk_indices", np.zeros(64, np.int32), ValueError, "topk_indices has shape .* 2 dimensions"),
    ("block_table", np.zeros((1, 4), np.int32), ValueError, r"block_table has shape \(1, 4\).* 2 requests"),
    ("block_table", np.zeros(4, np.int32), ValueError, "block_table has shape .* 2 dimensions"),
    ("block_size", 0, ValueError, "block_size is 0"),
    ("block_size", -16, ValueError, "block_size is -16"),
    ("block_size", 2**31, ValueError, "block_size is 2147483648"),
    ("block_size", 1 << 40_000, ValueError, "block_size is huge"),
    ("block_size", 16.0, TypeError, "block_size must be a whole number, not float"),
    ("block_size", True, TypeError, "block_size must be a whole number, not bool"),
    ("block_size", None, TypeError, "block_size must be a whole number, not NoneType"),
    ("scale", float("nan"), ValueError, "scale is nan, must be finite"),
    ("scale", float("-inf"), ValueError, "scale is -inf"),
    ("scale", "1", TypeError, "scale must be a number, not str"),
    ("scale", True, TypeError, "scale must be a number, not bool"),
    ("out", np.ones((4, 2, 8)), ValueError, r"out has shape \(4, 2, 8\)"),
    ("out", np.ones((4, 2, 4), np.int32), TypeError, "out must be of a floating-point dtype"),
    ("out", [[0.0]], TypeError, "out must be a numpy.ndarray"),
    ("out", np.broadcast_to(np.ones(1), (4, 2, 4)), ValueError, "out is read-only"),
    ("lse", np.ones((2, 4)), ValueError, r"lse has shape \(2, 4\)"),
    ("lse", np.ones((4, 2), bool), TypeError, "lse must be"),
    ("lse", np.broadcast_to(np.ones(1), (4, 2)), ValueError, "lse is read-only"),
    ("fp8_scales", None, TypeError, "fp8_scales must be a pair"),
    ("fp8_scales", (1.0,), TypeError, "fp8_scales must be a pair"),
    ("fp8_scales", (1.0, None), ValueError, "fp8_scales is given"),
    ("fp8_scales", (np.ones(3), np.ones(3)), ValueError, "fp8_scales is given"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), DECODES, ids=[f"{row[0]} {at}" for at, row in enumerate(DECODES)]
)
def test_a_refused_decode_changes_nothing(name: str, value: Any, error: type[Exception], words: str) -> None:
    guarded = Guarded()
    written = {"out": np.full((4, 2, 4), 7.0), "lse": np.full((4, 2), 7.0)}
    with pytest.raises(error, match=words):
        guarded.planner.decode(guarded.plan, **{**decode_arguments(), **written, name: value})
    assert (written["out"] == 7).all()
    assert (written["lse"] == 7).all()
    guarded.before = (*guarded.before[:2], guarded.planner.stats) if name == "fp8_scales" else guarded.before
    guarded.check()


def test_the_decode_of_the_table_is_right_without_its_change() -> None:
    guarded = Guarded()
    out, lse = guarded.planner.decode(guarded.plan, **decode_arguments())
    assert (out[:3] == 1).all()
    assert not out[3:].any()
    assert np.isneginf(lse[3:]).all()


def test_a_stale_plan_without_device_arrays_is_refused() -> None:
    made = planner()
    plan = made.plan(batch([1], [9]))
    made.plan(batch([1], [8]))
    for call in (made.refresh, made.quality):
        with pytest.raises(mlaplan.PlanError, match="device_query_start_loc and device_seq_lens are needed"):
            call(plan)
    assert made.plan(batch([1], [8])).decision.action == "nothing"


def frozen(size: int) -> Any:
    array = np.zeros(size, np.int32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("staging", "error", "words"),
    [
        (lambda _: None, TypeError, "staging must be .*NoneType"),
        (lambda _: [0] * 999, TypeError, "staging must be .*list"),
        (np.zeros, TypeError, "staging must be .*float64"),
        (lambda words: np.zeros((words, 1), np.int32), TypeError, "staging must be .*2 dimensions"),
        (lambda words: np.zeros(2 * words, np.int32)[::2], ValueError, "staging must be contiguous"),
        (lambda words: np.zeros(words - 1, np.int32), ValueError, "staging has .* expected at least"),
        (lambda words: np.frombuffer(bytearray(4 * words + 1), np.int32, words, 1), ValueError, "must be aligned"),
        (frozen, TypeError, "staging is read-only"),
    ],
)  # fmt: skip
def test_a_refused_staging_area_keeps_the_plan_to_be_written(
    staging: Callable[[int], Any], error: type[Exception], words: str
) -> None:
    made = planner(max_rows=8)
    step, layout = made._step, made._layouts[0]
    decision = step.decide(starts([1]), ints(5), None, None, True, False, False)
    assert decision.action == "copy"
    with pytest.raises(error, match=words):
        step.write(decision, staging(layout.words))
    ticket = step.write(decision, np.zeros(layout.words, np.int32)).ticket
    assert step.decide(starts([1]), ints(5), None, None, True, False, False, ticket).action == "nothing"


def test_an_array_is_not_read_while_it_is_written() -> None:
    """Aliased arguments: reading twice is fine, and one memory for all inputs too."""
    both = ints(0, 1, 2, 3)
    assert mlaplan.row_lengths(both, both[1:], 4).tolist() == [1, 2, 3]
    plan = planner().plan(mlaplan.Batch(both, mlaplan.Exact(both[1:]), None, True, both, both[1:]))
    assert_holds(plan, [1, 1, 1], [1, 2, 3])


values = st.one_of(st.none(), st.integers(-3, 70), st.sampled_from([row[0] for row in (*ARRAYS, *NUMBERS)]),
                   st.lists(st.integers(-2, 50), max_size=6).map(lambda some: np.array(some, np.int32)))  # fmt: skip


FIELDS = [field.name for field in dataclasses.fields(mlaplan.Batch)]


@given(st.lists(st.tuples(st.sampled_from(FIELDS), values), max_size=3),
       st.sampled_from(["exact", "bound", "raw"]), values, st.booleans())  # fmt: skip
def test_no_batch_causes_anything_but_a_type_or_value_error(
    changes: list[tuple[str, Any]],
    kind: str,
    lengths: Any,
    deferred: bool,
) -> None:
    guarded = Guarded()
    bad: Any = {**dict(changes)}
    if kind != "raw":
        bad["lengths"] = mlaplan.Exact(lengths) if kind == "exact" else mlaplan.UpperBound(lengths, 2)
    try:
        guarded.planner.plan(change(**bad), deferred=deferred)
    except (TypeError, ValueError) as error:
        assert str(error)  # noqa: PT017 - a success is fine as well
        guarded.check()


def test_a_step_planner_used_out_of_order_says_so() -> None:
    step = planner()._step
    decision = step.decide(starts([1]), ints(5), None, None, True, False, False)
    step.invalidate()
    calls: list[Callable[[], object]] = [
        lambda: step.launch_instead(decision),
        lambda: step.write(decision, np.zeros(9999, np.int32)),
    ]
    for call in calls:
        with pytest.raises(mlaplan.PlanError, match="no plan"):
            call()
    with pytest.raises(TypeError, match="decision"):
        step.launch_instead(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.Decision()
