"""The `slots` op: top-k indices to slots of the KV pool; `reference/slots.py` defines the result."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mlaplan.kernels.launch import Launch, next_power_of_two

_INT32_MAX = tl.constexpr((1 << 31) - 1)
_MAX_BLOCK = 1024


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_columns",
        "num_topk",
        "num_indices",
        "topk_stride_row",
        "table_stride_request",
    ]
)
def _slots_kernel(
    topk_indices_ptr,
    block_table_ptr,
    request_ids_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    num_requests,
    num_columns,
    num_topk,
    num_indices,
    topk_stride_row,
    topk_stride_entry,
    table_stride_request,
    table_stride_column,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """kv_indices[kv_indptr[t] + j] = table[r, i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE, i = topk[t, j].

    topk_indices_ptr: (rows, num_topk) int32. block_table_ptr: (num_requests, num_columns) int32, both with
    strides.
    request_ids_ptr: (rows,) int32. kv_indptr_ptr: (rows + 1,) int32. kv_indices_ptr: (num_indices,) int32.
    One program writes BLOCK entries of one row. Every index is checked, so none of the values has to be
    right.
    """
    row = tl.program_id(0)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(kv_indptr_ptr + row)
    length = tl.minimum(tl.load(kv_indptr_ptr + row + 1) - start, num_topk)
    request = tl.load(request_ids_ptr + row)
    place = start.to(tl.int64) + entry
    inside = (entry < length) & (place >= 0) & (place < num_indices)
    token = tl.load(
        topk_indices_ptr + row.to(tl.int64) * topk_stride_row + entry.to(tl.int64) * topk_stride_entry,
        mask=inside,
        other=-1,
    )
    column = token // BLOCK_SIZE
    known = inside & (token >= 0) & (column < num_columns) & (request >= 0) & (request < num_requests)
    block = tl.load(
        block_table_ptr + request.to(tl.int64) * table_stride_request + column.to(tl.int64) * table_stride_column,
        mask=known,
        other=-1,
    )
    slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
    known = known & (block >= 0) & (slot <= _INT32_MAX)
    tl.store(kv_indices_ptr + place, tl.where(known, slot, 0).to(tl.int32), mask=inside)


def slots_launch(
    topk_indices: Any,
    block_table: Any,
    request_ids: Any,
    kv_indptr: Any,
    kv_indices: Any,
    *,
    block_size: int,
    num_rows: int,
) -> Launch:
    """Returns the launch that `slots` runs; arguments as there.

    Raises:
        ValueError: An array is too small for the rows.
    """
    if topk_indices.shape[0] < num_rows:
        raise ValueError(f"topk_indices has {topk_indices.shape[0]} rows, expected at least {num_rows}")
    if request_ids.shape[0] < num_rows or kv_indptr.shape[0] <= num_rows:
        raise ValueError(
            f"request_ids has {request_ids.shape[0]} entries and kv_indptr {kv_indptr.shape[0]}, "
            f"expected at least {num_rows} and {num_rows + 1}"
        )
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, expected at least 1")
    num_topk = topk_indices.shape[1]
    block = min(_MAX_BLOCK, next_power_of_two(max(num_topk, 64)))
    return Launch(
        kernel=_slots_kernel,
        grid=(num_rows, -(-num_topk // block)),
        args=(
            topk_indices,
            block_table,
            request_ids,
            kv_indptr,
            kv_indices,
            *block_table.shape,
            num_topk,
            kv_indices.shape[0],
            *_strides(topk_indices),
            *_strides(block_table),
        ),
        constants={"BLOCK_SIZE": block_size, "BLOCK": block},
        options={"num_warps": 4},
    )


def slots(
    topk_indices: Any,
    block_table: Any,
    request_ids: Any,
    kv_indptr: Any,
    kv_indices: Any,
    *,
    block_size: int,
    num_rows: int,
) -> None:
    """Writes the KV slot of every entry of every row into `kv_indices`; `reference.slots.slots` in Triton.

    What the device holds is not known here: entries of a row beyond the columns of `topk_indices` stay as
    they are, and nothing is written outside `kv_indices`. An index that is no slot gives 0.

    Args:
        topk_indices: Shape (>= num_rows, longest row), int32, any strides. Token positions within the
            request.
        block_table: Shape (R, width), int32, any strides. KV block of each block of a request.
        request_ids: Shape (>= num_rows,), int32.
        kv_indptr: Shape (>= num_rows + 1,), int32.
        kv_indices: Shape (capacity,), int32, written in place.
        block_size: Tokens per block of the table.
        num_rows: Rows to convert.

    Raises:
        ValueError: An array is too small for the rows.
    """
    launch = slots_launch(
        topk_indices,
        block_table,
        request_ids,
        kv_indptr,
        kv_indices,
        block_size=block_size,
        num_rows=num_rows,
    )
    if 0 not in launch.grid:
        launch.run()


def _strides(array: Any) -> tuple[int, int]:
    """Strides in elements, of a torch tensor or a NumPy array."""
    if callable(getattr(array, "stride", None)):
        return (array.stride(0), array.stride(1))
    return (array.strides[0] // array.itemsize, array.strides[1] // array.itemsize)
