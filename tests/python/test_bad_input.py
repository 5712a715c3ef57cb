"""Bad input through every public function: a clear error that names the argument, and the position and value if any."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from bad_values import ARRAYS, NUMBERS
from mlaplan import _core
from mlaplan.device import make_device
from mlaplan.layout import Layout
from planning import ints

TOP = 2**31 - 1
QSL = ints(0, 2, 3)
LENS = ints(5, 6)
DICT: Any = {"max_rows": 8}
TABLE = _core.CostTable.named("aiter")


def schedule(**change: Any) -> Any:
    return mlaplan.schedule(**{"kv_indptr": ints(0, 5, 9), "num_cus": 4, **change})


def support(**change: Any) -> Any:
    return mlaplan.support(**{"arch": "gfx942", "heads": 16, "q_dtype": "bf16", "kv_dtype": "bf16", **change})


def shapes(**change: Any) -> Any:
    settings = {"max_rows": 8, "heads": 16, "arch": "gfx942", "num_cus": 304, "q_dtype": "bf16", "kv_dtype": "bf16"}
    return mlaplan.buffer_shapes(**{**settings, **change})


def budget(**change: Any) -> Any:
    return mlaplan.max_split_per_batch(
        **{"max_seq_len": 9, "topk": 4, "num_cus": 3, "min_tokens_per_split": 2, **change}
    )


def rows(**change: Any) -> Any:
    return mlaplan.row_lengths(**{"query_start_loc": QSL, "seq_lens": LENS, "topk": 4, **change})


def ids(**change: Any) -> Any:
    return mlaplan.request_ids(**{"query_start_loc": QSL, **change})


def costs(**change: Any) -> Any:
    return mlaplan.CostTable(**{"block_tokens": 16, "block": 1, "piece": 1, "whole": 1, "slot": 0, **change})


def finish(**change: Any) -> Any:
    return TABLE.finish_time(**{"work_indptr": ints(0, 1), "work_info": np.zeros(8, np.int32), **change})


def bound(**change: Any) -> Any:
    return TABLE.lower_bound(**{"row_lengths": ints(3, 4), "num_slots": 2, "fold": 1, **change})


def config(**change: Any) -> Any:
    return mlaplan.PlannerConfig(**{"max_rows": 8, "max_requests": 4, "topk": 16, "num_cus": 4, **change})


LAYOUT = Layout.of(8, num_cus=4, fold=1)
STEP: dict[str, Any] = {
    "max_requests": 4,
    "topk": 16,
    "num_cus": 4,
    "fold": 1,
    "split_budget": None,
    "min_tokens_per_split": 4,
    "classes": [(8, LAYOUT.offsets, LAYOUT.words)],
}


def step(**change: Any) -> Any:
    return _core.StepPlanner(**{**STEP, **change})


def decide(**change: Any) -> Any:
    arguments = {"query_start_loc": QSL, "lengths": LENS, "max_rejects": 2, "padded_rows": 4, "boundaries_exact": True,
                 "on_device": True, "force": False}  # fmt: skip
    return step().decide(**{**arguments, **change})


def defer(**change: Any) -> Any:
    arguments = {"query_start_loc": QSL, "lengths": LENS, "max_rejects": 2, "padded_rows": 4, "boundaries_exact": True}
    return step().defer(**{**arguments, **change})


ARRAY_ARGUMENTS: list[tuple[Callable[..., Any], str, str]] = [
    (mlaplan.segment_lengths, "query_start_loc", "query_start_loc"),
    (ids, "query_start_loc", "query_start_loc"),
    (rows, "query_start_loc", "query_start_loc"),
    (rows, "seq_lens", "seq_lens"),
    (mlaplan.kv_indptr, "row_lengths", "row_lengths"),
    (schedule, "kv_indptr", "kv_indptr"),
    (finish, "work_indptr", "work_indptr"),
    (finish, "work_info", "work_info"),
    (bound, "row_lengths", "row_lengths"),
    (decide, "query_start_loc", "query_start_loc"),
    (decide, "lengths", "seq_lens_bound"),
    (defer, "query_start_loc", "query_start_loc"),
    (defer, "lengths", "seq_lens_bound"),
]

NUMBER_ARGUMENTS: list[tuple[Callable[..., Any], str]] = [
    (ids, "padded_rows"),
    (rows, "padded_rows"),
    (rows, "topk"),
    *((budget, name) for name in ("max_seq_len", "topk", "num_cus", "min_tokens_per_split")),
    *((schedule, name) for name in ("num_cus", "max_split_per_batch", "fold")),
    *((support, name) for name in ("heads", "rows")),
    *((shapes, name) for name in ("max_rows", "heads", "num_cus")),
    *((costs, name) for name in ("block_tokens", "block", "piece", "whole", "slot")),
    *((bound, name) for name in ("num_slots", "fold")),
    *((step, name) for name in ("max_requests", "topk", "num_cus", "fold", "split_budget", "min_tokens_per_split")),
    *((decide, name) for name in ("max_rejects", "padded_rows")),
    *((defer, name) for name in ("max_rejects", "padded_rows")),
    *((config, name) for name in ("max_rows", "max_requests", "topk", "heads", "num_cus", "page_size", "split_budget")),
    *((config, name) for name in ("min_tokens_per_split", "fold", "staging_slots", "head_dim", "v_head_dim")),
]


def message(call: Callable[[], Any], error: type[Exception]) -> str:
    """The text of the error that `call` must raise, which may be a `PlanError` for a `ValueError`."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) in (error, mlaplan.PlanError) or error is TypeError, type(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("function", "argument", "name"), ARRAY_ARGUMENTS)
