"""The planner's own promises: refresh once per plan and graph, stale plans made anew, counts, settings, decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from mlaplan.device import HostDevice, make_device
from mlaplan.layout import PlanParams
from mlaplan.reference.attention import attention
from planning import assert_holds, batch, definition, held, ints, planner


def test_refresh_is_nothing_for_a_plan_that_is_held() -> None:
    made = planner()
    for way in ({}, {"lengths": None}, {}):
        plan = made.plan(batch([1, 2], [5, 40], on_device=True, **way))
        launches = made.stats.launches
        for _layer in range(3):
            made.refresh(plan)
        assert made.stats.launches == launches
    held_before = made.plan(batch([1], [5]))
    assert made.plan(batch([1], [5])).decision.action == "nothing"
    made.refresh(held_before)  # of the same values, so it is held though a newer plan is current


def test_refresh_makes_a_deferred_plan_once() -> None:
    made = planner()
    plan = made.plan(batch([1, 2], [5, 40], on_device=True), deferred=True)
    assert (plan.decision.action, plan.decision.reasons, plan.rows) == ("deferred", ("deferred",), None)
    assert made.stats.launches == 0
    for _layer in range(3):
        made.refresh(plan)
    assert made.stats.launches == 1
    assert_holds(plan, [1, 2], [5, 40])


def test_a_deferred_plan_drops_the_key() -> None:
    made = planner()
    made.plan(batch([1], [5], on_device=True))
    made.plan(batch([1], [5], on_device=True), deferred=True)
    plan = made.plan(batch([1], [5]))
    assert (plan.decision.action, plan.decision.reasons) == ("copy", ("made on the device before",))


def test_a_deferred_plan_makes_older_plans_stale() -> None:
    """Its replay may write the buffers without a word to the host."""
    device = HostDevice()
    made = planner(device)
    newer = made.plan(batch([1], [9], on_device=True), deferred=True)
    with device.record() as graph:
        made.refresh(newer)
    older = made.plan(batch([1], [5], on_device=True))
    made.plan(batch([1], [9], on_device=True), deferred=True)
    graph.replay()
    made.refresh(older)
    assert_holds(older, [1], [5])


def test_a_launch_drops_the_key() -> None:
    made = planner()
    made.plan(batch([1], [5]))
    made.plan(batch([1], [9], on_device=True, lengths=None))
    plan = made.plan(batch([1], [5]))
    assert (plan.decision.action, plan.decision.reasons) == ("copy", ("made on the device before",))
    assert_holds(plan, [1], [5])


def test_a_stale_plan_is_made_anew_and_the_newer_one_is_stale_then() -> None:
    made = planner()
    first = made.plan(batch([1], [5], on_device=True))
    second = made.plan(batch([2], [9], on_device=True))
    made.refresh(first)
    assert made.stats.launches == 1
    assert_holds(first, [1], [5])
    made.refresh(second)
    assert made.stats.launches == 2
    assert_holds(second, [2], [9])
    assert made.plan(batch([2], [9])).decision.action == "copy"


def test_every_graph_gets_one_node_per_plan() -> None:
    device = HostDevice()
    made = planner(device)
    query_start_loc, seq_lens = ints(0, 1), ints(5)
    some = mlaplan.Batch(ints(0, 1), None, device_query_start_loc=query_start_loc, device_seq_lens=seq_lens)
    plan, other = (made.plan(some, deferred=True) for _ in range(2))
    graphs = []
    for _capture in range(2):
        with device.record() as graph:
            for _layer in range(3):
                made.refresh(plan)
        assert len(graph.ops) == 1
        graphs.append(graph)
    with device.record() as graph:
        for _layer in range(3):
            made.refresh(plan)
            made.refresh(other)
    assert len(graph.ops) == 2
    for turn, graph in enumerate(graphs):
        seq_lens[0] = 7 + turn
        graph.replay()
        assert_holds(plan, [1], [7 + turn])


def test_nothing_runs_while_a_graph_is_captured() -> None:
    device = HostDevice()
    made = planner(device)
    some = batch([1], [5], on_device=True)
    plan = made.plan(some)
    before = made._arena.tobytes()
    with device.record() as graph:
        made.refresh(plan)
    assert made._arena.tobytes() == before
    assert len(graph.ops) == 1  # held or not: a replay has to make it
    launches = made.stats.launches
    made.refresh(plan)  # the host does not know what a replay has left behind
    assert made.stats.launches == launches + 1
    assert made.plan(batch([1], [5])).decision.action == "copy"


@pytest.mark.parametrize("way", ["launch", "schedule_maker"])
def test_a_plan_launched_under_capture_is_not_believed(way: str) -> None:
    device = HostDevice()
    made = planner(device, schedule_maker="device" if way == "schedule_maker" else "core")
    lengths = None if way == "launch" else mlaplan.Exact(ints(5))
    some = batch([1], [5], on_device=True, lengths=lengths)
    with device.record() as graph:
        if way == "launch":
            plan = made.plan(some)
            made.refresh(plan)
            assert len(graph.ops) == 1
        else:
            with pytest.raises(mlaplan.PlanError, match="deferred=True"):
                made.plan(some)
    for array in made._arrays[0]:
        array[...] = -1
    plan = made.plan(batch([1], [5]))
    assert plan.decision.action == "copy"
    assert_holds(plan, [1], [5])


class FailingDevice(HostDevice):
    """Runs the plan op only when told to."""

    failing = False

    def plan(self, *args: Any) -> None:
        if self.failing:
            raise RuntimeError("the launch failed")
        super().plan(*args)


def test_what_the_device_cannot_plan_is_refused_when_the_planner_is_made() -> None:
    """With the most rows of a plan and the resolved fold."""

    class SmallDevice(HostDevice):
        """Has no words for more than 200 tiles."""

        def check_sizes(self, num_rows: int, params: PlanParams) -> None:
            if num_rows * params.fold > 200:
                raise ValueError(f"{num_rows * params.fold} tiles")

    with pytest.raises(ValueError, match="256 tiles"):
        planner(SmallDevice(), max_rows=256)
    with pytest.raises(ValueError, match="256 tiles"):
        planner(SmallDevice(), max_rows=64, fold=4, heads=8)
    assert_holds(planner(SmallDevice(), max_rows=200).plan(batch([1], [5])), [1], [5])


@pytest.mark.parametrize("capturing", [False, True])
def test_a_failed_refresh_is_tried_again(capturing: bool) -> None:
    device = FailingDevice()
    made = planner(device)
    made.plan(batch([2], [9]))
    plan = made.plan(batch([1], [5], on_device=True), deferred=True)
    device.failing = True
    if not capturing:
        with pytest.raises(RuntimeError, match="failed"):
            made.refresh(plan)
        device.failing = False
        made.refresh(plan)
    else:
        with device.record() as graph:
            with pytest.raises(RuntimeError, match="failed"):
                made.refresh(plan)
            device.failing = False
            made.refresh(plan)
            made.refresh(plan)
        assert len(graph.ops) == 1
        graph.replay()
    assert_holds(plan, [1], [5])
    assert made.plan(batch([2], [9])).decision.action == "copy"


def test_a_failed_write_leaves_the_old_plan_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner(staging_slots=4)
    made.plan(batch([1], [5]))
    with monkeypatch.context() as patch:
        patch.setattr(made._ring, "ready", np.zeros(3, np.int32))
        for _attempt in range(9):
            with pytest.raises(ValueError, match="staging has 3 entries"):
                made.plan(batch([1], [6]))
    plan = made.plan(batch([1], [5]))
    assert plan.decision.action == "nothing"
    assert_holds(plan, [1], [5])
    assert_holds(made.plan(batch([1], [6])), [1], [6])


def test_a_failed_upload_in_the_middle_leaves_the_next_plan_right() -> None:
    class HalfDevice(HostDevice):
        """Copies half a plan and fails, once."""

        broken = False

        def upload(self, staging: Any, slot: int, buffer: Any, words: int) -> None:
            if self.broken:
                self.broken = False
                buffer[: words // 2] = staging.sources[slot][: words // 2]
                raise RuntimeError("half a copy")
            super().upload(staging, slot, buffer, words)

    device = HalfDevice()
    made = planner(device)
    for seq_len in (5, 9):
        made.plan(batch([1], [5]))
        device.broken = True
        with pytest.raises(RuntimeError, match="half"):
            made.plan(batch([2], [9]))
        plan = made.plan(batch([1], [seq_len]))
        assert plan.decision.reasons == ("invalidated",)
        assert_holds(plan, [1], [seq_len])


def test_statistics_count_every_step_and_what_the_device_did() -> None:
    made = planner()
    before = made.stats
    assert (before.steps, before.actions, before.reasons, before.copies) == (0, {}, {}, 0)
    made.plan(batch([1], [5]))
    made.plan(batch([1], [5]))
    made.plan(batch([1], [6]))
    made.plan(batch([2], [6]))
    made.plan(batch([2], [6], 64))
    made.plan(batch([2], [6], on_device=True, lengths=None))
    made.refresh(made.plan(batch([2], [6], on_device=True), deferred=True))
    stats = made.stats
    assert stats.steps == 7
    assert stats.actions == {"copy": 4, "nothing": 1, "launch": 1, "deferred": 1}
    assert stats.reasons == {"first plan": 1, "unchanged": 1, "lengths changed": 1, "boundaries changed": 1,
                             "other row class": 2,
                             "lengths unknown": 1, "deferred": 1}  # fmt: skip
    assert (stats.copies, stats.launches, stats.waits, stats.read_backs) == (4, 2, 0, 0)
    assert stats.allocations == before.allocations
    assert stats.bytes_copied % 4 == 0


def test_bytes_are_those_of_the_live_plan() -> None:
    made = planner()
    plan = made.plan(batch([3], [40]))
    layout = made._layouts[plan.decision.row_class]
    assert plan.num_works is not None
    assert made.stats.bytes_copied == 4 * layout.words_used(plan.num_works)
    assert plan.num_works == plan.arrays.work_indptr[-1]


@pytest.mark.parametrize("rows", range(1, 15))
def test_a_batch_belongs_to_the_smallest_class_that_holds_it(rows: int) -> None:
    made = planner(max_rows=14, capture_sizes=(3, 6, 12))
    assert made.config.row_classes == (1, 2, 3, 4, 6, 8, 12, 14)
    plan = made.plan(batch([rows], [rows]))
    assert len(plan.arrays.request_ids) == min(size for size in made.config.row_classes if size >= rows)
    assert (plan.rows, plan.padded_rows, len(plan.request_ids)) == (rows, rows, rows)


def test_the_same_rows_in_another_class_are_copied_again() -> None:
    made = planner()
    made.plan(batch([1, 2], [5, 6]))
    plan = made.plan(batch([1, 2], [5, 6], 9))
    assert (plan.decision.action, plan.decision.reasons) == ("copy", ("other row class",))
    assert_holds(plan, [1, 2], [5, 6])


@pytest.mark.parametrize("maker", ["core", "device"])
def test_who_makes_the_schedule_makes_no_difference(maker: str) -> None:
    made = planner(schedule_maker=maker)
    plan = made.plan(batch([3, 1], [40, 7], 6, on_device=True))
    assert plan.decision.action == {"core": "copy", "device": "launch"}[maker]
    assert ("schedule_maker is device" in plan.decision.reasons) == (maker == "device")
    assert_holds(plan, [3, 1], [40, 7])
    assert made.plan(batch([3, 1], [40, 7], 6, on_device=True)).decision.action == "nothing"
    # Without device arrays the device cannot, and the host does.
    assert made.plan(batch([3, 1], [40, 8], 6)).decision.action == "copy"


def test_always_rebuild_never_answers_nothing() -> None:
    made = planner(always_rebuild=True)
    for turn in range(3):
        plan = made.plan(batch([1], [5]))
        assert plan.decision.action == "copy"
        assert "forced" in plan.decision.reasons
        assert ("first plan" in plan.decision.reasons) == (turn == 0)


def test_invalidate_makes_the_next_plan_and_refresh_anew() -> None:
    made = planner()
    some = batch([1], [5], on_device=True)
    plan = made.plan(some)
    made.invalidate()
    made.refresh(plan)
    assert made.stats.launches == 1
    assert made.plan(some).decision.reasons == ("made on the device before",)
    made.invalidate()
    assert made.plan(some).decision.reasons == ("invalidated",)
    assert made.plan(some).decision.action == "nothing"


def test_boundaries_moved_on_the_device_are_the_devices() -> None:
    made = planner()
    # The first length is below the four query tokens that the host guesses for it.
    some = mlaplan.Batch(ints(0, 4, 4), mlaplan.Exact(ints(3, 9)), None, False, ints(0, 1, 4), ints(9, 7))
    plan = made.plan(some)
    assert (plan.decision.action, plan.decision.reasons) == ("launch", ("boundaries unknown",))
    assert_holds(plan, [1, 3], [9, 7])


@pytest.mark.parametrize("budget", [None, -1, 4])
def test_quality_is_that_of_the_schedule(budget: int | None) -> None:
    made = planner(split_budget=budget, topk=2048, num_cus=37)
    for query_lens, seq_lens in (([1], [9000]), ([4, 1, 1], [30, 9000, 700]), ([], [])):
        plan = made.plan(batch(query_lens, seq_lens, 8))
        quality = plan.quality()
        assert quality.lower_bound <= quality.finish_time
        lengths = np.array(definition(query_lens, seq_lens, 2048)[1], np.int32)
        split = -1 if plan.split_budget is None else plan.split_budget
        schedule = mlaplan.schedule(mlaplan.kv_indptr(lengths), num_cus=37, max_split_per_batch=split)
        assert quality.finish_time == schedule.finish_time
        assert quality.ratio == (quality.finish_time / quality.lower_bound if query_lens else 1.0)
    assert made.stats.read_backs == 15  # the only thing that reads back


def test_a_device_object_is_used_as_it_is() -> None:
    device = HostDevice()
    assert make_device(device) is device
    assert planner(device).device is device
    assert make_device("cpu").name == "cpu"
    assert make_device("cpu") is not make_device("cpu")


def decode_case(
    rng: np.random.Generator, made: mlaplan.Planner, query_lens: list[int], rows: int, block_size: int
) -> dict[str, Any]:
    """Random arguments of a decode: indices in and out of the table, blocks in any order."""
    config = made.config
    slots = 40 * block_size
    return {
        "q": rng.normal(size=(rows, config.heads, config.head_dim)),
        "kv_cache": rng.normal(size=(slots, config.head_dim)),
        "topk_indices": rng.integers(-3, 6 * block_size + 3, (rows + 2, config.topk + 3)).astype(np.int32),
        "block_table": rng.integers(0, 40, (max(len(query_lens), 1), 6)).astype(np.int32),
        "block_size": block_size,
    }


def expected_decode(
    made: mlaplan.Planner, case: dict[str, Any], query_lens: list[int], seq_lens: list[int], scale: float
) -> Any:
    """Softmax attention of each row over its slots, from the definition."""
    ids, lengths = definition(query_lens, seq_lens, made.params.topk)
    size, table = case["block_size"], case["block_table"]
    slots = []
    for row, (request, length) in enumerate(zip(ids, lengths, strict=True)):
        for index in case["topk_indices"][row, :length].tolist():
            known = 0 <= index < table.shape[1] * size
            slots.append(table[request, index // size] * size + index % size if known else 0)
    lengths += [0] * (case["q"].shape[0] - len(lengths))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return attention(case["q"], case["kv_cache"], np.array(slots, np.int32), indptr, scale, made.config.v_head_dim)


@given(
    some=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=6),
    padding=st.integers(0, 5),
    fold=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([None, -1, 1, 4]),
    block_size=st.sampled_from([1, 4, 64]),
    way=st.sampled_from(["copy", "launch", "deferred"]),
    seed=st.integers(0, 99),
)
def test_decode_is_attention_over_the_rows_slots(
    some: list[tuple[int, int]], padding: int, fold: int, budget: int | None, block_size: int, way: str, seed: int
) -> None:
    query_lens, seq_lens = [q for q, _ in some], [q + context for q, context in some]
    rows = sum(query_lens) + padding
    made = planner(fold=fold, split_budget=budget, heads=4, min_tokens_per_split=4)
    lengths: dict[str, Any] = {"lengths": None} if way == "launch" else {}
    plan = made.plan(batch(query_lens, seq_lens, rows, on_device=True, **lengths), deferred=way == "deferred")
    case = decode_case(np.random.default_rng(seed), made, query_lens, rows, block_size)
    out, lse = made.decode(plan, **case)
    wanted_out, wanted_lse = expected_decode(made, case, query_lens, seq_lens, 8**-0.5)
    np.testing.assert_allclose(out, wanted_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-12, atol=1e-12)
    live = sum(query_lens)
    assert not out[live:].any()
    assert np.isneginf(lse[live:]).all()


def test_decode_writes_where_it_is_told_and_scales_as_told() -> None:
    made = planner()
    plan = made.plan(batch([1, 2], [9, 40], 4))
    case = decode_case(np.random.default_rng(1), made, [1, 2], 4, 4)
    out, lse = np.full((4, 2, 4), np.nan), np.full((4, 2), np.nan)
    got = made.decode(plan, **case, scale=0.3, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    for got_array, wanted in zip(got, expected_decode(made, case, [1, 2], [9, 40], 0.3), strict=True):
        np.testing.assert_allclose(got_array, wanted, rtol=1e-12, atol=1e-12)


def test_decode_makes_a_plan_that_nobody_made_and_only_that() -> None:
    made = planner()
    case = decode_case(np.random.default_rng(1), made, [1], 1, 4)
    launches = []
    for deferred in (False, True):
        plan = made.plan(batch([1], [9], on_device=True), deferred=deferred)
        before = made.stats.launches
        made.decode(plan, **case)
        made.decode(plan, **case)
        launches.append(made.stats.launches - before)
    assert launches == [6, 7]  # slots, decode and merge twice, and the plan once


def test_two_planners_share_a_device_and_nothing_else() -> None:
    device = HostDevice()
    one, other = planner(device), planner(device, fold=2, topk=8)
    plans = [one.plan(batch([2], [30])), other.plan(batch([3], [5]))]
    assert_holds(plans[0], [2], [30])
    assert_holds(plans[1], [3], [5])
    one.invalidate()
    assert other.plan(batch([3], [5])).decision.action == "nothing"
    assert (one.stats.steps, other.stats.steps, one.stats.copies) == (1, 2, 2)  # what the device did is counted once


def test_a_planner_holds_what_the_last_of_many_plans_said() -> None:
    made = planner(staging_slots=2)
    plans = [made.plan(batch([1], [seq_len], on_device=True)) for seq_len in range(1, 12)]
    assert held(plans[0]).kv_indptr.tolist() == [0, 11]  # a plan is a view: stale ones show the newest
    assert sum(plan.generation == made._generation for plan in plans) == 1


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "wanted"),
    [
        ([1], [127], 1),
        ([2], [256], 2),
        ([200], [200], 1),
        ([1, 300], [7, 300], 2),
        ([4, 1], [383, 384], 4),
        ([1], [9000], 16),
    ],
)
def test_the_budget_goes_by_the_longest_row(query_lens: list[int], seq_lens: list[int], wanted: int) -> None:
    made = planner(topk=2048, num_cus=304, max_rows=512)
    plan = made.plan(batch(query_lens, seq_lens))
    longest = max(definition(query_lens, seq_lens, 2048)[1])
    assert plan.split_budget == wanted == mlaplan.max_split_per_batch(longest, topk=2048, num_cus=304)
    assert_holds(plan, query_lens, seq_lens)


def test_memory_that_is_not_back_yet_is_not_written_by_invalidate() -> None:
    made = planner()
    made.plan(batch([1], [40]))
    for array in made._constants[0]:
        array[...] = 9
    made.invalidate()
    assert (made._constants[0].qo_indptr == 9).all()  # only the next plan knows that the memory is there again
    plan = made.plan(batch([1], [40]))
    assert plan.constants.qo_indptr[:3].tolist() == [0, 1, 2]
    assert plan.constants.reduce_final_map[1].tolist() == [1, 2]
    assert int(plan.constants.work_metadata_ptrs[0]) == plan.arrays.work_indptr.ctypes.data
