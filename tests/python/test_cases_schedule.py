"""Reports about schedules, head counts, sizes and index types: each with its right answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.backends import partial_capacity
from mlaplan.reference.slots import slots
from planning import assert_holds, batch, ints, planner


def schedule(row_lengths: list[int], num_cus: int, **settings: object) -> mlaplan.Schedule:
    indptr = mlaplan.kv_indptr(np.array(row_lengths, np.int32))
    return mlaplan.schedule(indptr, num_cus=num_cus, **settings)  # type: ignore[arg-type]


def piece_lengths(made: mlaplan.Schedule) -> Any:
    return (made.work_info[:, 5] - made.work_info[:, 4]).tolist()


def works_per_row(made: mlaplan.Schedule, rows: int) -> Any:
    return np.bincount(made.work_info[:, 0], minlength=rows).tolist()


@pytest.mark.parametrize(
    ("lengths", "num_cus", "works"),
    [
        ([16, 0, 0, 0], 304, [1, 0, 0, 0]),
        ([2048, 0, 2048], 304, [128, 0, 128]),
        ([2048, 1, 2048], 304, [64, 1, 64]),
        ([16, 1, 1, 1], 304, [1, 1, 1, 1]),
    ],
)
def test_aiters_schedules_with_zero_rows(lengths: list[int], num_cus: int, works: list[int]) -> None:
    """ATOM#2057: zero rows get no work from aiter's newer planner."""
    assert works_per_row(schedule(lengths, num_cus), len(lengths)) == works


@given(
    st.lists(st.sampled_from([0, 0, 1, 15, 16, 17, 200, 2048]), max_size=30),
    st.integers(1, 40),
    st.sampled_from([-1, 1, 2, 16]),
    st.integers(1, 4),
)
def test_plans_give_zero_rows_nothing_and_the_others_all(
    lengths: list[int], num_cus: int, budget: int, fold: int
) -> None:
    """ATOM#2057: every token of every row once, and no empty work that would end a slot."""
    made = schedule(lengths, num_cus, max_split_per_batch=budget, fold=fold, skip_empty=True)
    assert made.is_safe
    assert min(piece_lengths(made), default=1) > 0
    covered = np.zeros((fold, sum(lengths)), np.int64)
    for tile, _, _, _, first, end, *_ in made.work_info.tolist():
        covered[tile % fold, first:end] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("owned", [[1, 1, 1, 1, 1, 0, 0, 0], [2, 2, 2, 2, 1, 1, 1, 1], [0, 0, 5], [0]])
def test_ranks_that_own_no_token_of_a_row_are_planned_safely(owned: list[int]) -> None:
    """vllm#45426, #46076: what one of 8 ranks owns of rows may be nothing."""
    made = schedule(owned, 304, skip_empty=True)
    assert works_per_row(made, len(owned)) == [int(length > 0) for length in owned]
    assert made.is_safe