def test_an_array_of_the_wrong_kind_is_named(function: Callable[..., Any], argument: str, name: str) -> None:
    for value, error, words in ARRAYS:
        if value is None and argument == "lengths":
            continue  # nothing is known then; with max_rejects see the table below
        text = message(lambda value=value: function(**{argument: value}), error)  # type: ignore[misc]
        assert text.startswith(name), (value, text)
        assert words in text, (value, text)


@pytest.mark.parametrize(("function", "argument"), NUMBER_ARGUMENTS)
def test_a_number_of_the_wrong_kind_is_named(function: Callable[..., Any], argument: str) -> None:
    for value, error, words in NUMBERS:
        text = message(lambda value=value: function(**{argument: value}), error)  # type: ignore[misc]
        assert text.startswith(argument), (value, text)
        if function is not config or error is TypeError:
            assert words in text, (value, text)


# One wrong value each: call, error, words of the message.
VALUES: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("no boundaries", lambda: mlaplan.segment_lengths(ints()), ValueError, "query_start_loc has 0 entries"),
    ("late start", lambda: ids(query_start_loc=ints(1, 2)), ValueError, r"query_start_loc\[0\] is 1, must be 0"),
    ("early start", lambda: ids(query_start_loc=ints(-1, 2)), ValueError, r"query_start_loc\[0\] is -1, must be 0"),
    ("falling", lambda: mlaplan.segment_lengths(ints(0, 3, 2, 9)), ValueError, r"query_start_loc\[2\] is 2.* 3"),
    ("falling at the end", lambda: rows(query_start_loc=ints(0, 1, 0)), ValueError, r"query_start_loc\[2\] is 0.* 1"),
    ("wrapping", lambda: ids(query_start_loc=ints(0, TOP, -TOP)), ValueError, rf"query_start_loc\[2\] is -{TOP}"),
    ("too many rows", lambda: ids(query_start_loc=ints(0, TOP)), mlaplan.PlanError, rf"rows.* {TOP}.* 16777216"),
    ("rows too many by one", lambda: ids(padded_rows=(1 << 24) + 1), mlaplan.PlanError, "rows.* 16777217"),
    ("few padded rows", lambda: ids(padded_rows=2), ValueError, "padded_rows is 2, must be at least 3"),
    ("negative padded rows", lambda: ids(padded_rows=-1), ValueError, "padded_rows is -1, must be at least 0"),
    ("huge padded rows", lambda: ids(padded_rows=2**62), mlaplan.PlanError, "rows.* 4611686018427387904"),
    ("short lengths", lambda: rows(seq_lens=ints(5)), ValueError, "seq_lens has 1 entries, expected 2"),
    ("long lengths", lambda: rows(seq_lens=ints(5, 6, 7)), ValueError, "seq_lens has 3 entries, expected 2"),
    ("length below its query", lambda: rows(seq_lens=ints(5, 0)), ValueError, r"seq_lens\[1\] is 0.* 1 query tokens"),
    ("negative length", lambda: rows(seq_lens=ints(-7, 6)), ValueError, r"seq_lens\[0\] is -7, must be at least 0"),
    ("least length", lambda: rows(seq_lens=ints(2, -TOP - 1)), ValueError, rf"seq_lens\[1\] is -{TOP + 1}"),
    ("topk 0", lambda: rows(topk=0), ValueError, "topk is 0, must be at least 1"),
    ("topk of 33 bits", lambda: rows(topk=2**32), ValueError, f"topk is 4294967296, must be at most {TOP}"),
    ("rows x topk", lambda: rows(topk=TOP), mlaplan.PlanError, r"rows x topk.* 6442450941"),
    ("negative row", lambda: mlaplan.kv_indptr(ints(4, -1)), ValueError, r"row_lengths\[1\] is -1, must be at least 0"),
    ("rows too long", lambda: mlaplan.kv_indptr(ints(TOP, 1)), mlaplan.PlanError, "kv_indptr.* 2147483648"),
    ("negative longest", lambda: budget(max_seq_len=-1), ValueError, "max_seq_len is -1, must be at least 0"),
    ("budget of topk 0", lambda: budget(topk=0), ValueError, "topk is 0"),
    ("budget of no units", lambda: budget(num_cus=0), ValueError, "num_cus is 0, must be at least 1"),
    ("budget of many units", lambda: budget(num_cus=65537), ValueError, "num_cus is 65537, must be at most 65536"),
    ("no tokens per split", lambda: budget(min_tokens_per_split=0), ValueError, "min_tokens_per_split is 0"),
    ("empty indptr", lambda: schedule(kv_indptr=ints()), ValueError, "kv_indptr has 0 entries"),
    ("falling indptr", lambda: schedule(kv_indptr=ints(0, 9, 8)), ValueError, r"kv_indptr\[2\] is 8.* 9"),
    ("negative indptr", lambda: schedule(kv_indptr=ints(-1, 8)), ValueError, r"kv_indptr\[0\] is -1"),
    ("schedule without units", lambda: schedule(num_cus=0), ValueError, "num_cus is 0"),
    ("schedule of negative units", lambda: schedule(num_cus=-4), ValueError, "num_cus is -4, must be at least 1"),
    ("schedule of many units", lambda: schedule(num_cus=2**40), ValueError, "num_cus is 1099511627776.* 65536"),
    ("budget 0", lambda: schedule(max_split_per_batch=0), ValueError, "max_split_per_batch is 0, must be -1"),
    ("budget -2", lambda: schedule(max_split_per_batch=-2), ValueError, "max_split_per_batch is -2"),
    ("budget of 32 bits", lambda: schedule(max_split_per_batch=2**31), ValueError, "max_split_per_batch is 2147483648"),
    ("fold 0", lambda: schedule(fold=0), ValueError, "fold is 0"),
    ("fold 129", lambda: schedule(fold=129), ValueError, "fold is 129, must be at most 128"),
    ("folded", lambda: schedule(kv_indptr=np.zeros(1 << 18, np.int32), fold=128), mlaplan.PlanError, "fold.* 33554304"),
    ("variant", lambda: schedule(variant="fast"), ValueError, 'variant is "fast".*parallel'),
    ("variant None", lambda: schedule(variant=None), TypeError, "variant"),
    ("policy", lambda: schedule(policy="best"), ValueError, 'policy is "best".*aiter'),
    ("policy 3", lambda: schedule(policy=3), TypeError, "policy"),
    ("skip_empty", lambda: schedule(skip_empty="yes"), TypeError, "skip_empty"),
    ("arch", lambda: support(arch="gfx90a"), ValueError, 'arch is "gfx90a".*gfx942'),
    ("arch None", lambda: support(arch=None), TypeError, "arch"),
    ("heads 0", lambda: support(heads=0), ValueError, "heads is 0"),
    ("heads -1", lambda: support(heads=-1), ValueError, "heads is -1"),
    ("q_dtype", lambda: support(q_dtype="int4"), ValueError, 'q_dtype is "int4".*bf16'),
    ("kv_dtype", lambda: support(kv_dtype=""), ValueError, 'kv_dtype is "".*bf16'),
    ("kv_dtype NumPy", lambda: support(kv_dtype=np.float32), TypeError, "kv_dtype"),
    ("negative rows", lambda: support(rows=-1), ValueError, "rows is -1, must be at least 0"),
    ("old release", lambda: support(aiter_version="0.0.1"), ValueError, 'aiter_version is "0.0.1"'),
    ("no release", lambda: support(aiter_version="latest"), ValueError, 'aiter_version is "latest"'),
    ("release number", lambda: support(aiter_version=0.1), TypeError, "aiter_version"),
    ("shapes of no rows", lambda: shapes(max_rows=0), ValueError, "max_rows is 0"),
    ("shapes of many rows", lambda: shapes(max_rows=2**62), mlaplan.PlanError, "max_rows"),
    ("shapes of many heads", lambda: shapes(heads=129), ValueError, "heads is 129, must be at most 128"),
    ("shapes of arch", lambda: shapes(arch="MI300X"), ValueError, 'arch is "MI300X"'),
    ("shapes of dtype", lambda: shapes(q_dtype="x"), ValueError, 'q_dtype is "x"'),
    ("cost table", lambda: mlaplan.CostTable.named("a100"), ValueError, 'name is "a100".*aiter'),
    ("cost table None", lambda: mlaplan.CostTable.named(None), TypeError, "name"),  # type: ignore[arg-type]
    ("no block", lambda: costs(block_tokens=0), ValueError, "block_tokens is 0, must be at least 1"),
    ("negative cost", lambda: costs(piece=-1), ValueError, "piece is -1, must be at least 0"),
    ("large cost", lambda: costs(slot=2**32), ValueError, "slot is 4294967296, must be at most 16777216"),
    ("cut works", lambda: finish(work_info=np.zeros(9, np.int32)), ValueError, "work_info has 9 entries.* of 8"),
    ("works beyond", lambda: finish(work_indptr=ints(0, 2)), ValueError, r"work_indptr\[1\] is 2, must be at most 1"),
    ("slots fall", lambda: finish(work_indptr=ints(0, 1, 0)), ValueError, r"work_indptr\[2\] is 0.* 1"),
    ("negative slot", lambda: finish(work_indptr=ints(-1, 1)), ValueError, r"work_indptr\[0\] is -1"),
    ("negative row length", lambda: bound(row_lengths=ints(3, -2)), ValueError, r"row_lengths\[1\] is -2"),
    ("no slots", lambda: bound(num_slots=0), ValueError, "num_slots is 0"),
    ("no fold", lambda: bound(fold=0), ValueError, "fold is 0"),
    ("device name", lambda: make_device("tpu"), ValueError, "device is 'tpu', known are"),
    ("device None", lambda: make_device(None), ValueError, "device is 'None'"),
    ("device number", lambda: make_device(0), ValueError, "device is '0'"),
    ("planner of a dict", lambda: mlaplan.Planner(DICT, "cpu"), TypeError, "config must be a PlannerConfig, not dict"),
    ("planner of a device", lambda: mlaplan.Planner(config(), "cpu:0"), ValueError, "device is 'cpu:0'"),
    ("step of no classes", lambda: step(classes=[]), ValueError, "classes has 0 entries"),
    ("step of classes 3", lambda: step(classes=3), ValueError, "classes must be a list"),
    ("step of short layout", lambda: step(classes=[(8, LAYOUT.offsets, 9)]), ValueError, r"classes\[0\] is 9"),
    ("step of overlap", lambda: step(classes=[(8, (0, 1, 2, 3, 4), 999)]), ValueError, r"classes\[0\]"),
    ("step of -8 rows", lambda: step(classes=[(-8, LAYOUT.offsets, LAYOUT.words)]), ValueError, "classes.* negative"),
    ("step of many rows", lambda: step(classes=[(2**64 - 1, LAYOUT.offsets, LAYOUT.words)]), ValueError, "rows x topk"),
    ("step of equal classes", lambda: step(classes=STEP["classes"] * 2), ValueError, r"classes\[1\] is 8, .* 9"),
    ("step of many requests", lambda: step(max_requests=2**40), ValueError, "max_requests is 1099511627776"),
    ("step of budget", lambda: step(split_budget=0), ValueError, "max_split_per_batch is 0"),
    ("bound without", lambda: decide(lengths=None), ValueError, "max_rejects is given without seq_lens_bound"),
    ("negative rejects", lambda: decide(max_rejects=-1), ValueError, "max_rejects is -1, must be at least 0"),
    ("exact as text", lambda: decide(boundaries_exact="no"), TypeError, "boundaries_exact"),
    ("force as number", lambda: decide(force=1), TypeError, "force"),
    ("nothing to write", lambda: step().write(decide(), np.zeros(999, np.int32)), mlaplan.PlanError, "no plan is"),
    ("nothing to launch", lambda: step().launch_instead(decide()), mlaplan.PlanError, "no plan is waiting"),
    ("no decision", lambda: step().write(None, np.zeros(999, np.int32)), TypeError, "decision"),
    ("negative ticket", lambda: decide(arrived=-1), OverflowError, "negative"),
    ("short staging", lambda: decide(max_rejects=None, staging=LENS.copy()), ValueError, "staging has . entries"),
    ("staging as list", lambda: decide(max_rejects=None, staging=[0] * 999), TypeError, "staging"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), [row[1:] for row in VALUES], ids=[row[0] for row in VALUES])
