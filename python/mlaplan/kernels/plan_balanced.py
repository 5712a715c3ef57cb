"""The plan kernel of the policy `balanced`, by the words of `docs/design.md` section 6.

`plan_fill.py` finds the least cost that slots may be filled up to, and the fill under it. aiter's walk is priced here,
and written where it is cheaper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlaplan.kernels.plan_fill import (
    LANES,
    blocks_of,
    cheapest_tile,
    cost_words,
    divisor,
    fill_cuts,
    find_rooms_of_fill,
    find_rooms_of_whole,
    least_capacity,
    slot_words,
    store_records,
    whole_tiles,
)
from mlaplan.kernels.plan_rows import (
    BLOCK_TOKENS,
    FALLING,
    OVERHEAD,
    TAIL,
    add_pair,
    fill,
    mark_owners,
    share_of_slot,
    slots_of,
    survey,
    weights,
    write_rows,
)
from mlaplan.kernels.plan_walk import find_rooms, first_state
from mlaplan.kernels.plan_works import PARTIALS_SHIFT, aiter_cuts, aiter_size, slots_and_works, write_works

_SPLITS = tl.constexpr(32)  # splits that are weighed at a time, by one warp
_NONE = tl.constexpr((1 << 31) - 1)
_SKIP = tl.constexpr(0)


@triton.jit
def _best_split(blocks, num_cus, block, piece, whole, merge, cut):
    """The fewest pieces that finish a row of so many blocks first."""
    count = tl.minimum(tl.maximum(blocks, 1), num_cus)
    best = _NONE
    taken = 1
    first = 1
    # Pieces are never merged sooner than a block is done by each. A row of one piece costs less than 2^30.
    soonest = tl.zeros([], tl.int64) + piece + block + merge + cut
    while (first <= count) & (soonest < best):
        pieces = first + tl.arange(0, _SPLITS)
        longest = ((blocks + pieces - 1).to(tl.uint32) // pieces.to(tl.uint32)).to(tl.int32)
        cost = piece + longest.to(tl.int64) * block + pieces.to(tl.int64) * merge + cut
        cost = tl.where(pieces == 1, whole + longest.to(tl.int64) * block, cost)
        cost = tl.where(pieces <= count, tl.minimum(cost, _NONE), _NONE).to(tl.int32)
        least = tl.min(cost, 0)
        found = tl.min(tl.where(cost == least, pieces, _NONE), 0)
        taken = tl.where(least < best, found, taken)
        best = tl.minimum(best, least)
        first += _SPLITS
        soonest += merge * _SPLITS
    return taken


@triton.jit
def _budget(split_budget, counted, blocks, num_cus, block, piece, whole, merge, cut):
    """The split budget: the one that is given, or what the longest row of so many blocks asks for."""
    budget = split_budget
    if split_budget == 0:
        budget = -1  # all slots: there are as many tiles, so that any number of pieces gives all of them
        if counted < num_cus:
            budget = _best_split(blocks, num_cus, block, piece, whole, merge, cut)
    return budget


@triton.jit
def _follow(has, head, tail, best, other_has, other_head, other_tail, other_best):
    """Joins two runs of tiles: what the first slot, the last one and the dearest one between them cost.

    A run that opens no slot has one, which is its first and its last.
    """
    between = tl.where((has > 0) & (other_has > 0), tail + other_head, 0)
    return (
        has | other_has,
        tl.where(has > 0, head, head + other_head),
        tl.where(other_has > 0, other_tail, tail + other_head),
        tl.maximum(tl.maximum(best, other_best), between),
    )


@triton.jit
def _price(head, uses_open, fresh, size, length, per_block, block, piece, whole):
    """What a tile's works cost, as a run of one tile."""
    fixed = tl.where(fresh + uses_open.to(tl.int32) > 1, piece, whole)
    begin = tl.where(uses_open, fixed + blocks_of(head, per_block) * block, 0)
    rest = length - head - (tl.maximum(fresh, 1) - 1) * tl.where(fresh > 1, size, 0)
    end = tl.where(fresh > 0, fixed + blocks_of(rest, per_block) * block, begin)
    # Of use only where a tile is longer than that: else it may pass 32 bits.
    between = piece + blocks_of(size, per_block) * block
    return (fresh > 0).to(tl.int32), begin, end, tl.where(fresh > 1, between, 0)


