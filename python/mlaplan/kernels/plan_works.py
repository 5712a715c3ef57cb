"""The last part of the plan kernel: from the room that each tile finds to its works."""

from __future__ import annotations

import triton
import triton.language as tl

from mlaplan.kernels.plan_rows import BLOCK_TOKENS, OVERHEAD, SERIAL, SKIP

# One 64-bit running sum carries the slots opened, the works and the partials of the tiles before.
WORKS_SHIFT = tl.constexpr(16)
PARTIALS_SHIFT = tl.constexpr(40)
_WORKS_MASK = tl.constexpr((1 << 24) - 1)
_SLOTS_MASK = tl.constexpr((1 << 16) - 1)
_MANY = tl.constexpr(1 << 26)  # blocks; more than any row has


@triton.jit
def aiter_cuts(tile, start, length, room, inside, share, FOLD: tl.constexpr, EMPTY: tl.constexpr):
    """How aiter's walk cuts tiles that find these rooms.

    Returns the tokens for the open slot, whether a work of the tile lies there, and the slots it opens.
    """
    if EMPTY == SKIP:
        # The walk knows rooms modulo `share`; only the first work of all finds a slot that is untouched.
        room += tl.where((start == 0) & (tile % FOLD == 0), share, 0)
    blocks = (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    missing = blocks + OVERHEAD - tl.maximum(room, OVERHEAD)
    fresh = tl.where(missing > 0, (missing + share - 1) // share, 0)
    uses_open = (fresh == 0) | (room > OVERHEAD)
    if EMPTY == SKIP:
        uses_open = uses_open & (blocks > 0)
        fresh = tl.where(blocks > 0, fresh, 0)
    else:
        dropped = (blocks == 0) & (room < OVERHEAD)
        uses_open = uses_open & (dropped == 0)
        if EMPTY == SERIAL:
            fresh = tl.where(dropped, 1, fresh)
    head = tl.where(fresh == 0, blocks, tl.maximum(room - OVERHEAD, 0))
    return tl.minimum(head * BLOCK_TOKENS, length), uses_open & inside, tl.where(inside, fresh, 0)


@triton.jit
def aiter_size(share):
    """Tokens of the works in slots that a tile opens."""
    return tl.minimum(share, _MANY) * BLOCK_TOKENS


@triton.jit
def store_work(work_info_ptr, work, tile, location, kv_start, kv_end, row_end, mask):
    """Writes works as two vectors of four words each."""
    rest = row_end - kv_end
    first = tl.join(tl.join(tile, tile), tl.join(location, tile + 1))
    second = tl.join(tl.join(kv_start, rest), tl.join(kv_end, tl.zeros_like(rest)))
    first = tl.reshape(first, work.shape + [4])  # noqa: RUF005 - a shape of Triton
    second = tl.reshape(second, work.shape + [4])  # noqa: RUF005 - a shape of Triton
    ptr = tl.expand_dims(work_info_ptr + work * 8, len(work.shape)) + tl.arange(0, 4)
    mask = tl.expand_dims(mask, len(work.shape))
    tl.store(ptr, first, mask=mask)
    tl.store(ptr + 4, second, mask=mask)


@triton.jit
def _write_fresh(
    work_info_ptr,
    work_indptr_ptr,
    work,
    slot,
    tile,
    location,
    is_cut,
    start,
    row_end,
    fresh,
    size,
    FRESH: tl.constexpr,
):
    """Writes the works in slots opened for each tile, FRESH of them at a time, and those slots."""
    most = tl.max(fresh, 0)
    for first in range(0, most, FRESH):
        step = (first + tl.arange(0, FRESH))[None, :]
        mask = step < fresh[:, None]
        # Differences are compared and not ends, which could pass 32 bits.
        kv_start = start[:, None] + tl.where(mask, step * size, 0)
        end = row_end[:, None] + step * 0
        kv_end = kv_start + tl.minimum(size, end - kv_start)
        place = location[:, None] + is_cut[:, None] * step
        this = work[:, None] + step
        store_work(work_info_ptr, this, tile[:, None] + step * 0, place, kv_start, kv_end, end, mask)
        tl.store(work_indptr_ptr + slot[:, None] + 1 + step, this, mask=mask)


@triton.jit
def write_works(
    work_indptr_ptr,
    reduce_indptr_ptr,
    work_info_ptr,
    tile,
    start,
    length,
    head,
    uses_open,
    fresh,
    size,
    kept,
    sums,
    FRESH: tl.constexpr,
):
    """Writes the works of one block of tiles and their pointers; returns the running sums behind it.

    `head` tokens go to the open slot where `uses_open`, the others to `fresh` slots by `size`, a number for all tiles
    or of shape (BLOCK, 1). `kept` says for which tiles `reduce_indptr` is written.
    """
    pieces = fresh + uses_open.to(tl.int32)
    partials = tl.where(pieces > 1, pieces, 0)
    packed = (partials.to(tl.int64) << PARTIALS_SHIFT) + (pieces.to(tl.int64) << WORKS_SHIFT) + fresh
    before = sums + tl.cumsum(packed, 0) - packed
    location = (before >> PARTIALS_SHIFT).to(tl.int32)
    work = (before >> WORKS_SHIFT).to(tl.int32) & _WORKS_MASK
    slot = before.to(tl.int32) & _SLOTS_MASK
    tl.debug_barrier()  # the walk used these words, and other threads than those that write them
    tl.store(reduce_indptr_ptr + tile, location, mask=kept)

    is_cut = (pieces > 1).to(tl.int32)
    location = tl.where(pieces > 1, location, -1)
    kv_end = start + head
    store_work(work_info_ptr, work, tile, location, start, kv_end, start + length, uses_open)
    in_open = uses_open.to(tl.int32)
    _write_fresh(
        work_info_ptr,
        work_indptr_ptr,
        work + in_open,
        slot,
        tile,
        location + in_open * is_cut,
        is_cut,
        kv_end,
        start + length,
        fresh,
        size,
        FRESH,
    )
    return sums + tl.sum(packed, 0)


@triton.jit
def slots_and_works(sums):
    """Slots opened and works written, of running sums."""
    return sums.to(tl.int32) & _SLOTS_MASK, (sums >> WORKS_SHIFT).to(tl.int32) & _WORKS_MASK