def test_a_wrong_value_is_named(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=words):
            call()
        assert tracemalloc.get_traced_memory()[1] < 200_000_000
    finally:
        tracemalloc.stop()


CONFIGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *[({name: 0}, ValueError, f"{name} is 0, must be at least 1") for name in
      ("max_rows", "max_requests", "topk", "heads", "num_cus", "min_tokens_per_split", "fold", "staging_slots")],
    ({"head_dim": 0}, ValueError, "head_dim is 0, must be at least 1"),
    ({"max_rows": np.int32(2**20), "topk": np.int32(2048)}, mlaplan.PlanError, "max_rows x topk is 2147483648"),
    ({"max_rows": 2**24 + 1, "topk": 1}, ValueError, "max_rows is 16777217, must be at most 16777216"),
    ({"max_rows": 2**20, "topk": 2048}, mlaplan.PlanError, "max_rows x topk is 2147483648"),
    ({"max_requests": 2**40}, ValueError, "max_requests is 1099511627776"),
    ({"staging_slots": 2**20}, ValueError, "staging_slots is 1048576, must be at most 1024"),
    ({"head_dim": 2**40}, ValueError, "head_dim is 1099511627776"),
    ({"heads": 10**9}, ValueError, "heads is 1000000000"),
    ({"num_cus": 65537}, ValueError, "num_cus is 65537"),
    ({"fold": 129}, ValueError, "fold is 129"),
    ({"v_head_dim": 577}, ValueError, "v_head_dim is 577, must be at most head_dim, 576"),
    ({"split_budget": 0}, ValueError, "split_budget is 0, must be -1"),
    ({"split_budget": -2}, ValueError, "split_budget is -2"),
    ({"split_budget": 2**31}, ValueError, "split_budget is 2147483648"),
    ({"page_size": 64}, ValueError, "page_size is 64"),
    ({"capture_sizes": [1, 2]}, TypeError, "capture_sizes must be a tuple of row counts, not list"),
    ({"capture_sizes": (1, 9)}, ValueError, r"capture_sizes\[1\] is 9, must be at most 8"),
    ({"capture_sizes": (0,)}, ValueError, r"capture_sizes\[0\] is 0"),
    ({"capture_sizes": (1, True)}, TypeError, r"capture_sizes\[1\] must be a whole number, not bool"),
    ({"capture_sizes": (1.5,)}, TypeError, r"capture_sizes\[0\]"),
    ({"policy": "balanced!"}, ValueError, "policy is 'balanced!'"),
    ({"policy": None}, TypeError, "policy must be a string"),
    ({"policy": np.array(["aiter", "x"])}, TypeError, "policy must be a string"),
    ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    ({"schedule_maker": "rust"}, ValueError, "schedule_maker is 'rust'"),
    ({"schedule_maker": "aiter"}, ValueError, "schedule_maker is 'aiter', but backend"),
    ({"q_dtype": "fp4"}, ValueError, "q_dtype is 'fp4'"),
    ({"kv_dtype": 8}, TypeError, "kv_dtype must be a string"),
    ({"arch": "gfx1100"}, ValueError, 'arch is "gfx1100"'),
    ({"arch": 942}, TypeError, "arch"),
    ({"arch": None, "num_cus": None, "backend": "aiter"}, ValueError, "arch is None"),
    ({"aiter_version": "x"}, ValueError, 'aiter_version is "x"'),
    ({"aiter_version": 18}, TypeError, "aiter_version"),
    ({"always_rebuild": 1}, TypeError, "always_rebuild must be True or False, not int"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), CONFIGS)
