"""The `slots` op: top-k token indices of each row to slots of the KV pool."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

_INT32_MAX = np.iinfo(np.int32).max


def slots(
    topk_indices: Int32Array,
    block_table: Int32Array,
    request_ids: Int32Array,
    kv_indptr: Int32Array,
    kv_indices: Int32Array,
    *,
    block_size: int,
    num_rows: int,
) -> None:
    """Writes the KV slot of every entry of every row into `kv_indices`, packed by `kv_indptr`.

    For row t of request r and j < `kv_indptr[t + 1] - kv_indptr[t]`, with `i = topk_indices[t, j]`:

        kv_indices[kv_indptr[t] + j] = block_table[r, i // block_size] * block_size + i % block_size

    and 0 where that is not a slot: i is negative, `i // block_size` is not a column of the table, r is not
    one of its rows, the entry of the table is negative, or the slot does not fit 32 bits. Slot 0 is always
    readable.

    Args:
        topk_indices: Shape (>= num_rows, >= longest row), int32, any strides. Token positions within the
            request.
        block_table: Shape (R, width), int32, any strides. KV block of each block of a request.
        request_ids: Shape (>= num_rows,), int32.
        kv_indptr: Shape (>= num_rows + 1,), int32, as the `plan` op leaves it.
        kv_indices: Shape (>= kv_indptr[num_rows],), int32, written in place up to that.
        block_size: Tokens per block of the table.
        num_rows: Rows to convert.

    Raises:
        ValueError: An array is too small for the rows. Nothing was written.
    """
    starts = kv_indptr[: num_rows + 1]
    lengths = np.diff(starts)
    longest = int(lengths.max(initial=0))
    total = int(starts[-1])
    if topk_indices.shape[0] < num_rows or topk_indices.shape[1] < longest:
        raise ValueError(f"topk_indices has shape {topk_indices.shape}, the rows need ({num_rows}, {longest})")
    if request_ids.shape[0] < num_rows or starts.shape[0] <= num_rows:
        raise ValueError(
            f"request_ids has {request_ids.shape[0]} entries and kv_indptr {kv_indptr.shape[0]}, "
            f"expected at least {num_rows} and {num_rows + 1}"
        )
    if kv_indices.shape[0] < total:
        raise ValueError(f"kv_indices has {kv_indices.shape[0]} entries, the rows need {total}")

    num_requests, width = block_table.shape
    index = topk_indices[:num_rows, :longest]
    request = request_ids[:num_rows, None]
    column = index // block_size
    known = (request >= 0) & (request < num_requests) & (index >= 0) & (column < width)
    if not known.any():  # also an empty table, which cannot be indexed
        kv_indices[int(starts[0]) : total] = 0
        return
    block = block_table[np.where(known, request, 0), np.where(known, column, 0)].astype(np.int64)
    slot = block * block_size + index % block_size
    known &= (block >= 0) & (slot <= _INT32_MAX)
    # Row-major selection of the first `length` entries of each row is the packed order.
    inside = np.arange(longest, dtype=np.int32) < lengths[:, None]
    kv_indices[int(starts[0]) : total] = np.where(known, slot, 0)[inside]
