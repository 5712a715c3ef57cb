"""The `decode` op for NVIDIA's Hopper GPUs, in Gluon: one group of warps gathers, others multiply.

`kernels/decode.py` holds the form for every GPU; both consume the same arrays, and `reference/decode.py` defines the
result. A random KV row of 1,152 bytes has to be on its way long before it is used, and what a row costs is mostly the
wait for it. So a program has a loader, four warps that copy the KV rows of step after step and of work after work
into a ring of two buffers of shared memory, and consumers, which never compute an address. Barriers in shared memory
say that a buffer is full or free.

* Few heads (`whole`): scores are (tokens, heads) and sums (columns, heads). KV rows are the left operand of both
  products, whose least height is 64, so that no row of the matrix units is padding, and neither KV nor queries take
  registers. Bound by memory: gathering alone takes 97% of the time from 128 rows on.
* Many heads (`scores` and `sums`): a group of four warps makes scores and weights, eight warps hold the sums of 64
  heads, 128 registers a thread. Products of one step overlap scores of the next. A step is a chain through both
  buffers, load, scores, sums, and none of the three fills its unit: so a buffer is full and free by halves of its
  columns, and scores of the first half are made while the second arrives.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlaplan.kernels.decode_hopper_warps import LOADERS, load, scores, sums, whole
from mlaplan.kernels.launch import Launch
from mlaplan.kernels.target import Tile

DEPTH, V_DIM = 576, 512  # the one shape of rows that the buffers are laid out for

_LOG2_E = gl.constexpr(1.4426950408889634)
# Registers of a thread of each group; the sums take the rest of 65,536: 160 beside the scores, 255 alone.
_LOADER_REGISTERS = gl.constexpr(80)
_SCORE_REGISTERS = gl.constexpr(112)


def takes(q: Any, kv_cache: Any, row_stride: int, v_dim: int, num_works: int) -> bool:
    """Whether the kernel is for these arrays: 16-bit floats of one type, rows in pieces of 16 aligned bytes."""
    return (
        (q.shape[2], v_dim) == (DEPTH, V_DIM)
        and q.dtype == kv_cache.dtype
        and q.itemsize == 2
        and row_stride % 16 == 0
        and num_works > 0
        and all(array.data_ptr() % 16 == 0 for array in (q, kv_cache) if hasattr(array, "data_ptr"))
    )


@gluon.jit
def _ring(dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], layout)


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(count):
        mbarrier.init(made.index(number), count=arrivals)
    return made


@gluon.jit(do_not_specialize=["num_rows", "num_partials", "num_indices", "num_works", "num_slots", "scale", "k_scale"])
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
    FOLD: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    V_DIM: gl.constexpr,
    HEADS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    EMPTY_ENDS_SLOT: gl.constexpr,
):
    """S = scale * q @ kv.T; lse = log(sum(exp(s))); o = exp(s - lse) @ kv[:, :V_DIM], per work.

    Arrays as in `kernels/decode.py`, q and kv_cache of one 16-bit type. The grid is slots times blocks of heads. Scores
    and sums are float32; weights are rounded to the type of q for the second product. A work that leads out of an
    array is cut or not run.
    """
    # The merge waits for this grid by itself: it may be set up meanwhile.
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    dtype: gl.constexpr = kv_cache_ptr.dtype.element_ty
    PARTS: gl.constexpr = 2 if SPLIT else 1
    kv_value = _ring(dtype, STAGES, TOKENS, V_DIM)
    kv_rest = _ring(dtype, STAGES, TOKENS, D - V_DIM)
    q_value = _ring(dtype, 1, HEADS, V_DIM).index(0)
    q_rest = _ring(dtype, 1, HEADS, D - V_DIM).index(0)
    full = _barriers(PARTS * STAGES, LOADERS * 32)
    empty = _barriers(PARTS * STAGES, 1)
    q_empty = _barriers(1, 1).index(0)
    num_tiles = num_rows * FOLD
    score_scale = scale * k_scale * _LOG2_E
    works = (work_indptr_ptr, work_info_ptr, num_tiles, num_partials, num_indices, num_works)
    outputs = (out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr)
    q_smem, kv_smem = (q_value, q_rest), (kv_value, kv_rest)
    if SPLIT:
        weights = _ring(dtype, 1, HEADS, TOKENS).index(0)
        factor = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        sent = _barriers(1, 1).index(0)
        taken = _barriers(1, 1).index(0)
        gl.warp_specialize(
            [
                (sums, (works, outputs, kv_smem, weights, factor, empty, sent, taken,
                        GROUP, V_DIM, HEADS, TOKENS, STAGES, EMPTY_ENDS_SLOT)),
                (scores, (works, outputs, score_scale, k_scale, q_smem, kv_smem, weights, factor, full, q_empty, sent,
                          taken, GROUP, HEADS, TOKENS, STAGES, EMPTY_ENDS_SLOT)),
                (load, (works, q_ptr, kv_cache_ptr, kv_indices_ptr, num_slots, kv_stride_slot, q_smem, kv_smem, full,
                        empty, q_empty, GROUP, D, V_DIM, HEADS, TOKENS, STAGES, PARTS, EMPTY_ENDS_SLOT)),
            ],
            [4, LOADERS],
            [_SCORE_REGISTERS, _LOADER_REGISTERS],
        )  # fmt: skip
    else:
        weights = _ring(dtype, 1, TOKENS, HEADS).index(0)
        gl.warp_specialize(
            [
                (whole, (works, outputs, score_scale, k_scale, q_smem, kv_smem, weights, full, empty, q_empty,
                         GROUP, V_DIM, HEADS, TOKENS, STAGES, EMPTY_ENDS_SLOT)),
                (load, (works, q_ptr, kv_cache_ptr, kv_indices_ptr, num_slots, kv_stride_slot, q_smem, kv_smem, full,
                        empty, q_empty, GROUP, D, V_DIM, HEADS, TOKENS, STAGES, PARTS, EMPTY_ENDS_SLOT)),
            ],
            [LOADERS],
            [_LOADER_REGISTERS],
        )  # fmt: skip


def hopper_launch(launch: Launch, tile: Tile) -> Launch:
    """Returns the launch that does on Hopper what `launch` does, one of the kernel for any GPU."""
    constants = {name: launch.constants[name] for name in ("FOLD", "GROUP", "D", "V_DIM", "EMPTY_ENDS_SLOT")}
    shape = {"HEADS": tile.heads, "TOKENS": tile.tokens, "STAGES": tile.num_stages, "SPLIT": tile.heads >= 64}
    return Launch(
        kernel=_decode_kernel,
        grid=(launch.grid[0] * -(-constants["GROUP"] // tile.heads),),
        args=launch.args,
        constants=constants | shape,
        options={"num_warps": tile.num_warps},
    )