def test_a_wrong_setting_is_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        config(**change)


def test_a_setting_that_no_device_fills_in_is_named() -> None:
    with pytest.raises(ValueError, match="num_cus is None"):
        mlaplan.Planner(config(arch=None, num_cus=None), "cpu")
    with pytest.raises(ValueError, match="num_cus and fold are open"):
        _ = config(num_cus=None).params
    with pytest.raises(ValueError, match="heads is 16, must be a multiple of the fold, 3"):
        mlaplan.Planner(config(fold=3), "cpu")


def test_the_table_is_long_enough() -> None:
    assert len(ARRAYS) + len(NUMBERS) + len(VALUES) + len(CONFIGS) >= 80


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.integers(-3, 9), max_size=4).map(lambda values: np.array(values, np.int32)),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(lambda values: np.array(values, np.int32)),
    st.sampled_from([row[0] for row in (*ARRAYS, *NUMBERS)]),
)  # fmt: skip


@given(st.sampled_from([*ARRAY_ARGUMENTS, *((f, a, a) for f, a in NUMBER_ARGUMENTS)]), anything)
def test_no_argument_causes_anything_but_a_type_or_value_error(
    entry: tuple[Callable[..., Any], str, str], value: Any
) -> None:
    function, argument, _name = entry
    try:
        function(**{argument: value})
    except (TypeError, ValueError) as error:
        assert str(error)  # noqa: PT017 - a success is fine as well
