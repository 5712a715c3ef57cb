"""The `decode` op: works of a schedule, split and persistent; `reference/decode.py` defines the result.

The kernel here runs on any GPU; Hopper GPUs get the one of `kernels/decode_hopper.py` where it is for the arrays.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mlaplan.kernels.launch import Launch, next_power_of_two
from mlaplan.kernels.target import Tile, gpu_kind, tile_for
from mlaplan.layout import PlanArrays

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_rows(
    kv_cache_ptr, slot, inside, kv_stride_slot, FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns FIRST up to LAST of some KV rows, zeros for lanes that are not inside."""
    column = FIRST + tl.arange(0, WIDTH)
    ptr = kv_cache_ptr + slot[:, None] * kv_stride_slot + column[None, :]
    mask = inside[:, None]
    if FIRST + WIDTH != LAST:
        mask = mask & (column < LAST)[None, :]
    rows = tl.load(ptr, mask=mask, other=0.0)
    if kv_cache_ptr.dtype.element_ty == tl.float8e4nv:
        # Two steps, both exact: gfx950 has one instruction for both, but no emulator knows it. The other 8-bit float
        # goes directly, because gfx942 rounds to bfloat16 in software.
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def _attend(
    q_value,
    q_rest,
    kv_cache_ptr,
    kv_indices_ptr,
    kv_start,
    kv_end,
    num_slots,
    kv_stride_slot,
    score_scale,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Weighted sum of values, sum of weights, and the peak of the scores in base 2, of one piece."""
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_V], tl.float32)
    for first in range(kv_start, kv_end, TOKENS):
        position = first + tl.arange(0, TOKENS)
        inside = position < kv_end
        slot = tl.load(kv_indices_ptr + position, mask=inside, other=0)
        # Slot 0 is always readable; an index that is no slot must not lead out of the pool.
        slot = tl.where((slot >= 0) & (slot < num_slots), slot, 0).to(tl.int64)
        value = _load_rows(kv_cache_ptr, slot, inside, kv_stride_slot, 0, V_DIM, BLOCK_V).to(q_value.dtype)
        score = tl.dot(q_value, tl.trans(value))
        if D > V_DIM:
            rest = _load_rows(kv_cache_ptr, slot, inside, kv_stride_slot, V_DIM, D, BLOCK_REST).to(q_value.dtype)
            score += tl.dot(q_rest, tl.trans(rest))
        score = tl.where(inside[None, :], score * score_scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shrink = tl.exp2(peak - new_peak)
        weight = tl.exp2(score - new_peak[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q_value.dtype), value, acc * shrink[:, None])
        peak = new_peak
    return acc, total, peak


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_partials",
        "num_indices",
        "num_works",
        "num_slots",
        "scale",
        "k_scale",
    ]
)
def _decode_kernel(
    q_ptr,
    kv_cache_ptr,
    kv_indices_ptr,
    work_indptr_ptr,
    work_info_ptr,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    num_rows,
    num_partials,
    num_indices,
    num_works,
    num_slots,
    kv_stride_slot,
    scale,
    k_scale,
    FOLD: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    V_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    EMPTY_ENDS_SLOT: tl.constexpr,
):
    """S = scale * q @ kv.T; lse = log(sum(exp(s))); o = exp(s - lse) @ kv[:, :V_DIM], per work.

    q_ptr: (num_rows, FOLD * GROUP, D), contiguous. kv_cache_ptr: (num_slots, D), rows kv_stride_slot apart.
    kv_indices_ptr: (num_indices,) int32. work_indptr_ptr: (slots + 1,) int32. work_info_ptr: (num_works, 8)
    int32.
    out_ptr: (num_rows, FOLD * GROUP, V_DIM). lse_ptr: (num_rows, FOLD * GROUP) float32. partial_out_ptr:
    (num_partials, GROUP, V_DIM) float32. partial_lse_ptr: (num_partials, GROUP) float32.

    Axis 0 of the grid is the slot, axis 1 a block of HEADS heads of the group. Scores and sums are float32;
    weights are rounded to the type of q for the second product. A work that leads out of an array is cut or
    not run.
    """
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_V)
    rest = V_DIM + tl.arange(0, BLOCK_REST)
    in_group = head < GROUP
    in_value = in_group[:, None] & (column < V_DIM)[None, :]
    slot = tl.program_id(0)
    work = tl.maximum(tl.load(work_indptr_ptr + slot), 0)
    last = tl.minimum(tl.load(work_indptr_ptr + slot + 1), num_works)
    while work < last:
        info_ptr = work_info_ptr + work * 8
        tile = tl.load(info_ptr)
        location = tl.load(info_ptr + 1)
        kv_start = tl.maximum(tl.load(info_ptr + 4), 0)
        kv_end = tl.minimum(tl.load(info_ptr + 5), num_indices)
        is_empty = kv_start >= kv_end
        work += 1
        if EMPTY_ENDS_SLOT:
            work = tl.where(is_empty, last, work)
        runs = (tile >= 0) & (tile < num_rows * FOLD) & (location < num_partials)
        if EMPTY_ENDS_SLOT:
            runs = runs & (is_empty == 0)
        if runs:
            # Head groups of a row are consecutive tiles, so a tile's first head is `tile * GROUP` from the
            # first of all.
            first_head = tile.to(tl.int64) * GROUP
            q_row = q_ptr + (first_head + head)[:, None] * D
            q_value = tl.load(q_row + column[None, :], mask=in_value, other=0.0)
            q_rest = tl.load(q_row + rest[None, :], mask=in_group[:, None] & (rest < D)[None, :], other=0.0)
            acc, total, peak = _attend(
                q_value,
                q_rest,
                kv_cache_ptr,
                kv_indices_ptr,
                kv_start,
                kv_end,
                num_slots,
                kv_stride_slot,
                scale * k_scale * _LOG2_E,
                HEADS,
                TOKENS,
                D,
                V_DIM,
                BLOCK_V,
                BLOCK_REST,
            )
            safe_total = tl.where(total == 0.0, 1.0, total)
            result = acc * (k_scale / safe_total)[:, None]
            result_lse = tl.where(total == 0.0, float("-inf"), peak * _LN_2 + tl.log(safe_total))
            if location < 0:
                out_row = first_head + head
                tl.store(
                    out_ptr + out_row[:, None] * V_DIM + column[None, :],
                    result.to(out_ptr.dtype.element_ty),
                    mask=in_value,
                )
                tl.store(lse_ptr + out_row, result_lse, mask=in_group)
            else:
                part_row = location.to(tl.int64) * GROUP + head
                tl.store(partial_out_ptr + part_row[:, None] * V_DIM + column[None, :], result, mask=in_value)
                tl.store(partial_lse_ptr + part_row, result_lse, mask=in_group)


def decode_launch(
    q: Any,
    kv_cache: Any,
    kv_indices: Any,
    arrays: PlanArrays,
    *,
    fold: int,
    scale: float,
    v_dim: int = 512,
    out: Any,
    lse: Any,
    partial_out: Any,
    partial_lse: Any,
    empty_work_ends_slot: bool = True,
    k_scale: float = 1.0,
    backend: str = "cuda",
    tile: Tile | None = None,
) -> Launch:
    """Returns the launch that `decode` runs; arguments as there.

    Args:
        q: As `decode`, and so are the others that are not named here.
        kv_cache: As `decode`.
        kv_indices: As `decode`.
        arrays: As `decode`.
        fold: As `decode`.
        scale: As `decode`.
        v_dim: As `decode`.
        out: As `decode`.
        lse: As `decode`.
        partial_out: As `decode`.
        partial_lse: As `decode`.
        empty_work_ends_slot: As `decode`.
        k_scale: As `decode`.
        backend: "cuda", "hip", or "hopper" for a form of its own where it is for the arrays.
        tile: How the kernel for any GPU is to cut; `tile_for` says so when None.

    Raises:
        ValueError: The shapes do not belong together.
    """
    num_rows, num_heads, depth = q.shape
    if fold < 1 or num_heads % fold:
        raise ValueError(f"fold is {fold}, expected a divisor of the {num_heads} heads of q")
    group = num_heads // fold
    num_partials = partial_lse.shape[0]
    expected = (
        ("kv_cache", kv_cache, (kv_cache.shape[0], depth)),
        ("out", out, (num_rows, num_heads, v_dim)),
        ("lse", lse, (num_rows, num_heads)),
        ("partial_out", partial_out, (num_partials, group, v_dim)),
        ("partial_lse", partial_lse, (num_partials, group)),
    )
    for name, array, wanted in expected:
        if tuple(array.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {wanted}")
    if v_dim > depth or kv_cache.shape[0] < 1:
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}, expected rows, and v_dim {v_dim} columns of each"
        )
    row_stride, num_works = _row_stride(kv_cache), arrays.work_info.shape[0]
    is_fixed = tile is not None
    tile = tile or tile_for("cuda" if backend == "hopper" else backend, group, kv_cache.itemsize)
    launch = Launch(
        kernel=_decode_kernel,
        grid=(arrays.work_indptr.shape[0] - 1, -(-group // tile.heads)),
        args=(
            q,
            kv_cache,
            kv_indices,
            arrays.work_indptr,
            arrays.work_info,
            out,
            lse,
            partial_out,
            partial_lse,
            num_rows,
            num_partials,
            kv_indices.shape[0],
            num_works,
            kv_cache.shape[0],
            row_stride,
            float(scale),
            float(k_scale),
        ),
        constants={
            "FOLD": fold,
            "GROUP": group,
            "D": depth,
            "V_DIM": v_dim,
            "HEADS": tile.heads,
            "TOKENS": tile.tokens,
            "BLOCK_V": max(16, next_power_of_two(v_dim)),
            "BLOCK_REST": max(16, next_power_of_two(depth - v_dim)),
            "EMPTY_ENDS_SLOT": empty_work_ends_slot,
        },
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    if backend == "hopper" and not is_fixed:
        from mlaplan.kernels import decode_hopper

        if decode_hopper.takes(q, kv_cache, row_stride, v_dim, num_works):
            return decode_hopper.hopper_launch(launch, tile_for(backend, group, kv_cache.itemsize))
    return launch


def decode(
    q: Any,
    kv_cache: Any,
    kv_indices: Any,
    arrays: PlanArrays,
    *,
    fold: int,
    scale: float,
    v_dim: int = 512,
    out: Any,
    lse: Any,
    partial_out: Any,
    partial_lse: Any,
    empty_work_ends_slot: bool = True,
    k_scale: float = 1.0,
) -> None:
    """Runs every work of every slot once; `reference.decode.decode` in Triton.

    Args:
        q: Shape (rows, heads, D), bfloat16 or float16, contiguous. `fold` divides heads.
        kv_cache: Shape (num_slots, D), bfloat16, float16 or an 8-bit float, rows contiguous.
        kv_indices: Shape (tokens,), int32. KV slot of each position.
        arrays: A plan; `work_indptr` and `work_info` are read.
        fold: Tiles per row.
        scale: Factor of the scores.
        v_dim: Leading entries of a KV row that are its value.
        out: Shape (rows, heads, v_dim), contiguous, written in place.
        lse: Shape (rows, heads), float32, contiguous, written in place.
        partial_out: Shape (partials, heads // fold, v_dim), float32, contiguous, written in place.
        partial_lse: Shape (partials, heads // fold), float32, contiguous, written in place.
        empty_work_ends_slot: Whether an empty work ends its slot, as in aiter's kernels, or gives zeros and
            -inf.
        k_scale: What an entry of `kv_cache` is multiplied with, one factor for all.

    Raises:
        ValueError: The shapes do not belong together.
    """
    decode_launch(
        q,
        kv_cache,
        kv_indices,
        arrays,
        fold=fold,
        scale=scale,
        v_dim=v_dim,
        out=out,
        lse=lse,
        partial_out=partial_out,
        partial_lse=partial_lse,
        empty_work_ends_slot=empty_work_ends_slot,
        k_scale=k_scale,
        backend=gpu_kind(q),
    ).run()


def _row_stride(array: Any) -> int:
    """Elements from one row to the next, of a torch tensor or a NumPy array."""
    return int(array.stride(0) if callable(getattr(array, "stride", None)) else array.strides[0] // array.itemsize)
