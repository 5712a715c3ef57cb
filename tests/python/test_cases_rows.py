"""Reports about keys, lengths that the host may not know, and the cost of a step: each with its right answer."""

from __future__ import annotations

import gc
import sys
from functools import partial
from itertools import product
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.device import HostDevice
from planning import assert_holds, batch, definition, from_nothing, held, ints, planner, starts


class Unreadable(np.ndarray):
    """A device array: its dtype and shape are there, its content is not."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise AssertionError("device memory was read")

    __array_function__ = __array_ufunc__ = __getitem__ = __iter__ = _refuse
    tolist = item = copy = tobytes = max = min = sum = astype = __array__ = _refuse


def unreadable(values: Int32Array) -> Any:
    return values.view(Unreadable)


def test_saturated_draft_steps_plan_once_and_read_nothing() -> None:
    """vllm#54369."""
    made = planner(topk=2048)
    launches = []
    for step in range(3):
        seq_lens = np.arange(16384, 16392, dtype=np.int32) + step
        arrays = {"device_query_start_loc": unreadable(starts([1] * 8)), "device_seq_lens": unreadable(seq_lens)}
        plan = made.plan(mlaplan.Batch(starts([1] * 8), mlaplan.Exact(seq_lens), **arrays))
        assert np.diff(plan.kv_indptr).tolist() == [2048] * 8
        launches.append(plan.decision.action)
    assert launches == ["copy", "nothing", "nothing"]
    assert (made.stats.read_backs, made.stats.copies, made.stats.launches) == (0, 1, 0)


def test_an_unreadable_array_says_when_it_is_read() -> None:
    with pytest.raises(AssertionError, match="was read"):
        unreadable(ints(1, 2))[0]
    with pytest.raises(AssertionError, match="was read"):
        np.diff(unreadable(ints(1, 2)))


def test_draft_steps_below_topk_are_made_anew() -> None:
    """vllm#54369, the case where an empty hook would be wrong."""
    made = planner(topk=2048)
    for length in (5, 6, 7):
        plan = made.plan(batch([1], [length]))
        assert plan.decision.action == "copy"
        assert plan.kv_indptr.tolist() == [0, length]


@pytest.mark.parametrize(("bound", "action"), [(2053, "launch"), (2054, "nothing")])
def test_saturation_is_proven_with_room_for_every_reject(bound: int, action: str) -> None:
    """vllm#40654: 2053 may truly be rows of 2047, 2048, 2048, 2048."""
    made = planner(topk=2048)
    made.plan(batch([4], [9000], on_device=True))
    truth = bound - 3
    assert (definition([4], [truth], 2048)[1] == [2048] * 4) is (action == "nothing")
    plan = made.plan(batch([4], [truth], on_device=True, lengths=mlaplan.UpperBound(ints(bound), 3)))
    assert plan.decision.action == action
    assert_holds(plan, [4], [truth])


@pytest.mark.parametrize("topk", [1, 2, 3, 7])
def test_a_bound_is_believed_if_every_length_it_allows_gives_one_plan(topk: int) -> None:
    """vllm#40654: the proof against all lengths that a bound stands for."""
    made = planner(topk=topk)
    for query_len, rejects, slack in product(range(1, 5), range(4), range(-4, 7)):
        bound = max(query_len, topk + query_len - 1 + slack)
        possible = range(bound - rejects, bound + 1)
        plans = {tuple(definition([query_len], [length], topk)[1]) for length in possible if length >= query_len}
        # A length below the query tokens cannot be, but the bound does not say so.
        certain = len(plans) == 1 and possible[0] >= query_len
        lengths = mlaplan.UpperBound(ints(bound), rejects)
        made.invalidate()
        plan = made.plan(batch([query_len], [bound], on_device=True, lengths=lengths))
        believed = plan.decision.action == "copy"
        assert believed or plan.decision.action == "launch"
        assert certain or not believed, (query_len, rejects, bound)
        # Not to believe it costs a launch; it is only done where some row may be short.
        assert believed or possible[0] - query_len + 1 < topk, (query_len, rejects, bound)


def test_unknown_lengths_let_the_device_decide() -> None:
    """vllm#29134: a plan and no exception, without a read."""
    made = planner(topk=16)
    plan = made.plan(batch([1, 2], [5, 40], on_device=True, lengths=None))
    assert plan.decision.action == "launch"
    assert "lengths unknown" in plan.decision.reasons
    assert made.stats.read_backs == 0
    assert_holds(plan, [1, 2], [5, 40])
    bound = mlaplan.UpperBound(ints(7, 40), 2)
    plan = made.plan(batch([1, 2], [5, 40], on_device=True, lengths=bound))
    assert plan.decision.reasons == ("bound not saturated",)
    assert_holds(plan, [1, 2], [5, 40])