@pytest.mark.parametrize(("length", "budget", "most"), [(20, 16, 2), (1, 16, 1), (33, 16, 3), (160, 4, 4)])
def test_no_more_pieces_than_the_length_can_fill(length: int, budget: int, most: int) -> None:
    """aiter#3641, #4420, #4350."""
    for num_cus in (4, 80, 304):
        assert 1 <= schedule([length], num_cus, max_split_per_batch=budget).num_works <= most


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.integers(1, 304), st.integers(1, 32))
def test_pieces_are_never_more_than_blocks(lengths: list[int], num_cus: int, budget: int) -> None:
    """aiter#3641, the kind: at most ceil(len / 16) pieces of a row."""
    made = schedule(lengths, num_cus, max_split_per_batch=budget)
    assert all(works <= -(-n // 16) for n, works in zip(lengths, works_per_row(made, len(lengths)), strict=True))


def test_a_budget_keeps_pieces_large() -> None:
    """vllm#46832: 128 pieces of 16 tokens, or 4 of 576, 576, 576 and 320; no difference at 256 rows."""
    assert piece_lengths(schedule([2048], 304)) == [16] * 128
    assert piece_lengths(schedule([2048], 304, max_split_per_batch=4)) == [576, 576, 576, 320]
    for budget in (-1, 4):
        assert schedule([2048] * 256, 304, max_split_per_batch=budget).num_works == 512


@given(st.integers(0, 2**40), st.integers(1, 2**31 - 1), st.integers(1, 65536), st.integers(1, 2**31 - 1))
def test_the_budget_rule(longest: int, topk: int, num_cus: int, least: int) -> None:
    """vllm#46832: a power of two that reaches the work per split, capped by the compute units."""
    budget = mlaplan.max_split_per_batch(longest, topk=topk, num_cus=num_cus, min_tokens_per_split=least)
    splits = max(1, min(longest, topk) // least)
    power = 1
    while power < splits:
        power *= 2
    assert budget == min(power, num_cus)


@pytest.mark.parametrize(("cap", "slots_used", "works", "longest"), [(16, 32, 30, 144), (-1, 256, 128, 32)])
def test_the_cap_is_a_budget_of_the_batch(cap: int, slots_used: int, works: int, longest: int) -> None:
    """ATOM#1911, #611: two rows with a cap of 16 may use 32 slots."""
    made = schedule([2048, 2048], 256, max_split_per_batch=cap)
    assert (made.num_slots, made.num_works, max(piece_lengths(made))) == (slots_used, works, longest)


def test_scratch_is_tiles_plus_slots_and_not_their_product() -> None:
    """aiter#3855, #5559: 512 rows, 256 compute units."""
    assert partial_capacity(512, 256) <= 768
    shapes = mlaplan.buffer_shapes(512, 128, arch="gfx942", num_cus=256, q_dtype="fp8", kv_dtype="fp8")
    assert shapes["work_info_set"] == (767, 8)
    assert shapes["reduce_partial_map"] == (510,)


@pytest.mark.parametrize("num_cus", [20, 38, 80, 228, 256, 304])
def test_any_number_of_compute_units_plans_16384_rows(num_cus: int) -> None:
    """rocm-amdgpu-bench#18 and aiter#1352, #1606, #3391."""
    lengths = [1 + (i * 7919) % 2048 for i in range(16_384)]
    made = schedule(lengths, num_cus)
    assert made.work_indptr.size == num_cus + 1
    assert made.work_indptr[-1] == made.num_works <= 16_384 + num_cus - 1
    assert sum(piece_lengths(made)) == sum(lengths)


@given(
    st.lists(st.integers(1, 2048), min_size=1, max_size=60),
    st.sampled_from([4, 20, 38, 80, 228, 256, 304]),
    st.sampled_from([-1, 1, 2, 4, 16]),
)
def test_works_stay_below_rows_plus_budget(lengths: list[int], num_cus: int, budget: int) -> None:
    """aiter#1352: each cut adds one work, and there is a cut per slot at most."""
    made = schedule(lengths, num_cus, max_split_per_batch=budget)
    assert made.num_works <= len(lengths) + made.num_slots - 1
    assert np.count_nonzero(np.diff(made.work_indptr)) <= made.num_slots


@pytest.mark.parametrize("lengths", [[5000] + [200] * 13, [1152] * 14])
def test_a_schedule_reports_its_cost(lengths: list[int]) -> None:
    """sglang#39968: uneven and even rows of about the same size."""
    made = schedule(lengths, 256)
    costs = [0] * 256
    for slot in range(256):
        for work in made.work_info[made.work_indptr[slot] : made.work_indptr[slot + 1]].tolist():
            costs[slot] += -(-(work[5] - work[4]) // 16) + 16
    assert made.finish_time == max(costs)
    assert sum(costs) / 256 <= made.lower_bound <= made.finish_time


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("heads", "padded"), [(4, 16), (8, 16), (12, 16), (16, 16), (24, 32), (64, 64), (128, 128)])
def test_heads_are_padded_to_16(arch: str, heads: int, padded: int) -> None:
    """aiter#726, vllm#40763, ATOM#1252."""
    answer = mlaplan.support(arch, heads, "bf16", "bf16")
    assert answer.padded_heads == padded
    assert answer.persistent
    assert (padded // answer.fold) in (16, padded)


def test_an_unsupported_shape_is_an_answer_with_a_reason() -> None:
    """vllm#36855, aiter#2577."""
    answer = mlaplan.support("gfx942", 16, "fp16", "fp16")
    assert (answer.persistent, answer.fold) == (False, 1)
    assert "fp16" in answer.reason


@pytest.mark.parametrize(("heads", "allowed"), [(64, False), (16, True)])
def test_a_fallback_is_only_offered_where_it_exists(heads: int, allowed: bool) -> None:
    """vllm#49649: 64 heads in fp8 have no decode without a schedule."""
    assert mlaplan.support("gfx942", heads, "fp8", "fp8").non_persistent is allowed
    assert mlaplan.support("gfx950", heads, "fp8", "fp8").non_persistent is allowed


def test_folded_rows_read_the_kv_of_their_own_token() -> None:
    """aiter#3310: with fold 2, rows 0 and 1 read the tokens of row 0, rows 2 and 3 those of row 1."""
    made = schedule([40, 24], 304, fold=2, max_split_per_batch=1)
    read = {tile: set[int]() for tile in range(4)}
    for tile, _, _, _, first, end, *_ in made.work_info.tolist():
        read[tile] |= set(range(first, end))
    assert [sorted(tokens) for tokens in read.values()] == [[*range(40)]] * 2 + [[*range(40, 64)]] * 2


@pytest.mark.parametrize(("release", "fold"), [("0.1.7.post5", 4), ("0.1.17", 4), ("0.1.18", 1), ("main", 1)])
def test_the_fold_is_that_of_the_release(release: str, fold: int) -> None:
    """aiter#4363, #4365: 64 heads in fp8 on gfx942 are folded until v0.1.18 brings a kernel."""
    config = mlaplan.PlannerConfig(
        max_rows=8, max_requests=8, heads=64, q_dtype="fp8", kv_dtype="fp8", aiter_version=release
    )
    assert mlaplan.Planner(config, "cpu").params.fold == fold


@pytest.mark.parametrize("page_size", [0, 2, 16, 64, -1])
def test_another_page_size_than_assumed_is_refused(page_size: int) -> None:
    """aiter#4363, vllm#54359: rows address single slots."""
    with pytest.raises(ValueError, match=f"page_size is {page_size}, must be 1"):
        mlaplan.PlannerConfig(max_rows=8, max_requests=8, page_size=page_size)
    assert mlaplan.PlannerConfig(max_rows=8, max_requests=8).page_size == 1


def test_bad_indices_become_slot_zero() -> None:
    """Vllm's index conversion, operator notes for GLM-5.1: never a negative slot, nor one behind the table."""
    out = np.full(8, -9, np.int32)
    wanted = [2 * 8 + 5, 0, 4 * 8 + 1, 0, 0]
    indices: Int32Array = ints(5, -1, 9, 16, 2**31 - 1).reshape(1, 5)
    slots(indices, ints(2, 4).reshape(1, 2), ints(0), ints(0, 5), out, block_size=8, num_rows=1)
    assert out.tolist() == [*wanted, -9, -9, -9]


def test_a_narrow_table_pads_instead_of_reading_a_neighbour() -> None:
    """vllm#46074, #43970: 3,125 columns of 64 tokens, an index in column 3,126."""
    table = np.arange(2 * 3125, dtype=np.int32).reshape(2, 3125)
    out = np.zeros(2, np.int32)
    slots(ints(200_000, 199_999).reshape(1, 2), table, ints(0), ints(0, 2), out, block_size=64, num_rows=1)
    assert out.tolist() == [0, 3124 * 64 + 63]


@pytest.mark.parametrize(("topk", "most"), [(2048, 1_048_575), (512, 4_194_303), (1 << 20, 2047)])
def test_rows_times_topk_fits_32_bits(topk: int, most: int) -> None:
    """vllm#46222, #47671, sglang#34947."""
    assert mlaplan.row_lengths(ints(0), ints(), topk, most).size == most
    for call in (
        lambda: mlaplan.row_lengths(ints(0), ints(), topk, most + 1),
        lambda: mlaplan.PlannerConfig(max_rows=most + 1, max_requests=1, topk=topk),
    ):
        with pytest.raises(mlaplan.PlanError, match=f"rows x topk.* {(most + 1) * topk}.*2147483647"):
            call()
    assert mlaplan.PlannerConfig(max_rows=most, max_requests=1, topk=topk).max_rows == most


def test_sums_are_checked_when_they_are_narrowed() -> None:
    """flashinfer#3136: no wrap-around."""
    half = 2**30
    assert mlaplan.kv_indptr(ints(half, half - 1)).tolist() == [0, half, 2**31 - 1]
    with pytest.raises(mlaplan.PlanError, match="2147483648"):
        mlaplan.kv_indptr(ints(half, half))


def test_planned_dtypes_are_stated() -> None:
    """sglang#32849, #33022."""
    config = mlaplan.PlannerConfig(max_rows=8, max_requests=8, q_dtype="fp8", kv_dtype="fp8")
    made = mlaplan.Planner(config, "cpu")
    described = made.backend.describe()
    assert (described["q_dtype"], described["kv_dtype"], made.config.out_dtype) == ("fp8", "fp8", "bf16")


def test_lengths_alone_can_be_had() -> None:
    """vllm#54121, #57756: dense top-k rows and lengths, no ragged repack."""
    assert mlaplan.row_lengths(ints(0, 1, 3), ints(5, 9000), 2048, 4).tolist() == [5, 2048, 2048, 0]


@pytest.mark.parametrize("name", ["causal", "sinks", "dcp"])
def test_settings_that_would_be_ignored_are_refused(name: str) -> None:
    """flashinfer#296, vllm#54404."""
    with pytest.raises(TypeError, match=name):
        mlaplan.PlannerConfig(max_rows=8, max_requests=8, **{name: True})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=name):
        planner().plan(batch([1], [9]), **{name: True})


def test_a_release_without_an_arch_is_refused_for_it_would_be_ignored() -> None:
    """flashinfer#296."""
    with pytest.raises(ValueError, match="aiter_version"):
        mlaplan.PlannerConfig(max_rows=8, max_requests=8, arch=None, num_cus=8, aiter_version="0.1.18")


@pytest.mark.parametrize("name", ["device_query_start_loc", "device_seq_lens"])
def test_one_device_array_without_the_other_is_refused(name: str) -> None:
    """flashinfer#296: half of an input is not ignored in silence."""
    whole = batch([1], [9], on_device=True)
    without: Any = {name: None}
    for deferred in (False, True):
        with pytest.raises(ValueError, match=name):
            planner().plan(dataclasses.replace(whole, **without), deferred=deferred)


def test_a_batch_near_the_largest_index_is_planned_right() -> None:
    """vllm#47671: contexts of two billion tokens in 32-bit lengths."""
    top = 2**31 - 1
    plan = planner().plan(batch([3, 1], [top, top - 1]))
    assert_holds(plan, [3, 1], [top, top - 1])
