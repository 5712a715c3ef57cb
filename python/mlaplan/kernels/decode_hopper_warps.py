"""What the groups of warps of the Hopper decode do; `kernels/decode_hopper.py` puts them together.

Each group walks the works of its slot on its own, from the same arrays, and so meets the same steps. Buffers are full
or free by barriers in shared memory; a barrier's phase turns with each round of the ring. With many heads each half of
a buffer's columns has barriers of its own, those of the second half behind all of the first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOADERS = gl.constexpr(4)  # warps that gather
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _slot_and_block(GROUP: gl.constexpr, HEADS: gl.constexpr):
    """The program's slot and block of heads. Blocks of a slot are neighbours, for they gather the same rows."""
    BLOCKS: gl.constexpr = (GROUP + HEADS - 1) // HEADS
    return gl.program_id(0) // BLOCKS, gl.program_id(0) % BLOCKS


@gluon.jit
def _work_at(works, work):
    _, work_info_ptr, _, _, num_indices, _ = works
    info_ptr = work_info_ptr + work * 8
    tile = gl.load(info_ptr)
    location = gl.load(info_ptr + 1)
    kv_start = gl.load(info_ptr + 4)
    kv_end = gl.load(info_ptr + 5)
    # The start is cut on both sides, so that no position behind it wraps around.
    return tile, location, gl.minimum(gl.maximum(kv_start, 0), num_indices), gl.minimum(kv_end, num_indices)


@gluon.jit
def _first_work(works, GROUP: gl.constexpr, HEADS: gl.constexpr):
    """The slot's range of works, and its first one."""
    work_indptr_ptr, _, _, _, _, num_works = works
    slot, _ = _slot_and_block(GROUP, HEADS)
    # In small batches the slots before have one work each; a guess that holds saves a wait for memory.
    guess = gl.minimum(slot, num_works - 1)
    begin = gl.load(work_indptr_ptr + slot)
    end = gl.load(work_indptr_ptr + slot + 1)
    tile, location, kv_start, kv_end = _work_at(works, guess)
    work = gl.maximum(begin, 0)
    last = gl.minimum(end, num_works)
    if (work != guess) & (work < last):
        tile, location, kv_start, kv_end = _work_at(works, work)
    return work, last, tile, location, kv_start, kv_end


@gluon.jit
def _runs(works, tile, location, kv_start, kv_end, EMPTY_ENDS_SLOT: gl.constexpr):
    """Whether a work is run; it is not when it leads out of an array."""
    runs = (tile >= 0) & (tile < works[2]) & (location < works[3])
    if EMPTY_ENDS_SLOT:
        runs = runs & (kv_start < kv_end)
    return runs


