"""Planners in threads: one each, one shared by mistake, functions on shared arrays, a thread when Python ends.

A planner serves one thread. Sharing one is a mistake that may raise and may give a plan that another thread has already
written over, but it must neither crash nor hang, and `invalidate` makes the planner right again.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mlaplan
from planning import assert_holds, batch, planner

THREADS = 8


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Threads change places at nearly every line, where something may go wrong."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(work: Callable[[int], None]) -> list[BaseException]:
    """Runs the work in every thread at once and returns what they raised; one that hangs fails the test."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    return errors


def truth(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Query tokens and lengths of a random batch."""
    query_lens = rng.integers(0, 5, int(rng.integers(1, 9))).tolist()
    return query_lens, [query + int(rng.choice([0, 3, 15, 900])) for query in query_lens]


def some_step(made: mlaplan.Planner, rng: np.random.Generator, *, look: bool) -> None:
    """Plans a random batch in a random way."""
    query_lens, seq_lens = truth(rng)
    way = int(rng.integers(4))
    known: dict[str, Any] = {} if way else {"lengths": None}
    plan = made.plan(batch(query_lens, seq_lens, on_device=way < 3, **known), deferred=way == 2)
    if way == 2:
        made.refresh(plan)
    if look:
        assert_holds(plan, query_lens, seq_lens)


def test_a_planner_in_each_thread_is_as_good_as_one_alone() -> None:
    def work(number: int) -> None:
        made, rng = planner(staging_slots=2, fold=1 + number % 2), np.random.default_rng(number)
        for _ in range(60):
            some_step(made, rng, look=True)
        assert made.stats.steps == 60

    assert together(work) == []


def test_a_planner_that_threads_share_neither_crashes_nor_hangs() -> None:
    made = planner(staging_slots=2)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for turn in range(150):
            try:
                some_step(made, rng, look=False)
            except ValueError as error:
                # A step that another thread cut short; nothing else may come of it.
                assert "decide" in str(error) or "written" in str(error)  # noqa: PT017 - may succeed
            if turn % 50 == 49:
                made.invalidate()

    assert together(work) == []
    made.invalidate()
    rng = np.random.default_rng(99)
    for _ in range(30):
        some_step(made, rng, look=True)


def test_functions_serve_any_number_of_threads_at_once() -> None:
    boundaries, lengths = np.arange(200, dtype=np.int32), np.full(199, 700, np.int32)
    lengths[::3] = 40
    rows = mlaplan.row_lengths(boundaries, lengths, 512)
    wanted = mlaplan.schedule(mlaplan.kv_indptr(rows), num_cus=80)

    def work(_number: int) -> None:
        for _ in range(50):
            assert np.array_equal(mlaplan.row_lengths(boundaries, lengths, 512), rows)
            made = mlaplan.schedule(mlaplan.kv_indptr(rows), num_cus=80)
            assert np.array_equal(made.work_info, wanted.work_info)
            assert np.array_equal(made.work_indptr, wanted.work_indptr)

    assert together(work) == []


def test_a_plan_is_read_in_threads_while_it_is_held() -> None:
    made = planner()
    query_lens, seq_lens = [1, 3, 2], [9, 400, 2]
    plan = made.plan(batch(query_lens, seq_lens, on_device=True))

    def work(_number: int) -> None:
        for _ in range(100):
            made.refresh(plan)  # held, so that nothing is done
            assert_holds(plan, query_lens, seq_lens)
            assert made.stats.launches == 0

    assert together(work) == []


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


PLAN = """
import numpy as np, mlaplan
planner = mlaplan.Planner(mlaplan.PlannerConfig(max_rows=8, max_requests=8, topk=16, num_cus=4), device="cpu")
def step(length):
    plan = planner.plan(mlaplan.Batch(np.array([0, 1], np.int32), mlaplan.Exact(np.array([length], np.int32))))
    assert plan.kv_indptr.tolist() == [0, min(length, 16)]
"""


def test_a_thread_that_plans_when_the_interpreter_ends_is_no_crash() -> None:
    code = f"""{PLAN}
import threading, time, itertools
def work():
    for length in itertools.cycle(range(1, 40)):
        step(length)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(3):
        ran = run(code)
        assert (ran.returncode, ran.stderr) == (0, "")


def test_the_package_is_imported_by_threads_at_once() -> None:
    code = """
import threading
start, errors = threading.Barrier(8), []
def work():
    start.wait()
    try:
        import mlaplan
        mlaplan.PlannerConfig(max_rows=1, max_requests=1)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""
    ran = run(code)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_sub_interpreter_plans_or_refuses_the_import() -> None:
    # NumPy is loaded once per process, so here it is the sub-interpreter that has to do without.
    code = f"""{PLAN}
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
made = interpreters.create()
try:
    told = interpreters.run_string(made, {PLAN + "step(9)"!r})
except Exception as error:
    told = error
if told is not None:
    assert "ImportError" in str(told) or "ImportError" in str(getattr(told, "type", "")), told
interpreters.destroy(made)
step(7)
"""
    ran = run(code)
    assert (ran.returncode, ran.stderr) == (0, "")
