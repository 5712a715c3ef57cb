"""The first half of the plan kernel: who owns each row, how long it is, and the blocks that a slot is given.

The inputs are read in blocks and never as single elements: a scalar load becomes `s_load` on gfx9, and the scalar
cache was reported to be stale for inputs that are written outside a captured graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_TOKENS = tl.constexpr(16)
OVERHEAD = tl.constexpr(16)  # blocks that a row weighs beside its own

# How empty rows are treated.
SKIP = tl.constexpr(0)
PARALLEL = tl.constexpr(1)
SERIAL = tl.constexpr(2)

# What is known of the boundaries, the worse the larger.
_ONE_EACH = tl.constexpr(0)  # row t belongs to request t
_ORDERED = tl.constexpr(1)
FALLING = tl.constexpr(2)

TAIL = tl.constexpr(512)  # words that a tail is filled with at a time
_LAST = tl.constexpr((1 << 31) - 1)


@triton.jit
def larger(a, b):
    """Combines two values in a scan."""
    return tl.maximum(a, b)


@triton.jit
def _larger_pair(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def add_pair(a0, a1, b0, b1):
    """Combines two pairs in a scan."""
    return a0 + b0, a1 + b1


@triton.jit
def _join_totals(weight, filled, longest, other_weight, other_filled, other_longest):
    return weight + other_weight, filled + other_filled, tl.maximum(longest, other_longest)


@triton.jit
def fill(ptr, begin, end, value, BLOCK: tl.constexpr):
    """Writes one value at [begin, end)."""
    for first in range(begin, end, BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(ptr + index, tl.zeros([BLOCK], tl.int32) + value, mask=index < end)


@triton.jit
def survey(query_start_loc_ptr, num_requests, num_rows, BLOCK: tl.constexpr):
    """Returns the live rows and what is known of the boundaries.

    "One each" holds if boundaries rise by one up to some request and stay there: then each one that rises begins at
    the number of its request.
    """
    live = 0
    order = 0
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        inside = request < num_requests
        begin = tl.load(query_start_loc_ptr + request, mask=inside & (request > 0), other=0)
        end = tl.load(query_start_loc_ptr + request + 1, mask=inside, other=0)
        begin = tl.minimum(tl.maximum(begin, 0), num_rows)
        end = tl.minimum(tl.maximum(end, 0), num_rows)
        single = ((begin == request) & (end == request + 1)) | (begin == end)
        kind = tl.where(single, _ONE_EACH, tl.where(begin < end, _ORDERED, FALLING))
        most, worst = tl.reduce((end, tl.where(inside, kind, 0)), 0, _larger_pair)
        live = tl.maximum(live, most)
        order = tl.maximum(order, worst)
    return live, order


@triton.jit
def mark_owners(query_start_loc_ptr, request_ids_ptr, num_requests, num_rows, live, BLOCK: tl.constexpr):
    """Leaves in `request_ids` the request that owns each row, for boundaries that may fall."""
    fill(request_ids_ptr, 0, num_rows, 0, BLOCK)
    tl.debug_barrier()
    boundary = 0
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        inside = request < num_requests
        begin = tl.load(query_start_loc_ptr + request, mask=inside & (request > 0), other=0)
        end = tl.load(query_start_loc_ptr + request + 1, mask=inside, other=0)
        begin = tl.minimum(tl.maximum(begin, 0), num_rows)
        begin = tl.maximum(tl.associative_scan(begin, 0, larger), boundary)
        end = tl.maximum(begin, tl.minimum(end, num_rows))
        tl.store(request_ids_ptr + begin, request + 1, mask=begin < end)
        boundary = tl.max(end, 0)
    tl.debug_barrier()
    owner = 0
    for first in range(0, live, BLOCK):
        row = first + tl.arange(0, BLOCK)
        # Marks grow with the row, so the largest mark so far is that of the owner.
        mark = tl.load(request_ids_ptr + row, mask=row < live, other=0)
        mark = tl.maximum(tl.associative_scan(mark, 0, larger), owner)
        owner = tl.max(mark, 0)
        tl.debug_barrier()  # the marks were read by other threads than those that write here
        tl.store(request_ids_ptr + row, mark - 1, mask=row < live)
    tl.debug_barrier()


@triton.jit
def _search(query_start_loc_ptr, row, num_requests, most):
    """Counts the requests that end at or before each row; `most` is a power of two, at least half of them."""
    count = tl.zeros_like(row)
    step = most
    while step > 0:
        ahead = count + step
        end = tl.load(query_start_loc_ptr + ahead, mask=ahead <= num_requests, other=_LAST)
        count = tl.where(end <= row, ahead, count)
        step = step // 2
    return count


@triton.jit
def row_lengths(
    query_start_loc_ptr, seq_lens_ptr, request_ids_ptr, row, live, order, num_requests, num_rows, most, topk
):
    """Returns request and length of each row; 0 and 0 behind the live rows."""
    inside = row < live
    if order == _ONE_EACH:
        owner = row
    elif order == _ORDERED:
        owner = _search(query_start_loc_ptr, row, num_requests, most)
    else:
        owner = tl.load(request_ids_ptr + row, mask=inside, other=0)
    end = tl.load(query_start_loc_ptr + owner + 1, mask=inside, other=0)
    seq_len = tl.load(seq_lens_ptr + owner, mask=inside, other=0)
    behind = tl.minimum(end, num_rows) - 1 - row
    length = tl.minimum(tl.maximum(tl.maximum(seq_len, 0) - behind, 0), topk)
    return tl.where(inside, owner, 0), tl.where(inside, length, 0)


@triton.jit
def weights(length, inside, EMPTY: tl.constexpr):
    """Blocks that tiles weigh, overhead included."""
    need = (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS + OVERHEAD
    if EMPTY == SKIP:
        return tl.where(length > 0, need, 0)
    return tl.where(inside, need, 0)


@triton.jit
def totals(need, counted, length):
    """Returns the weight of all rows, how many count, and the longest one."""
    return tl.reduce((need, counted, length), 0, _join_totals)


@triton.jit
def write_rows(
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
    BLOCK: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Writes `request_ids` and `kv_indptr` block by block; returns what `totals` returns."""
    weight = 0
    filled = 0
    longest = 0
    total = 0
    for first in range(0, live, BLOCK):
        row = first + tl.arange(0, BLOCK)
        owner, length = row_lengths(
            query_start_loc_ptr, seq_lens_ptr, request_ids_ptr, row, live, order, num_requests, num_rows, most, topk
        )
        need = weights(length, row < live, EMPTY)
        block_weight, block_filled, block_longest = totals(need, (need > 0).to(tl.int32), length)
        if order == FALLING:
            tl.debug_barrier()  # the owners were read by other threads than those that write here
        tl.store(request_ids_ptr + row, owner, mask=row < live)
        tl.store(kv_indptr_ptr + row + 1, total + tl.cumsum(length, 0), mask=row < live)
        total += tl.sum(length, 0)
        weight += block_weight
        filled += block_filled
        longest = tl.maximum(longest, block_longest)
    fill(request_ids_ptr, live, num_rows, 0, BLOCK)
    fill(kv_indptr_ptr, live + 1, num_rows + 1, total, BLOCK)
    return weight, filled, longest


@triton.jit
def slots_of(counted, num_cus, budget):
    """Slots that the budget leaves `counted` tiles, at least 1. The product of two numbers may pass 32 bits."""
    limited = tl.minimum(tl.minimum(budget, num_cus).to(tl.int64) * counted, num_cus).to(tl.int32)
    return tl.maximum(tl.where(budget < 0, num_cus, limited), 1)


@triton.jit
def share_of_slot(weight, counted, longest, num_cus, split_budget, min_tokens_per_split):
    """Blocks per slot, at least 1. `counted` tiles share the slots that the budget allows."""
    # next_power_of_two(splits), of a number that is at most num_cus and so has 16 bits
    rounded = tl.minimum(tl.maximum(longest // min_tokens_per_split, 1), num_cus) - 1
    rounded |= rounded >> 1
    rounded |= rounded >> 2
    rounded |= rounded >> 4
    rounded |= rounded >> 8
    budget = tl.where(split_budget == 0, rounded + 1, split_budget)
    num_slots = slots_of(counted, num_cus, budget)
    return tl.maximum((weight + num_slots - 1) // num_slots, 1)
