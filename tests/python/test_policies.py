"""The policies `balanced` and `invariant` in the reference: against every schedule there is, and rule by rule."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlaplan.backends import partial_capacity
from mlaplan.config import PlannerConfig
from mlaplan.costs import CostTable
from mlaplan.layout import Layout, PlanArrays, PlanParams, work_capacity
from mlaplan.reference import policies
from mlaplan.reference.plan import ReferenceSchedule, _aiter_works, plan, schedule, split_budget
from policy_cases import BF16_16, FP8_16, PORTABLE, TABLES, best_longest_slot, lengths, parameters, price, tables

COMPUTE_UNITS = st.sampled_from([1, 2, 3, 7, 20, 132, 304])
BUDGETS = st.one_of(st.none(), st.just(-1), st.integers(1, 20))


def make(policy: str, rows: Any, table: CostTable, **more: Any) -> ReferenceSchedule:
    return schedule(np.array(rows, np.int64), parameters(policy, table, **more))


def pieces_of(made: ReferenceSchedule, tile: int) -> list[tuple[int, int]]:
    """Tokens of each piece of a tile, counted from the tile's start."""
    works = made.work_info[made.work_info[:, 0] == tile]
    return [(int(work[4] - works[0][4]), int(work[5] - works[0][4])) for work in works]


