"""The parts of the kernel of `balanced` by the words of `docs/design.md`, far beyond the numbers that batches bring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_cases import Arena, Case, rows_case

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from plan_runs import check, run
from triton import language as tl

import mlaplan
from mlaplan.costs import CostTable
from mlaplan.kernels import plan_fill
from mlaplan.layout import PlanParams

_STATES = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _divide_kernel(number_ptr, by_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    index = tl.arange(0, BLOCK)
    factor, shift = plan_fill.divisor(tl.load(by_ptr + index))
    number = tl.load(number_ptr + index)
    tl.store(out_ptr + index, plan_fill._divide(number, factor, shift))


@triton.jit  # type: ignore[untyped-decorator]
def _step_kernel(  # type: ignore[no-untyped-def] # noqa: ANN202
    blocks_ptr,  # noqa: ANN001
    room_ptr,  # noqa: ANN001
    capacity_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    block,  # noqa: ANN001
    piece,  # noqa: ANN001
    whole,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
    FORM: tl.constexpr,  # noqa: N803
):
    """One tile in each lane: slots opened, room behind, and how far that is above a multiple of a block."""
    index = tl.arange(0, BLOCK)
    blocks, room = tl.load(blocks_ptr + index), tl.load(room_ptr + index)
    costs = plan_fill.cost_words(block, piece, whole)
    slot = plan_fill.slot_words(tl.load(capacity_ptr + index), costs)
    above = plan_fill.above_of(room, costs)
    ready = plan_fill._prepare(plan_fill._record(blocks, costs), slot, costs, FORM)
    if FORM == plan_fill.LARGE:
        full = plan_fill._full_room(slot, costs)
        room, opened = plan_fill._step_large(ready, room - full, index * 0, slot, plan_fill._gap(slot, costs))
        room += full
    else:
        room, above, opened = plan_fill._step(ready, room, above, index * 0, slot, costs, FORM)
    tl.store(out_ptr + index, opened)
    tl.store(out_ptr + BLOCK + index, room)
    tl.store(out_ptr + 2 * BLOCK + index, above)


@triton.jit  # type: ignore[untyped-decorator]
def _cuts_kernel(  # type: ignore[no-untyped-def] # noqa: ANN202
    length_ptr,  # noqa: ANN001
    room_ptr,  # noqa: ANN001
    capacity_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    block_tokens,  # noqa: ANN001
    block,  # noqa: ANN001
    piece,  # noqa: ANN001
    whole,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    """How each tile is cut."""
    index = tl.arange(0, BLOCK)
    costs = plan_fill.cost_words(block, piece, whole)
    slot = plan_fill.slot_words(tl.load(capacity_ptr + index), costs)
    length, room = tl.load(length_ptr + index), tl.load(room_ptr + index)
    per_block = plan_fill.divisor(block_tokens)
    head, uses_open, fresh, size = plan_fill.fill_cuts(length, room, block_tokens, per_block, slot, costs)
    tl.store(out_ptr + index, head)
    tl.store(out_ptr + BLOCK + index, uses_open.to(tl.int32))
    tl.store(out_ptr + 2 * BLOCK + index, fresh)
    tl.store(out_ptr + 3 * BLOCK + index, size)


def _definition(blocks: int, room: int, capacity: int, table: CostTable) -> tuple[bool, int, int, int]:
    """Whether one tile fits, blocks for the open slot, slots opened and room behind, by the definition's words."""
    block, piece, whole = table.block, table.piece, table.whole
    need = whole + blocks * block
    if need <= room:
        return True, blocks, 0, room - need
    head = min(blocks - 1, (room - piece) // block) if room >= piece else 0
    if head < 1 and need <= capacity:
        return False, 0, 1, capacity - need
    head = max(head, 0)
    most = min(blocks - 1, (capacity - piece) // block)
    left = blocks - head
    fresh = -(-left // most)
    return False, head, fresh, capacity - piece - (left - (fresh - 1) * most) * block


def _tables(rng: np.random.Generator) -> list[CostTable]:
    """Any proportions: `piece` far below and above `whole`, blocks cheap and dear, costs at their limit."""
    tables = [
        CostTable(block_tokens=16, block=1, piece=1 << 24, whole=1 << 24),
        CostTable(block_tokens=16, block=1 << 24, piece=1 << 24, whole=0),
        CostTable(block_tokens=16, block=1, piece=0, whole=0),
        CostTable(block_tokens=16, block=1, piece=0, whole=1 << 24),
        CostTable(block_tokens=16, block=(1 << 24) - 1, piece=(1 << 24) - 1, whole=3),
    ]
    for _ in range(25):
        block, whole = int(rng.integers(1, 1 << rng.integers(1, 24))), int(rng.integers(0, 1 << rng.integers(1, 24)))
        piece = min(block + whole, int(rng.integers(0, 1 << rng.integers(1, 25))), 1 << 24)
        tables.append(CostTable(block_tokens=16, block=block, piece=piece, whole=whole))
    return tables


def _states(rng: np.random.Generator, table: CostTable) -> tuple[np.ndarray[Any, Any], ...]:
    """Blocks, rooms and capacities up to what the planner accepts, most of them where something changes."""
    most = (1 << 30) - 64 - table.whole - table.piece
    largest = min(1 << 20, most // table.block)
    blocks = np.clip(rng.integers(1, 1 << rng.integers(1, 21), _STATES), 1, largest)
    count = np.clip(rng.integers(1, 1 << rng.integers(1, 21), _STATES), 1, largest)
    near = rng.random(_STATES) < 0.5
    count[near] = np.clip(blocks[near] + rng.integers(-2, 3, int(near.sum())), 1, largest)
    jitter = rng.integers(0, table.block, _STATES)
    capacity = table.piece + count * table.block + np.where(rng.random(_STATES) < 0.5, jitter, 0)
    capacity += np.where(rng.random(_STATES) < 0.5, table.whole, 0)
    capacity[blocks == 1] = np.maximum(capacity[blocks == 1], table.whole + table.block)
    taken = rng.integers(0, count + 1) * table.block + np.where(rng.random(_STATES) < 0.5, table.piece, table.whole)
    room = np.clip(capacity - taken - rng.integers(-2, 3, _STATES), 0, capacity)
    room[::7] = capacity[::7]
    need = table.whole + blocks * table.block
    room[::11] = np.clip(need[::11] + rng.integers(-1, 2, need[::11].size), 0, capacity[::11])
    return tuple(array.astype(np.int32) for array in (blocks, room, capacity))


@pytest.mark.interpret
def test_quotients_are_exact_interpreted(rng: np.random.Generator) -> None:
    size = 1 << 14
    for turn in range(10):
        by = rng.integers(1, 1 << int(rng.integers(1, 32)), size)
        near = np.clip((1 << rng.integers(0, 32, size)) + rng.integers(-2, 3, size), 1, (1 << 31) - 1)
        by = np.where(rng.random(size) < 0.5, by, near)
        number = rng.integers(0, 1 << 30, size)
        number = np.where(rng.random(size) < 0.3, number, number // by * by - (rng.random(size) < 0.5)).clip(0)
        if turn == 0:
            number[:] = (1 << 30) - 1
        inputs = [torch.from_numpy(array.astype(np.int32)) for array in (number, by)]
        out = torch.empty(size, dtype=torch.int32)
        _divide_kernel[(1,)](*inputs, out, BLOCK=size)
        np.testing.assert_array_equal(out.numpy(), number // by)


def _run(kernel: Any, inputs: tuple[np.ndarray[Any, Any], ...], rows: int, *costs: int, **constants: Any) -> Any:
    out = torch.empty((rows, _STATES), dtype=torch.int32)
    kernel[(1,)](*map(torch.from_numpy, inputs), out, *costs, BLOCK=_STATES, **constants)
    return out.numpy()


@pytest.mark.interpret
def test_one_tile_is_poured_by_the_definition_interpreted(rng: np.random.Generator) -> None:
    """In every form that is for it."""
    seen = set()
    for table in _tables(rng) * 2:
        costs = table.block, table.piece, table.whole
        inputs = _states(rng, table)
        any_form = _run(_step_kernel, inputs, 3, *costs, FORM=plan_fill.ANY)
        short = _run(_step_kernel, inputs, 3, *costs, FORM=plan_fill.SHORT)
        for state, (n, r, x) in enumerate(zip(*(array.tolist() for array in inputs), strict=True)):
            fits, head, fresh, after = _definition(n, r, x, table)
            wanted = [fresh, after, (after - table.piece) % table.block]
            where = f"{n} blocks, room {r} of {x}: {table}"
            assert any_form[:, state].tolist() == wanted, where
            is_short = table.whole + n * table.block <= x
            if is_short and (n > 1 or table.piece >= table.whole):
                assert short[:, state].tolist() == wanted, where
            seen.add((fits, head > 0, min(fresh, 3), is_short))
    wanted_kinds = {(True, True, 0, True), (False, True, 1, True), (False, False, 1, True), (False, True, 1, False)}
    wanted_kinds |= {(False, True, 3, False), (False, False, 2, False), (False, False, 3, False)}
    assert seen >= wanted_kinds, wanted_kinds - seen


@pytest.mark.interpret
def test_a_tile_that_fills_slots_is_poured_by_the_definition_interpreted(rng: np.random.Generator) -> None:
    """Behind a piece of any number of blocks, the most that a slot holds among them."""
    seen = set()
    for table in _tables(rng) * 2:
        blocks, room, capacity = _states(rng, table)
        full = (capacity - table.piece) // table.block
        held = np.clip((capacity - table.piece - room) // table.block, 1, full)
        held[::5] = full[::5]
        room = (capacity - table.piece - held * table.block).astype(np.int32)
        inputs = blocks, room, capacity
        out = _run(_step_kernel, inputs, 3, table.block, table.piece, table.whole, FORM=plan_fill.LARGE)
        for state, (n, r, x) in enumerate(zip(*(array.tolist() for array in inputs), strict=True)):
            if n - 1 < int(full[state]) or table.whole + n * table.block <= x:
                continue
            _, head, fresh, after = _definition(n, r, x, table)
            assert out[:2, state].tolist() == [fresh, after], f"{n} blocks, room {r} of {x}: {table}"
            seen.add((head > 0, min(fresh, 3), after + table.block == x - table.piece))
    assert seen >= {(has, fresh, last) for has in (True, False) for fresh in (2, 3) for last in (True, False)}, seen


@pytest.mark.interpret
def test_one_tile_is_cut_by_the_definition_interpreted(rng: np.random.Generator) -> None:
    tokens = 16
    for table in _tables(rng):
        blocks, room, capacity = _states(rng, table)
        length = (blocks * tokens - rng.integers(0, tokens, _STATES)).astype(np.int32)
        inputs = length, room, capacity
        out = _run(_cuts_kernel, inputs, 4, tokens, table.block, table.piece, table.whole)
        for state, (n, r, x) in enumerate(zip(blocks.tolist(), room.tolist(), capacity.tolist(), strict=True)):
            fits, head, fresh, _ = _definition(n, r, x, table)
            got = out[:, state].tolist()
            where = f"{n} blocks, room {r} of {x}: {table}"
            wanted = int(length[state]) if fits else head * tokens
            assert got[:3] == [wanted, int(fits or head > 0), fresh], where
            if fresh:
                whole = head == 0 and fresh == 1
                most = min(n - 1, (x - table.piece) // table.block)
                assert got[3] == (int(length[state]) if whole else most * tokens), where


_PORTABLE = CostTable(block_tokens=64, block=2606, piece=1650, whole=1503, slot=4848, merge=243, cut=3000)
_DEAR_PIECES = CostTable(block_tokens=16, block=3, piece=900, whole=900, merge=1, cut=7)
_DEAR_ROWS = CostTable(block_tokens=16, block=3, piece=5, whole=900, merge=1)


def _largest(rows: int, params: PlanParams) -> CostTable:
    """Costs in some proportion, as large as they are accepted."""
    size = {"rows": rows, "topk": params.topk, "num_cus": params.num_cus, "fold": params.fold}
    for block in range(1 << 24, 0, -(1 << 15)):
        table = CostTable(block_tokens=64, block=block, piece=block // 2, whole=block // 3, cut=1 << 24)
        if table.longest_slot_bound(**size) <= 1 << 30:
            return table
    raise AssertionError("no table is accepted")


@pytest.mark.interpret
@pytest.mark.parametrize("table", [_PORTABLE, _DEAR_PIECES, _DEAR_ROWS, None])
@pytest.mark.parametrize(
    ("rows", "num_cus", "split_budget", "fold"), [(70, 7, None, 1), (37, 256, -1, 1), (33, 40, 2, 3)]
)
def test_rows_that_share_slots_and_rows_of_many_slots_interpreted(
    device: str,
    rng: np.random.Generator,
    table: CostTable | None,
    rows: int,
    num_cus: int,
    split_budget: int,
    fold: int,
) -> None:
    """Both forms of the walk, more than one group of tiles, and numbers near those that are accepted."""
    params = PlanParams(
        topk=2048, num_cus=num_cus, fold=fold, split_budget=split_budget, policy="balanced", cost_table=table
    )
    if table is None:
        params = replace(params, cost_table=_largest(rows + 3, params))
    for lens in (rng.integers(1, 2049, rows), np.full(rows, 2048), rng.integers(0, 90, rows)):
        check(rows_case(lens, rows + 3, params), device)


@pytest.mark.interpret
@pytest.mark.parametrize("whole", [0, 30])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_the_longest_row_just_fits_an_empty_slot_or_just_does_not_interpreted(
    device: str, whole: int, missing: int
) -> None:
    """Where one form of the walk hands over to the other: the least capacity is that row's cost less some number."""
    table = CostTable(block_tokens=1, block=1, piece=whole // 2, whole=whole)
    params = PlanParams(topk=2048, num_cus=4, split_budget=-1, policy="balanced", cost_table=table)
    for order in ([50, 50, 50, 50 - 4 * missing], [50 - 4 * missing, 50, 50, 50], [25, 50, 25, 50, 50 - 4 * missing]):
        check(rows_case(np.array(order), 6, params), device)


@pytest.mark.interpret
@pytest.mark.parametrize("num_cus", [3, 64])
def test_as_many_tiles_as_chunks_and_groups_have_and_one_more_or_less_interpreted(
    device: str, rng: np.random.Generator, num_cus: int
) -> None:
    params = PlanParams(topk=2048, num_cus=num_cus, split_budget=-1, policy="balanced", cost_table=_PORTABLE)
    for rows in (1, 7, 8, 9, 15, 16, 17, 23, 32, 33):
        check(rows_case(rng.integers(1, 2049, rows), 35, params), device)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("lens", "num_cus", "table"),
    [
        # 100 pieces are best, which the fourth round of 32 finds.
        ([1600], 200, CostTable(block_tokens=16, block=1000, piece=0, whole=0, merge=8)),
        # 32 and 64 pieces cost the same.
        ([1024], 200, CostTable(block_tokens=16, block=32, piece=0, whole=0, merge=1)),
        # Fewer tiles than compute units, and more than half of them; one piece is best, so one unit has nothing.
        ([1600, 700, 1600], 4, CostTable(block_tokens=16, block=3, piece=5, whole=9, merge=1, cut=1 << 24)),
        ([1600, 700, 1600], 3, CostTable(block_tokens=16, block=3, piece=5, whole=9, merge=1, cut=1 << 24)),
    ],
)
def test_the_number_of_pieces_is_weighed_interpreted(
    device: str, lens: list[int], num_cus: int, table: CostTable
) -> None:
    """Without a split budget: as many slots as the pieces that finish the longest row first."""
    params = PlanParams(topk=2048, num_cus=num_cus, policy="balanced", cost_table=table)
    check(rows_case(np.array(lens), len(lens) + 1, params), device)


@pytest.mark.interpret
def test_the_cost_of_cutting_decides_at_its_boundary_interpreted(device: str, rng: np.random.Generator) -> None:
    """Where the walk cuts nothing and the fill's slots are shorter by some number: at that one, and at the next."""
    found = 0
    while found < 4:
        rows, whole = int(rng.integers(2, 7)), int(rng.integers(0, 2000))
        table = CostTable(
            block_tokens=1, block=int(rng.integers(1, 9)), piece=int(rng.integers(0, whole + 1)), whole=whole
        )
        params = PlanParams(topk=1024, num_cus=rows - 1, split_budget=-1, policy="balanced", cost_table=table)
        lens = rng.integers(1, 1025, rows)

        found += _check_at_boundary(lens, params, device)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("rows", "num_cus", "fold"), [(9, 4, 1), (7, 2, 3), (5, 3, 8), (40, 3, 1), (33, 16, 1), (264, 67, 1)]
)
def test_rows_of_as_many_blocks_stay_whole_from_some_cost_of_a_cut_on_interpreted(
    device: str, rng: np.random.Generator, rows: int, num_cus: int, fold: int
) -> None:
    """Found before anything is searched, and after that; rows without a token lie between the others."""
    params = PlanParams(topk=2048, num_cus=num_cus, fold=fold, split_budget=-1, policy="balanced")
    found = 0
    for table in (_PORTABLE, _DEAR_PIECES, replace(_DEAR_ROWS, whole=90)):
        lens = rng.integers(2048 - table.block_tokens + 1, 2049, rows)
        lens = np.insert(lens, rng.integers(0, rows, 3), 0)
        found += _check_at_boundary(lens, replace(params, cost_table=table), device)
    assert found > 0


def _check_at_boundary(lens: np.ndarray[Any, Any], params: PlanParams, device: str) -> bool:
    """Checks the dearest cut with which rows are cut, and the cheapest with which none is; False where none is such."""
    assert params.cost_table is not None
    table = params.cost_table

    def at(cut: int) -> Case:
        return rows_case(lens, lens.size, replace(params, cost_table=replace(table, cut=cut)))

    def is_cut(cut: int) -> bool:
        arena = Arena(lens.size, params)
        return bool(arena.views(arena.expected(at(cut))).reduce_indptr[-1] > 0)

    if not is_cut(0) or is_cut(1 << 24):
        return False
    least, most = 0, 1 << 24
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if is_cut(middle) else (least, middle)
    for cut in (least, most, (1 << 24) - 1):
        check(at(cut), device)
    return True


@pytest.mark.gpu
def test_capacities_that_open_more_slots_than_32_bits_count(device: str) -> None:
    """Under the least capacities a piece is one block, and there are 2^32 blocks."""
    rows, fold, topk = 1024, 4, 1 << 20
    table = CostTable(block_tokens=1, block=1, piece=1 << 18, whole=1 << 18)
    params = PlanParams(topk=topk, num_cus=65_535, fold=fold, split_budget=-1, policy="balanced", cost_table=table)
    lens = np.full(rows, topk, np.int32)
    got = Arena(rows, params).views(run(rows_case(lens, rows, params), device))
    kv_indptr = np.arange(rows + 1, dtype=np.int32) * topk
    wanted = mlaplan.schedule(kv_indptr, num_cus=params.num_cus, fold=fold, policy="balanced", cost_table=table.core)
    np.testing.assert_array_equal(got.work_indptr, wanted.work_indptr)
    np.testing.assert_array_equal(got.work_info[: len(wanted.work_info)], wanted.work_info)
    np.testing.assert_array_equal(got.reduce_indptr, wanted.reduce_indptr)
