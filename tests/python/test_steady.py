"""Steady steps allocate nothing and move nothing; staging areas are never overwritten before their copy has run."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.device import HostDevice
from mlaplan.device.ring import StagingRing
from mlaplan.layout import PlanArrays
from planning import assert_holds, batch, held, planner

STEPS = 1000
LEAK = 8 * STEPS  # whoever keeps anything of each step keeps a pointer of it at least
ROWS = (8, 11, 24, 64)


class Seen(NamedTuple):
    """What a thousand steps left behind."""

    kept: int  # bytes more than before
    peak: int  # bytes more than before, at the worst moment
    allocations: int
    addresses: int
    decisions: set[str]


def batches(way: str) -> list[mlaplan.Batch]:
    """Sixteen batches, made beforehand so that only planning is measured."""
    made = []
    for turn in range(16):
        rows = ROWS[turn % len(ROWS)]
        more: dict[str, Any] = {"on_device": True, "lengths": None} if way in ("launch", "deferred") else {}
        length = 900 if way == "nothing" else 3 + turn
        made.append(
            batch([1] * (64 if way == "nothing" else rows), [length] * (64 if way == "nothing" else rows), 64, **more)
        )
    return made


def watch(made: mlaplan.Planner, way: str, step: Callable[[mlaplan.Planner, mlaplan.Batch], mlaplan.Plan]) -> Seen:
    """Runs a thousand steps after a warm-up and looks at what they did."""
    some = batches(way)
    for turn in range(64):
        step(made, some[turn % 16])
    gc.collect()
    allocations, addresses, decisions = made.device.counters.allocations, set(), set()
    for turn in range(16):
        plan = step(made, some[turn])
        addresses.add(tuple(array.ctypes.data for array in (*plan.arrays, *plan.constants)))
    tracemalloc.start()
    step(made, some[0])
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for turn in range(STEPS):
        step(made, some[turn % 16])
    peak = tracemalloc.get_traced_memory()[1] - before
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    for turn in range(16):
        plan = step(made, some[turn])
        addresses.add(tuple(array.ctypes.data for array in (*plan.arrays, *plan.constants)))
        decisions.add(plan.decision.action)
    return Seen(kept, peak, made.device.counters.allocations - allocations, len(addresses), decisions)


def one_step(made: mlaplan.Planner, some: mlaplan.Batch) -> mlaplan.Plan:
    return made.plan(some)


def one_deferred_step(made: mlaplan.Planner, some: mlaplan.Batch) -> mlaplan.Plan:
    return made.plan(some, deferred=True)


def is_steady(seen: Seen) -> bool:
    # A plan, its decision and their like are about a kilobyte and gone at the next step.
    return seen.kept < LEAK and seen.peak < 6000 and seen.allocations == 0 and seen.addresses == 1


@pytest.mark.parametrize("way", ["nothing", "copy", "deferred"])
def test_a_thousand_steps_allocate_nothing_and_move_nothing(way: str) -> None:
    seen = watch(planner(max_requests=64, max_rows=1024), way, one_deferred_step if way == "deferred" else one_step)
    assert seen.decisions == {way}
    assert is_steady(seen), seen


def test_a_thousand_launches_move_nothing() -> None:
    """The host's reference op makes arrays of its own as it goes, so only what stays is looked at."""
    seen = watch(planner(max_requests=64, max_rows=1024), "launch", one_step)
    assert seen.decisions == {"launch"}
    assert (seen.allocations, seen.addresses) == (0, 1)
    assert seen.kept < LEAK


def hoarding(made: mlaplan.Planner, some: mlaplan.Batch, hoard: list[Any]) -> mlaplan.Plan:
    hoard.append(made.plan(some).decision)
    return made.plan(some)


def copying(made: mlaplan.Planner, some: mlaplan.Batch) -> mlaplan.Plan:
    _ = made._arena.copy()
    return made.plan(some)


def growing(made: mlaplan.Planner, some: mlaplan.Batch) -> mlaplan.Plan:
    made.device.allocate(1)
    return made.plan(some)


def moving(made: mlaplan.Planner, some: mlaplan.Batch) -> mlaplan.Plan:
    made._arena = made._arena.copy()
    made._arrays = [made._views(layout) for layout in made._layouts]
    return made.plan(some)


@pytest.mark.parametrize("fault", ["hoarding", "copying", "growing", "moving"])
def test_a_planner_that_is_not_steady_is_noticed(fault: str) -> None:
    hoard: list[Any] = []
    step = {
        "hoarding": lambda made, some: hoarding(made, some, hoard),
        "copying": copying,
        "growing": growing,
        "moving": moving,
    }[fault]
    seen = watch(planner(max_requests=64, max_rows=1024), "copy", step)
    assert not is_steady(seen)
    wrong = {
        "hoarding": seen.kept > LEAK,
        "copying": seen.peak > 6000,
        "growing": seen.allocations > 0,
        "moving": seen.addresses > 1,
    }
    assert wrong[fault], seen


