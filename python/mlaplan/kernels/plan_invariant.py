"""The plan kernel of the policy `invariant`: every row is cut by itself, its pieces are shared out by their cost."""

from __future__ import annotations

import triton
import triton.language as tl

from mlaplan.kernels.plan_rows import FALLING, TAIL, add_pair, fill, mark_owners, survey, write_rows
from mlaplan.kernels.plan_works import store_work

_SKIP = tl.constexpr(0)


@triton.jit
def _blocks(tokens, block_tokens):
    return (tl.maximum(tokens, 1) - 1) // block_tokens + 1


@triton.jit
def _tiles(kv_indptr_ptr, tile, tiles, piece_tokens, block_tokens, block, piece, whole, FOLD: tl.constexpr):
    """Start, length and pieces of tiles, and what a full piece, the last one and all of them cost."""
    row = tile // FOLD
    start = tl.load(kv_indptr_ptr + row, mask=tile < tiles, other=0)
    length = tl.load(kv_indptr_ptr + row + 1, mask=tile < tiles, other=0) - start
    pieces = tl.where(length > 0, (tl.maximum(length, 1) - 1) // piece_tokens + 1, 0)
    fixed = tl.where(pieces > 1, piece, whole)
    behind = tl.maximum(pieces, 1) - 1
    rest = length - behind * tl.where(behind > 0, piece_tokens, 0)
    last = fixed + _blocks(rest, block_tokens).to(tl.int64) * block
    full = piece + _blocks(tl.where(behind > 0, piece_tokens, 1), block_tokens).to(tl.int64) * block
    cost = tl.where(pieces > 0, behind * full + last, 0)
    return start, length, pieces, full, last, cost


@triton.jit
def _slots(cost, num_cus, total, inverse):
    """The slots of works that have works of so much cost before them; `inverse` is about 1 over `total`.

    A float has 24 bits and a slot has 16, so that the first guess is off by one at most.
    """
    shared = cost * num_cus
    slot = (shared.to(tl.float32) * inverse).to(tl.int32)
    left = shared - slot.to(tl.int64) * total
    return slot + (left >= total).to(tl.int32) - (left < 0).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_rows",
        "most",
        "topk",
        "num_cus",
        "piece_tokens",
        "block_tokens",
        "block",
        "piece",
        "whole",
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
def invariant_kernel(
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
    piece_tokens,
    block_tokens,
    block,
    piece,
    whole,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
    FRESH: tl.constexpr,
):
    """Makes one plan; one program. Parameters as those of the kernel in `plan.py`, the cost table, and the piece.

    `num_cus` times the cost of all works stays below 2^62. FRESH: slots that are written at a time behind one work.
    """
    live, order = survey(query_start_loc_ptr, num_requests, num_rows, BLOCK)
    if order == FALLING:
        mark_owners(query_start_loc_ptr, request_ids_ptr, num_requests, num_rows, live, BLOCK)
    write_rows(
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
    total = tl.zeros([], tl.int64)
    for base in range(0, tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        _, _, _, _, _, cost = _tiles(kv_indptr_ptr, tile, tiles, piece_tokens, block_tokens, block, piece, whole, FOLD)
        total += tl.sum(cost, 0)
    if total == 0:
        fill(work_indptr_ptr, 1, num_cus + 1, 0, TAIL)
    total = tl.maximum(total, 1)
    inverse = 1.0 / total.to(tl.float32)
    spent = tl.zeros([], tl.int64)
    works = tl.zeros([], tl.int64)  # works, and partials above them
    for base in range(0, tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        start, length, pieces, full, last, cost = _tiles(
            kv_indptr_ptr, tile, tiles, piece_tokens, block_tokens, block, piece, whole, FOLD
        )
        packed = pieces.to(tl.int64) + (tl.where(pieces > 1, pieces, 0).to(tl.int64) << 32)
        behind, worked = tl.associative_scan((cost, packed), 0, add_pair)
        behind = spent + behind - cost
        worked = works + worked - packed
        work = (worked & 0x7FFFFFFF).to(tl.int32)
        location = (worked >> 32).to(tl.int32)
        tl.store(reduce_indptr_ptr + tile, location, mask=tile < tiles)
        slot = _slots(behind, num_cus, total, inverse)
        for at in range(tl.max(pieces, 0)):
            inside = at < pieces
            is_last = at == pieces - 1
            cut = pieces > 1
            kv_start = start + tl.where(inside, at * tl.where(cut, piece_tokens, 0), 0)
            kv_end = tl.where(is_last, start + length, kv_start + tl.where(cut, piece_tokens, 0))
            place = tl.where(cut, location + at, -1)
            store_work(work_info_ptr, work + at, tile, place, kv_start, kv_end, start + length, inside)
            behind += tl.where(is_last, last, full)
            following = _slots(behind, num_cus, total, inverse)
            gap = tl.where(inside, following - slot, 0)
            for first in range(0, tl.max(gap, 0), FRESH):
                step = (first + tl.arange(0, FRESH))[None, :]
                ends = (work + at + 1)[:, None] + step * 0
                tl.store(work_indptr_ptr + slot[:, None] + 1 + step, ends, mask=step < gap[:, None])
            slot = following
        spent += tl.sum(cost, 0)
        works += tl.sum(packed, 0)
    partials = (works >> 32).to(tl.int32)
    fill(reduce_indptr_ptr, tiles, num_rows * FOLD, partials, BLOCK)
    tl.store(reduce_indptr_ptr + num_rows * FOLD + tl.arange(0, 1), nothing + partials)