def test_exact_and_bound_paths_agree_when_nothing_was_rejected() -> None:
    """vllm-ascend#16465."""
    query_lens, seq_lens = [2, 4, 1], [30, 5, 900]
    exact = planner().plan(batch(query_lens, seq_lens))
    bound = planner().plan(batch(query_lens, seq_lens, on_device=True, lengths=mlaplan.UpperBound(ints(*seq_lens), 3)))
    assert (exact.decision.action, bound.decision.action) == ("copy", "launch")
    for one, other in zip(held(exact), held(bound), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("rows", [(100, 10, 50), (8, 128, 1, 64), (64, 63, 65)])
def test_a_smaller_plan_leaves_no_tail_of_a_larger_one(rows: tuple[int, ...]) -> None:
    """vllm#42982: build 100 tokens, then 10, then 50."""
    made = planner(max_rows=128, max_requests=128, topk=8)
    for count in rows:
        plan = made.plan(batch([1] * count, [20] * count, 128))
        assert_holds(plan, [1] * count, [20] * count)
        assert not plan.request_ids[count:].any()
        assert plan.decision.action == "copy"
    assert made.plan(batch([1] * count, [21] * count, 128)).decision.action == "nothing"


def test_whether_exact_lengths_are_needed_is_said() -> None:
    """sglang#26128, sglang#27979: a proven bound needs none."""
    proven = planner(topk=16).plan(batch([1], [99], lengths=mlaplan.UpperBound(ints(99), 3)))
    assert "saturation proven by bound" in proven.decision.reasons
    assert proven.decision.action == "copy"
    with pytest.raises(mlaplan.PlanError, match="device_query_start_loc and device_seq_lens are needed"):
        planner(topk=16).plan(batch([1], [17], lengths=mlaplan.UpperBound(ints(17), 3)))


requests = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=12)


@given(steps=st.lists(st.tuples(requests, st.integers(0, 20)), min_size=1, max_size=5), fold=st.integers(1, 3))
def test_plans_are_the_definition_bit_for_bit(steps: list[tuple[list[tuple[int, int]], int]], fold: int) -> None:
    """TensorRT-LLM#18268, #19094: mixed, empty and padded batches, one after the other."""
    made = planner(max_rows=128, max_requests=12, topk=17, fold=fold, heads=6, min_tokens_per_split=2)
    for some, padding in steps:
        query_lens = [query_len for query_len, _ in some]
        seq_lens = [query_len + context for query_len, context in some]
        rows = min(128, sum(query_lens) + padding)
        plan = made.plan(batch(query_lens, seq_lens, rows))
        assert_holds(plan, query_lens, seq_lens)
        assert plan.padded_rows == len(plan.request_ids) == len(plan.kv_indptr) - 1 == rows


def test_padding_moves_within_a_class_without_a_copy() -> None:
    """ATOM#2039: what depends on the batch is uploaded once; padding is a longer view of it."""
    made = planner(capture_sizes=(24,))
    first = made.plan(batch([2] * 9, [9] * 9, 18))
    for rows in (24, 19, 18, 22):
        plan = made.plan(batch([2] * 9, [9] * 9, rows))
        assert plan.decision.action == "nothing"
        assert plan.kv_indptr.ctypes.data == first.kv_indptr.ctypes.data
        assert plan.kv_indptr.tolist() == [*first.kv_indptr.tolist(), *[first.kv_indptr[18]] * (rows - 18)]
    assert made.stats.copies == 1


def calls_of_a_plan(num_requests: int) -> int:
    """Python and C calls during one plan that copies."""
    made = planner(max_rows=1024, max_requests=1024)
    batches = [batch([1] * num_requests, [length] * num_requests) for length in (5, 6)]
    made.plan(batches[0])
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # whose callbacks are calls as well
    sys.setprofile(count)
    try:
        made.plan(batches[1])
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_no_python_per_request() -> None:
    """TensorRT-LLM#16073, flashinfer#5264, vllm#57352: a plan takes as many calls for 1,024 requests as for one."""
    assert 10 < calls_of_a_plan(1) == calls_of_a_plan(64) == calls_of_a_plan(1024)


@pytest.mark.parametrize("live", [1, 8, 60])
def test_cost_follows_live_rows_and_not_the_capacity(live: int) -> None:
    """sglang#37124: capacity 16,384 rows, live 8."""
    copied = set()
    for capacity in (64, 1024, 16384):
        made = planner(max_rows=capacity, max_requests=64)
        made.plan(batch([1] * live, [9] * live))
        copied.add(made.stats.bytes_copied)
    assert len(copied) == 1
    assert copied.pop() < 4 * (64 * 8 + 20 * 2 + 64 * 8 * 2 + 8 * (64 + 20))


