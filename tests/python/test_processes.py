"""Processes: fork, spawn and forkserver, planners made before a fork, and what can be sent from one to another."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan.layout import PlanArrays
from planning import assert_holds, batch, planner
from worker import planned

HERE = Path(__file__).parent


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_settings_and_batches_are_sent_to_other_processes(way: str) -> None:
    settings = planner().config
    batches = [batch([1, 3], [9, 40], 8), batch([2], [7], on_device=True), batch([], [])]
    context = multiprocessing.get_context(way)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        results = list(pool.map(planned, [settings] * len(batches), batches))
    for handed, (actions, arrays) in zip(batches, results, strict=True):
        assert actions == {"copy": 1}
        plan = planner().plan(handed)
        query_lens = np.diff(handed.query_start_loc).tolist()
        assert isinstance(handed.lengths, mlaplan.Exact)
        assert_holds(plan, query_lens, handed.lengths.seq_lens.tolist(), PlanArrays(*arrays))


def sent(data: bytes) -> Any:
    """What another process gets."""
    return pickle.loads(data)  # noqa: S301 - pickled here


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_can_be_pickled_comes_back_equal(protocol: int) -> None:
    made = planner()
    handed = batch([1, 2], [9, 40], on_device=True)
    made.plan(handed)
    again = sent(pickle.dumps(handed, protocol))
    for name in ("query_start_loc", "device_query_start_loc", "device_seq_lens"):
        assert np.array_equal(getattr(again, name), getattr(handed, name))
        assert getattr(again, name).dtype == np.int32
    assert np.array_equal(again.lengths.seq_lens, [9, 40])
    bound = sent(pickle.dumps(mlaplan.UpperBound(np.array([5], np.int32), 3), protocol))
    assert (bound.bound.tolist(), bound.max_rejects) == ([5], 3)
    for value in (made.config, made.stats, made.params):
        assert sent(pickle.dumps(value, protocol)) == value
    error = sent(pickle.dumps(mlaplan.PlanError("too many"), protocol))
    assert isinstance(error, mlaplan.PlanError)
    assert str(error) == "too many"


def test_what_belongs_to_a_process_is_not_sent() -> None:
    made = planner()
    plan = made.plan(batch([1], [9]))
    for value in (made, plan, plan.decision, made._step):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(value)
        with pytest.raises(TypeError, match="cannot pickle"):
            copy.deepcopy(value)


FORKED = """
import os, sys
sys.path.insert(0, {here!r})
from planning import assert_holds, batch, planner
from mlaplan.device import HostDevice

delayed = {delayed}
device = HostDevice(delayed=delayed)
made = planner(device, staging_slots=2)
held = made.plan(batch([1, 2], [9, 40], on_device=True))
waiting = made.plan(batch([3], [30], on_device=True), deferred=True)
device.synchronize()

def use(first):
    for length in range(first, first + 20):
        made.plan(batch([1], [length]))
        if delayed and length % 4 == 3:
            device.synchronize()
    plan = made.plan(batch([2, 1], [first + 3, 9]))
    device.synchronize()
    assert_holds(plan, [2, 1], [first + 3, 9])
    for plan, query_lens, seq_lens in ((held, [1, 2], [9, 40]), (waiting, [3], [30])):
        made.refresh(plan)
        device.synchronize()
        assert_holds(plan, query_lens, seq_lens)

children = []
for number in range(3):
    pid = os.fork()
    if pid == 0:
        try:
            use(5 + number)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(pid)
    use(9 + number)
for pid in children:
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
use(2)
print("all right")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("delayed", [False, True])
def test_a_planner_made_before_a_fork_serves_both_processes(delayed: bool) -> None:
    code = FORKED.format(here=str(HERE), delayed=delayed)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "all right\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_in_the_middle_of_a_step_leaves_both_right() -> None:
    code = textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(HERE)!r})
        from planning import assert_holds, batch, planner
        from mlaplan.device import HostDevice

        class Forking(HostDevice):
            child = None
            def upload(self, *arguments):
                if self.child is None:
                    self.child = os.fork()
                super().upload(*arguments)

        device = Forking()
        made = planner(device)
        for length in (9, 9, 10, 40, 41):
            assert_holds(made.plan(batch([1, 2], [5, length])), [1, 2], [5, length])
        if device.child == 0:
            os._exit(0)
        _, status = os.waitpid(device.child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    """)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
