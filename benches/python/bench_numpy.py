"""NumPy doing what the core does in a step, against one call of the core, in one run.

`unchanged` is the check of a batch and the comparison with the one before, `rows` request ids and kv_indptr, `plan`
rows and schedule. The functions here are written as one writes NumPy; those for the rows have no loop.

    python benches/python/bench_numpy.py

prints the ratios; `make bench` times each function.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from mlaplan import _core
from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference import plan as reference

Int32Array = npt.NDArray[np.int32]

REQUESTS = (1, 8, 64, 256, 1024, 8192)
TOPK, NUM_CUS = 2048, 304


class Pair(NamedTuple):
    """The same work done by NumPy and by one call of the core."""

    numpy: Callable[[], Any]
    core: Callable[[], Any]


def contexts_of(starts: Int32Array, lens: Int32Array) -> Int32Array:
    """Checks a batch, and returns each request's context as far as its rows depend on it.

    Raises:
        ValueError: The batch is wrong.
    """
    queries = np.diff(starts)
    if starts[0] != 0 or (queries < 0).any() or (lens < queries).any():
        raise ValueError("the boundaries or the lengths are wrong")
    contexts = np.minimum(lens - queries, TOPK - 1)
    contexts[queries == 0] = TOPK - 1
    return contexts


def is_unchanged(starts: Int32Array, lens: Int32Array, held: tuple[Int32Array, Int32Array]) -> bool:
    """Whether the rows of a batch are those that are held."""
    contexts = contexts_of(starts, lens)
    return np.array_equal(starts, held[0]) and np.array_equal(contexts, held[1])


def write_rows(starts: Int32Array, lens: Int32Array, ids: Int32Array, indptr: Int32Array) -> None:
    """Writes `request_ids` and `kv_indptr`."""
    contexts = contexts_of(starts, lens)
    queries = np.diff(starts)
    ids[:] = np.repeat(np.arange(lens.size, dtype=np.int32), queries)
    token = np.arange(starts[-1], dtype=np.int32) - starts[ids]
    np.cumsum(np.minimum(contexts[ids] + token + 1, TOPK), out=indptr[1:])


def batch(requests: int, *, saturated: bool) -> tuple[Int32Array, Int32Array]:
    """Boundaries and lengths of a decode batch."""
    rng = np.random.default_rng(requests)
    lens = rng.integers(TOPK, 3 * TOPK, requests) if saturated else rng.integers(1, 2 * TOPK, requests)
    return np.arange(requests + 1, dtype=np.int32), lens.astype(np.int32)


def _planner(requests: int) -> tuple[_core.StepPlanner, Layout]:
    layout = Layout.of(requests, num_cus=NUM_CUS, fold=1)
    planner = _core.StepPlanner(
        max_requests=requests,
        topk=TOPK,
        num_cus=NUM_CUS,
        fold=1,
        split_budget=16,
        min_tokens_per_split=128,
        classes=[(layout.rows, layout.offsets, layout.words)],
    )
    return planner, layout


def _decide(
    planner: _core.StepPlanner,
    starts: Int32Array,
    lens: Int32Array,
    *,
    force: bool = False,
    arrived: int = 0,
    staging: Int32Array | None = None,
) -> _core.Decision:
    # By position, as `Planner` calls it: names cost 0.1 us.
    return planner.decide(starts, lens, None, None, True, False, force, arrived, staging)  # noqa: FBT003


def unchanged(requests: int) -> Pair:
    """A batch whose rows are those of the step before."""
    starts, lens = batch(requests, saturated=True)
    held = (starts.copy(), contexts_of(starts, lens))
    planner, layout = _planner(requests)
    staging = np.zeros(layout.words, np.int32)
    ticket = _decide(planner, starts, lens, staging=staging).ticket
    assert _decide(planner, starts, lens + 1, arrived=ticket, staging=staging).action == "nothing"
    assert is_unchanged(starts, lens + 1, held)
    decide = planner.decide
    return Pair(
        lambda: is_unchanged(starts, lens, held),
        lambda: decide(starts, lens, None, None, True, False, False, ticket, staging),  # noqa: FBT003
    )


def rows(requests: int) -> Pair:
    """Request ids and kv_indptr, which are three calls of the core where nothing else is asked."""
    starts, lens = batch(requests, saturated=False)
    ids, indptr = np.zeros(requests, np.int32), np.zeros(requests + 1, np.int32)

    def by_core() -> tuple[Int32Array, Int32Array]:
        return _core.request_ids(starts), _core.kv_indptr(_core.row_lengths(starts, lens, TOPK))

    write_rows(starts, lens, ids, indptr)
    for ours, theirs in zip(by_core(), (ids, indptr), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return Pair(lambda: write_rows(starts, lens, ids, indptr), by_core)


def plan(requests: int) -> Pair:
    """Rows and schedule; NumPy's side is the reference, whose walk over the rows is a loop in Python."""
    starts, lens = batch(requests, saturated=False)
    planner, layout = _planner(requests)
    staging = np.zeros(layout.words, np.int32)
    params = PlanParams(topk=TOPK, num_cus=NUM_CUS, split_budget=16)
    arrays = PlanArrays(*(np.zeros(shape, np.int32) for shape in layout.shapes))

    def by_core() -> None:
        _decide(planner, starts, lens, force=True, staging=staging)

    by_core()
    reference.plan(starts, lens, arrays, params)
    for offset, array in zip(layout.offsets, arrays, strict=True):
        np.testing.assert_array_equal(staging[offset : offset + array.size].reshape(array.shape), array)
    return Pair(lambda: reference.plan(starts, lens, arrays, params), by_core)


QUESTIONS: dict[str, Callable[[int], Pair]] = {"unchanged": unchanged, "rows": rows, "plan": plan}


def lowest_us(call: Callable[[], Any], seconds: float = 0.3) -> float:
    """The lowest time of a call in microseconds, for nothing but other programs makes it longer."""
    timer = timeit.Timer(call)
    loops = max(1, timer.autorange()[0] // 20)
    repeats = max(5, int(seconds / max(timer.timeit(loops), 1e-9)))
    return 1e6 * min(timer.repeat(repeats, loops)) / loops


@pytest.fixture(autouse=True)
def _release_only(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_disable") and _core.build_profile != "release":
        pytest.fail("a debug build is not worth timing: build with --release")


@pytest.mark.parametrize("requests", [1, 256])
@pytest.mark.parametrize("side", Pair._fields)
@pytest.mark.parametrize("question", QUESTIONS)
def test_numpy_and_core(benchmark: Any, question: str, side: str, requests: int) -> None:
    benchmark.group = f"{question}, {requests} requests"
    benchmark(getattr(QUESTIONS[question](requests), side))


def main() -> None:
    """Prints the lowest time of each side, and their ratio."""
    for question, make in QUESTIONS.items():
        for requests in REQUESTS:
            by_numpy, by_core = (lowest_us(call) for call in make(requests))
            print(f"{question:10} {requests:5} {by_numpy:10.2f} us {by_core:8.2f} us {by_numpy / by_core:6.0f} times")


if __name__ == "__main__":
    main()