def check_structure(made: ReferenceSchedule, rows: list[int], params: PlanParams) -> None:
    """Every token of every live tile once, in order, in no more slots, works and partials than there is room for."""
    fold, num_cus = params.fold, params.num_cus
    ends = np.cumsum(rows)
    info = made.work_info
    assert made.work_indptr[0] == 0
    assert made.work_indptr[-1] == len(info)
    assert np.all(np.diff(made.work_indptr) >= 0)
    assert np.count_nonzero(np.diff(made.work_indptr)) <= made.num_slots
    partials = 0
    position = 0
    for tile in range(len(rows) * fold):
        tokens, row_end = rows[tile // fold], int(ends[tile // fold])
        works = []
        while position < len(info) and info[position, 0] == tile:
            works.append(info[position].tolist())
            position += 1
        assert bool(works) == (tokens > 0)
        at = row_end - tokens
        for _tile, location, query, query_end, start, end, behind, unused in works:
            assert (query, query_end, start, behind, unused) == (tile, tile + 1, at, row_end - end, 0)
            assert end > start
            assert location == (partials if len(works) > 1 else -1)
            partials += len(works) > 1
            at = end
        assert not works or at == row_end
        assert made.reduce_indptr[tile + 1] == partials
    assert position == len(info)
    tiles = max(1, len(rows) * fold)
    assert len(info) <= work_capacity(tiles, num_cus, params.pieces)
    assert partials <= partial_capacity(tiles, num_cus, pieces=params.pieces)


def is_the_walk(made: ReferenceSchedule, rows: list[int], params: PlanParams) -> bool:
    """Whether it is aiter's schedule on as many slots, for which no budget need exist that says so."""
    lengths = np.repeat(np.array(rows, np.int64), params.fold)
    works = _aiter_works(lengths[lengths > 0], made.num_slots, "parallel")[0] if made.num_slots else []
    return [(work.slot, work.end - work.begin) for work in works] == [work[1:] for work in shape(made)]


def shape(made: ReferenceSchedule) -> list[tuple[int, int, int]]:
    """Tile, slot and tokens of every work."""
    slots = np.repeat(np.arange(len(made.work_indptr) - 1), np.diff(made.work_indptr))
    tokens = made.work_info[:, 5] - made.work_info[:, 4]
    return list(zip(made.work_info[:, 0].tolist(), slots.tolist(), tokens.tolist(), strict=True))


def candidates(blocks: list[int], num_slots: int, table: CostTable) -> tuple[int, int]:
    """The first of the 64 costs that are tried, and how far they are apart."""
    load = sum(table.whole + count * table.block for count in blocks)
    span = max(table.whole, 2 * table.piece) + table.block + max(0, table.piece - table.whole)
    return max(-(-load // num_slots), table.piece + table.block), max(1, -(-span // 63))


def is_cut(made: ReferenceSchedule) -> bool:
    """Whether any row is."""
    return bool(made.reduce_indptr[-1])


def total(made: ReferenceSchedule, table: CostTable) -> int:
    """The longest slot, and what it costs to have something to merge."""
    return max(price(made, table)) + (table.cut if is_cut(made) else 0)


@given(lengths(), tables(), COMPUTE_UNITS, BUDGETS, st.integers(1, 4))
def test_a_balanced_schedule_covers_every_token_once(
    rows: list[int], table: CostTable, num_cus: int, budget: int | None, fold: int
) -> None:
    params = parameters("balanced", table, num_cus=num_cus, split_budget=budget, fold=fold)
    made = schedule(np.array(rows, np.int64), params)
    check_structure(made, rows, params)
    assert max(price(made, table)) <= made.limit
    if not is_the_walk(made, rows, params):
        for tile in range(len(rows) * fold):
            assert all(start % table.block_tokens == 0 for start, _end in pieces_of(made, tile))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.integers(1, 3),
    tables(),
    st.integers(1, 6),
    st.sampled_from([None, -1, 1, 2, 3]),
)
@example([1, 6, 1, 1], 1, CostTable(block_tokens=16, block=1, piece=0, whole=12), 4, -1)
def test_no_schedule_in_order_finishes_a_step_of_the_search_sooner(
    blocks: list[int], off: int, table: CostTable, num_cus: int, budget: int | None
) -> None:
    table = table if table not in TABLES else replace(table, block=5, piece=4, whole=7)
    rows = [max(1, count * table.block_tokens - off * (index % 2)) for index, count in enumerate(blocks)]
    blocks = [table.blocks(tokens) for tokens in rows]
    made = make("balanced", rows, table, num_cus=num_cus, split_budget=budget)
    best, longest = best_longest_slot(blocks, made.num_slots, table), max(price(made, table))
    start, step = candidates(blocks, made.num_slots, table)
    if is_cut(made):
        assert longest <= max(best + step - 1, start)
    else:
        # A walk that leaves every row whole may be longer, by less than what having a merge costs.
        assert longest <= max(best + step - 1, start) + max(0, table.cut - 1)
    # Cuts of 16 tokens may be finer than blocks.
    assert best <= longest or is_the_walk(made, rows, parameters("balanced", table, num_cus=num_cus))
    # A capacity is enough exactly where some schedule fits into it: so a bisection may take the place of the scan.
    for capacity in range(start, start + 63 * step + 1):
        assert policies.is_enough(blocks, capacity, made.num_slots, table) == (capacity >= best)
    assert best <= start + 63 * step


@given(lengths(), tables(), COMPUTE_UNITS, BUDGETS)
def test_balanced_is_never_worse_than_the_walk_on_as_many_slots(
    rows: list[int], table: CostTable, num_cus: int, budget: int | None
) -> None:
    made = make("balanced", rows, table, num_cus=num_cus, split_budget=budget)
    tiles = max(1, int(np.count_nonzero(rows)))
    walk = make("aiter", rows, table, num_cus=num_cus, split_budget=-1 if budget == -1 else -(-made.num_slots // tiles))
    if walk.num_slots == made.num_slots:
        assert total(made, table) <= total(walk, table)
        if is_cut(made) or not is_cut(walk) or table.cut == 0:
            assert max(price(made, table)) <= max(price(walk, table))


def test_a_row_of_one_block_is_cut_where_aiter_does_and_gains_by_it() -> None:
    """Pieces of 16 tokens of a block of 64 cost less than the row whole, and the fill cannot make them."""
    walk = make("aiter", [64], FP8_16, num_cus=304, split_budget=-1)
    assert pieces_of(walk, 0) == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert max(price(walk, FP8_16)) < FP8_16.whole + FP8_16.block
    made = make("balanced", [64], FP8_16, num_cus=304, split_budget=-1)
    assert np.array_equal(made.work_info, walk.work_info)
    assert np.array_equal(made.work_indptr, walk.work_indptr)
    assert made.limit == FP8_16.piece + FP8_16.block
    # A table by which pieces are dearer has it whole.
    whole = make("balanced", [64], PORTABLE, num_cus=304, split_budget=1)
    assert pieces_of(whole, 0) == [(0, 64)]


def test_one_full_row_is_cut_at_the_blocks_of_the_kernel() -> None:
    """Of 16 slots each gets 144 tokens from aiter, three blocks of 64; two are enough."""
    walk = make("aiter", [2048], FP8_16, num_cus=304, split_budget=16)
    made = make("balanced", [2048], FP8_16, num_cus=304, split_budget=16)
    assert max(price(walk, FP8_16)) == FP8_16.piece + 3 * FP8_16.block
    assert max(price(made, FP8_16)) == FP8_16.piece + 2 * FP8_16.block
    assert pieces_of(made, 0) == [(start, start + 128) for start in range(0, 2048, 128)]


def test_a_fill_worked_out_by_hand() -> None:
    """Rows of 3, 1 and 4 blocks: whole ones cost 2 more, pieces 1 more."""
    table = CostTable(block_tokens=10, block=1, piece=1, whole=2)
    works = [tuple(work) for work in policies.fill([3, 1, 4], 6, table)]
    # Slot 0: 5 of 6. The row of one block needs 3. Slot 1: 3, then two blocks of the last row in what is left.
    assert works == [(0, 0, 0, 3), (1, 1, 0, 1), (2, 1, 0, 2), (2, 2, 2, 4)]
    # Just too little for a whole row of three: two pieces, although three blocks as a piece would fit.
    assert [tuple(work) for work in policies.fill([3], 4, table)] == [(0, 0, 0, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("tokens", "table", "num_cus", "pieces"),
    [
        (0, BF16_16, 304, 1),
        (1, BF16_16, 304, 1),
        # ceil(n / k) b + k m, with n = 128, b = 3115, m = 2000: 8 x 3115 + 16 x 2000 is the least.
        (2048, BF16_16, 304, 16),
        (2048, BF16_16, 4, 4),
        (2048, replace(BF16_16, merge=0), 304, 128),
        (2048, replace(BF16_16, merge=1 << 24), 304, 1),
        # One piece: 15460 + 128 x 3115 = 414180; 16: 11330 + 8 x 3115 + 16 x 2000 = 68250, 345930 less.
        (2048, replace(BF16_16, cut=345_929), 304, 16),
        (2048, replace(BF16_16, cut=345_930), 304, 1),
        # Two pieces of 4 blocks and one of 8 cost the same: the fewest.
        (8, CostTable(block_tokens=1, block=1, piece=0, whole=0, merge=2), 304, 1),
    ],
)
def test_the_split_budget_weighs_pieces_against_their_merge(
    tokens: int, table: CostTable, num_cus: int, pieces: int
) -> None:
    assert split_budget(tokens, parameters("balanced", table, num_cus=num_cus)) == pieces


@given(st.integers(1, 4096), tables(), COMPUTE_UNITS)
def test_no_other_number_of_pieces_finishes_the_longest_row_sooner(tokens: int, table: CostTable, num_cus: int) -> None:
    params = parameters("balanced", table, num_cus=num_cus)
    blocks = -(-tokens // table.block_tokens)
    costs = {1: table.whole + blocks * table.block}
    for pieces in range(2, min(blocks, num_cus) + 1):
        costs[pieces] = table.piece - (-blocks // pieces) * table.block + pieces * table.merge + table.cut
    chosen = split_budget(tokens, params)
    assert costs[chosen] == min(costs.values())
    assert all(costs[fewer] > costs[chosen] for fewer in range(1, chosen))


def filled(rows: list[int], num_slots: int, table: CostTable) -> tuple[list[tuple[int, int, int]], int]:
    """The fill under the least candidate that is enough, and that candidate."""
    blocks = [table.blocks(tokens) for tokens in rows]
    low, step = candidates(blocks, num_slots, table)
    limit = next(c for c in range(low, low + 64 * step, step) if policies.is_enough(blocks, c, num_slots, table))
    cut = [
        (w.tile, w.slot, w.begin * table.block_tokens, w.end * table.block_tokens)
        for w in policies.fill(blocks, limit, table)
    ]
    return [(tile, slot, min(end, rows[tile]) - begin) for tile, slot, begin, end in cut], limit


@given(
    st.integers(1, 2048), st.lists(st.integers(0, 40), min_size=1, max_size=40), tables(), st.integers(1, 20),
    st.integers(1, 3),
)  # fmt: skip
def test_the_cheapest_is_taken_of_the_fill_the_walk_and_whole_rows(
    longest: int, off: list[int], table: CostTable, num_cus: int, fold: int
) -> None:
    rows = [max(1, longest - less) for less in off]
    tiles = [tokens for tokens in rows for _ in range(fold)]
    more = {"num_cus": num_cus, "split_budget": -1, "fold": fold}
    walk = make("aiter", rows, table, **more)
    walked = max(price(walk, table))
    works, limit = filled(tiles, num_cus, table)
    each = -(-len(tiles) // num_cus)
    whole = [(tile, tile // each, tokens) for tile, tokens in enumerate(tiles)]
    prices = {table.whole + table.blocks(tokens) * table.block for tokens in tiles}
    even = each * prices.pop() if len(prices) == 1 else None
    gain = walked - limit
    for cut in {0, max(gain, 0), min(max(gain + 1, 0), 1 << 24), 1 << 24, max(0, (even or 0) - limit)}:
        cost, wanted = limit + cut, works
        if even is not None and even < cost:
            cost, wanted = even, whole
        if walked + (cut if is_cut(walk) else 0) < cost:
            wanted = shape(walk)
        made = make("balanced", rows, replace(table, cut=cut), **more)
        assert shape(made) == wanted
        assert max(price(made, table)) <= made.limit


@pytest.mark.parametrize(
    ("rows", "cut", "works"),
    [
        # Whole rows: 4 in a slot, 271388. The fill needs 263 thousand and the merge.
        (256, 12_515, [4] * 64 + [0] * 2),
        (256, 0, None),
        (128, 12_515, [2] * 64 + [0] * 2),
        (512, 12_515, [8] * 64 + [0] * 2),
        # 5 in a slot would be 76 thousand longer than the even share of 4.5.
        (300, 12_515, None),
        (66, 0, [1] * 66),
    ],
)
def test_full_rows_stay_whole_where_cutting_gains_less_than_it_costs(
    rows: int, cut: int, works: list[int] | None
) -> None:
    """128 heads on an H200: 66 slots."""
    table = CostTable(block_tokens=64, block=2004, piece=5723, whole=3719, slot=6449, merge=1289, cut=cut)
    made = make("balanced", [2048] * rows, table, num_cus=66)
    assert is_cut(made) == (works is None)
    if works is not None:
        assert np.diff(made.work_indptr).tolist() == works


def test_no_live_row_gives_no_work() -> None:
    for policy in ("balanced", "invariant"):
        for rows in ([], [0], [0, 0, 0]):
            made = make(policy, rows, PORTABLE)
            assert made.work_info.shape == (0, 8)
            assert made.work_indptr.tolist() == [0] * 21
            assert made.reduce_indptr.tolist() == [0] * (len(rows) + 1)


@given(lengths(), tables(), COMPUTE_UNITS, BUDGETS, st.sampled_from(["balanced", "invariant"]))
def test_empty_rows_change_nothing_but_the_numbers_of_rows(
    rows: list[int], table: CostTable, num_cus: int, budget: int | None, policy: str
) -> None:
    params = parameters(policy, table, num_cus=num_cus, split_budget=budget, piece_tokens=100)
    live = [index for index, tokens in enumerate(rows) if tokens]
    whole, packed = schedule(np.array(rows, np.int64), params), schedule(np.array([rows[i] for i in live]), params)
    renumbered = packed.work_info.copy()
    for column, more in ((0, 0), (2, 0), (3, 1)):
        renumbered[:, column] = np.array(live, np.int64)[packed.work_info[:, 0]] + more if live else 0
    assert np.array_equal(whole.work_info, renumbered)
    assert np.array_equal(whole.work_indptr, packed.work_indptr)


@given(lengths(), tables(), COMPUTE_UNITS, st.sampled_from([1, 16, 100, 256, 2048, 5000]), st.integers(1, 4))
def test_an_invariant_row_is_cut_by_itself_alone(
    rows: list[int], table: CostTable, num_cus: int, piece_tokens: int, fold: int
) -> None:
    rows = [tokens % 300 for tokens in rows] if piece_tokens == 1 else rows
    params = parameters("invariant", table, num_cus=num_cus, piece_tokens=piece_tokens, fold=fold)
    made = schedule(np.array(rows, np.int64), params)
    check_structure(made, rows, params)
    for row, tokens in enumerate(rows):
        starts = range(0, tokens, piece_tokens)
        wanted = [(start, min(start + piece_tokens, tokens)) for start in starts]
        for part in range(fold):
            assert pieces_of(made, row * fold + part) == wanted


def test_invariant_pieces_placed_by_hand() -> None:
    """Pieces of 10 tokens: four of cost 3, one whole row of cost 5, two of 3 and one of 2: a total of 25 on 3 slots."""
    table = CostTable(block_tokens=5, block=1, piece=1, whole=3)
    made = make("invariant", [40, 10, 22], table, num_cus=3, piece_tokens=10)
    # Costs before: 0 3 6 9 | 12 | 17 20 23; times 3 over 25.
    assert made.work_indptr.tolist() == [0, 3, 5, 8]
    assert [pieces_of(made, tile) for tile in range(3)] == [
        [(0, 10), (10, 20), (20, 30), (30, 40)], [(0, 10)], [(0, 10), (10, 20), (20, 22)],
    ]  # fmt: skip
    assert made.work_info[:, 1].tolist() == [0, 1, 2, 3, -1, 4, 5, 6]


@given(lengths(), tables(), COMPUTE_UNITS, st.sampled_from([16, 100, 256]))
def test_invariant_slots_share_the_cost_evenly(
    rows: list[int], table: CostTable, num_cus: int, piece_tokens: int
) -> None:
    made = make("invariant", rows, table, num_cus=num_cus, piece_tokens=piece_tokens)
    costs = price(made, table)
    # What begins before a slot's end belongs to it, so it passes its share by less than one piece.
    most = max([table.most_expensive(min(piece_tokens, tokens)) for tokens in rows if tokens], default=0)
    assert all(cost * num_cus < sum(costs) + most * num_cus or not cost for cost in costs)


@given(lengths(longest=600, rows=12), st.sampled_from(["balanced", "invariant"]), st.integers(1, 3))
def test_a_plan_holds_the_schedule_and_stays_inside_its_arrays(rows: list[int], policy: str, fold: int) -> None:
    params = parameters(policy, PORTABLE, topk=500, num_cus=7, fold=fold, piece_tokens=64)
    layout = Layout.of(14, num_cus=7, fold=fold, pieces=params.pieces)
    arrays = PlanArrays(*(np.full(shape, -77, np.int32) for shape in layout.shapes))
    plan(np.arange(len(rows) + 1, dtype=np.int32), np.array(rows, np.int32), arrays, params)
    made = schedule(np.minimum(rows, 500), params)
    count = len(made.work_info)
    assert np.array_equal(arrays.work_info[:count], made.work_info)
    assert np.all(arrays.work_info[count:] == -77)
    assert np.array_equal(arrays.work_indptr, made.work_indptr)
    assert np.array_equal(arrays.reduce_indptr[: len(rows) * fold + 1], made.reduce_indptr)
    assert np.all(arrays.reduce_indptr[len(rows) * fold :] == made.reduce_indptr[-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "fair"}, r"policy is 'fair', known are"),
        ({"cost_table": None}, r"cost_table is None.*'balanced'"),
        ({"cost_table": None, "policy": "invariant"}, r"cost_table is None.*'invariant'"),
        ({"empty_rows": "aiter"}, r"empty_rows is 'aiter'.*'balanced'"),
        ({"piece_tokens": 0}, r"piece_tokens is 0"),
    ],
)
def test_a_plan_that_is_not_defined_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(np.array([5]), replace(parameters("balanced", PORTABLE), **change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block": 0}, ValueError, "block is 0, must be at least 1"),
        ({"block_tokens": 0}, ValueError, "block_tokens is 0"),
        ({"merge": -1}, ValueError, "merge is -1"),
        ({"whole": (1 << 24) + 1}, ValueError, "whole is 16777217"),
        ({"slot": 1.5}, TypeError, "slot must be a whole number, not float"),
        ({"slot": True}, TypeError, "slot must be a whole number, not bool"),
        ({"slot": None}, TypeError, "slot must be a whole number, not NoneType"),
        ({"cut": -1}, ValueError, "cut is -1, must be at least 0"),
        ({"cut": (1 << 24) + 1}, ValueError, "cut is 16777217"),
        ({"cut": "3"}, TypeError, "cut must be a whole number, not str"),
        ({"merge": 10**400}, ValueError, "merge is of 1329 bits, must be a number of at most 64 bits"),
        ({"piece": 20, "whole": 10, "block": 9}, ValueError, r"piece is 20, must be at most whole \+ block, 19"),
    ],
)
def test_a_cost_table_refuses_what_the_policies_cannot_use(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    good: dict[str, Any] = {"block_tokens": 16, "block": 5, "piece": 3, "whole": 2, "slot": 1, "merge": 1}
    assert CostTable(**good).fields == (16, 5, 3, 2, 1, 1, 0)
    assert CostTable(**good, cut=7).fields == CostTable(**good, cut=7).core.fields == (16, 5, 3, 2, 1, 1, 7)
    with pytest.raises(error, match=message):
        CostTable(**{**good, **change})


def test_a_cost_table_is_a_value_that_can_be_sent() -> None:
    table = replace(CostTable.named("gfx942 fp8 64"), cut=17)
    settings = PlannerConfig(max_rows=8, max_requests=8, policy="balanced", cost_table=table)
    for value in (table, settings, settings.resolved(None).params):
        for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):  # noqa: S301 - our own
            assert same == value
            assert hash(same) == hash(value)
    assert CostTable.of(table.core) == table
    with pytest.raises(FrozenInstanceError):
        table.block = 3  # type: ignore[misc]


def test_a_cost_table_takes_numpy_numbers_as_whole_numbers() -> None:
    table = CostTable(block_tokens=np.int32(16), block=np.int64(5), piece=np.uint8(3), whole=2)  # type: ignore[arg-type]
    assert table == CostTable(block_tokens=16, block=5, piece=3, whole=2)
    assert all(type(number) is int for number in table.fields)
    assert hash(table) == hash(CostTable(block_tokens=16, block=5, piece=3, whole=2))


@given(lengths(rows=30), tables(), COMPUTE_UNITS, BUDGETS, st.integers(1, 3))
def test_no_slot_passes_the_bound_that_the_settings_are_checked_by(
    rows: list[int], table: CostTable, num_cus: int, budget: int | None, fold: int
) -> None:
    params = parameters("balanced", table, num_cus=num_cus, split_budget=budget, fold=fold)
    bound = table.longest_slot_bound(rows=30, topk=2048, num_cus=num_cus, fold=fold)
    made = schedule(np.array(rows, np.int64), params)
    walk = schedule(np.array(rows, np.int64), replace(params, policy="aiter", split_budget=made.num_slots))
    assert max(made.limit, *price(made, table)) + table.slot <= bound
    assert max(price(walk, table)) + table.slot <= bound