def test_layers_share_one_launch_and_fresh_views_hit() -> None:
    """TensorRT-LLM#12581, #3322, sglang#32978, #39085: keys are values and not objects."""
    made = planner()
    source_starts, source_lens = starts([1, 1, 2]), ints(5, 6, 70)
    plan = made.plan(batch([1, 1, 2], [5, 6, 70], on_device=True, lengths=None), deferred=True)
    for _layer in range(61):
        made.refresh(plan)
    assert made.stats.launches == 1
    made.plan(mlaplan.Batch(source_starts, mlaplan.Exact(source_lens)))
    for _layer in range(61):
        again = made.plan(mlaplan.Batch(source_starts[:], mlaplan.Exact(source_lens[:].copy())))
        assert again.decision.action == "nothing"
    assert (made.stats.copies, made.stats.launches) == (1, 1)


def test_a_first_and_a_later_prefill_chunk_have_other_keys() -> None:
    """vllm#47042, aiter#4076: both have the clamped length topk."""
    made = planner(topk=4)
    first = made.plan(batch([4], [4]))
    assert first.kv_indptr.tolist() == [0, 1, 3, 6, 10]
    later = made.plan(batch([4], [8]))
    assert (later.decision.action, later.decision.reasons) == ("copy", ("lengths changed",))
    assert later.kv_indptr.tolist() == [0, 4, 8, 12, 16]


@pytest.mark.parametrize(
    ("seq_len", "tokens", "blocks", "works"), [(8192, 14_681_088, 4116, 8332), (16384, 16_777_216, 4624, 8192)]
)
def test_prefill_chunks_of_real_size(seq_len: int, tokens: int, blocks: int, works: int) -> None:
    """vllm#47042: 8,192 tokens a chunk, topk 2048, 256 compute units."""
    indptr = mlaplan.kv_indptr(mlaplan.row_lengths(ints(0, 8192), ints(seq_len), 2048))
    assert indptr[-1] == tokens
    made = mlaplan.schedule(indptr, num_cus=256)
    assert (made.blocks_per_slot + 16, made.num_works) == (blocks, works)


@given(one=requests, other=requests, topk=st.integers(1, 12))
def test_nothing_is_answered_exactly_when_the_plans_are_equal(
    one: list[tuple[int, int]], other: list[tuple[int, int]], topk: int
) -> None:
    """vllm#47042: the key against the rows themselves, on pairs of batches."""
    made = planner(max_rows=128, topk=topk)
    plans = []
    for some in (one, other):
        query_lens, seq_lens = [q for q, _ in some], [q + context for q, context in some]
        plan = made.plan(batch(query_lens, seq_lens, 128))
        plans.append((plan, definition(query_lens, seq_lens, topk)))
        assert_holds(plan, query_lens, seq_lens)
    if plans[1][0].decision.action == "nothing":
        assert plans[0][1] == plans[1][1]
    # The other way round idle requests in between are a difference to the key and none to the rows.
    elif all(q for q, _ in [*one, *other]):
        assert plans[0][1] != plans[1][1]


def test_what_is_read_after_a_plan_was_written_before_it_without_a_wait() -> None:
    """vllm#47196, #47404: order by the queue, not by a host wait."""
    device = HostDevice(delayed=True)
    made = planner(device)
    snapshots: list[tuple[list[int], Any]] = []

    def look(plan: mlaplan.Plan, seq_lens: list[int]) -> None:
        snapshots.append((seq_lens, held(plan)))

    for length in range(1, 8):
        for more in ({}, {"lengths": None}):
            plan = made.plan(batch([1, 2], [length, length + 9], on_device=True, **more))
            device.submit(partial(look, plan, [length, length + 9]))
    assert made.stats.waits == 0
    assert not snapshots
    device.synchronize()
    assert len(snapshots) == 14
    for seq_lens, arrays in snapshots:
        assert_holds(plan, [1, 2], seq_lens, arrays)


def test_one_frozen_config_feeds_sizing_planning_and_decoding() -> None:
    """vllm#46997: 64 heads fold by their dtypes, so other dtypes are another planner."""
    folds = {}
    for dtype in ("fp8", "bf16"):
        config = mlaplan.PlannerConfig(
            max_rows=8, max_requests=8, arch="gfx942", heads=64, q_dtype=dtype, kv_dtype=dtype
        )
        made = mlaplan.Planner(config, "cpu")
        folds[dtype] = made.params.fold
        assert (made.config.q_dtype, made.config.kv_dtype) == (dtype, dtype)
        assert held(made.plan(batch([1], [9]))).reduce_indptr.size == 1 + folds[dtype]
        with pytest.raises(AttributeError):
            made.config.q_dtype = "bf16"  # type: ignore[misc]
    assert folds == {"fp8": 1, "bf16": 4}


