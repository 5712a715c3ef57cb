"""The policies `balanced` and `invariant`, by the words of `docs/design.md` section 6: loops over whole numbers."""

from __future__ import annotations

from typing import NamedTuple

from mlaplan.costs import CostTable
from mlaplan.layout import PlanParams

CANDIDATES = 64  # capacities that `balanced` tries


class Work(NamedTuple):
    """One work: tokens `begin` up to `end` of a live tile, by its position among the live ones, in a slot."""

    tile: int
    slot: int
    begin: int
    end: int


Works = list[Work]


def best_split(longest_row: int, params: PlanParams) -> int:
    """Pieces that finish the longest row first, if each had a slot of its own: their merge counts against them.

    Args:
        longest_row: Its tokens.
        params: `cost_table` and `num_cus` are used.

    Returns:
        At least 1, at most `num_cus`; the fewest of several that are as good.
    """
    table = _table(params)
    blocks = table.blocks(longest_row)
    best, least = 1, table.whole + blocks * table.block
    for pieces in range(2, min(blocks, params.num_cus) + 1):
        cost = table.piece + -(-blocks // pieces) * table.block + pieces * table.merge + table.cut
        if cost < least:
            best, least = pieces, cost
    return best


def balanced(lengths: list[int], num_slots: int, walk: Works, params: PlanParams) -> tuple[Works, int]:
    """Fills slots in order up to the least of 64 evenly spaced costs that is enough; aiter's walk where it is cheaper.

    That fill counts as one that cuts a tile, which costs `cut`. Tiles that are all of as many blocks may also stay
    whole, as many in every slot.

    Args:
        lengths: Tokens of each live tile, at least 1.
        num_slots: Slots that may be used, S.
        walk: aiter's works for the same tiles on as many slots.
        params: `cost_table` is used.

    Returns:
        The works, and the cost that no slot passes, `slot` not included.
    """
    if not lengths:
        return [], 0
    table = _table(params)
    blocks = [table.blocks(tokens) for tokens in lengths]
    load = sum(table.whole + count * table.block for count in blocks)
    low = max(-(-load // num_slots), table.piece + table.block)
    high = low + max(table.whole, 2 * table.piece) + table.block + max(0, table.piece - table.whole)
    step = max(1, -(-(high - low) // (CANDIDATES - 1)))
    candidates = (low + index * step for index in range(CANDIDATES))
    limit = next(capacity for capacity in candidates if is_enough(blocks, capacity, num_slots, table))
    cost = limit + table.cut
    if min(blocks) == max(blocks):
        whole = -(-len(blocks) // num_slots) * (table.whole + blocks[0] * table.block)
        if whole < cost:
            limit = cost = whole
    longest = longest_slot(lengths, walk, table)
    is_cut = len(walk) > len(lengths)
    if longest + (table.cut if is_cut else 0) < cost:
        return walk, longest
    works = [
        Work(tile, slot, begin * table.block_tokens, min(end * table.block_tokens, lengths[tile]))
        for tile, slot, begin, end in fill(blocks, limit, table)
    ]
    return works, limit


def longest_slot(lengths: list[int], works: Works, table: CostTable) -> int:
    """Cost of the longest slot, `slot` not included."""
    pieces = [0] * len(lengths)
    for work in works:
        pieces[work.tile] += 1
    cost: dict[int, int] = {}
    for work in works:
        fixed = table.whole if pieces[work.tile] == 1 else table.piece
        cost[work.slot] = cost.get(work.slot, 0) + fixed + table.blocks(work.end - work.begin) * table.block
    return max(cost.values())


def is_enough(blocks: list[int], capacity: int, num_slots: int, table: CostTable) -> bool:
    """Whether the fill of slots of this capacity needs at most so many."""
    if min(blocks) == 1 and table.whole + table.block > capacity:
        return False  # a tile of one block cannot be cut
    return fill(blocks, capacity, table)[-1].slot < num_slots


def fill(blocks: list[int], capacity: int, table: CostTable) -> Works:
    """Fills slot after slot up to `capacity`, tiles in order, each as far as it goes.

    Args:
        blocks: Blocks of each tile, at least 1.
        capacity: Room of a slot; at least a piece of one block, and a whole tile of one block where there is one.
        table: What works cost.

    Returns:
        The works, `begin` and `end` in blocks.
    """
    works: Works = []
    slot, room = 0, capacity
    for tile, count in enumerate(blocks):
        done = 0
        while done < count:
            left = count - done
            # A tile of which nothing was taken yet is whole or has two pieces at least.
            whole_cost = table.whole + count * table.block
            affordable = (room - table.piece) // table.block
            if done == 0 and whole_cost <= room:
                taken, cost = count, whole_cost
            else:
                taken = min(left if done else count - 1, affordable)
                cost = table.piece + taken * table.block
            if taken >= 1:
                works.append(Work(tile, slot, done, done + taken))
                done += taken
                room -= cost
            if done < count:
                slot, room = slot + 1, capacity
    return works


def invariant(lengths: list[int], params: PlanParams) -> Works:
    """Cuts every tile into pieces of `piece_tokens`, whatever the others are, and shares their cost out evenly.

    Args:
        lengths: Tokens of each live tile, at least 1.
        params: `cost_table`, `piece_tokens` and `num_cus` are used.

    Returns:
        The works.
    """
    table, size = _table(params), params.piece_tokens
    placed: list[tuple[int, int, int, int]] = []  # tile, cost of all before, begin, end
    total = 0
    for tile, tokens in enumerate(lengths):
        fixed = table.whole if tokens <= size else table.piece
        for begin in range(0, tokens, size):
            end = min(begin + size, tokens)
            placed.append((tile, total, begin, end))
            total += fixed + table.blocks(end - begin) * table.block
    return [Work(tile, before * params.num_cus // total, begin, end) for tile, before, begin, end in placed]


def _table(params: PlanParams) -> CostTable:
    if params.cost_table is None:
        raise ValueError(f"cost_table is None, but policy {params.policy!r} places works by their cost")
    return params.cost_table
