"""The `plan` op in one launch: rows and schedule from the device's `query_start_loc` and `seq_lens` alone.

One workgroup does all of it, so that nothing has to wait for another one. `reference/plan.py` defines the
result.

The walk over the tiles is the only part that is sequential. With `need` the blocks of a tile, overhead
included, C the blocks per slot and V the overhead, the room of the open slot obeys

    room' = max((room - need) mod C, V)

where no tile is empty: a slot's first room C + V is V modulo C. How many slots a tile opens is worked out
from `room` for all tiles at once afterwards, and their numbers are a running sum.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mlaplan.kernels.launch import Launch, next_power_of_two
from mlaplan.layout import PlanArrays, PlanParams

_BLOCK_TOKENS = tl.constexpr(16)
_OVERHEAD = tl.constexpr(16)

# How empty rows are treated.
_SKIP = tl.constexpr(0)
_PARALLEL = tl.constexpr(1)
_SERIAL = tl.constexpr(2)

# One 64-bit running sum carries the slots opened, the works and the partials of the tiles before.
_WORKS_SHIFT = tl.constexpr(16)
_PARTIALS_SHIFT = tl.constexpr(40)
_MAX_CUS = (1 << 16) - 1
_MAX_TILES = 1 << 22

_MAX_BLOCK = 1024
_MAX_TOPK = 1 << 30
_MANY = tl.constexpr(1 << 26)  # blocks; more than any row has


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _mark_requests(
    query_start_loc_ptr,
    seq_lens_ptr,
    request_ids_ptr,
    kv_indptr_ptr,
    num_requests,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Writes at each request's first row its number plus 1, and the base of its row lengths.

    Returns the live rows. Rows that begin no request keep what they hold. The loads are of blocks and never
    of single
    elements: a scalar load becomes `s_load` on gfx9, and the scalar cache was reported to be stale for these
    inputs.
    """
    boundary = 0
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        inside = request < num_requests
        begin = tl.load(query_start_loc_ptr + request, mask=inside & (request > 0), other=0)
        end = tl.load(query_start_loc_ptr + request + 1, mask=inside, other=0)
        seq_len = tl.load(seq_lens_ptr + request, mask=inside, other=0)
        begin = tl.minimum(tl.maximum(begin, 0), num_rows)
        begin = tl.maximum(tl.associative_scan(begin, 0, _larger), boundary)
        end = tl.maximum(begin, tl.minimum(end, num_rows))
        has_rows = begin < end
        tl.store(request_ids_ptr + begin, request + 1, mask=has_rows)
        tl.store(kv_indptr_ptr + begin, tl.maximum(seq_len, 0) - end + 1, mask=has_rows)
        boundary = tl.max(end, 0)
    return boundary


