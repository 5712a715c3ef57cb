"""The plan kernel of the policy `balanced`, by the words of `docs/design.md` section 6.

All 64 costs that a slot may be filled up to are tried in one walk, each by a lane of its own; a second walk finds the
rooms under the least that is enough. aiter's walk is priced beside them and written where it is cheaper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mlaplan.kernels.plan_rows import (
    FALLING,
    TAIL,
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

_CANDIDATES = tl.constexpr(64)
_SPLITS = tl.constexpr(256)  # splits that are weighed at a time
_NONE = tl.constexpr((1 << 31) - 1)
_SKIP = tl.constexpr(0)


@triton.jit
def _divide(number, by, inverse):
    """The whole quotient of numbers below 2^31, itself below 2^20; `inverse` is 1 / `by` in 32 bits."""
    quotient = (number.to(tl.float32) * inverse).to(tl.int32)
    rest = number - quotient * by
    return quotient + (rest >= by).to(tl.int32) - (rest < 0).to(tl.int32)


@triton.jit
def _blocks(tokens, block_tokens):
    return tl.where(tokens > 0, (tl.maximum(tokens, 1) - 1) // block_tokens + 1, 0)


@triton.jit
def _pour(blocks, room, capacity, most, inverse_most, block, inverse_block, piece, whole):
    """Fills slots of a capacity with tiles of at least one block that find these rooms.

    Returns whether a tile fits as a whole, else its blocks for the open slot, the slots it opens, and the room behind
    it. `most` is what a slot takes of a tile at a time.
    """
    need = whole + blocks * block
    fits = need <= room
    spare = tl.minimum(tl.maximum(room - piece, 0), (blocks - 1) * block)
    head = _divide(spare, block, inverse_block)
    left = blocks - head
    alone = (head == 0) & (need <= capacity)
    # As a piece all of it would fit, but there is no such piece: the last block goes into a slot of its own.
    short = (head == 0) & (most >= blocks)
    pieces = _divide(left + most - 1, most, inverse_most)
    last = tl.where(short, 1, left - (pieces - 1) * most)
    pieces = tl.where(short, 2, pieces)
    after = tl.where(alone, capacity - need, capacity - piece - last * block)
    fresh = tl.where(fits, 0, tl.where(alone, 1, pieces))
    return fits, head, fresh, tl.where(fits, room - need, after)


@triton.jit
def _best_split(blocks, num_cus, block, piece, whole, merge):
    """The fewest pieces that finish a row of so many blocks first."""
    count = tl.minimum(tl.maximum(blocks, 1), num_cus)
    best = tl.full([], (1 << 62) - 1, tl.int64)
    for first in range(1, count + 1, _SPLITS):
        pieces = first + tl.arange(0, _SPLITS)
        longest = (blocks + pieces - 1) // pieces
        cost = piece + longest.to(tl.int64) * block + pieces.to(tl.int64) * merge
        cost = tl.where(pieces == 1, whole + longest.to(tl.int64) * block, cost)
        key = tl.where(pieces <= count, (cost << 17) + pieces, (1 << 62) - 1)
        best = tl.minimum(best, tl.min(key, 0))
    return (best & 0x1FFFF).to(tl.int32)


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
def _price(head, uses_open, fresh, size, length, block_tokens, block, piece, whole):
    """What a tile's works cost, as a run of one tile."""
    fixed = tl.where(fresh + uses_open.to(tl.int32) > 1, piece, whole)
    begin = tl.where(uses_open, fixed + _blocks(head, block_tokens) * block, 0)
    rest = length - head - (tl.maximum(fresh, 1) - 1) * tl.where(fresh > 1, size, 0)
    end = tl.where(fresh > 0, fixed + _blocks(rest, block_tokens) * block, begin)
    between = tl.where(fresh > 1, piece + _blocks(tl.where(fresh > 1, size, 0), block_tokens) * block, 0)
    return (fresh > 0).to(tl.int32), begin, end, between


@triton.jit
def _last_of(values, index, BLOCK: tl.constexpr):
    return tl.sum(tl.where(index == BLOCK - 1, values, 0), 0)


@triton.jit
def _load_tiles(kv_indptr_ptr, tile, tiles, FOLD: tl.constexpr):
    """Start and length of tiles, 0 behind the live ones."""
    row = tile // FOLD
    start = tl.load(kv_indptr_ptr + row, mask=tile < tiles, other=0)
    return start, tl.load(kv_indptr_ptr + row + 1, mask=tile < tiles, other=0) - start