def test_a_decode_part_is_planned_as_a_batch_of_its_own() -> None:
    """TensorRT-LLM#12161: one decode row of a mixed batch, not its five rows."""
    query_start_loc, seq_lens = ints(0, 1, 5), ints(16, 4)
    plan = planner(topk=4).plan(mlaplan.Batch(query_start_loc[:2], mlaplan.Exact(seq_lens[:1])))
    assert (plan.rows, plan.request_ids.tolist(), plan.kv_indptr.tolist()) == (1, [0], [0, 4])


def test_micro_batches_have_buffers_of_their_own_and_shifted_contexts() -> None:
    """vllm#50945, #56031: 160 new tokens split 80 and 80, topk 64."""
    device = HostDevice()
    halves = [planner(device, max_rows=128, topk=64) for _ in range(2)]
    plans = [made.plan(batch([80], [seq_len])) for made, seq_len in zip(halves, (80, 160), strict=True)]
    assert np.diff(plans[0].kv_indptr).tolist() == [min(i + 1, 64) for i in range(80)]
    assert np.diff(plans[1].kv_indptr).tolist() == [64] * 80
    assert not np.shares_memory(halves[0]._arena, halves[1]._arena)


def test_a_plan_says_whether_the_decode_consumes_its_schedule() -> None:
    """ATOM#1379."""
    assert planner().plan(batch([1], [9])).kind == "persistent"


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(1, 30))
def test_rows_of_any_starts_on_the_device_stay_inside(values: list[int], topk: int) -> None:
    """hip#3902 for launched plans: whatever the device's arrays hold, the rows are inside the class."""
    made = planner(topk=topk, max_requests=32)
    query_start_loc, seq_lens = np.array(values, np.int32), np.array(values[1:], np.int32)
    host = np.zeros(len(values), np.int32)
    plan = made.plan(mlaplan.Batch(host, None, 40, False, query_start_loc, seq_lens), deferred=True)
    made.refresh(plan)
    wanted = from_nothing(query_start_loc, seq_lens, len(plan.arrays.request_ids), made.params)
    assert np.array_equal(plan.arrays.kv_indptr, wanted.kv_indptr)
    assert plan.arrays.request_ids.max(initial=0) < max(len(seq_lens), 1)
    assert (np.diff(plan.arrays.kv_indptr) <= topk).all()


@pytest.mark.parametrize("context", [0, 8, 5000])
def test_equal_totals_with_another_split_are_another_plan(context: int) -> None:
    """vllm#47042, the kind: saturated rows of other requests differ in their request ids alone."""
    made = planner(topk=16)
    for query_lens in ([1, 2, 1], [2, 1, 1], [1, 1, 2], [4], [1, 2, 1]):
        seq_lens = [context + query_len for query_len in query_lens]
        plan = made.plan(batch(query_lens, seq_lens))
        assert (plan.decision.action, plan.decision.reasons[-1]) in (
            ("copy", "first plan"),
            ("copy", "boundaries changed"),
        )
        assert_holds(plan, query_lens, seq_lens)


def test_idle_requests_at_the_end_cost_nothing() -> None:
    """A padded graph's idle requests, whatever lengths they carry, are the same plan."""
    made = planner(topk=16)
    made.plan(batch([1, 2], [9, 30]))
    for query_lens, seq_lens in (([1, 2, 0], [9, 30, 0]), ([1, 2, 0, 0], [9, 30, 77, 3]), ([1, 2], [9, 31])):
        plan = made.plan(batch(query_lens, seq_lens))
        assert plan.decision.action == "nothing"
        assert_holds(plan, query_lens, seq_lens)
    assert made.plan(batch([1, 0, 2], [9, 4, 30])).decision.action == "copy"  # its request ids are others
    assert made.plan(batch([1, 0, 2], [9, 2, 30])).decision.action == "nothing"


def test_an_idle_request_does_not_spoil_the_proof() -> None:
    """vllm#40654, with a request that has no query tokens between two that are saturated."""
    lengths = mlaplan.UpperBound(ints(99, 3, 99), 3)
    plan = planner(topk=16).plan(batch([1, 0, 2], [99, 3, 99], lengths=lengths))
    assert (plan.decision.action, plan.decision.reasons) == ("copy", ("saturation proven by bound", "first plan"))
    assert_holds(plan, [1, 0, 2], [99, 3, 99])
