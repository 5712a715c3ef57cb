"""The `merge` op: partial outputs of cut rows to whole rows, and a defined output for empty ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mlaplan.layout import PlanArrays

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.floating[Any]]


def merge(
    partial_out: FloatArray,
    partial_lse: FloatArray,
    arrays: PlanArrays,
    *,
    reduce_partial_map: Int32Array,
    reduce_final_map: Int32Array,
    out: FloatArray,
    lse: FloatArray,
    fold: int,
    after_decode: bool = False,
    one_cut: bool = False,
) -> None:
    """Merges the partials of every tile that has at least two, in float64.

    With the partials k of a tile:

        lse = log(sum_k exp(lse_k))          natural log
        o   = sum_k exp(lse_k - lse) * o_k

    A partial with an LSE of -inf counts for nothing; if all are, the tile is zeros and -inf. Rows of `out` of
    length 0, padding or not, become zeros with an LSE of -inf. Other rows were written by `decode` and stay.

    Args:
        partial_out: Shape (partials, heads // fold, v_dim), any float dtype, normalised within each piece.
        partial_lse: Shape (partials, heads // fold), any float dtype.
        arrays: A plan; `reduce_indptr` and `kv_indptr` are read.
        reduce_partial_map: Shape (>= reduce_indptr[-1],), int32. Partial of each entry.
        reduce_final_map: Shape (>= tiles, 2), int32. Query start and end of each tile.
        out: Shape (rows, heads, v_dim), written in place; at most as many rows as the plan's class.
        lse: Shape (rows, heads), written in place.
        fold: Tiles per row.
        after_decode: As the kernel's; nothing here overlaps.
        one_cut: As the kernel's; partials are summed up in one order here.
    """
    del after_decode, one_cut
    num_rows, num_heads = out.shape[:2]
    group = num_heads // fold
    starts = arrays.reduce_indptr.tolist()
    for tile in np.flatnonzero(np.diff(arrays.reduce_indptr) >= 2).tolist():
        row, part = divmod(int(reduce_final_map[tile, 0]), fold)
        if row >= num_rows:
            continue
        heads = slice(part * group, (part + 1) * group)
        partials = reduce_partial_map[starts[tile] : starts[tile + 1]]
        lse_parts = partial_lse[partials].astype(np.float64)
        peak = lse_parts.max(axis=0)
        weights = np.exp(lse_parts - np.where(np.isneginf(peak), 0.0, peak))
        total = weights.sum(axis=0)
        shares = weights / np.where(total == 0, 1.0, total)
        out[row, heads] = np.einsum("kh,khv->hv", shares, partial_out[partials].astype(np.float64))
        with np.errstate(divide="ignore"):
            lse[row, heads] = peak + np.log(total)
    empty = np.flatnonzero(np.diff(arrays.kv_indptr[: num_rows + 1]) == 0)
    out[empty] = 0
    lse[empty] = -np.inf