@triton.jit
def _aiter_block(
    scratch_ptr,
    tile,
    base,
    tiles,
    kept,
    start,
    length,
    before,
    share,
    state,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """How aiter's walk cuts one block of tiles; also the sum of needs and the state behind it."""
    need = weights(length, tile < tiles, _SKIP)
    weight = before + tl.cumsum(need, 0)
    room, state = find_rooms(scratch_ptr, tile, base, tiles, kept, weight, need, share, state, BLOCK, _SKIP, EVEN)
    head, uses_open, fresh = aiter_cuts(tile, start, length, room, tile < tiles, share, FOLD, _SKIP)
    return head, uses_open, fresh, before + tl.sum(need, 0), state


@triton.jit
def _price_aiter(
    kv_indptr_ptr,
    scratch_ptr,
    tiles,
    kept,
    share,
    block_tokens,
    block,
    piece,
    whole,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The longest slot of aiter's walk by the cost table."""
    state = first_state(share, _SKIP)
    before = 0
    has = 0
    first = 0
    last = 0
    best = 0
    for base in range(0, tiles, BLOCK):
        index = tl.arange(0, BLOCK)
        tile = base + index
        start, length = _load_tiles(kv_indptr_ptr, tile, tiles, FOLD)
        head, uses_open, fresh, before, state = _aiter_block(
            scratch_ptr, tile, base, tiles, kept, start, length, before, share, state, BLOCK, FOLD, EVEN
        )
        run = _price(head, uses_open, fresh, aiter_size(share), length, block_tokens, block, piece, whole)
        a, b, c, d = tl.associative_scan(run, 0, _follow)
        has, first, last, best = _follow(
            has,
            first,
            last,
            best,
            _last_of(a, index, BLOCK),
            _last_of(b, index, BLOCK),
            _last_of(c, index, BLOCK),
            _last_of(d, index, BLOCK),
        )
    tl.debug_barrier()  # what comes next writes the walk's words
    return tl.maximum(best, tl.maximum(first, last))


@triton.jit
def _count_blocks(
    kv_indptr_ptr, scratch_ptr, tiles, block_tokens, block, whole, BLOCK: tl.constexpr, FOLD: tl.constexpr
):
    """Leaves the blocks of every tile; returns what all tiles cost as a whole, and the fewest blocks of one."""
    load = tl.zeros([], tl.int64)
    fewest = _NONE
    for base in range(0, tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        _, length = _load_tiles(kv_indptr_ptr, tile, tiles, FOLD)
        blocks = _blocks(length, block_tokens)
        tl.store(scratch_ptr + tile, blocks, mask=tile < tiles)
        load += tl.sum(tl.where(blocks > 0, whole + blocks.to(tl.int64) * block, 0), 0)
        fewest = tl.minimum(fewest, tl.min(tl.where(blocks > 0, blocks, _NONE), 0))
    return load, fewest


@triton.jit
def _least_capacity(scratch_ptr, tiles, num_slots, fewest, low, step, block, inverse_block, piece, whole):
    """The least of the 64 capacities under which the fill needs no more than `num_slots` slots."""
    lane = tl.arange(0, _CANDIDATES)
    capacity = low + lane * step
    most = (capacity - piece) // block
    inverse_most = 1.0 / most.to(tl.float32)
    room = capacity
    opened = tl.zeros([_CANDIDATES], tl.int32)
    nobody = tl.zeros([_CANDIDATES], tl.int32)
    following = tl.load(scratch_ptr + nobody, mask=nobody < tiles, other=0)
    for index in range(tiles):
        blocks = following
        following = tl.load(scratch_ptr + nobody + index + 1, mask=nobody + index + 1 < tiles, other=0)
        _, _, fresh, after = _pour(
            tl.maximum(blocks, 1), room, capacity, most, inverse_most, block, inverse_block, piece, whole
        )
        opened += tl.where(blocks > 0, fresh, 0)
        room = tl.where(blocks > 0, after, room)
    enough = (opened < num_slots) & ((fewest > 1) | (whole + block <= capacity))
    return tl.min(tl.where(enough | (lane == _CANDIDATES - 1), capacity, _NONE), 0)


@triton.jit
def _fill_block(
    scratch_ptr,
    tile,
    base,
    tiles,
    length,
    capacity,
    most,
    room,
    block_tokens,
    block,
    inverse_block,
    piece,
    whole,
    BLOCK: tl.constexpr,
):
    """How the fill cuts one block of tiles, the size of pieces in tokens, and the room behind it."""
    only = tl.arange(0, 1)
    now = only + room
    full = only + capacity
    limit = only + most
    inverse_most = 1.0 / limit.to(tl.float32)
    rooms = tl.zeros([BLOCK], tl.int32)
    end = tl.minimum(tiles, base + BLOCK)
    following = tl.load(scratch_ptr + base + only)
    for index in range(base, end):
        blocks = following
        following = tl.load(scratch_ptr + index + 1 + only, mask=index + 1 + only < end, other=0)
        rooms = tl.where(tile == index, now, rooms)
        _, _, _, after = _pour(
            tl.maximum(blocks, 1), now, full, limit, inverse_most, block, inverse_block, piece, whole
        )
        now = tl.where(blocks > 0, after, now)
    blocks = tl.load(scratch_ptr + tile, mask=tile < tiles, other=0)
    counted = tl.maximum(blocks, 1)
    inverse = 1.0 / most.to(tl.float32)
    fits, head, fresh, _ = _pour(counted, rooms, capacity, most, inverse, block, inverse_block, piece, whole)
    fresh = tl.where(blocks > 0, fresh, 0)
    uses_open = (fits | (head > 0)) & (blocks > 0)
    size = tl.where((head == 0) & (fresh == 1), length, tl.minimum(most, counted - 1) * block_tokens)
    return tl.where(fits, length, head * block_tokens), uses_open, fresh, size, tl.max(now, 0)


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
    budget = split_budget
    if split_budget == 0:
        budget = _best_split(_blocks(longest, block_tokens), num_cus, block, piece, whole, merge)
    share = share_of_slot(weight * FOLD, counted, longest, num_cus, budget, 1)
    num_slots = slots_of(counted, num_cus, budget)
    aiter_longest = _price_aiter(
        kv_indptr_ptr,
        reduce_indptr_ptr,
        tiles,
        kept,
        share,
        block_tokens,
        block,
        piece,
        whole,
        BLOCK,
        FOLD,
        EVEN,
    )
    load, fewest = _count_blocks(kv_indptr_ptr, reduce_indptr_ptr, tiles, block_tokens, block, whole, BLOCK, FOLD)
    tl.debug_barrier()
    low = tl.maximum(((load + num_slots - 1) // num_slots).to(tl.int32), piece + block)
    step = tl.maximum((span + _CANDIDATES - 2) // (_CANDIDATES - 1), 1)
    inverse_block = 1.0 / block.to(tl.float32)
    capacity = _least_capacity(
        reduce_indptr_ptr, tiles, num_slots, fewest, low, step, block, inverse_block, piece, whole
    )
    tl.debug_barrier()  # aiter's walk writes where the blocks of the tiles were read
    takes = (capacity - piece) // block
    state = first_state(share, _SKIP)
    before = 0
    room = capacity
    sums = tl.zeros([], tl.int64)
    for base in range(0, tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        start, length = _load_tiles(kv_indptr_ptr, tile, tiles, FOLD)
        if aiter_longest < capacity:
            head, uses_open, fresh, before, state = _aiter_block(
                reduce_indptr_ptr, tile, base, tiles, kept, start, length, before, share, state, BLOCK, FOLD, EVEN
            )
            size = tl.zeros([BLOCK], tl.int32) + aiter_size(share)
        else:
            head, uses_open, fresh, size, room = _fill_block(
                reduce_indptr_ptr,
                tile,
                base,
                tiles,
                length,
                capacity,
                takes,
                room,
                block_tokens,
                block,
                inverse_block,
                piece,
                whole,
                BLOCK,
            )
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
            tile < tiles,
            sums,
            FRESH,
        )
    partials = (sums >> PARTIALS_SHIFT).to(tl.int32)
    fill(reduce_indptr_ptr, tiles, kept, partials, BLOCK)
    slots, works = slots_and_works(sums)
    fill(work_indptr_ptr, slots + 1, num_cus + 1, works, TAIL)
    tl.store(reduce_indptr_ptr + kept + tl.arange(0, 1), nothing + partials)
