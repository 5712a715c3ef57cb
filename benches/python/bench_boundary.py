"""What one crossing into Rust costs, and one step of the planner on the host device, by batch size.

The host device copies and launches nothing asynchronous, so a step here is the host's own work: the check of the batch,
the decision, for a copy also rows and schedule, and a copy of the arena within host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import _core

REQUESTS = (1, 64, 256, 512)
TOPK = 2048


@pytest.fixture(autouse=True)
def _release_only(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_disable") and _core.build_profile != "release":
        pytest.fail("a debug build is not worth timing: build with --release")


def batches(requests: int, lengths: tuple[int, ...]) -> list[mlaplan.Batch]:
    """Decode batches of one token per request, with lengths below topk and above it."""
    query_start_loc = np.arange(requests + 1, dtype=np.int32)
    made = []
    for length in lengths:
        seq_lens = np.full(requests, length, np.int32)
        seq_lens[1::2] = 3 * TOPK
        made.append(
            mlaplan.Batch(
                query_start_loc,
                mlaplan.Exact(seq_lens),
                device_query_start_loc=query_start_loc.copy(),
                device_seq_lens=seq_lens.copy(),
            )
        )
    return made


def planner(requests: int) -> mlaplan.Planner:
    return mlaplan.Planner(mlaplan.PlannerConfig(max_rows=requests, max_requests=requests), "cpu")


def test_crossing_with_one_request(benchmark: Callable[..., Any]) -> None:
    query_start_loc = np.array([0, 1], np.int32)
    assert benchmark(mlaplan.segment_lengths, query_start_loc).tolist() == [1]


def test_crossing_that_raises(benchmark: Callable[..., Any]) -> None:
    query_start_loc = np.array([0, 2, 1], np.int32)

    def refused() -> str:
        try:
            mlaplan.segment_lengths(query_start_loc)
        except ValueError as error:
            return str(error)
        return ""

    assert "query_start_loc[2]" in benchmark(refused)


@pytest.mark.parametrize("requests", REQUESTS)
def test_step_with_nothing_to_do(benchmark: Callable[..., Any], requests: int) -> None:
    made, (some,) = planner(requests), batches(requests, (100,))
    made.plan(some)
    assert benchmark(made.plan, some).decision.action == "nothing"
    assert made.stats.copies == 1


@pytest.mark.parametrize("requests", REQUESTS)
def test_step_that_copies(benchmark: Callable[..., Any], requests: int) -> None:
    made, turns = planner(requests), cycle(batches(requests, (100, 101)))
    for _turn in range(4):
        made.plan(next(turns))
    plan = benchmark(lambda: made.plan(next(turns)))
    assert plan.decision.action == "copy"
    assert made.stats.actions == {"copy": made.stats.steps}


@pytest.mark.parametrize("requests", REQUESTS)
def test_step_that_is_deferred(benchmark: Callable[..., Any], requests: int) -> None:
    made, (some,) = planner(requests), batches(requests, (100,))
    plan = benchmark(lambda: made.plan(some, deferred=True))
    assert plan.decision.action == "deferred"
    assert (made.stats.copies, made.stats.launches) == (0, 0)


@pytest.mark.parametrize("requests", REQUESTS)
def test_schedule_alone(benchmark: Callable[..., Any], requests: int) -> None:
    (some,) = batches(requests, (100,))
    assert isinstance(some.lengths, mlaplan.Exact)
    indptr = mlaplan.kv_indptr(mlaplan.row_lengths(some.query_start_loc, some.lengths.seq_lens, TOPK))
    made = benchmark(lambda: mlaplan.schedule(indptr, num_cus=304, max_split_per_batch=16))
    assert made.num_works >= requests