@gluon.jit
def _next_work(work, last, kv_start, kv_end, EMPTY_ENDS_SLOT: gl.constexpr):
    following = work + 1
    if EMPTY_ENDS_SLOT:
        following = gl.where(kv_start >= kv_end, last, following)
    return following


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    """The next buffer of a ring; the phase of its barriers turns with each round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _entries_at(kv_indices_ptr, first, kv_end, TOKENS: gl.constexpr, layout: gl.constexpr):
    position = first + gl.arange(0, TOKENS, layout=layout)
    return gl.load(kv_indices_ptr + position, mask=position < kv_end, other=0)


@gluon.jit
def _load_queries(q_ptr, q_smem, q_empty, q_phase, tile, head, column, rest, GROUP: gl.constexpr, D: gl.constexpr):
    row_ptr = q_ptr + ((tile.to(gl.int64) * GROUP + head) * D)[:, None]
    in_group = (head < GROUP)[:, None]
    mbarrier.wait(q_empty, q_phase)
    async_copy.async_copy_global_to_shared(q_smem[0], row_ptr + column, mask=in_group)
    async_copy.async_copy_global_to_shared(q_smem[1], row_ptr + rest, mask=in_group)


@gluon.jit
def load(
    works,
    q_ptr,
    kv_cache_ptr,
    kv_indices_ptr,
    num_slots,
    kv_stride_slot,
    q_smem,
    kv_smem,
    full,
    empty,
    q_empty,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    V_DIM: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    EMPTY_ENDS_SLOT: gl.constexpr,
):
    """The loader: queries of every work and KV rows of every step, as soon as a buffer, or half of one, is free.

    Indices and works are read one ahead. The first barrier of a work's first step says that the queries have come as
    well. They go behind the KV, which then need not wait for the end of the last work's scores; but many queries of the
    first work are sent for while its first indices are waited for.
    """
    WIDTH: gl.constexpr = V_DIM // PARTS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOADERS, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    column = gl.arange(0, V_DIM, layout=columns)[None, :]
    part_column = gl.arange(0, WIDTH, layout=columns)[None, :]
    rest = V_DIM + gl.arange(0, D - V_DIM, layout=columns)[None, :]
    head = _slot_and_block(GROUP, HEADS)[1] * HEADS + gl.arange(0, HEADS, layout=rows)
    token = gl.arange(0, TOKENS, layout=rows)
    work, last, tile, location, kv_start, kv_end = _first_work(works, GROUP, HEADS)
    stage = 0
    phase = 1
    q_phase = 1
    entry = _entries_at(kv_indices_ptr, kv_start, kv_end, TOKENS, rows)
    is_first = 1 if PARTS > 1 else 0  # whether the queries at hand are many, and nothing was loaded yet
    while work < last:
        runs = _runs(works, tile, location, kv_start, kv_end, EMPTY_ENDS_SLOT)
        work = _next_work(work, last, kv_start, kv_end, EMPTY_ENDS_SLOT)
        next_tile, next_location, next_start, next_end = _work_at(works, gl.minimum(work, works[5] - 1))
        if runs & (kv_start < kv_end):
            for first in range(kv_start, kv_end, TOKENS):
                if PARTS > 1 and is_first != 0:
                    _load_queries(q_ptr, q_smem, q_empty, q_phase, tile, head, column, rest, GROUP, D)
                    q_phase ^= 1
                inside = (first + token < kv_end)[:, None]
                # Slot 0 is always readable; an index that is no slot must not lead out of the pool.
                slot = gl.where((entry >= 0) & (entry < num_slots), entry, 0).to(gl.int64)
                row_ptr = kv_cache_ptr + (slot * kv_stride_slot)[:, None]
                if first + TOKENS < kv_end:
                    entry = _entries_at(kv_indices_ptr, first + TOKENS, kv_end, TOKENS, rows)
                else:
                    entry = _entries_at(kv_indices_ptr, next_start, next_end, TOKENS, rows)
                for part in gl.static_range(PARTS):
                    value = kv_smem[0].index(stage).slice(part * WIDTH, WIDTH, dim=1)
                    mbarrier.wait(empty.index(part * STAGES + stage), phase)
                    async_copy.async_copy_global_to_shared(value, row_ptr + part * WIDTH + part_column, mask=inside)
                    if part == PARTS - 1:
                        async_copy.async_copy_global_to_shared(kv_smem[1].index(stage), row_ptr + rest, mask=inside)
                    if part == 0:
                        if (first == kv_start) & (is_first == 0):
                            _load_queries(q_ptr, q_smem, q_empty, q_phase, tile, head, column, rest, GROUP, D)
                            q_phase ^= 1
                        is_first = 0
                    async_copy.mbarrier_arrive(full.index(part * STAGES + stage), increment_count=False)
                stage, phase = _advance(stage, phase, STAGES)
        else:
            entry = _entries_at(kv_indices_ptr, next_start, next_end, TOKENS, rows)
        tile, location, kv_start, kv_end = next_tile, next_location, next_start, next_end


@gluon.jit
def _store(
    values, ptr, first_row, FIRST_COLUMN: gl.constexpr, GROUP: gl.constexpr, V_DIM: gl.constexpr, HEADS: gl.constexpr
):
    """Rows of heads from `first_row` on and columns from FIRST_COLUMN on, in whatever layout they are."""
    layout: gl.constexpr = values.type.layout
    head = _slot_and_block(GROUP, HEADS)[1] * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    column = FIRST_COLUMN + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(ptr + ((first_row + head) * V_DIM)[:, None] + column[None, :], values, mask=(head < GROUP)[:, None])


@gluon.jit
def _store_by_rows(
    left,
    right,
    buffer,
    left_empty,
    right_empty,
    ptr,
    first_row,
    GROUP: gl.constexpr,
    V_DIM: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Stores two halves of columns by way of a buffer that the caller owns, and gives that back.

    A product's layout has 16 bytes of a row next to each other, half a sector: stored from there, 64 heads took 7 us.
    """
    HALF: gl.constexpr = V_DIM // 2
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    buffer.slice(0, HALF, dim=1).store(left.to(buffer.dtype))
    buffer.slice(HALF, HALF, dim=1).store(right.to(buffer.dtype))
    rows = buffer.load(stored)
    mbarrier.arrive(left_empty, count=1)
    mbarrier.arrive(right_empty, count=1)
    head = _slot_and_block(GROUP, HEADS)[1] * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, stored))
    column = gl.arange(0, V_DIM, layout=gl.SliceLayout(0, stored))
    # One address and constants: 32 bits suffice within a row's heads.
    place = (head * V_DIM)[:, None] + column[None, :]
    gl.store(ptr + first_row * V_DIM + place, rows, mask=(head < GROUP)[:, None])


