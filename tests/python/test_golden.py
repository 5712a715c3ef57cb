"""The 300 golden vectors of aiter's own planner, through the public functions: arrays, sizes, fold and variant."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan

ARRAYS = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


@pytest.fixture(scope="module")
def vectors(shared: Path) -> list[dict[str, Any]]:
    with gzip.open(shared / "golden" / "aiter_mla_metadata_v1_2.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def dtypes(vector: dict[str, Any]) -> tuple[str, str]:
    # null stands for "not passed", which aiter takes as bf16.
    return vector["q_dtype"] or "bf16", vector["kv_dtype"] or "bf16"


def expected_arrays(arrays: dict[str, Any], tiles: int) -> dict[str, np.ndarray]:
    final_map = np.full((tiles, 2), -1)
    for tile, first, end in arrays["reduce_final_map"]:
        final_map[tile] = first, end
    return {**{name: np.array(arrays[name]) for name in ARRAYS}, "reduce_final_map": final_map}


def test_every_vector_is_there(vectors: list[dict[str, Any]]) -> None:
    assert len(vectors) == 300


def test_fold_and_variant(vectors: list[dict[str, Any]]) -> None:
    for vector in vectors:
        rows = len(vector["qo_indptr"]) - 1
        support = mlaplan.support(vector["arch"], vector["heads"], *dtypes(vector), rows=rows)
        assert (support.fold, support.variant) == (vector["qk_batch_ratio"], vector["planner"]), vector["id"]


def test_sizes(vectors: list[dict[str, Any]]) -> None:
    for vector in vectors:
        q_dtype, kv_dtype = dtypes(vector)
        shapes = mlaplan.buffer_shapes(
            vector["max_batch"],
            vector["heads"],
            arch=vector["arch"],
            num_cus=vector["num_cu"],
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
        )
        wanted = {name: tuple(np.atleast_1d(size)) for name, size in vector["sizes"].items()}
        assert shapes == wanted, vector["id"]


def test_schedules_of_both_variants(vectors: list[dict[str, Any]]) -> None:
    compared = {"parallel": 0, "serial": 0}
    for vector in vectors:
        tiles = (len(vector["qo_indptr"]) - 1) * vector["qk_batch_ratio"]
        # The variants agree unless a row is empty; then the vector holds the serial one apart.
        by_variant = {vector["planner"]: vector, "serial": vector.get("serial", vector)}
        for variant, arrays in by_variant.items():
            made = mlaplan.schedule(
                np.array(vector["kv_indptr"], np.int32),
                num_cus=vector["num_cu"],
                max_split_per_batch=vector["max_split_per_batch"],
                fold=vector["qk_batch_ratio"],
                variant=variant,
            )
            for name, wanted in expected_arrays(arrays, tiles).items():
                got = getattr(made, name)
                assert np.array_equal(got, wanted.reshape(got.shape)), (vector["id"], variant, name)
            assert (made.num_slots, made.blocks_per_slot) == (vector["num_slots"], vector["blocks_per_slot"])
            compared[variant] += 1
    assert compared["serial"] == 300
    assert compared["parallel"] > 100


def lost_works(made: mlaplan.Schedule) -> int:
    """Works with KV tokens that come after an empty one in their slot: aiter's kernels never run them."""
    lost = 0
    for first, end in zip(made.work_indptr[:-1], made.work_indptr[1:], strict=True):
        empty = made.work_info[first:end, 4] == made.work_info[first:end, 5]
        lost += int(np.count_nonzero(~empty & np.logical_or.accumulate(empty))) if end > first else 0
    return lost


def test_aiters_own_schedules_that_lose_works_are_known_as_unsafe(vectors: list[dict[str, Any]]) -> None:
    losing = []
    for vector in vectors:
        indptr = np.array(vector["kv_indptr"], np.int32)
        settings = {"num_cus": vector["num_cu"], "max_split_per_batch": vector["max_split_per_batch"],
                    "fold": vector["qk_batch_ratio"]}  # fmt: skip
        made = mlaplan.schedule(indptr, variant=vector["planner"], **settings)
        if lost_works(made):
            losing.append(vector["kind"])
            assert not made.is_safe
        skipping = mlaplan.schedule(indptr, skip_empty=True, **settings)
        assert skipping.is_safe
        assert not lost_works(skipping)
    assert losing == ["zero_some"] * 9
