"""Runs the plan kernel between guard bands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from plan_cases import Arena, Case, Int32Array, golden_cases, golden_difference

from mlaplan.kernels.plan import plan


def run(case: Case, device: str) -> Int32Array:
    """All words of the arena after one launch."""
    arena = Arena(case.num_rows, case.params)
    words = torch.from_numpy(arena.words).to(device)
    starts, lens = (torch.from_numpy(array).to(device) for array in (case.query_start_loc, case.seq_lens))
    plan(starts, lens, arena.views(words), case.params)
    result: Int32Array = words.cpu().numpy()
    return result


def check(case: Case, device: str) -> None:
    """Compares every word of the arena with what the reference leaves there."""
    difference = Arena(case.num_rows, case.params).difference(case, run(case, device))
    assert not difference, (difference, case.seq_lens.tolist())


def check_vectors(vectors: Iterable[dict[str, Any]], device: str) -> int:
    """Compares with aiter's own plans and with the reference; returns how many plans that were."""
    plans = 0
    for vector in vectors:
        for case, wanted in golden_cases(vector):
            words = run(case, device)
            arena = Arena(case.num_rows, case.params)
            assert not golden_difference(vector, arena.views(words), wanted), case.name
            assert not arena.difference(case, words)
            plans += 1
    return plans
