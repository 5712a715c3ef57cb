"""Launches of every kernel for arrays of any size, made of NumPy arrays that nobody fills."""

from __future__ import annotations

from typing import Any

import numpy as np
from decode_cases import DEPTH, SCALE, V_DIM

from mlaplan.kernels.decode import decode_launch
from mlaplan.kernels.launch import Launch
from mlaplan.kernels.merge import merge_launch
from mlaplan.kernels.plan import plan_launch
from mlaplan.kernels.slots import slots_launch
from mlaplan.layout import Layout, PlanArrays, PlanParams

# NumPy's stand-ins, as the harness for AMD code has them too.
BF16, FP8 = np.dtype("uint16"), np.dtype("uint8")
BF16_TYPES = {"q_ptr": "*bf16", "kv_cache_ptr": "*bf16", "out_ptr": "*bf16"}


def fp8_type(arch: str) -> str:
    """Triton's name of the 8-bit float that the architecture's matrix units take."""
    return "*fp8e4b8" if arch == "gfx942" else "*fp8e4nv"


def _empty(*shape: int, dtype: Any = np.int32) -> Any:
    return np.empty(shape, dtype)


def arrays_of(num_rows: int, num_cus: int, fold: int, pieces: int | None = None) -> PlanArrays:
    """The arrays of a class."""
    layout = Layout.of(num_rows, num_cus=num_cus, fold=fold, pieces=pieces)
    return PlanArrays(*(_empty(*shape) for shape in layout.shapes))


def plan(num_rows: int, num_requests: int, params: PlanParams) -> Launch:
    """A launch of `plan`."""
    arrays = arrays_of(num_rows, params.num_cus, params.fold, params.pieces)
    return plan_launch(_empty(num_requests + 1), _empty(num_requests), arrays, params)


def slots(num_rows: int, num_requests: int, *, width: int = 100, topk: int = 2048) -> Launch:
    """A launch of `slots`."""
    return slots_launch(
        _empty(num_rows, topk),
        _empty(num_requests, width),
        _empty(num_rows),
        _empty(num_rows + 1),
        _empty(num_rows * topk),
        block_size=16,
        num_rows=num_rows,
    )


def decode(
    num_rows: int,
    heads: int,
    fold: int = 1,
    *,
    backend: str = "hip",
    dtype: Any = BF16,
    kv_dtype: Any = BF16,
    kv_stride: int = DEPTH,
    pool: int = 1000,
    partials: int = 99,
) -> Launch:
    """A launch of `decode`."""
    return decode_launch(
        _empty(num_rows, heads, DEPTH, dtype=dtype),
        _empty(pool, kv_stride, dtype=kv_dtype)[:, :DEPTH],
        _empty(num_rows * 2048),
        arrays_of(num_rows, 304, fold),
        fold=fold,
        scale=SCALE,
        v_dim=V_DIM,
        out=_empty(num_rows, heads, V_DIM, dtype=dtype),
        lse=_empty(num_rows, heads, dtype=np.float32),
        partial_out=_empty(partials, heads // fold, V_DIM, dtype=np.float32),
        partial_lse=_empty(partials, heads // fold, dtype=np.float32),
        backend=backend,
    )


def merge(num_rows: int, heads: int, fold: int = 1, *, dtype: Any = BF16, partials: int = 99, **options: Any) -> Launch:
    """A launch of `merge`."""
    return merge_launch(
        _empty(partials, heads // fold, V_DIM, dtype=np.float32),
        _empty(partials, heads // fold, dtype=np.float32),
        arrays_of(num_rows, 304, fold),
        reduce_partial_map=_empty(partials),
        reduce_final_map=_empty(num_rows * fold, 2),
        out=_empty(num_rows, heads, V_DIM, dtype=dtype),
        lse=_empty(num_rows, heads, dtype=np.float32),
        fold=fold,
        **options,
    )