@triton.jit
def _number_rows(request_ids_ptr, kv_indptr_ptr, live, num_rows, topk, BLOCK: tl.constexpr):
    """Turns the marks into `request_ids` and `kv_indptr`.

    Returns the rows that are not empty, the blocks of all rows and the longest row.
    """
    filled = 0
    num_blocks = 0
    longest = 0
    total = 0
    owner = tl.zeros([], tl.int64)
    for first in range(0, live, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < live
        mark = tl.load(request_ids_ptr + row, mask=inside, other=0)
        base = tl.load(kv_indptr_ptr + row, mask=inside & (mark > 0), other=0)
        # Marks grow with the row, so the largest pair so far is the pair of the request that owns the row.
        pair = (mark.to(tl.int64) << 32) | (base.to(tl.int64) & 0xFFFFFFFF)
        pair = tl.maximum(tl.associative_scan(pair, 0, _larger), owner)
        owner = tl.max(pair, 0)
        length = tl.minimum(tl.maximum(pair.to(tl.int32) + row, 0), topk)
        length = tl.where(inside, length, 0)
        start = total + tl.cumsum(length, 0) - length
        tl.debug_barrier()  # the marks were read by other threads than those that write here
        tl.store(request_ids_ptr + row, (pair >> 32).to(tl.int32) - 1, mask=inside)
        tl.store(kv_indptr_ptr + row, start, mask=inside)
        total += tl.sum(length, 0)
        filled += tl.sum((length > 0).to(tl.int32), 0)
        num_blocks += tl.sum((length + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS, 0)
        longest = tl.maximum(longest, tl.max(length, 0))
    _fill(kv_indptr_ptr, live, num_rows + 1, total, BLOCK)
    return filled, num_blocks, longest


@triton.jit
def _fill(ptr, begin, end, value, BLOCK: tl.constexpr):
    for first in range(begin, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(ptr + index, tl.zeros([BLOCK], tl.int32) + value, mask=index < end)


@triton.jit
def _share(counted, num_blocks, longest, num_cus, split_budget, min_tokens_per_split, FOLD: tl.constexpr):
    """Blocks per slot, at least 1. `counted` rows share the slots that the budget allows."""
    splits = tl.maximum(longest // min_tokens_per_split, 1)
    rounded = 1
    while rounded < tl.minimum(splits, num_cus):
        rounded *= 2
    budget = tl.where(split_budget == 0, rounded, split_budget)
    limited = tl.minimum(num_cus, tl.minimum(budget, num_cus) * counted * FOLD)
    num_slots = tl.maximum(tl.where(budget < 0, num_cus, limited), 1)
    weight = (num_blocks + _OVERHEAD * counted) * FOLD
    return tl.maximum((weight + num_slots - 1) // num_slots, 1)


@triton.jit
def _write_needs(
    kv_indptr_ptr,
    reduce_indptr_ptr,
    live,
    share,
    BLOCK: tl.constexpr,
    FOLD: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Leaves what the walk has to know of each row at its first tile of `reduce_indptr`."""
    for first in range(0, live, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < live
        start = tl.load(kv_indptr_ptr + row, mask=inside, other=0)
        end = tl.load(kv_indptr_ptr + row + 1, mask=inside, other=0)
        need = (end - start + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS + _OVERHEAD
        if EMPTY == _SKIP:
            need = tl.where(end > start, need % share, 0)
        tl.store(reduce_indptr_ptr + row * FOLD, need, mask=inside)


@triton.jit
def _next_room(room, need, share, EMPTY: tl.constexpr):
    """Room of the open slot behind a tile; see the module for the short form."""
    if EMPTY == _SKIP:
        rest = room - need
        wrapped = (rest + share).to(tl.uint32, bitcast=True)
        # As unsigned numbers the smaller one is the one that is not negative and below `share`.
        rest = tl.minimum(rest.to(tl.uint32, bitcast=True), wrapped)
        return tl.maximum(rest.to(tl.int32, bitcast=True), _OVERHEAD)
    rest = tl.maximum(room, _OVERHEAD) - need
    fresh = tl.where(rest < 0, (share - 1 - rest) // share, 0)
    rest += fresh * share
    closed = share if EMPTY == _SERIAL else 0
    return tl.where((need == _OVERHEAD) & (room < _OVERHEAD), closed, rest)


@triton.jit
def _walk_row(reduce_indptr_ptr, row, live, room, need, share, FOLD: tl.constexpr, EMPTY: tl.constexpr):
    """Leaves the room before each tile of one row in `reduce_indptr`; returns the room behind them."""
    for part in tl.static_range(FOLD):
        tl.store(reduce_indptr_ptr + row * FOLD + part, room, mask=row < live)
        room = _next_room(room, need, share, EMPTY)
    return room


@triton.jit
def _need(reduce_indptr_ptr, row, live, FOLD: tl.constexpr):
    return tl.load(reduce_indptr_ptr + row * FOLD, mask=row < live, other=0)


@triton.jit
def _walk(reduce_indptr_ptr, live, share, FOLD: tl.constexpr, EMPTY: tl.constexpr):
    """Replaces the needs in `reduce_indptr` by the room that each tile finds.

    Needs are loaded one group ahead, so that their latency is not part of the chain, and behind a barrier, because
    another thread's store would replace a need before this thread has read it.
    """
    room = _OVERHEAD + tl.zeros([], tl.int32)
    if EMPTY != _SKIP:
        room += share
    n0 = _need(reduce_indptr_ptr, 0, live, FOLD)
    n1 = _need(reduce_indptr_ptr, 1, live, FOLD)
    n2 = _need(reduce_indptr_ptr, 2, live, FOLD)
    n3 = _need(reduce_indptr_ptr, 3, live, FOLD)
    n4 = _need(reduce_indptr_ptr, 4, live, FOLD)
    n5 = _need(reduce_indptr_ptr, 5, live, FOLD)
    n6 = _need(reduce_indptr_ptr, 6, live, FOLD)
    n7 = _need(reduce_indptr_ptr, 7, live, FOLD)
    for row in range(0, live, 8):
        m0 = _need(reduce_indptr_ptr, row + 8, live, FOLD)
        m1 = _need(reduce_indptr_ptr, row + 9, live, FOLD)
        m2 = _need(reduce_indptr_ptr, row + 10, live, FOLD)
        m3 = _need(reduce_indptr_ptr, row + 11, live, FOLD)
        m4 = _need(reduce_indptr_ptr, row + 12, live, FOLD)
        m5 = _need(reduce_indptr_ptr, row + 13, live, FOLD)
        m6 = _need(reduce_indptr_ptr, row + 14, live, FOLD)
        m7 = _need(reduce_indptr_ptr, row + 15, live, FOLD)
        tl.debug_barrier()
        room = _walk_row(reduce_indptr_ptr, row, live, room, n0, share, FOLD, EMPTY)
        room = _walk_row(reduce_indptr_ptr, row + 1, live, room, n1, share, FOLD, EMPTY)
        room = _walk_row(reduce_indptr_ptr, row + 2, live, room, n2, share, FOLD, EMPTY)
        room = _walk_row(reduce_indptr_ptr, row + 3, live, room, n3, share, FOLD, EMPTY)
        room = _walk_row(reduce_indptr_ptr, row + 4, live, room, n4, share, FOLD, EMPTY)
        room = _walk_row(reduce_indptr_ptr, row + 5, live, room, n5, share, FOLD, EMPTY)
        room = _walk_row(reduce_indptr_ptr, row + 6, live, room, n6, share, FOLD, EMPTY)
        room = _walk_row(reduce_indptr_ptr, row + 7, live, room, n7, share, FOLD, EMPTY)
        n0, n1, n2, n3 = m0, m1, m2, m3
        n4, n5, n6, n7 = m4, m5, m6, m7


@triton.jit
def _cut(blocks, room, share, EMPTY: tl.constexpr):
    """Returns the blocks for the open slot, whether a work of the tile lies there, and the slots it opens."""
    missing = blocks + _OVERHEAD - tl.maximum(room, _OVERHEAD)
    fresh = tl.where(missing > 0, (missing + share - 1) // share, 0)
    uses_open = (fresh == 0) | (room > _OVERHEAD)
    if EMPTY == _SKIP:
        uses_open = uses_open & (blocks > 0)
        fresh = tl.where(blocks > 0, fresh, 0)
    else:
        dropped = (blocks == 0) & (room < _OVERHEAD)
        uses_open = uses_open & (dropped == 0)
        if EMPTY == _SERIAL:
            fresh = tl.where(dropped, 1, fresh)
    head = tl.where(fresh == 0, blocks, tl.maximum(room - _OVERHEAD, 0))
    return head, uses_open, fresh


@triton.jit
def _store_work(work_info_ptr, work, tile, location, kv_start, kv_end, row_end, mask):
    ptr = work_info_ptr + work * 8
    tl.store(ptr, tile, mask=mask)
    tl.store(ptr + 1, location, mask=mask)
    tl.store(ptr + 2, tile, mask=mask)
    tl.store(ptr + 3, tile + 1, mask=mask)
    tl.store(ptr + 4, kv_start, mask=mask)
    tl.store(ptr + 5, kv_end, mask=mask)
    tl.store(ptr + 6, row_end - kv_end, mask=mask)
    tl.store(ptr + 7, tl.zeros_like(kv_start), mask=mask)


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
    share,
    FRESH: tl.constexpr,
):
    """Writes the works in slots opened for each tile, FRESH of them at a time, and those slots."""
    most = tl.max(fresh, 0)
    for first in range(0, most, FRESH):
        step = (first + tl.arange(0, FRESH))[None, :]
        mask = step < fresh[:, None]
        # Differences are compared and not ends, which could pass 32 bits.
        kv_start = start[:, None] + tl.where(mask, step * share * _BLOCK_TOKENS, 0)
        kv_end = kv_start + tl.minimum(tl.minimum(share, _MANY) * _BLOCK_TOKENS, row_end[:, None] - kv_start)
        place = location[:, None] + is_cut[:, None] * step
        this = work[:, None] + step
        _store_work(work_info_ptr, this, tile[:, None] + step * 0, place, kv_start, kv_end, row_end[:, None], mask)
        tl.store(work_indptr_ptr + slot[:, None] + 1 + step, this, mask=mask)


@triton.jit
def _write_works(
    kv_indptr_ptr,
    work_indptr_ptr,
    reduce_indptr_ptr,
    work_info_ptr,
    live,
    num_rows,
    num_cus,
    share,
    BLOCK: tl.constexpr,
    FRESH: tl.constexpr,
    FOLD: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Writes the works of all tiles from the room that each one found, and the pointers with their tails."""
    sums = tl.zeros([], tl.int64)
    for first in range(0, live * FOLD, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        inside = tile < live * FOLD
        row = tile // FOLD
        start = tl.load(kv_indptr_ptr + row, mask=inside, other=0)
        row_end = tl.load(kv_indptr_ptr + row + 1, mask=inside, other=0)
        room = tl.load(reduce_indptr_ptr + tile, mask=inside, other=0)
        if EMPTY == _SKIP:
            # The walk knows rooms modulo `share`; only the first work of all finds a slot that is untouched.
            room += tl.where((start == 0) & (tile % FOLD == 0), share, 0)
        blocks = (row_end - start + _BLOCK_TOKENS - 1) // _BLOCK_TOKENS
        head, uses_open, fresh = _cut(blocks, room, share, EMPTY)
        uses_open = uses_open & inside
        fresh = tl.where(inside, fresh, 0)
        pieces = fresh + uses_open.to(tl.int32)
        partials = tl.where(pieces > 1, pieces, 0)
        packed = (partials.to(tl.int64) << _PARTIALS_SHIFT) + (pieces.to(tl.int64) << _WORKS_SHIFT) + fresh
        before = sums + tl.cumsum(packed, 0) - packed
        sums += tl.sum(packed, 0)
        location = (before >> _PARTIALS_SHIFT).to(tl.int32)
        work = (before >> _WORKS_SHIFT).to(tl.int32) & 0xFFFFFF
        slot = before.to(tl.int32) & 0xFFFF
        tl.debug_barrier()  # the rooms were read by other threads than those that write here
        tl.store(reduce_indptr_ptr + tile, location, mask=inside)

        is_cut = (pieces > 1).to(tl.int32)
        location = tl.where(pieces > 1, location, -1)
        kv_end = start + tl.minimum(head * _BLOCK_TOKENS, row_end - start)
        _store_work(work_info_ptr, work, tile, location, start, kv_end, row_end, uses_open)
        in_open = uses_open.to(tl.int32)
        start = kv_end
        location += in_open * is_cut
        work += in_open
        _write_fresh(
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
            share,
            FRESH,
        )
    slots = sums.to(tl.int32) & 0xFFFF
    works = (sums >> _WORKS_SHIFT).to(tl.int32) & 0xFFFFFF
    _fill(work_indptr_ptr, 0, 1, 0, 1)
    _fill(work_indptr_ptr, slots + 1, num_cus + 1, works, BLOCK)
    _fill(reduce_indptr_ptr, live * FOLD, num_rows * FOLD + 1, (sums >> _PARTIALS_SHIFT).to(tl.int32), BLOCK)


@triton.jit(
    do_not_specialize=["num_requests", "num_rows", "topk", "num_cus", "split_budget", "min_tokens_per_split"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr"],
)
def _plan_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    request_ids_ptr,
    kv_indptr_ptr,
    work_indptr_ptr,
    reduce_indptr_ptr,
    work_info_ptr,
    num_requests,
    num_rows,
    topk,
    num_cus,
    split_budget,
    min_tokens_per_split,
    BLOCK: tl.constexpr,
    FRESH: tl.constexpr,
    FOLD: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Makes one plan; one program.

    query_start_loc_ptr: (num_requests + 1,) int32, any values. seq_lens_ptr: (num_requests,) int32, any
    values. The others: the arrays of `PlanArrays` for `num_rows` rows, int32. `request_ids`, `kv_indptr` and
    `reduce_indptr` also serve as scratch before they get their values. `split_budget` is 0 for the
    work-per-split rule.
    """
    _fill(request_ids_ptr, 0, num_rows, 0, BLOCK)
    tl.debug_barrier()
    live = _mark_requests(
        query_start_loc_ptr, seq_lens_ptr, request_ids_ptr, kv_indptr_ptr, num_requests, num_rows, BLOCK
    )
    tl.debug_barrier()
    filled, num_blocks, longest = _number_rows(request_ids_ptr, kv_indptr_ptr, live, num_rows, topk, BLOCK)
    counted = filled if EMPTY == _SKIP else live
    share = _share(counted, num_blocks, longest, num_cus, split_budget, min_tokens_per_split, FOLD)
    tl.debug_barrier()
    _write_needs(kv_indptr_ptr, reduce_indptr_ptr, live, share, BLOCK, FOLD, EMPTY)
    tl.debug_barrier()
    _walk(reduce_indptr_ptr, live, share, FOLD, EMPTY)
    tl.debug_barrier()
    _write_works(
        kv_indptr_ptr,
        work_indptr_ptr,
        reduce_indptr_ptr,
        work_info_ptr,
        live,
        num_rows,
        num_cus,
        share,
        BLOCK,
        FRESH,
        FOLD,
        EMPTY,
    )


def plan_launch(query_start_loc: Any, seq_lens: Any, arrays: PlanArrays, params: PlanParams) -> Launch:
    """Returns the launch that `plan` runs.

    Everything in it is a constant of the arrays' shapes and of `params`, so a captured graph may replay it.

    Args:
        query_start_loc: Shape (R + 1,), int32, on the device.
        seq_lens: Shape (R,), int32, in tokens, on the device.
        arrays: The arrays of a class of P rows.
        params: What the plan depends on beside the batch.

    Raises:
        ValueError: The shapes do not belong together, or `params` holds what the kernel cannot plan.
    """
    num_rows = arrays.request_ids.shape[0]
    num_requests = seq_lens.shape[0]
    _check(query_start_loc, num_requests, arrays, params)
    empty = _SKIP if params.empty_rows == "skip" else _SERIAL if params.variant == "serial" else _PARALLEL
    block = min(_MAX_BLOCK, next_power_of_two(max(num_rows, 32)))
    return Launch(
        kernel=_plan_kernel,
        grid=(1,),
        args=(
            query_start_loc,
            seq_lens,
            *arrays,
            num_requests,
            num_rows,
            params.topk,
            params.num_cus,
            0 if params.split_budget is None else params.split_budget,
            params.min_tokens_per_split,
        ),
        constants={"BLOCK": block, "FRESH": max(1, 256 // block), "FOLD": params.fold, "EMPTY": empty.value},
        options={"num_warps": max(1, min(4, block // 128))},
    )


def plan(query_start_loc: Any, seq_lens: Any, arrays: PlanArrays, params: PlanParams) -> None:
    """Writes rows and schedule of one batch into `arrays` with one launch; `reference.plan.plan` in Triton.

    Nothing on the host is read but shapes, so the launch may be captured and replayed for other contents of
    the two inputs. Whatever they hold, reads and writes stay inside the arrays given.

    Args:
        query_start_loc: Shape (R + 1,), int32, contiguous, any values.
        seq_lens: Shape (R,), int32, contiguous, any values.
        arrays: The arrays of a class of P rows, contiguous; written in place.
        params: What the plan depends on beside the batch. The caller keeps `P * topk < 2**31`.

    Raises:
        ValueError: The shapes do not belong together, or `params` holds what the kernel cannot plan.
    """
    plan_launch(query_start_loc, seq_lens, arrays, params).run()


def _check(query_start_loc: Any, num_requests: int, arrays: PlanArrays, params: PlanParams) -> None:
    if params.variant not in ("parallel", "serial"):
        raise ValueError(f"variant is {params.variant!r}, known are 'parallel', 'serial'")
    if params.empty_rows not in ("skip", "aiter"):
        raise ValueError(f"empty_rows is {params.empty_rows!r}, known are 'skip', 'aiter'")
    if params.split_budget is not None and params.split_budget != -1 and params.split_budget < 1:
        raise ValueError(f"split_budget is {params.split_budget}, expected -1, at least 1, or None")
    num_rows, num_tiles = arrays.request_ids.shape[0], arrays.request_ids.shape[0] * params.fold
    if not 1 <= params.num_cus <= _MAX_CUS:
        raise ValueError(f"num_cus is {params.num_cus}, expected 1 to {_MAX_CUS}")
    if not 1 <= params.topk <= _MAX_TOPK or num_rows * params.topk >= 1 << 31:
        raise ValueError(f"topk is {params.topk}, expected at least 1 and rows * topk below 2**31 for {num_rows} rows")
    if num_tiles > _MAX_TILES:
        raise ValueError(f"request_ids has {num_rows} rows; times fold {params.fold} that is above {_MAX_TILES}")
    expected = (
        ("query_start_loc", query_start_loc, (num_requests + 1,)),
        ("kv_indptr", arrays.kv_indptr, (num_rows + 1,)),
        ("work_indptr", arrays.work_indptr, (params.num_cus + 1,)),
        ("reduce_indptr", arrays.reduce_indptr, (num_tiles + 1,)),
        ("work_info", arrays.work_info, (num_tiles + params.num_cus - 1, 8)),
    )
    for name, array, wanted in expected:
        if tuple(array.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {wanted}")
