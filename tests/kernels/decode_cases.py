"""Batches for decode and merge: a plan, KV indices, and how far results may be off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference import plan as reference

Int32Array = npt.NDArray[np.int32]

DEPTH = 576
V_DIM = 512
SCALE = DEPTH**-0.5


@dataclass(frozen=True, slots=True)
class Batch:
    """One planned batch.

    Attributes:
        arrays: The plan of `num_rows` rows, padding included.
        kv_indices: Pool slot of each position; a permutation, so that a wrong position shows.
        pool: Rows of the KV pool.
    """

    arrays: PlanArrays
    params: PlanParams
    heads: int
    num_rows: int
    kv_indices: Int32Array
    pool: int

    @property
    def group(self) -> int:
        return self.heads // self.params.fold

    @property
    def num_partials(self) -> int:
        return max(1, int(self.arrays.reduce_indptr[-1]))

    @property
    def maps(self) -> tuple[Int32Array, Int32Array]:
        """`reduce_partial_map` and `reduce_final_map` of this call shape."""
        tiles = np.arange(self.num_rows * self.params.fold, dtype=np.int32)
        return np.arange(self.num_partials, dtype=np.int32), np.stack((tiles, tiles + 1), axis=1)


def make_batch(
    rng: np.random.Generator,
    lengths: list[int],
    *,
    heads: int = 16,
    fold: int = 1,
    num_cus: int = 7,
    padding: int = 2,
    topk: int = 2048,
    split_budget: int | None = -1,
) -> Batch:
    """Plans rows of these lengths, each a request of its own, with padding rows behind them."""
    params = PlanParams(topk=topk, num_cus=num_cus, fold=fold, split_budget=split_budget)
    num_rows = len(lengths) + padding
    shapes = Layout.of(num_rows, num_cus=num_cus, fold=fold).shapes
    arrays = PlanArrays(*(np.zeros(shape, np.int32) for shape in shapes))
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    reference.plan(starts, np.array(lengths, np.int32), arrays, params)
    total = int(arrays.kv_indptr[-1])
    pool = total + 40
    return Batch(arrays, params, heads, num_rows, rng.permutation(pool)[:total].astype(np.int32), pool)


def relative_error(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    """||got - want|| / ||want||; infinite if `got` holds a NaN."""
    error = float(np.linalg.norm(got.astype(np.float64) - want))
    return np.inf if np.isnan(error) else error / max(float(np.linalg.norm(want)), 1e-30)


def lse_error(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    """Largest difference; infinite where only one of them is -inf, or where `got` is NaN or +inf."""
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return np.inf
    return float(np.abs(got[finite] - want[finite]).max(initial=0.0))
