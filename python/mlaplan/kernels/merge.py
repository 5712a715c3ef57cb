"""The `merge` op: partial outputs of cut rows to whole rows; `reference/merge.py` defines the result."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mlaplan.kernels.launch import Launch, next_power_of_two
from mlaplan.layout import PlanArrays


@triton.jit(do_not_specialize=["num_rows", "num_partials", "num_map_entries"])
def _merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    reduce_indptr_ptr,
    kv_indptr_ptr,
    reduce_partial_map_ptr,
    reduce_final_map_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    num_partials,
    num_map_entries,
    FOLD: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
):
    """Lse = log(sum_k exp(lse_k)); o = sum_k exp(lse_k - lse) * o_k, over the two or more partials k of a tile.

    partial_out_ptr: (num_partials, GROUP, V_DIM) float32, contiguous. partial_lse_ptr: (num_partials, GROUP)
    float32.
    reduce_indptr_ptr: (tiles + 1,) int32. kv_indptr_ptr: (rows of the class + 1,) int32.
    reduce_partial_map_ptr: (num_map_entries,) int32. reduce_final_map_ptr: (tiles, 2) int32. out_ptr:
    (num_rows, FOLD * GROUP, V_DIM).
    lse_ptr: (num_rows, FOLD * GROUP) float32. One program makes one head of one tile. Sums are float32.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_V)
    in_row = column < V_DIM
    first = tl.load(reduce_indptr_ptr + tile)
    last = tl.minimum(tl.load(reduce_indptr_ptr + tile + 1), num_map_entries)
    row = tile // FOLD
    row_ptr = kv_indptr_ptr + tl.minimum(row, num_rows - 1)
    if (row < num_rows) & (tl.load(row_ptr) == tl.load(row_ptr + 1)):
        whole = row.to(tl.int64) * (FOLD * GROUP) + (tile % FOLD) * GROUP + head
        nothing = tl.zeros([BLOCK_V], out_ptr.dtype.element_ty)
        tl.store(out_ptr + whole * V_DIM + column, nothing, mask=in_row)
        tl.store(lse_ptr + whole, float("-inf"))
    if last - first >= 2:
        target = tl.load(reduce_final_map_ptr + tile * 2)
        peak = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        acc = tl.zeros([BLOCK_V], tl.float32)
        for begin in range(first, last, BLOCK_PARTIALS):
            entry = begin + tl.arange(0, BLOCK_PARTIALS)
            inside = (entry < last) & (entry >= 0)
            partial = tl.load(reduce_partial_map_ptr + entry, mask=inside, other=0)
            inside = inside & (partial >= 0) & (partial < num_partials)
            place = partial.to(tl.int64) * GROUP + head
            part_lse = tl.load(partial_lse_ptr + place, mask=inside, other=float("-inf"))
            used = inside & (part_lse > float("-inf"))
            part = tl.load(
                partial_out_ptr + place[:, None] * V_DIM + column[None, :],
                mask=used[:, None] & in_row[None, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(part_lse, 0))
            # Nothing but -inf so far: any finite number serves as the peak.
            safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weight = tl.exp(part_lse - safe_peak)
            shrink = tl.exp(peak - safe_peak)
            acc = acc * shrink + tl.sum(part * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            peak = new_peak
        if (target >= 0) & (target < num_rows * FOLD):
            whole = target.to(tl.int64) * GROUP + head
            safe_total = tl.where(total == 0.0, 1.0, total)
            result = acc / safe_total
            tl.store(out_ptr + whole * V_DIM + column, result.to(out_ptr.dtype.element_ty), mask=in_row)
            tl.store(lse_ptr + whole, tl.where(total == 0.0, float("-inf"), peak + tl.log(safe_total)))


def merge_launch(
    partial_out: Any,
    partial_lse: Any,
    arrays: PlanArrays,
    *,
    reduce_partial_map: Any,
    reduce_final_map: Any,
    out: Any,
    lse: Any,
    fold: int,
) -> Launch:
    """Returns the launch that `merge` runs; arguments as there.

    Raises:
        ValueError: The shapes do not belong together.
    """
    num_rows, num_heads, v_dim = out.shape
    num_partials, group = partial_lse.shape
    num_tiles = arrays.reduce_indptr.shape[0] - 1
    if group * fold != num_heads or tuple(partial_out.shape) != (num_partials, group, v_dim):
        raise ValueError(
            f"partial_out has shape {tuple(partial_out.shape)} and partial_lse {tuple(partial_lse.shape)}, "
            f"expected (partials, {num_heads // fold}, {v_dim}) and (partials, {num_heads // fold})"
        )
    if tuple(lse.shape) != (num_rows, num_heads):
        raise ValueError(f"lse has shape {tuple(lse.shape)}, expected {(num_rows, num_heads)}")
    if num_rows * fold > num_tiles or reduce_final_map.shape[0] < num_tiles:
        raise ValueError(
            f"out has {num_rows} rows and reduce_final_map {reduce_final_map.shape[0]} entries, "
            f"expected at most {num_tiles // fold} and at least {num_tiles}"
        )
    return Launch(
        kernel=_merge_kernel,
        grid=(num_tiles, group),
        args=(
            partial_out,
            partial_lse,
            arrays.reduce_indptr,
            arrays.kv_indptr,
            reduce_partial_map,
            reduce_final_map,
            out,
            lse,
            num_rows,
            num_partials,
            reduce_partial_map.shape[0],
        ),
        constants={
            "FOLD": fold,
            "GROUP": group,
            "V_DIM": v_dim,
            "BLOCK_V": next_power_of_two(v_dim),
            "BLOCK_PARTIALS": 8,
        },
        options={"num_warps": 4},
    )


def merge(
    partial_out: Any,
    partial_lse: Any,
    arrays: PlanArrays,
    *,
    reduce_partial_map: Any,
    reduce_final_map: Any,
    out: Any,
    lse: Any,
    fold: int,
) -> None:
    """Merges the partials of every tile with at least two, in float32; `reference.merge.merge` in Triton.

    A partial with an LSE of -inf counts for nothing. Rows of `out` of length 0, padding or not, become zeros
    with an LSE of -inf. Other rows stay.

    Args:
        partial_out: Shape (partials, heads // fold, v_dim), float32, contiguous.
        partial_lse: Shape (partials, heads // fold), float32, contiguous.
        arrays: A plan; `reduce_indptr` and `kv_indptr` are read.
        reduce_partial_map: Shape (>= reduce_indptr[-1],), int32.
        reduce_final_map: Shape (>= tiles, 2), int32, contiguous.
        out: Shape (rows, heads, v_dim), bfloat16, float16 or float32, contiguous, written in place; at most
            as many rows
            as the plan's class.
        lse: Shape (rows, heads), float32, contiguous, written in place.
        fold: Tiles per row.

    Raises:
        ValueError: The shapes do not belong together.
    """
    launch = merge_launch(
        partial_out,
        partial_lse,
        arrays,
        reduce_partial_map=reduce_partial_map,
        reduce_final_map=reduce_final_map,
        out=out,
        lse=lse,
        fold=fold,
    )
    if out.shape[0]:
        launch.run()
