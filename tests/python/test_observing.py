"""Who watches a planner: no false alarm, nothing lost, and coming and going at any time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import replay
from mlaplan.device import HostDevice
from mlaplan.metrics import Totals
from mlaplan.recorder import Recorder
from mlaplan.replay import WhatIf
from mlaplan.trace import TraceReader
from planning import assert_holds, batch, ints, planner, starts


@pytest.mark.parametrize("delayed", [False, True])
def test_an_older_plan_made_again_is_no_difference(delayed: bool) -> None:
    made = planner(HostDevice(delayed=delayed))
    with made.self_check(1) as checked:
        older = made.plan(batch([1, 1], [5, 6], on_device=True))
        made.plan(batch([1, 1, 1], [9, 12, 3], on_device=True))
        older.quality()
        assert_holds(older, [1, 1], [5, 6])
    assert (checked.checks, checked.skipped, checked.differences) == (1, 1, 0)


@pytest.mark.parametrize("delayed", [False, True])
def test_inputs_may_be_written_until_a_deferred_plan_is_made(delayed: bool) -> None:
    device = HostDevice(delayed=delayed)
    made = planner(device)
    boundaries, lengths = starts([1, 1]), ints(5, 6)
    with made.self_check(1) as checked:
        for length in range(7, 12):
            plan = made.plan(mlaplan.Batch(starts([1, 1]), None, None, True, boundaries, lengths), deferred=True)
            device.store(lengths, ints(length, 3))
            made.refresh(plan)
        device.submit(lambda: plan.arrays.kv_indptr.__setitem__(1, 99))
    assert (checked.checks, checked.differences) == (5, 1), "and what is wrong is still found"
    assert checked.first is not None
    assert (checked.first.step, checked.first.actual, checked.first.expected) == (4, 99, 11)


def test_a_plan_that_only_became_a_node_is_skipped() -> None:
    device = HostDevice()
    made = planner(device)
    some = batch([1, 1], [5, 6], on_device=True)
    with made.self_check(1) as checked:
        plan = made.plan(some, deferred=True)
        with device.record() as graph:
            made.refresh(plan)
        made.plan(some, deferred=True)
        graph.replay()
    assert (checked.checks, checked.skipped, checked.differences) == (1, 1, 0)


@pytest.mark.parametrize("keep", ["first", "last"])
def test_a_planner_that_is_dropped_leaves_a_whole_trace(keep: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.trace"
    made: Any = planner()
    made.record(path, keep=keep)
    for length in range(5, 15):
        made.plan(batch([1], [length]))
    del made
    gc.collect()
    reader = TraceReader(path)
    assert len(list(reader.records())) == 10
    assert reader.damage is None
    assert reader.end == {"steps": 10, "full": False, "dropped": 0}


def test_closing_never_raises(tmp_path: Path) -> None:
    class Full:
        def write(self, _content: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(5, "Input/output error")

    made = planner()
    recorder = made.record(tmp_path / "steps.trace")
    made.plan(batch([1], [5]))
    recorder._file, file = Full(), recorder._file  # type: ignore[assignment]
    recorder.close()
    assert isinstance(recorder.error, OSError)
    assert recorder.error.errno == 28
    assert made.observer is None
    assert file is not None
    file.close()


def in_the_middle(made: mlaplan.Planner, action: Callable[[], object]) -> None:
    """Plans a step in the middle of which something happens, as a signal's handler does."""
    device: Any = made.device
    upload = device.upload

    def act_and_upload(*arguments: Any) -> None:
        device.upload = upload
        action()
        upload(*arguments)

    device.upload = act_and_upload
    made.plan(batch([1], [5]))


def test_listeners_come_and_go_in_the_middle_of_a_step(tmp_path: Path) -> None:
    made = planner()
    checked = made.self_check(1)
    recorders: list[Recorder] = []
    in_the_middle(made, lambda: recorders.append(made.record(tmp_path / "steps.trace")))
    made.plan(batch([1], [6]))
    (recorder,) = recorders
    assert recorder.steps == 2
    made.invalidate()
    in_the_middle(made, checked.close)
    counted = checked.checks
    for length in range(7, 12):
        made.plan(batch([1], [length]))
    assert checked.checks == counted, "it was closed"
    assert recorder.steps == 8
    recorder.close()
    assert made.observer is None


def test_comparisons_of_every_self_check_are_counted() -> None:
    made, totals = planner(), Totals()
    totals.add(made)
    for _ in range(3):
        with made.self_check(1):
            for length in range(5, 9):
                plan = made.plan(batch([1], [length]))
            plan.arrays.kv_indptr[1] = 1
        numbers = totals.read()
    assert (numbers["self_checks", ""], numbers["self_check_differences", ""]) == (12, 3)


def test_a_plan_that_cannot_be_made_again_stays_what_it_was(tmp_path: Path) -> None:
    made = planner()
    with made.record(tmp_path / "steps.trace") as recorder:
        plan = made.plan(batch([1], [5]))
        with pytest.raises(mlaplan.PlanError, match="are needed"):
            made.remake(plan)
        made.refresh(plan)
        assert_holds(plan, [1], [5])
        with pytest.raises(TypeError, match="plan must be a Plan, not str"):
            made.remake("plan")  # type: ignore[arg-type]
        other = planner().plan(batch([1], [5], on_device=True))
        with pytest.raises(ValueError, match="another planner"):
            made.remake(other)
        assert other.generation >= 0
        assert recorder.recording
    assert len(list(TraceReader(tmp_path / "steps.trace").records())) == 1, "nothing was remade"


@pytest.mark.parametrize(
    ("lengths", "what_if", "actions"),
    [
        (mlaplan.Exact(ints(100)), WhatIf(lengths="bound", max_rejects=90), {"launch": 1}),
        (mlaplan.UpperBound(ints(100), 3), WhatIf(max_rejects=90), {"launch": 1}),
        (mlaplan.UpperBound(ints(100), 3), WhatIf(settings={"topk": 128}), {"launch": 1}),
        (mlaplan.UpperBound(ints(100), 3), WhatIf(), {"copy": 1}),
    ],
)
def test_a_trace_without_device_arrays_can_be_asked_what_if(
    lengths: Any, what_if: WhatIf, actions: dict[str, int], tmp_path: Path
) -> None:
    made = planner()
    with made.record(tmp_path / "steps.trace"):
        made.plan(mlaplan.Batch(np.array([0, 1], np.int32), lengths))
    found = replay.replay(TraceReader(tmp_path / "steps.trace"), what_if)
    assert dict(found.actions) == actions
    assert found.differences == []
