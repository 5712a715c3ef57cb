"""Attention of whole rows, from nothing but the definition: what decode and merge together must equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def attention(
    q: npt.NDArray[np.floating[Any]],
    kv_cache: npt.NDArray[np.floating[Any]],
    kv_indices: npt.NDArray[np.int32],
    kv_indptr: npt.NDArray[np.int32],
    scale: float,
    v_dim: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns softmax attention of each row over its KV slots, in float64.

    Args:
        q: Shape (rows, heads, D), any float dtype.
        kv_cache: Shape (num_slots, D), any float dtype.
        kv_indices: Shape (tokens,), int32. KV slot of each position.
        kv_indptr: Shape (>= rows + 1,), int32. First position of each row.
        scale: Factor of the scores.
        v_dim: Leading entries of a KV row that are its value.

    Returns:
        Output (rows, heads, v_dim), and LSE (rows, heads), natural log. Zeros and -inf for a row without
        tokens.
    """
    num_rows, num_heads, _ = q.shape
    out = np.zeros((num_rows, num_heads, v_dim))
    lse = np.full((num_rows, num_heads), -np.inf)
    for row in range(num_rows):
        tokens = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
        if tokens.size == 0:
            continue
        keys = kv_cache[tokens].astype(np.float64)
        scores = scale * (q[row].astype(np.float64) @ keys.T)
        lse[row] = np.logaddexp.reduce(scores, axis=1)
        out[row] = np.exp(scores - lse[row][:, None]) @ keys[:, :v_dim]
    return out, lse
