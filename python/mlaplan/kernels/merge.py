"""The `merge` op: partial outputs of cut rows to whole rows; `reference/merge.py` defines the result."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mlaplan.kernels.launch import Launch, next_power_of_two
from mlaplan.kernels.target import gpu_kind
from mlaplan.layout import PlanArrays


class MergeTile(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        partials: Partials that a program reads at once.
        heads: Heads that a program makes.
        num_warps: Warps or waves of a program.
        shared: Whether fewer programs than blocks of heads may share a tile.
    """

    partials: int
    heads: int
    num_warps: int
    shared: bool


_ONE_CUT = MergeTile(partials=4, heads=4, num_warps=4, shared=True)
_ENOUGH_PROGRAMS = 512  # some four for each multiprocessor of an H200
_FEWEST_PER_TILE = 8


def merge_tile(num_tiles: int, group: int) -> MergeTile:
    """Returns the cut for so many tiles of `group` heads; there are two, so that no batch size compiles anew.

    With few tiles each is cut into many pieces, and more programs than GPUs have room for would do nothing. With many
    most are whole: what costs then is to start programs that have nothing to do.
    """
    if num_tiles * group < 1024:
        return MergeTile(partials=16, heads=1, num_warps=4, shared=False)
    return _ONE_CUT


def programs_per_tile(num_tiles: int, blocks: int) -> int:
    """Returns how many programs share the blocks of heads of a tile: as many as those, unless there are many tiles."""
    return min(blocks, max(_FEWEST_PER_TILE, -(-_ENOUGH_PROGRAMS // max(num_tiles, 1))))


@triton.jit
def _zero_heads(out_ptr, lse_ptr, whole, in_group, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr):
    """What is defined for a row without KV: zeros, and an LSE of -inf."""
    column = tl.arange(0, BLOCK_V)
    mask = in_group[:, None] & (column < V_DIM)[None, :]
    nothing = tl.zeros([HEADS, BLOCK_V], out_ptr.dtype.element_ty)
    tl.store(out_ptr + whole[:, None] * V_DIM + column[None, :], nothing, mask=mask)
    tl.store(lse_ptr + whole, tl.full([HEADS], float("-inf"), tl.float32), mask=in_group)


@triton.jit
def _merge_heads(
    partial_out_ptr,
    partial_lse_ptr,
    reduce_partial_map_ptr,
    out_ptr,
    lse_ptr,
    first,
    last,
    partial,
    target,
    head,
    num_targets,
    num_partials,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Merges some heads of one tile; `partial` are its first partials."""
    in_group = head < GROUP
    lane = tl.arange(0, BLOCK_PARTIALS)
    column = tl.arange(0, BLOCK_V)
    in_row = column < V_DIM
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_V], tl.float32)
    for begin in range(first, last, BLOCK_PARTIALS):
        known = (begin + lane < last) & (partial >= 0) & (partial < num_partials)
        inside = known[:, None] & in_group[None, :]
        place = partial.to(tl.int64)[:, None] * GROUP + head[None, :]
        part_lse = tl.load(partial_lse_ptr + place, mask=inside, other=float("-inf"))
        part = tl.load(
            partial_out_ptr + place[:, :, None] * V_DIM + column[None, None, :],
            mask=inside[:, :, None] & in_row[None, None, :],
            other=0.0,
        )
        following = begin + BLOCK_PARTIALS + lane
        partial = tl.load(reduce_partial_map_ptr + following, mask=following < last, other=-1)
        new_peak = tl.maximum(peak, tl.max(part_lse, 0))
        # Nothing but -inf so far: any finite number serves as the peak.
        safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp(part_lse - safe_peak[None, :])
        shrink = tl.exp(peak - safe_peak)
        # A partial that counts for nothing may hold anything, NaN too.
        part = tl.where((part_lse > float("-inf"))[:, :, None], part, 0.0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        peak = new_peak
    if (target >= 0) & (target < num_targets):
        whole = target.to(tl.int64) * GROUP + head
        safe_total = tl.where(total == 0.0, 1.0, total)
        result = (acc / safe_total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + whole[:, None] * V_DIM + column[None, :],
            result,
            mask=in_group[:, None] & in_row[None, :],
        )
        result_lse = tl.where(total == 0.0, float("-inf"), peak + tl.log(safe_total))
        tl.store(lse_ptr + whole, result_lse, mask=in_group)


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
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Lse = log(sum_k exp(lse_k)); o = sum_k exp(lse_k - lse) * o_k, over the two or more partials k of a tile.

    partial_out_ptr: (num_partials, GROUP, V_DIM) float32, contiguous. partial_lse_ptr: (num_partials, GROUP)
    float32.
    reduce_indptr_ptr: (tiles + 1,) int32. kv_indptr_ptr: (rows of the class + 1,) int32.
    reduce_partial_map_ptr: (num_map_entries,) int32. reduce_final_map_ptr: (tiles, 2) int32. out_ptr:
    (num_rows, FOLD * GROUP, V_DIM).
    lse_ptr: (num_rows, FOLD * GROUP) float32. Axis 0 of the grid is the tile, axis 1 a block of HEADS heads; with
    SHARED any number of programs share the blocks. Sums are float32.

    With OVERLAP the grid was started before the decode's end. The plan is older than the decode, and rows without KV
    are not the decode's: both may be touched before it ends.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    end: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    first = tl.load(reduce_indptr_ptr + tile)
    last = tl.minimum(tl.load(reduce_indptr_ptr + tile + 1), num_map_entries)
    target = tl.load(reduce_final_map_ptr + tile * 2)
    row = tile // FOLD
    row_ptr = kv_indptr_ptr + tl.minimum(row, num_rows - 1)
    is_empty = (row < num_rows) & (tl.load(row_ptr) == tl.load(row_ptr + 1))
    entry = first + tl.arange(0, BLOCK_PARTIALS)
    partial = tl.load(reduce_partial_map_ptr + entry, mask=(entry >= 0) & (entry < last), other=-1)
    # Where a program has one block there is no loop of one turn: for it gfx9 would spill scalar registers.
    if is_empty:
        heads = tile.to(tl.int64) * GROUP + tl.arange(0, HEADS)
        if SHARED:
            for each in range(block, end, tl.num_programs(1)):
                in_group = each * HEADS + tl.arange(0, HEADS) < GROUP
                _zero_heads(out_ptr, lse_ptr, heads + each * HEADS, in_group, V_DIM, BLOCK_V, HEADS)
        else:
            in_group = block * HEADS + tl.arange(0, HEADS) < GROUP
            _zero_heads(out_ptr, lse_ptr, heads + block * HEADS, in_group, V_DIM, BLOCK_V, HEADS)
    if OVERLAP:
        # Every program waits: a grid that ends without it may end before the decode, and what follows start.
        tl.extra.cuda.gdc_wait()
    if (first >= 0) & (last - first >= 2):
        if SHARED:
            for each in range(block, end, tl.num_programs(1)):
                _merge_heads(
                    partial_out_ptr, partial_lse_ptr, reduce_partial_map_ptr, out_ptr, lse_ptr, first, last, partial,
                    target, each * HEADS + tl.arange(0, HEADS), num_rows * FOLD, num_partials, GROUP, V_DIM, BLOCK_V,
                    BLOCK_PARTIALS, HEADS,
                )  # fmt: skip
        else:
            _merge_heads(
                partial_out_ptr, partial_lse_ptr, reduce_partial_map_ptr, out_ptr, lse_ptr, first, last, partial,
                target, block * HEADS + tl.arange(0, HEADS), num_rows * FOLD, num_partials, GROUP, V_DIM, BLOCK_V,
                BLOCK_PARTIALS, HEADS,
            )  # fmt: skip


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
    backend: str = "cuda",
    after_decode: bool = False,
    one_cut: bool = False,
) -> Launch:
    """Returns the launch that `merge` runs; arguments as there, and `backend` as in `decode_launch`.

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
    tile = _ONE_CUT if one_cut else merge_tile(num_tiles, group)
    blocks = -(-group // tile.heads)
    overlap = after_decode and backend == "hopper"
    return Launch(
        kernel=_merge_kernel,
        grid=(num_tiles, programs_per_tile(num_tiles, blocks) if tile.shared else blocks),
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
            "BLOCK_PARTIALS": tile.partials,
            "HEADS": tile.heads,
            "SHARED": tile.shared,
            "OVERLAP": overlap,
        },
        options={"num_warps": tile.num_warps} | ({"launch_pdl": True} if overlap else {}),
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
    after_decode: bool = False,
    one_cut: bool = False,
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
        after_decode: Whether `decode` of these arrays is what was last queued on the stream. Where the GPU can, the
            merge is set up while the decode runs.
        one_cut: Sum partials up in the same order whatever the number of tiles, so that the bits of a row depend on
            its own partials alone.

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
        backend=gpu_kind(out),
        after_decode=after_decode,
        one_cut=one_cut,
    )
    if out.shape[0]:
        launch.run()
