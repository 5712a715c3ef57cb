"""Reports about captured graphs, empty rows, idle ranks, late copies and lost buffers: each with its right answer."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from mlaplan.device import HostDevice
from mlaplan.device.host import HostGraph
from mlaplan.layout import PlanArrays
from planning import assert_holds, batch, from_nothing, held, ints, planner, starts


def captured(made: mlaplan.Planner, rows: int, query_start_loc: Any, seq_lens: Any) -> tuple[mlaplan.Plan, HostGraph]:
    """A plan of `rows` rows and the graph that makes it of what the two arrays hold."""
    host = np.zeros(len(query_start_loc), np.int32)
    plan = made.plan(
        mlaplan.Batch(host, None, rows, device_query_start_loc=query_start_loc, device_seq_lens=seq_lens), deferred=True
    )
    device: Any = made.device
    with device.record() as graph:
        made.refresh(plan)
    return plan, graph


def attend(made: mlaplan.Planner, plan: mlaplan.Plan, **more: Any) -> tuple[Any, Any]:
    """Decodes random queries; every value of the output is overwritten or stays NaN."""
    config, rng = made.config, np.random.default_rng(5)
    rows, heads = plan.padded_rows, config.heads
    shape = (rows, heads, config.v_head_dim)
    return made.decode(
        plan,
        rng.normal(size=(rows, heads, config.head_dim)),
        rng.normal(size=(64, config.head_dim)),
        np.tile(np.arange(config.topk, dtype=np.int32), (rows, 1)),
        np.zeros((len(plan.batch.query_start_loc) - 1, 8), np.int32),
        block_size=64,
        out=np.full(shape, np.nan),
        lse=np.full(shape[:2], np.nan),
        **more,
    )


def test_outputs_keep_their_addresses_over_plans_of_other_totals() -> None:
    """aiter#5193, #5194, #4587: 200 plans, the split count explicit in each."""
    made = planner(capture_sizes=(32,))
    rng = np.random.default_rng(1)
    addresses, constants = set(), set()
    for step in range(200):
        count = int(rng.integers(17, 33))
        lengths = rng.integers(2, 99, count // 2).tolist()
        plan = made.plan(batch([2] * (count // 2), lengths, 32))
        assert plan.split_budget is not None or plan.decision.action == "nothing", step
        addresses.add(tuple(array.ctypes.data for array in plan.arrays))
        constants.add(tuple((array.ctypes.data, array.tobytes()) for array in plan.constants))
        assert_holds(plan, [2] * (count // 2), lengths)
    assert len(addresses) == len(constants) == 1


def test_rows_without_work_are_named_and_their_output_is_defined() -> None:
    """vllm#37682: pad rows show neither stale values nor NaN."""
    made = planner()
    plan = made.plan(batch([1] * 6, [9] * 6, 8))
    assert list(plan.rows_without_work) == [6, 7]
    out, lse = attend(made, plan)
    assert not out[6:].any()
    assert np.isneginf(lse[6:]).all()
    assert np.isfinite(out).all()
    assert np.isfinite(lse[:6]).all()


@pytest.mark.parametrize("budget", [None, 4, -1])
def test_a_graph_captured_with_dummy_lengths_plans_the_real_ones(budget: int | None) -> None:
    """vllm#51119, aiter#4405: one split for ever, because capture saw the length 1."""
    made = planner(topk=2048, num_cus=256, split_budget=budget)
    query_start_loc, seq_lens = ints(0, 1), ints(1)
    plan, graph = captured(made, 1, query_start_loc, seq_lens)
    for length in (1, 2048, 100_000, 300):
        seq_lens[0] = length
        graph.replay()
        assert_holds(plan, [1], [length])
        host_made = planner(topk=2048, num_cus=256, split_budget=budget).plan(batch([1], [length]))
        for one, other in zip(held(plan), held(host_made), strict=True):
            assert np.array_equal(one, other)
    seq_lens[0] = 2048
    graph.replay()
    assert held(plan).work_info.shape[0] == {None: 15, 4: 4, -1: 128}[budget]


def test_cumulative_arrays_are_padded_with_their_total() -> None:
    """vllm#21691, FlashMLA#3: 123 entries in room for 129."""
    made = planner(max_rows=128, max_requests=128, capture_sizes=(128,))
    for way in ({}, {"lengths": None, "on_device": True}):
        plan = made.plan(batch([1] * 122, [9] * 122, 128, **way))
        arrays = held(plan)
        assert arrays.kv_indptr.size == 129
        assert (arrays.kv_indptr[123:] == arrays.kv_indptr[122]).all()
        assert (arrays.reduce_indptr[123:] == arrays.reduce_indptr[122]).all()


def test_rows_and_requests_are_counted_apart() -> None:
    """rtp-llm#1181, sglang#26019: 128 rows, then 118 live ones of 128, by copy and by launch."""
    for way in ({}, {"lengths": None, "on_device": True}):
        made = planner(max_rows=128, max_requests=128)
        made.plan(batch([2] * 64, [900] * 64))
        plan = made.plan(batch([2] * 59, [30] * 59, 128, **way))
        assert plan.request_ids[118:].tolist() == [0] * 10
        assert not np.diff(plan.kv_indptr)[118:].any()
        assert_holds(plan, [2] * 59, [30] * 59)


@pytest.mark.parametrize("seq_lens", [[16, 0, 0, 0], [0, 20, 0, 1], [0, 0, 0, 0]])
def test_an_empty_live_row_gets_no_work_and_a_defined_output(seq_lens: list[int]) -> None:
    """ATOM#2057, vllm#45426, #54404: an empty row counts for nothing and hides no row behind it."""
    made = planner(num_cus=304)
    arrays: Any = {"device_query_start_loc": starts([1] * 4), "device_seq_lens": ints(*seq_lens)}
    plan = made.plan(mlaplan.Batch(starts([1] * 4), None, **arrays))
    assert np.diff(plan.kv_indptr).tolist() == [min(length, 16) for length in seq_lens]
    works = held(plan).work_info
    assert (works[:, 4] < works[:, 5]).all()
    assert set(works[:, 0].tolist()) == {row for row, length in enumerate(seq_lens) if length}
    out, lse = attend(made, plan)
    for row, length in enumerate(seq_lens):
        assert np.isfinite(out[row]).all()
        assert np.isneginf(lse[row]).all() == (length == 0)
        assert bool(out[row].any()) == (length > 0)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "lengths"), [([], [], []), ([0], [0], []), ([1], [1], [1]), ([0, 0], [0, 7], [])]
)
def test_idle_ranks_have_valid_plans(query_lens: list[int], seq_lens: list[int], lengths: list[int]) -> None:
    """sglang#39899, vllm#51984, #53578: no requests, no tokens, a dummy token."""
    assert mlaplan.row_lengths(starts(query_lens), ints(*seq_lens), 16).tolist() == lengths
    for deferred in (False, True):
        made = planner()
        plan = made.plan(batch(query_lens, seq_lens, on_device=True), deferred=deferred)
        out, _lse = attend(made, plan)
        assert plan.kv_indptr.tolist() == [0, *np.cumsum(lengths)]
        assert out.shape[0] == len(lengths)
        assert_holds(plan, query_lens, seq_lens)


def test_unknown_local_lengths_need_the_device() -> None:
    """vllm#45426, #52377: what a rank owns of a row depends on the indexer's choice."""
    with pytest.raises(mlaplan.PlanError, match="device_query_start_loc and device_seq_lens"):
        planner().plan(batch([1], [99], lengths=None))


def test_each_plan_keeps_its_own_sizes() -> None:
    """vllm#45227, #39616: verify with 4 tokens, decode with 1, verify with 3."""
    made = planner(capture_sizes=(3, 8))
    plans = [made.plan(batch([query_len] * 2, [30] * 2)) for query_len in (4, 1, 3)]
    assert [(plan.kind, plan.rows, plan.padded_rows) for plan in plans] == [
        ("persistent", rows, rows) for rows in (8, 2, 6)
    ]
    assert [len(plan.request_ids) for plan in plans] == [8, 2, 6]


def test_a_bound_is_neither_a_length_nor_corrected_twice() -> None:
    """vllm#32951, #36013, #44492."""
    bound = mlaplan.UpperBound(ints(40), 3)
    assert not isinstance(bound, mlaplan.Exact)
    with pytest.raises(AttributeError):
        bound.max_rejects = 0  # type: ignore[misc]
    for missing in (mlaplan.UpperBound(None, 3), mlaplan.UpperBound(ints(40), None), mlaplan.Exact(None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"seq_lens|max_rejects"):
            planner().plan(batch([1], [40], lengths=missing))
    with pytest.raises(TypeError, match="max_rejects"):
        mlaplan.UpperBound(ints(40))  # type: ignore[call-arg]
    assert bound.bound.tolist() == [40]


def test_host_arrays_may_die_right_after_the_plan() -> None:
    """vllm-ascend#12071, #16428: the copy comes late, and the source was freed."""
    device = HostDevice(delayed=True)
    made = planner(device)
    source = batch([1, 3], [7, 90])
    plan = made.plan(source)
    source.query_start_loc[:] = -1
    del source
    gc.collect()
    device.synchronize()
    assert_holds(plan, [1, 3], [7, 90])


def test_a_graph_survives_a_prefills_query_starts() -> None:
    """hip#3902: starts of a prefill stay in the buffer while the next decode is replayed."""
    made = planner(max_rows=1024, max_requests=3, topk=64)
    query_start_loc, seq_lens = ints(0, 1, 2, 3), ints(1, 1, 1)
    plan, graph = captured(made, 1024, query_start_loc, seq_lens)
    for values, lengths in (([0, 996, 996, 996], [1000, 0, 0]), ([0, 1, 2, 3], [70, 5, 64])):
        query_start_loc[:], seq_lens[:] = values, lengths
        graph.replay()
        assert_holds(plan, np.diff(values).tolist(), lengths)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=6, max_size=6),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=5, max_size=5),
)
def test_wild_starts_in_a_graph_write_inside_the_arena(values: list[int], lengths: list[int]) -> None:
    """hip#3902: `[0, 996, 2, 3]` and worse."""
    made = planner(max_rows=64, capture_sizes=(24,))
    query_start_loc, seq_lens = ints(0, 0, 0, 0, 0, 0), ints(0, 0, 0, 0, 0)
    plan, graph = captured(made, 24, query_start_loc, seq_lens)
    query_start_loc[:], seq_lens[:] = values, lengths
    end = made._layouts[plan.decision.row_class].words
    made._arena[end:] = -5
    graph.replay()
    assert (made._arena[end:] == -5).all()
    wanted = from_nothing(query_start_loc, seq_lens, 24, made.params)
    for name, got, want in zip(PlanArrays._fields, held(plan), wanted, strict=True):
        assert np.array_equal(got, want[: len(got)]), name


def test_discarded_buffers_are_planned_anew() -> None:
    """Hazard: the buffers are gone while the key survives."""
    made = planner()
    plan = made.plan(batch([1, 2], [5, 40]))
    for array in plan.arrays:
        array[...] = -99
    assert made.plan(batch([1, 2], [5, 40])).decision.action == "nothing"  # nobody has told it
    made.invalidate()
    plan = made.plan(batch([1, 2], [5, 40]))
    assert (plan.decision.action, plan.decision.reasons) == ("copy", ("invalidated",))
    assert_holds(plan, [1, 2], [5, 40])


class FailingDevice(HostDevice):
    """A device whose next upload or plan fails."""

    failing = ""

    def upload(self, *args: Any) -> None:
        if self.failing == "upload":
            raise RuntimeError("the copy failed")
        super().upload(*args)

    def plan(self, *args: Any) -> None:
        if self.failing == "plan":
            raise RuntimeError("the launch failed")
        super().plan(*args)


@pytest.mark.parametrize("way", ["upload", "launch", "launch of a copy"])
def test_a_failed_launch_or_copy_is_not_believed(way: str) -> None:
    """Hazard: a key that was stored before the launch failed."""
    device = FailingDevice()
    made = planner(device, schedule_maker="device" if way == "launch of a copy" else "core")
    made.plan(batch([1], [5]))
    lengths = None if way == "launch" else mlaplan.Exact(ints(9))
    failing = batch([1], [9], on_device=True, lengths=lengths)
    for wanted in (9, 5):
        device.failing = "upload" if way == "upload" else "plan"
        for _attempt in range(2):
            with pytest.raises(RuntimeError, match="failed"):
                made.plan(failing)
        device.failing = ""
        plan = made.plan(batch([1], [wanted]))
        assert plan.decision.action == "copy"
        assert_holds(plan, [1], [wanted])
        made.plan(batch([1], [5]))


def test_target_and_draft_have_planners_of_their_own() -> None:
    """Hazard: shared buffers with separate keys."""
    device = HostDevice()
    target, draft = planner(device), planner(device)
    first = target.plan(batch([4], [60]))
    draft.plan(batch([1], [3]))
    assert target.plan(batch([4], [60])).decision.action == "nothing"
    assert_holds(first, [4], [60])
    with pytest.raises(ValueError, match="another planner"):
        draft.refresh(first)