@triton.jit
def _add_five(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _add_six(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def _load_tiles(kv_indptr_ptr, tile, tiles, FOLD: tl.constexpr):
    """Start and length of tiles, 0 behind the live ones."""
    row = tile // FOLD
    start = tl.load(kv_indptr_ptr + row, mask=tile < tiles, other=0)
    return start, tl.load(kv_indptr_ptr + row + 1, mask=tile < tiles, other=0) - start


@triton.jit
def _survey_tiles(
    kv_indptr_ptr,
    records_ptr,
    tiles,
    counted,
    share,
    per_block,
    costs,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
):
    """Returns what the first slot of aiter's walk costs, whether it ends in a piece of a tile, and all blocks.

    Leaves the records of the `counted` tiles that are not empty.
    """
    all_blocks = tl.zeros([], tl.int64)  # those of one round fit 32 bits
    weight = 0
    filled = 0
    cost = 0
    is_cut = 0
    for base in range(0, tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        _, length = _load_tiles(kv_indptr_ptr, tile, tiles, FOLD)
        need = weights(length, tile < tiles, _SKIP)
        blocks = blocks_of(length, per_block)
        is_filled = (blocks > 0).to(tl.int32)
        end, rank = tl.associative_scan((need, is_filled), 0, add_pair)
        store_records(records_ptr, counted, tile, blocks, filled + rank - is_filled, costs)
        # The slot has `share` blocks and the overhead of one tile; what is left of a piece's own overhead is its head.
        end += weight
        head = share - (end - need)
        fits = (need > 0) & (end - OVERHEAD <= share)
        cuts = (need > 0) & (end - OVERHEAD > share) & (head > 0)
        head = blocks_of(tl.where(cuts, head, 0) * BLOCK_TOKENS, per_block)
        fixed = tl.where(fits, costs[2], tl.where(cuts, costs[1], 0))
        works = fixed + tl.where(fits, blocks, head) * costs[0]
        sums = tl.reduce((need, is_filled, works, cuts.to(tl.int32), blocks), 0, _add_five)
        needs, count, works, pieces, blocks = sums
        weight += needs
        filled += count
        cost += works
        is_cut += pieces
        all_blocks += blocks
    return cost, is_cut, all_blocks


@triton.jit
def _price_walk(
    kv_indptr_ptr,
    rooms_ptr,
    tiles,
    kept,
    share,
    per_block,
    block,
    piece,
    whole,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Returns the longest slot of aiter's walk and whether it cuts a tile; leaves the room that each tile finds."""
    state = first_state(share, _SKIP)
    before = 0
    has = 0
    first = 0
    last = 0
    best = 0
    is_cut = 0
    for base in range(0, tiles, BLOCK):
        index = tl.arange(0, BLOCK)
        tile = base + index
        start, length = _load_tiles(kv_indptr_ptr, tile, tiles, FOLD)
        inside = tile < tiles
        need = weights(length, inside, _SKIP)
        weight = before + tl.cumsum(need, 0)
        room, state = find_rooms(rooms_ptr, tile, base, tiles, kept, weight, need, share, state, BLOCK, _SKIP, EVEN)
        head, uses_open, fresh = aiter_cuts(tile, start, length, room, inside, share, FOLD, _SKIP)
        run = _price(head, uses_open, fresh, aiter_size(share), length, per_block, block, piece, whole)
        a, b, c, d = tl.associative_scan(run, 0, _follow)
        tl.debug_barrier()  # the walk used these words, and other threads than those that write them
        tl.store(rooms_ptr + tile, room, mask=inside)
        ends = index == BLOCK - 1
        cuts = (fresh + uses_open.to(tl.int32) > 1).to(tl.int32)
        a, b, c, d, cuts, needs = tl.reduce(
            (tl.where(ends, a, 0), tl.where(ends, b, 0), tl.where(ends, c, 0), tl.where(ends, d, 0), cuts, need),
            0,
            _add_six,
        )
        has, first, last, best = _follow(has, first, last, best, a, b, c, d)
        is_cut += cuts
        before += needs
    return tl.maximum(best, tl.maximum(first, last)), is_cut


@triton.jit
def _walk_is_longer(cost, is_cut, longest, share, least, per_block, costs, cut):
    """Whether some slot of aiter's walk shows that it costs `least`; `cost` and `is_cut` are those of the first one.

    A tile of more blocks than two slots share fills one with a piece.
    """
    has_middle = longest // (2 * BLOCK_TOKENS) > share  # twice the share could pass 32 bits
    middle = costs[1] + blocks_of(tl.where(has_middle, share, 1) * BLOCK_TOKENS, per_block) * costs[0]
    by_first = cost >= least - tl.where(is_cut > 0, cut, 0)
    return by_first | (has_middle & (middle >= least - cut))


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_rows",
        "most",
        "topk",
        "num_cus",
        "split_budget",
        "block_tokens",
        "block",
        "piece",
        "whole",
        "merge",
        "cut",
        "span",
    ],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "request_ids_ptr",
        "kv_indptr_ptr",
        "work_indptr_ptr",
        "reduce_indptr_ptr",
    ],
)
def balanced_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    request_ids_ptr,
    kv_indptr_ptr,
    work_indptr_ptr,
    reduce_indptr_ptr,
    work_info_ptr,
    num_requests,
    num_rows,
    most,
    topk,
    num_cus,
    split_budget,
    block_tokens,
    block,
    piece,
    whole,
    merge,
    cut,
    span,
    BLOCK: tl.constexpr,
    FRESH: tl.constexpr,
    FOLD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Makes one plan; one program. Parameters as those of the kernel in `plan.py`, and the cost table.

    `span` is `high - low` of the definition, which the table alone determines. No cost of a slot passes 2^30.
    """
    live, order = survey(query_start_loc_ptr, num_requests, num_rows, BLOCK)
    if order == FALLING:
        mark_owners(query_start_loc_ptr, request_ids_ptr, num_requests, num_rows, live, BLOCK)
    weight, filled, longest = write_rows(
        query_start_loc_ptr,
        seq_lens_ptr,
        request_ids_ptr,
        kv_indptr_ptr,
        num_requests,
        num_rows,
        most,
        topk,
        live,
        order,
        BLOCK,
        _SKIP,
    )
    nothing = tl.zeros([1], tl.int32)
    tl.store(kv_indptr_ptr + tl.arange(0, 1), nothing)
    tl.store(work_indptr_ptr + tl.arange(0, 1), nothing)
    tl.debug_barrier()
    tiles = live * FOLD
    kept = num_rows * FOLD
    counted = filled * FOLD
    per_block = divisor(block_tokens)
    longest_blocks = blocks_of(longest, per_block)
    budget = _budget(split_budget, counted, longest_blocks, num_cus, block, piece, whole, merge, cut)
    share = share_of_slot(weight * FOLD, counted, longest, num_cus, budget, 1)
    num_slots = slots_of(counted, num_cus, budget)
    costs = cost_words(block, piece, whole)
    first_cost, first_is_cut, blocks = _survey_tiles(
        kv_indptr_ptr, work_info_ptr, tiles, counted, share, per_block, costs, BLOCK, FOLD
    )
    tl.debug_barrier()
    cheapest = cheapest_tile(work_info_ptr, counted, BLOCK)
    load = blocks * block + counted.to(tl.int64) * whole
    low = tl.maximum(((load + num_slots - 1) // num_slots).to(tl.int32), piece + block)
    step = tl.maximum((span + LANES - 2) // (LANES - 1), 1)
    capacity = whole_tiles(counted, num_slots, cheapest, longest_blocks, costs)
    lane = 0
    # No capacity is below `low`.
    stays_whole = capacity < low + cut
    if stays_whole == 0:
        found, lane = least_capacity(work_info_ptr, counted, num_slots, cheapest, longest_blocks, low, step, costs)
        stays_whole = capacity < found + cut
        capacity = tl.where(stays_whole, capacity, found)
    least = capacity + tl.where(stays_whole, 0, cut)
    slot = slot_words(tl.maximum(capacity, low), costs)
    takes_walk = False
    if _walk_is_longer(first_cost, first_is_cut, longest, share, least, per_block, costs, cut) == 0:
        walk_longest, is_cut = _price_walk(
            kv_indptr_ptr,
            reduce_indptr_ptr,
            tiles,
            kept,
            share,
            per_block,
            block,
            piece,
            whole,
            BLOCK,
            FOLD,
            EVEN,
        )
        takes_walk = walk_longest < least - tl.where(is_cut > 0, cut, 0)
    if takes_walk == 0:
        tl.debug_barrier()
        if stays_whole:
            find_rooms_of_whole(work_info_ptr, reduce_indptr_ptr, counted, num_slots, cheapest, BLOCK)
        else:
            find_rooms_of_fill(work_info_ptr, reduce_indptr_ptr, counted, lane, slot, costs)
    tl.debug_barrier()
    sums = tl.zeros([], tl.int64)
    for base in range(0, tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        inside = tile < tiles
        start, length = _load_tiles(kv_indptr_ptr, tile, tiles, FOLD)
        # The room that a tile finds in the walk, or in the fill.
        found = tl.load(reduce_indptr_ptr + tile, mask=inside, other=0)
        if takes_walk:
            head, uses_open, fresh = aiter_cuts(tile, start, length, found, inside, share, FOLD, _SKIP)
            size = tl.zeros_like(head) + aiter_size(share)
        else:
            head, uses_open, fresh, size = fill_cuts(length, found, block_tokens, per_block, slot, costs)
        sums = write_works(
            work_indptr_ptr,
            reduce_indptr_ptr,
            work_info_ptr,
            tile,
            start,
            length,
            head,
            uses_open,
            fresh,
            size[:, None],
            inside,
            sums,
            FRESH,
        )
    partials = (sums >> PARTIALS_SHIFT).to(tl.int32)
    fill(reduce_indptr_ptr, tiles, kept, partials, BLOCK)
    slots, works = slots_and_works(sums)
    fill(work_indptr_ptr, slots + 1, num_cus + 1, works, TAIL)
    tl.store(reduce_indptr_ptr + kept + tl.arange(0, 1), nothing + partials)