class Snapshots:
    """Plans queued on a device that does not move by itself, each followed by a look at what the buffers hold then."""

    def __init__(self, *, staging_slots: int, on_device: bool) -> None:
        self.device = HostDevice(delayed=True)
        self.planner = planner(self.device, staging_slots=staging_slots, max_rows=16)
        self.expected: list[tuple[mlaplan.Plan, list[int], list[int]]] = []
        self.seen: list[PlanArrays] = []
        rng = np.random.default_rng(3)
        for _turn in range(2000):
            query_lens = rng.integers(0, 4, int(rng.integers(1, 5))).tolist()
            seq_lens = (rng.integers(0, 30, len(query_lens)) + query_lens).tolist()
            plan = self.planner.plan(batch(query_lens, seq_lens, on_device=on_device))
            self.expected.append((plan, query_lens, seq_lens))
            self.device.submit(partial(self.look, plan))

    def look(self, plan: mlaplan.Plan) -> None:
        """Keeps what the buffers hold now."""
        self.seen.append(held(plan))

    def check(self) -> int:
        """Runs what is queued; returns how many snapshots do not equal their own plan."""
        self.device.synchronize()
        assert len(self.seen) == len(self.expected) == 2000
        wrong = 0
        for arrays, (plan, query_lens, seq_lens) in zip(self.seen, self.expected, strict=True):
            try:
                assert_holds(plan, query_lens, seq_lens, arrays)
            except AssertionError:  # noqa: PERF203 - each snapshot is a case of its own
                wrong += 1
        return wrong


@pytest.mark.parametrize("staging_slots", [1, 2, 3, 8])
def test_no_area_is_rewritten_before_its_copy_ran(staging_slots: int) -> None:
    """ATOM#1784, imp#568, vllm#47644, 1Cat-vLLM#406: without device arrays the host waits, and says so."""
    run = Snapshots(staging_slots=staging_slots, on_device=False)
    stats = run.planner.stats
    assert stats.actions["copy"] > 1500
    # Areas are freed by halves, and the first two halves are free to begin with.
    slots = max(2, staging_slots)
    assert stats.waits == sum(copy % slots in (0, -(-slots // 2)) for copy in range(stats.actions["copy"])) - 2
    assert stats.launches == 0
    assert run.check() == 0


@pytest.mark.parametrize("staging_slots", [1, 8])
def test_where_the_device_can_plan_the_host_does_not_wait(staging_slots: int) -> None:
    """ATOM#1784: a busy ring makes a launch of a copy."""
    run = Snapshots(staging_slots=staging_slots, on_device=True)
    stats = run.planner.stats
    assert (stats.copies, stats.waits) == (max(2, staging_slots), 0)
    assert stats.reasons["staging busy"] == stats.actions["launch"] == stats.launches > 1500
    assert run.device.completed == 0
    assert run.check() == 0


@pytest.mark.parametrize("staging_slots", [1, 8])
def test_without_the_guard_snapshots_are_wrong(staging_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(self: StagingRing) -> Int32Array:
        self.ready = self.areas[self._next]
        return self.ready

    monkeypatch.setattr(StagingRing, "reserve", reserve)
    run = Snapshots(staging_slots=staging_slots, on_device=False)
    assert run.planner.stats.waits == 0
    assert run.check() > 1000


def test_a_plan_that_took_a_launch_for_want_of_staging_is_held() -> None:
    device = HostDevice(delayed=True)
    made = planner(device, staging_slots=2)
    for seq_len in (2, 3):
        made.plan(batch([1], [seq_len], on_device=True))
    busy = made.plan(batch([1], [4], on_device=True))
    assert (busy.decision.action, busy.decision.reasons) == ("launch", ("lengths changed", "staging busy"))
    assert made.plan(batch([1], [4])).decision.action == "nothing"
    made.refresh(busy)
    assert made.stats.launches == 1
    device.synchronize()
    assert_holds(busy, [1], [4])
    assert made.plan(batch([1], [5], on_device=True)).decision.action == "copy"


@pytest.mark.parametrize("slots", [2, 3, 4, 5, 8])
def test_an_area_is_free_again_when_its_copy_ran(slots: int) -> None:
    """Against a list of the copies under way, on a device that moves at random."""
    device = HostDevice(delayed=True)
    ring = device.staging(slots, 4)
    target, rng = device.allocate(4), np.random.default_rng(slots)
    copied_by: dict[int, int] = {}
    refused = 0
    for turn in range(3000):
        area = ring.reserve()
        if area is None:
            refused += 1
            if rng.random() < 0.2:
                area = ring.wait()
        if area is not None and rng.random() < 0.9:  # else the plan could not be written, and nothing is copied
            slot = ring.take()
            assert area is ring.areas[slot]
            assert device.completed >= copied_by.get(slot, 0), "the copy from this area has not run"
            device.upload(ring, slot, target, 4)
            copied_by[slot] = device.submitted
        device.advance(min(device.submitted, device.completed + int(rng.integers(0, 2))))
        if turn % 50 == 0:
            device.advance(device.submitted)
            assert ring.reserve() is not None, "no copy is under way, so there is an area"
    assert refused > 100


def test_waiting_for_an_area_does_not_move_the_mark() -> None:
    """Asking again while other work is queued: the area is free when its own copies have run."""
    device = HostDevice(delayed=True)
    ring, target = device.staging(2, 4), device.allocate(4)
    for wanted in (0, 1):
        assert ring.reserve() is ring.areas[wanted]
        assert ring.take() == wanted
        device.upload(ring, wanted, target, 4)
    for _other in range(5):
        assert ring.reserve() is None
        device.submit(lambda: None)
    device.advance(2)
    assert ring.reserve() is ring.areas[0]
    device.upload(ring, ring.take(), target, 4)
    assert ring.reserve() is ring.areas[1]
