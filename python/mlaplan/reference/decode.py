"""The `decode` op: every work of a schedule, one after the other, in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaplan.layout import PlanArrays

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.floating[Any]]


def decode(
    q: FloatArray,
    kv_cache: FloatArray,
    kv_indices: Int32Array,
    arrays: PlanArrays,
    *,
    fold: int,
    scale: float,
    v_dim: int = 512,
    out: FloatArray,
    lse: FloatArray,
    partial_out: FloatArray,
    partial_lse: FloatArray,
    empty_work_ends_slot: bool = True,
) -> None:
    """Runs every work of every slot once.

    A work of tile t, whose query is row `t // fold` and head group `t % fold`, attends to the slots
    `kv_indices[kv_start:kv_end]`:

        s   = scale * q @ kv.T
        lse = log(sum(exp(s)))          natural log
        o   = exp(s - lse) @ kv[:, :v_dim]

    Location -1 writes o and lse to `out` and `lse`; any other writes row `location` of the partial buffers.
    Partials are normalised within their piece.

    In aiter's kernels an empty work ends its slot: it writes nothing, and later works of the slot are not
    run. So here, unless `empty_work_ends_slot` is false; then an empty work gives zeros and -inf.
    Works of rows that `q` does not have are not run.

    Args:
        q: Shape (rows, heads, D), any float dtype. `fold` divides heads.
        kv_cache: Shape (num_slots, D), any float dtype.
        kv_indices: Shape (tokens,), int32. KV slot of each position.
        arrays: A plan; `work_indptr` and `work_info` are read.
        fold: Tiles per row.
        scale: Factor of the scores.
        v_dim: Leading entries of a KV row that are its value.
        out: Shape (rows, heads, v_dim), written in place.
        lse: Shape (rows, heads), written in place.
        partial_out: Shape (partials, heads // fold, v_dim), written in place.
        partial_lse: Shape (partials, heads // fold), written in place.
        empty_work_ends_slot: Whether to do as aiter's kernels do.
    """
    group = q.shape[1] // fold
    work_indptr = arrays.work_indptr.tolist()
    works = arrays.work_info[: work_indptr[-1]].tolist()
    for first, last in pairwise(work_indptr):
        for _, location, tile, _, kv_start, kv_end, _, _ in works[first:last]:
            if kv_start == kv_end and empty_work_ends_slot:
                break
            row, part = divmod(tile, fold)
            if row >= q.shape[0]:
                continue
            heads = slice(part * group, (part + 1) * group)
            kv = kv_cache[kv_indices[kv_start:kv_end]].astype(np.float64)
            result, result_lse = _attend(q[row, heads].astype(np.float64), kv, scale, v_dim)
            if location < 0:
                out[row, heads], lse[row, heads] = result, result_lse
            else:
                partial_out[location], partial_lse[location] = result, result_lse


def _attend(
    q: npt.NDArray[np.float64], kv: npt.NDArray[np.float64], scale: float, v_dim: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Attention of one query's heads over the rows of `kv`, and its LSE."""
    heads = q.shape[0]
    if kv.shape[0] == 0:
        return np.zeros((heads, v_dim)), np.full(heads, -np.inf)
    scores = scale * (q @ kv.T)
    peak = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True)
    return (weights @ kv[:, :v_dim]) / total, (peak + np.log(total))[:, 0]
