"""The reference `plan`: vectors of aiter's planner, hand-worked values, a second walk, wild input."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference.plan import ReferenceSchedule, plan, rows, schedule, split_budget

SENTINEL = -0x35014542
INT32 = np.iinfo(np.int32)

lengths_of_rows = st.lists(
    st.one_of(
        st.integers(1, 2048),
        st.builds(lambda blocks, off: max(1, 16 * blocks + off), st.integers(0, 128), st.integers(-1, 1)),
        st.sampled_from([1, 15, 16, 17, 256, 2048]),
    ),
    min_size=0,
    max_size=60,
)
with_empty_rows = lengths_of_rows.flatmap(
    lambda live: st.lists(st.just(0), max_size=12).flatmap(lambda empty: st.permutations(live + empty))
)
parameters = st.builds(
    PlanParams,
    topk=st.just(2048),
    num_cus=st.sampled_from([1, 2, 3, 4, 8, 20, 38, 80, 228, 256, 304]),
    fold=st.integers(1, 8),
    split_budget=st.one_of(st.none(), st.just(-1), st.integers(1, 40)),
    min_tokens_per_split=st.sampled_from([1, 64, 128, 512]),
    variant=st.sampled_from(["parallel", "serial"]),
    empty_rows=st.sampled_from(["skip", "aiter"]),
)


def as_int32(values: Any) -> np.ndarray:
    return np.array(list(values), np.int32)


def make(lengths: Any, **params: Any) -> ReferenceSchedule:
    return schedule(as_int32(lengths), PlanParams(**{"topk": 2048, "num_cus": 304, "split_budget": -1, **params}))


def slots_of_works(made: ReferenceSchedule) -> np.ndarray:
    return np.repeat(np.arange(made.work_indptr.size - 1), np.diff(made.work_indptr))


def works_of(made: ReferenceSchedule, tile: int) -> np.ndarray:
    works: np.ndarray = made.work_info[made.work_info[:, 0] == tile]
    return works


def same(left: ReferenceSchedule, right: ReferenceSchedule) -> bool:
    pairs: Any = zip(left, right, strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


# The walk with one number carried, for rows that are not empty: (slot, tile, kv start, kv end) of each work.
def one_number_walk(lengths: list[int], num_slots: int) -> list[tuple[int, int, int, int]]:
    blocks = [(length + 15) // 16 for length in lengths]
    per_slot = -(-sum(n + 16 for n in blocks) // num_slots)
    room, slot, start, works = per_slot + 16, 0, 0, []
    for tile, (length, n) in enumerate(zip(lengths, blocks, strict=True)):
        need = n + 16
        fresh = -(-max(0, need - room) // per_slot)
        cuts = [0, n] if fresh == 0 else [0, room - 16]
        for _ in range(fresh):
            cuts.append(min(n, cuts[-1] + per_slot))
        for step, (begin, end) in enumerate(pairwise(cuts)):
            if end > begin:
                stop = min(start + 16 * end, start + length)
                works.append((slot + step, tile, start + 16 * begin, stop))
        room = max(room - need + fresh * per_slot, 16)
        slot += fresh
        start += length
    return works


# Row by row, with Python's integers, from the rule in the docstring of `plan`.
def rows_one_by_one(starts: list[int], lens: list[int], topk: int, num_rows: int) -> tuple[list[int], list[int]]:
    bounds = [0]
    for start in starts[1:]:
        bounds.append(max(bounds[-1], min(max(start, 0), num_rows)))
    ids, lengths = [0] * num_rows, [0] * num_rows
    for request, (begin, end) in enumerate(pairwise(bounds)):
        for row in range(begin, end):
            ids[row] = request
            lengths[row] = min(max(lens[request] - (end - begin) + (row - begin) + 1, 0), topk)
    return ids, lengths


def guarded_arrays(num_rows: int, params: PlanParams) -> tuple[np.ndarray, PlanArrays, np.ndarray]:
    """An arena of sentinels with a band around it, the arrays in it, and a mask of their words."""
    layout, band = Layout.of(num_rows, num_cus=params.num_cus, fold=params.fold), 256
    arena = np.full(layout.words + 2 * band, SENTINEL, np.int32)
    owned = np.zeros(arena.size, bool)
    views = []
    for offset, shape in zip(layout.offsets, layout.shapes, strict=True):
        begin, size = band + offset, int(np.prod(shape))
        owned[begin : begin + size] = True
        views.append(arena[begin : begin + size].reshape(shape))
    return arena, PlanArrays(*views), owned


def check_plan(starts: list[int], lens: list[int], num_rows: int, params: PlanParams) -> None:
    """Plans in a guarded arena and compares every word of it with a plan made another way."""
    arena, arrays, owned = guarded_arrays(num_rows, params)
    query_start_loc, seq_lens = as_int32(starts), as_int32(lens)
    plan(query_start_loc, seq_lens, arrays, params)
    assert query_start_loc.tolist() == starts
    assert seq_lens.tolist() == lens

    ids, lengths = rows_one_by_one(starts, lens, params.topk, num_rows)
    live = min(max(0, *starts[1:]), num_rows) if lens else 0
    made = schedule(as_int32(lengths[:live]), params)
    total = sum(lengths)
    assert arrays.request_ids.tolist() == ids
    assert arrays.kv_indptr.tolist() == [sum(lengths[:t]) for t in range(num_rows)] + [total]
    assert np.array_equal(arrays.work_indptr, made.work_indptr)
    behind = (num_rows - live) * params.fold
    assert np.array_equal(arrays.reduce_indptr, np.pad(made.reduce_indptr, (0, behind), mode="edge"))
    num_works = made.work_info.shape[0]
    assert np.array_equal(arrays.work_info[:num_works], made.work_info)
    assert (arrays.work_info[num_works:] == SENTINEL).all()
    assert (arena[~owned] == SENTINEL).all()
    for *_, kv_start, kv_end, behind_end, zero in arrays.work_info[:num_works].tolist():
        assert 0 <= kv_start <= kv_end <= kv_end + behind_end <= total
        assert zero == 0


# Golden vectors.


@pytest.fixture(scope="module")
def golden(shared: Path) -> list[dict[str, Any]]:
    with gzip.open(shared / "golden" / "aiter_mla_metadata_v1_2.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def check_golden(case: dict[str, Any], want: dict[str, Any], params: PlanParams) -> None:
    made = schedule(np.diff(as_int32(case["kv_indptr"])).astype(np.int32), params)
    for name in ("work_indptr", "reduce_indptr", "reduce_partial_map"):
        assert getattr(made, name).tolist() == want[name], (case["id"], name)
    assert made.work_info.tolist() == want["work_info"], case["id"]
    merged = [[t, *made.reduce_final_map[t].tolist()] for t in np.flatnonzero(np.diff(made.reduce_indptr))]
    assert merged == want["reduce_final_map"], case["id"]
    assert (made.num_slots, made.blocks_per_slot) == (case["num_slots"], case["blocks_per_slot"]), case["id"]


def golden_params(case: dict[str, Any], variant: str, empty_rows: str) -> PlanParams:
    return PlanParams(
        topk=case["topk"],
        num_cus=case["num_cu"],
        fold=case["qk_batch_ratio"],
        split_budget=case["max_split_per_batch"],
        variant=variant,
        empty_rows=empty_rows,
    )


def test_all_golden_vectors_are_reproduced_in_both_variants(golden: list[dict[str, Any]]) -> None:
    checked = 0
    for case in golden:
        check_golden(case, case, golden_params(case, case["planner"], "aiter"))
        other = "serial" if case["planner"] == "parallel" else "parallel"
        if "serial" in case:
            check_golden(case, case["serial"], golden_params(case, "serial", "aiter"))
        elif 0 not in np.diff(case["kv_indptr"]):
            check_golden(case, case, golden_params(case, other, "aiter"))
            check_golden(case, case, golden_params(case, other, "skip"))
        checked += 1
    assert checked == 300


def test_golden_rows_follow_from_the_requests(golden: list[dict[str, Any]]) -> None:
    for case in golden:
        if case["requests"] is None:
            continue
        queries = [new for _, new in case["requests"]]
        starts = as_int32(np.cumsum([0, *queries]))
        lens = as_int32(context + new for context, new in case["requests"])
        num_rows = len(case["kv_indptr"]) - 1
        ids, lengths = rows(starts, lens, case["topk"], num_rows)
        assert np.cumsum([0, *lengths]).tolist() == case["kv_indptr"], case["id"]
        live = int(starts[-1])
        assert np.array_equal(ids[:live], np.repeat(np.arange(len(queries)), queries)), case["id"]


# Values worked by hand.


@pytest.mark.parametrize(
    ("num_rows", "budget", "want"),
    [
        (1, -1, 1),
        (8, -1, 4),
        (32, -1, 16),
        (64, -1, 31),
        (128, -1, 61),
        (512, -1, 243),
        (1, 4, 36),
        (8, 16, 9),
        (32, 16, 16),
        (128, 4, 61),
    ],
)
def test_blocks_per_slot_of_full_rows(num_rows: int, budget: int, want: int) -> None:
    assert make([2048] * num_rows, split_budget=budget).blocks_per_slot == want


def test_budgets_cut_one_full_row_as_reported() -> None:
    assert np.diff(make([2048]).work_info[:, 4:6]).ravel().tolist() == [16] * 128
    assert np.diff(make([2048], split_budget=4).work_info[:, 4:6]).ravel().tolist() == [576, 576, 576, 320]
    assert make([2048] * 256).work_info.shape[0] == 512
    two = make([2048] * 2, split_budget=16, num_cus=256)
    assert (two.num_slots, two.work_info.shape[0]) == (32, 30)
    assert np.diff(two.work_info[:, 4:6]).max() == 144
    assert len(works_of(make([2048, 16, 16, 16], split_budget=1), 0)) == 3


def test_the_rule_sets_the_budget_from_the_longest_row() -> None:
    def rule(longest: int, tokens: int = 128, cus: int = 304) -> int:
        return split_budget(longest, PlanParams(topk=2048, num_cus=cus, min_tokens_per_split=tokens))

    assert [rule(n) for n in (0, 1, 127, 128, 255, 256, 383, 384, 2047, 2048)] == [
        1,
        1,
        1,
        1,
        1,
        2,
        2,
        4,
        16,
        16,
    ]
    assert (rule(2048, tokens=1), rule(2048, tokens=512), rule(2048, cus=10)) == (304, 4, 10)
    assert same(make([2048, 7], split_budget=None), make([2048, 7], split_budget=16))


def test_empty_rows_as_aiter_drops_them() -> None:
    counted = {"empty_rows": "aiter"}
    assert make([16, 0, 0, 0], **counted).work_info[:, 0].tolist() == [0]
    assert 1 not in make([2048, 0, 2048], **counted).work_info[:, 0]
    assert [len(works_of(make([2048, 1, 2048], **counted), t)) for t in range(3)] == [64, 1, 64]
    assert make([16, 1, 1, 1], **counted).work_info.shape[0] == 4
    assert make([0] * 6, num_cus=8, **counted).work_info.shape[0] == 1
    serial = make([0] * 6, num_cus=8, variant="serial", **counted)
    assert serial.work_info[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (serial.work_info[:, 1] == -1).all()
    assert not serial.reduce_indptr.any()


def test_skipped_empty_rows_have_no_weight_and_no_work() -> None:
    padded = make([2048] * 8 + [0] * 504)
    assert len(np.unique(slots_of_works(padded))) == 256
    assert len(np.unique(slots_of_works(make([2048] * 8 + [0] * 504, empty_rows="aiter")))) == 36
    assert len(np.unique(slots_of_works(make([2048] * 8 + [0] * 56, empty_rows="aiter")))) == 152
    for lengths in ([], [0], [0, 0, 0]):
        made = make(lengths, split_budget=4)
        assert made.work_info.shape == (0, 8)
        assert not made.work_indptr.any()
        assert not made.reduce_indptr.any()
        assert made.reduce_indptr.size == len(lengths) + 1


def test_first_and_later_chunks_of_a_prompt_differ() -> None:
    assert rows(as_int32([0, 4]), as_int32([4]), 4, 4)[1].tolist() == [1, 2, 3, 4]
    assert rows(as_int32([0, 4]), as_int32([8]), 4, 4)[1].tolist() == [4, 4, 4, 4]
    assert rows(as_int32([0, 1, 5]), as_int32([16, 4]), 4, 6)[0].tolist() == [0, 1, 1, 1, 1, 0]


# Properties of any schedule.


@given(with_empty_rows, parameters)
@example([], PlanParams(topk=2048, num_cus=1))
@example([0, 2048, 0], PlanParams(topk=2048, num_cus=1, fold=8, split_budget=1))
def test_works_cover_every_row_once_in_order(lengths: list[int], params: PlanParams) -> None:
    made = schedule(as_int32(lengths), params)
    starts = np.cumsum([0, *lengths])
    locations = []
    for tile in range(len(lengths) * params.fold):
        row = tile // params.fold
        works = works_of(made, tile)
        if lengths[row] == 0:
            assert len(works) <= (params.empty_rows == "aiter")
        else:
            assert works[0, 4] == starts[row]
            assert works[-1, 5] == starts[row + 1]
            assert np.array_equal(works[1:, 4], works[:-1, 5])
            assert (works[:, 4] < works[:, 5]).all()
            assert ((works[:, 4] - starts[row]) % 16 == 0).all()
        assert np.array_equal(works[:, 6], starts[row + 1] - works[:, 5])
        assert (works[:, 2] == tile).all()
        assert (works[:, 3] == tile + 1).all()
        assert not works[:, 7].any()
        pieces = len(works) if len(works) >= 2 else 0
        assert np.diff(made.reduce_indptr)[tile] == pieces
        assert (works[:, 1] == -1).all() if pieces == 0 else True
        begin, end = made.reduce_indptr[tile : tile + 2]
        assert works[:pieces, 1].tolist() == made.reduce_partial_map[begin:end].tolist()
        locations += works[:pieces, 1].tolist()
    assert locations == list(range(made.reduce_indptr[-1]))
    assert made.work_indptr[0] == 0
    assert made.work_indptr[-1] == len(made.work_info)
    assert (np.diff(made.work_indptr) >= 0).all()
    planned = len(lengths) if params.empty_rows == "aiter" else np.count_nonzero(lengths)
    if planned:
        assert len(made.work_info) <= planned * params.fold + made.num_slots - 1
        assert made.reduce_indptr[-1] <= max(0, 2 * (made.num_slots - 1))
        assert not np.diff(made.work_indptr)[made.num_slots :].any()


@given(lengths_of_rows.filter(bool), parameters)
def test_the_walk_equals_its_form_with_one_number(lengths: list[int], params: PlanParams) -> None:
    made = schedule(as_int32(lengths), params)
    budget = split_budget(max(lengths), params)
    tiles = [length for length in lengths for _ in range(params.fold)]
    num_slots = params.num_cus if budget < 0 else min(params.num_cus, budget * len(tiles))
    walked = one_number_walk(tiles, num_slots)
    starts, tile_starts = np.cumsum([0, *lengths]), np.cumsum([0, *tiles])
    want = [
        (slot, tile, begin - tile_starts[tile] + starts[tile // params.fold], end - begin)
        for slot, tile, begin, end in walked
    ]
    spans = made.work_info[:, [0, 4]].tolist()
    sizes = (made.work_info[:, 5] - made.work_info[:, 4]).tolist()
    have = [(c, *span, size) for c, span, size in zip(slots_of_works(made), spans, sizes, strict=True)]
    assert have == want


@given(with_empty_rows, parameters)
def test_skip_is_the_schedule_without_the_empty_rows(lengths: list[int], params: PlanParams) -> None:
    made = schedule(as_int32(lengths), replace(params, empty_rows="skip"))
    kept = [row for row, length in enumerate(lengths) if length]
    packed = schedule(as_int32(lengths[row] for row in kept), replace(params, empty_rows="aiter"))
    back = np.array([row * params.fold + part for row in kept for part in range(params.fold)], np.int64)
    want = packed.work_info.copy()
    want[:, 0] = want[:, 2] = back[packed.work_info[:, 0]]
    want[:, 3] = want[:, 2] + 1
    assert np.array_equal(made.work_info, want)
    assert np.array_equal(made.work_indptr, packed.work_indptr)
    pieces = np.zeros(len(lengths) * params.fold, np.int64)
    pieces[back] = np.diff(packed.reduce_indptr)
    assert np.diff(made.reduce_indptr).tolist() == pieces.tolist()


@given(with_empty_rows, parameters)
def test_variants_differ_only_where_an_empty_row_counts(lengths: list[int], params: PlanParams) -> None:
    serial = schedule(as_int32(lengths), replace(params, variant="serial"))
    parallel = schedule(as_int32(lengths), replace(params, variant="parallel"))
    if params.empty_rows == "skip" or 0 not in lengths:
        assert same(serial, parallel)
    else:
        empty = np.repeat(np.array(lengths) == 0, params.fold)
        assert np.bincount(serial.work_info[:, 0], minlength=empty.size)[empty].tolist() == [1] * int(empty.sum())


# The op in place, with any values.


wild = st.one_of(
    st.integers(-3, 40),
    st.integers(INT32.min, INT32.max),
    st.sampled_from([INT32.min, INT32.max, -1, 0, 996]),
)


@given(st.data(), st.integers(0, 9), st.integers(1, 33), parameters, st.sampled_from([1, 4, 64, 2048]))
def test_wild_boundaries_and_lengths_stay_inside(
    data: st.DataObject, num_reqs: int, num_rows: int, params: PlanParams, topk: int
) -> None:
    starts = data.draw(st.lists(wild, min_size=num_reqs + 1, max_size=num_reqs + 1))
    lens = data.draw(st.lists(wild, min_size=num_reqs, max_size=num_reqs))
    check_plan(starts, lens, num_rows, replace(params, topk=topk))


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 6)), max_size=12), st.integers(0, 9), parameters)
def test_valid_batches_are_planned_by_the_definition(
    requests: list[tuple[int, int]], padding: int, params: PlanParams
) -> None:
    starts = np.cumsum([0, *(new for _, new in requests)]).tolist()
    num_rows = max(1, starts[-1] + padding)
    check_plan(starts, [context + new for context, new in requests], num_rows, params)
    ids, lengths = rows(as_int32(starts), as_int32(c + n for c, n in requests), params.topk, num_rows)
    want = [(r, min(c + i + 1, params.topk)) for r, (c, n) in enumerate(requests) for i in range(n)]
    assert list(zip(ids.tolist(), lengths.tolist(), strict=True)) == want + [(0, 0)] * (num_rows - len(want))


@pytest.mark.parametrize("starts", [[0, 996, 996, 996], [0, 1, 2, 3], [0, 996, 2, 3], [7, -5, 2**31 - 1, 0]])
@pytest.mark.parametrize("lens", [[3000, 1, 2], [2**31 - 1] * 3, [-(2**31), -1, 0]])
@pytest.mark.parametrize("num_rows", [3, 1024])
def test_stale_query_starts_are_clamped(starts: list[int], lens: list[int], num_rows: int) -> None:
    check_plan(starts, lens, num_rows, PlanParams(topk=2048, num_cus=304))


def test_a_smaller_plan_leaves_nothing_of_a_larger_one() -> None:
    params = PlanParams(topk=2048, num_cus=80, fold=2)
    _, arrays, _ = guarded_arrays(128, params)
    plan(as_int32(range(129)), as_int32(range(500, 628)), arrays, params)
    plan(as_int32([*range(118), 118]), as_int32(range(1, 119)), arrays, params)
    assert not arrays.request_ids[118:].any()
    assert (arrays.kv_indptr[118:] == 118 * 119 // 2).all()
    assert (arrays.reduce_indptr[236:] == arrays.reduce_indptr[236]).all()


def test_arrays_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    params = PlanParams(topk=2048, num_cus=8)
    arena, arrays, _ = guarded_arrays(4, params)
    starts, lens = as_int32([0, 1]), as_int32([5])
    cases: list[tuple[str, np.ndarray, PlanArrays, PlanParams]] = [
        ("query_start_loc", as_int32([0, 1, 2]), arrays, params),
        ("work_indptr", starts, arrays, replace(params, num_cus=9)),
        ("reduce_indptr", starts, arrays, replace(params, fold=2)),
        ("kv_indptr", starts, arrays._replace(kv_indptr=arrays.kv_indptr[:-1]), params),
        ("work_info", starts, arrays._replace(work_info=arrays.work_info[:-1]), params),
        ("variant", starts, arrays, replace(params, variant="fast")),
        ("empty_rows", starts, arrays, replace(params, empty_rows="drop")),
    ]
    for name, query_start_loc, given_arrays, given_params in cases:
        with pytest.raises(ValueError, match=name):
            plan(query_start_loc, lens, given_arrays, given_params)
    assert (arena == SENTINEL).all()