@gluon.jit
def _store_lse(outputs, peak, total, tile, location, GROUP: gl.constexpr, HEADS: gl.constexpr, layout: gl.constexpr):
    """LSE of whole row or piece. Returns the total, or 1 where nothing was summed."""
    safe_total = gl.where(total == 0.0, 1.0, total)
    lse = gl.where(total == 0.0, float("-inf"), peak * _LN_2 + gl.log(safe_total))
    head = _slot_and_block(GROUP, HEADS)[1] * HEADS + gl.arange(0, HEADS, layout=layout)
    if location < 0:
        gl.store(outputs[1] + (tile.to(gl.int64) * GROUP + head), lse, mask=head < GROUP)
    else:
        gl.store(outputs[3] + (location.to(gl.int64) * GROUP + head), lse, mask=head < GROUP)
    return safe_total


@gluon.jit
def whole(
    works,
    outputs,
    score_scale,
    k_scale,
    q_smem,
    kv_smem,
    weight_smem,
    full,
    empty,
    q_empty,
    GROUP: gl.constexpr,
    V_DIM: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    EMPTY_ENDS_SLOT: gl.constexpr,
):
    """The consumer for few heads: scores (tokens, heads), sums (columns, heads)."""
    WARPS: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, HEADS * 4 // WARPS, 16])
    sums_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEADS, 16])
    per_head: gl.constexpr = gl.SliceLayout(0, mma)
    sums_head: gl.constexpr = gl.SliceLayout(0, sums_mma)
    stored: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, mma))
    work, last, tile, location, kv_start, kv_end = _first_work(works, GROUP, HEADS)
    stage = 0
    phase = 0
    while work < last:
        runs = _runs(works, tile, location, kv_start, kv_end, EMPTY_ENDS_SLOT)
        work = _next_work(work, last, kv_start, kv_end, EMPTY_ENDS_SLOT)
        next_tile, next_location, next_start, next_end = _work_at(works, gl.minimum(work, works[5] - 1))
        if runs:
            peak = gl.full([HEADS], float("-inf"), gl.float32, layout=per_head)
            zeros = gl.zeros([TOKENS, HEADS], gl.float32, layout=mma)
            totals = zeros  # per thread; added up once, at the end
            acc = gl.zeros([V_DIM, HEADS], gl.float32, layout=sums_mma)
            for first in range(kv_start, kv_end, TOKENS):
                mbarrier.wait(full.index(stage), phase)
                # What ordinary copies wrote is read by the matrix units, which see memory in another way.
                fence_async_shared()
                value = kv_smem[0].index(stage)
                score = warpgroup_mma(value, q_smem[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
                score = warpgroup_mma(kv_smem[1].index(stage), q_smem[1].permute((1, 0)), score, is_async=True)
                score = warpgroup_mma_wait(0, deps=(score,))
                mbarrier.arrive(q_empty, count=1, pred=first + TOKENS >= kv_end)
                score = gl.where((first + token < kv_end)[:, None], score * score_scale, float("-inf"))
                new_peak = gl.maximum(peak, gl.max(score, 0))
                shrink = gl.exp2(peak - new_peak)
                weight = gl.exp2(score - new_peak[None, :])
                totals = totals * shrink[None, :] + weight
                weight_smem.store(weight.to(weight_smem.dtype))
                fence_async_shared()
                acc = acc * gl.convert_layout(shrink, sums_head)[None, :]
                acc = warpgroup_mma(value.permute((1, 0)), weight_smem, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(stage), count=1)
                peak = new_peak
                stage, phase = _advance(stage, phase, STAGES)
            safe_total = _store_lse(outputs, peak, gl.sum(totals, 0), tile, location, GROUP, HEADS, per_head)
            factor = gl.convert_layout(k_scale / safe_total, sums_head)
            result = gl.permute(acc * factor[None, :], (1, 0))
            if location < 0:
                rounded = result.to(outputs[0].dtype.element_ty)
                _store(
                    gl.convert_layout(rounded, stored), outputs[0], tile.to(gl.int64) * GROUP, 0, GROUP, V_DIM, HEADS
                )
            else:
                partial = gl.convert_layout(result, stored)
                _store(partial, outputs[2], location.to(gl.int64) * GROUP, 0, GROUP, V_DIM, HEADS)
        tile, location, kv_start, kv_end = next_tile, next_location, next_start, next_end


@gluon.jit
def _by_lanes(scores):
    """Scores with their tokens as (TOKENS / 8, 8): a thread has all of an entry of the last axis, and asks no other."""
    return scores.reshape([scores.shape[0], scores.shape[1] // 8, 8])


@gluon.jit
def scores(
    works,
    outputs,
    score_scale,
    k_scale,
    q_smem,
    kv_smem,
    weight_smem,
    factor_smem,
    full,
    q_empty,
    sent,
    taken,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    EMPTY_ENDS_SLOT: gl.constexpr,
):
    """The first consumer for many heads: sends weights and a factor of the sums for every step, and one at the end."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    HALF: gl.constexpr = q_smem[0].shape[1] // 2
    per_head: gl.constexpr = gl.SliceLayout(1, mma)
    # A positive scale, and it is that, is multiplied with in the addition that exponentials need anyway.
    late_scale = gl.where(score_scale > 0, score_scale, 1.0)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, mma))
    work, last, tile, location, kv_start, kv_end = _first_work(works, GROUP, HEADS)
    stage = 0
    phase = 0
    sent_phase = 1
    while work < last:
        runs = _runs(works, tile, location, kv_start, kv_end, EMPTY_ENDS_SLOT)
        work = _next_work(work, last, kv_start, kv_end, EMPTY_ENDS_SLOT)
        next_tile, next_location, next_start, next_end = _work_at(works, gl.minimum(work, works[5] - 1))
        if runs:
            peak = gl.full([HEADS], float("-inf"), gl.float32, layout=per_head)
            zeros = gl.zeros([HEADS, TOKENS], gl.float32, layout=mma)
            totals = gl.sum(_by_lanes(zeros), 1)  # added up over a row's threads once, at the end
            for first in range(kv_start, kv_end, TOKENS):
                mbarrier.wait(full.index(stage), phase)
                # What ordinary copies wrote is read by the matrix units, which see memory in another way.
                fence_async_shared()
                value = kv_smem[0].index(stage).permute((1, 0))
                left, right = q_smem[0].slice(0, HALF, dim=1), q_smem[0].slice(HALF, HALF, dim=1)
                score = warpgroup_mma(left, value.slice(0, HALF, dim=0), zeros, use_acc=False, is_async=True)
                mbarrier.wait(full.index(STAGES + stage), phase)
                fence_async_shared()
                score = warpgroup_mma(right, value.slice(HALF, HALF, dim=0), score, is_async=True)
                score = warpgroup_mma(q_smem[1], kv_smem[1].index(stage).permute((1, 0)), score, is_async=True)
                score = warpgroup_mma_wait(0, deps=(score,))
                if (score_scale > 0) == 0:
                    score = score * score_scale
                if first + TOKENS >= kv_end:
                    mbarrier.arrive(q_empty, count=1)
                    score = gl.where((first + token < kv_end)[None, :], score, float("-inf"))
                highest = gl.convert_layout(gl.max(gl.max(_by_lanes(score), 1), 1), per_head)
                new_peak = gl.maximum(peak, highest * late_scale)
                shrink = gl.exp2(peak - new_peak)
                weight = gl.exp2(score * late_scale - new_peak[:, None])
                mbarrier.wait(taken, sent_phase)
                weight_smem.store(weight.to(weight_smem.dtype))
                factor_smem.store(shrink)
                fence_async_shared()
                mbarrier.arrive(sent, count=1)
                sent_phase ^= 1
                of_thread = gl.sum(_by_lanes(weight), 1)
                totals = totals * gl.convert_layout(shrink, gl.SliceLayout(1, totals.type.layout))[:, None] + of_thread
                peak = new_peak
                stage, phase = _advance(stage, phase, STAGES)
            total = gl.convert_layout(gl.sum(totals, 1), per_head)
            factor = k_scale / gl.where(total == 0.0, 1.0, total)
            mbarrier.wait(taken, sent_phase)
            factor_smem.store(factor)
            mbarrier.arrive(sent, count=1)
            sent_phase ^= 1
            _store_lse(outputs, peak, total, tile, location, GROUP, HEADS, per_head)
        tile, location, kv_start, kv_end = next_tile, next_location, next_start, next_end


@gluon.jit
def sums(
    works,
    outputs,
    kv_smem,
    weight_smem,
    factor_smem,
    empty,
    sent,
    taken,
    GROUP: gl.constexpr,
    V_DIM: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    EMPTY_ENDS_SLOT: gl.constexpr,
):
    """The second consumer for many heads: the weighted sums of values."""
    # Instructions of 256 columns need 154 registers to begin with, and a program of 16 warps begins with 128.
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, gl.num_warps() // 4], [16, 128, 16])
    HALF: gl.constexpr = V_DIM // 2
    BY_ROWS: gl.constexpr = outputs[0].dtype.element_ty == kv_smem[0].dtype
    per_head: gl.constexpr = gl.SliceLayout(1, mma)
    work, last, tile, location, kv_start, kv_end = _first_work(works, GROUP, HEADS)
    stage = 0
    phase = 0
    sent_phase = 0
    while work < last:
        runs = _runs(works, tile, location, kv_start, kv_end, EMPTY_ENDS_SLOT)
        work = _next_work(work, last, kv_start, kv_end, EMPTY_ENDS_SLOT)
        if runs:
            # Whole rows go through the work's last buffer. Sums of pieces are wider and do not gain by that.
            keeps_last = BY_ROWS & (location < 0)
            # Two halves of columns: the first is free, and loaded anew, while the second is multiplied.
            left = gl.zeros([HEADS, HALF], gl.float32, layout=mma)
            right = gl.zeros([HEADS, HALF], gl.float32, layout=mma)
            for first in range(kv_start, kv_end, TOKENS):
                mbarrier.wait(sent, sent_phase)
                factor = factor_smem.load(per_head)[:, None]
                value = kv_smem[0].index(stage)
                is_given_back = (first + TOKENS < kv_end) | (keeps_last == 0)
                left = left * factor
                fence_async_shared()
                left = warpgroup_mma(weight_smem, value.slice(0, HALF, dim=1), left, is_async=True)
                right = right * factor
                right = warpgroup_mma(weight_smem, value.slice(HALF, HALF, dim=1), right, is_async=True)
                left = warpgroup_mma_wait(1, deps=(left,))
                mbarrier.arrive(empty.index(stage), count=1, pred=is_given_back)
                right = warpgroup_mma_wait(0, deps=(right,))
                mbarrier.arrive(empty.index(STAGES + stage), count=1, pred=is_given_back)
                mbarrier.arrive(taken, count=1)
                sent_phase ^= 1
                stage, phase = _advance(stage, phase, STAGES)
            mbarrier.wait(sent, sent_phase)
            factor = factor_smem.load(per_head)[:, None]
            left, right = left * factor, right * factor
            mbarrier.arrive(taken, count=1)
            sent_phase ^= 1
            first_row = gl.where(location < 0, tile, location).to(gl.int64) * GROUP
            if location >= 0:
                _store(left, outputs[2], first_row, 0, GROUP, V_DIM, HEADS)
                _store(right, outputs[2], first_row, HALF, GROUP, V_DIM, HEADS)
            elif BY_ROWS and kv_start < kv_end:
                # Not remembered from the loop: Triton takes a variable that is set to another one before and in a loop
                # for one that the loop leaves as it is.
                used = gl.where(stage == 0, STAGES - 1, stage - 1)
                buffer, left_empty, right_empty = kv_smem[0].index(used), empty.index(used), empty.index(STAGES + used)
                _store_by_rows(left, right, buffer, left_empty, right_empty, outputs[0], first_row, GROUP, V_DIM, HEADS)
            else:
                dtype: gl.constexpr = outputs[0].dtype.element_ty
                _store(left.to(dtype), outputs[0], first_row, 0, GROUP, V_DIM, HEADS)
                _store(right.to(dtype), outputs[0], first_row, HALF, GROUP, V_DIM, HEADS)
        # Not read ahead as elsewhere: the first weights are far, and registers few.
        tile, location, kv_start, kv_end = _work_at(works, gl.minimum(work, works[5] - 1))
