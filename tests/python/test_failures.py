"""Failures in the middle: every operation of the device seam fails in turn, and whatever comes next must be right.

A history of calls is run once to count the operations that it asks the device for. Then it is run again for each of
them: that operation raises before it does anything, behind what it does, or half way through a copy. What the buffers
hold after every later call is compared with a plan from nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.device import HostDevice
from mlaplan.layout import PlanArrays
from planning import assert_holds, held, planner, starts

MAX_ROWS, MAX_REQUESTS, TOPK = 12, 4, 16
Call = tuple[str, int]


class Injected(Exception):  # noqa: N818 - what a driver raises is called something like this
    """The failure that was asked for."""


@dataclass
class Fault:
    """Which operation fails and how; counts on without a number."""

    at: int | None = None
    mode: str = "before"
    seen: int = 0
    names: list[str] = field(default_factory=list)

    def hit(self, name: str) -> bool:
        """Counts an operation; whether it is the one to fail."""
        self.seen += 1
        self.names.append(name)
        return self.at == self.seen


class FaultyMarker:
    """A marker whose methods are operations."""

    def __init__(self, device: FaultyDevice, marker: Any) -> None:
        self._device, self._marker = device, marker

    def record(self) -> None:
        self._device.guarded("record", self._marker.record)

    def done(self) -> bool:
        return bool(self._device.guarded("done", self._marker.done))

    def wait(self) -> None:
        self._device.guarded("wait", self._marker.wait)


class FaultyDevice(HostDevice):
    """A host device, each of whose operations can be made to fail."""

    def __init__(self, fault: Fault, *, delayed: bool = False) -> None:
        super().__init__(delayed=delayed)
        self.fault = fault

    def guarded(self, name: str, operation: Callable[[], Any]) -> Any:
        """Runs an operation, unless it is the one to fail."""
        hit = self.fault.hit(name)
        if hit and self.fault.mode != "after":
            raise Injected(name)
        result = operation()
        if hit:
            raise Injected(name)
        return result

    def allocate(self, words: int) -> Any:
        return self.guarded("allocate", lambda: super(FaultyDevice, self).allocate(words))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.guarded("empty", lambda: super(FaultyDevice, self).empty(shape, dtype))

    def array(self, values: Any) -> Any:
        return self.guarded("array", lambda: super(FaultyDevice, self).array(values))

    def store(self, array: Any, values: Any) -> None:
        self.guarded("store", lambda: super(FaultyDevice, self).store(array, values))

    def staging(self, slots: int, words: int) -> Any:
        ring = self.guarded("staging", lambda: super(FaultyDevice, self).staging(slots, words))
        first, second = ring._markers
        ring._markers = (FaultyMarker(self, first), FaultyMarker(self, second))
        return ring

    def upload(self, staging: Any, slot: int, buffer: Any, words: int) -> None:
        if self.fault.mode == "half" and self.fault.at == self.fault.seen + 1:
            self.advance(self.submitted)
            buffer[: words // 2] = staging.sources[slot][: words // 2]
        self.guarded("upload", lambda: super(FaultyDevice, self).upload(staging, slot, buffer, words))

    def plan(self, *arguments: Any) -> None:
        self.guarded("plan", lambda: super(FaultyDevice, self).plan(*arguments))

    def run(self, op: Any, *arguments: Any, **keywords: Any) -> None:
        self.guarded("run", lambda: super(FaultyDevice, self).run(op, *arguments, **keywords))

    def to_host(self, array: Any) -> Any:
        return self.guarded("to_host", lambda: super(FaultyDevice, self).to_host(array))


@dataclass
class Made:
    """A plan and the truth behind it."""

    plan: mlaplan.Plan
    query_lens: list[int]
    seq_lens: list[int]
    arrays: bool


class World:
    """A planner, the plans that are still around, and a graph; every call checks what it leaves."""

    def __init__(self, fault: Fault, *, seed: int, delayed: bool, maker: str) -> None:
        self.device = FaultyDevice(fault, delayed=delayed)
        self.planner = planner(
            self.device, max_rows=MAX_ROWS, max_requests=MAX_REQUESTS, topk=TOPK, num_cus=7, staging_slots=2,
            min_tokens_per_split=4, schedule_maker=maker, capture_sizes=(3, 6),
        )  # fmt: skip
        self.rng = np.random.default_rng(seed)
        self.around: list[Made] = []
        self.graphs: dict[int, Any] = {}
        self.consumed: list[tuple[Made, PlanArrays]] = []
        self.persistent = (np.zeros(MAX_REQUESTS + 1, np.int32), np.zeros(MAX_REQUESTS, np.int32))

    def call(self, kind: str, seed: int) -> None:
        """Makes one call of a history; equal seeds make equal calls."""
        self.rng = np.random.default_rng(seed)
        getattr(self, kind)()

    def check(self, made: Made) -> None:
        """Compares what the buffers hold with a plan from nothing."""
        self.device.advance(self.device.submitted)
        for earlier, arrays in self.consumed:
            assert_holds(earlier.plan, earlier.query_lens, earlier.seq_lens, arrays)
        self.consumed.clear()
        assert_holds(made.plan, made.query_lens, made.seq_lens)
        constants = made.plan.constants
        tiles = np.arange(len(constants.qo_indptr))
        assert np.array_equal(constants.qo_indptr, tiles)
        assert np.array_equal(constants.reduce_final_map, np.stack([tiles[:-1], tiles[1:]], axis=1))

    def truth(self) -> tuple[list[int], list[int]]:
        """Query tokens and lengths of a random batch."""
        query_lens = self.rng.integers(0, 4, int(self.rng.integers(1, MAX_REQUESTS + 1))).tolist()
        contexts = self.rng.choice([0, 1, 3, TOPK - 2, TOPK, 900], len(query_lens)).tolist()
        return query_lens, [query + context for query, context in zip(query_lens, contexts, strict=True)]

    def plan(self, *, known: bool = True, on_device: bool = False, deferred: bool = False) -> None:
        """Plans a new batch."""
        self.plan_this(*self.truth(), known=known, on_device=on_device or deferred or not known, deferred=deferred)

    def plan_this(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        *,
        known: bool,
        on_device: bool,
        deferred: bool = False,
        look: bool = True,
    ) -> None:
        """Plans a batch, and looks at what the buffers hold unless the plan is deferred."""
        boundaries, lengths = starts(query_lens), np.array(seq_lens, np.int32)
        arrays: tuple[Int32Array | None, Int32Array | None] = (None, None)
        if on_device:
            arrays = boundaries.copy(), lengths.copy()
        handed = mlaplan.Batch(boundaries, mlaplan.Exact(lengths) if known else None, None, True, *arrays)
        made = Made(self.planner.plan(handed, deferred=deferred), query_lens, seq_lens, on_device)
        self.around = [*self.around[-4:], made]
        if look and not deferred:
            self.check(made)

    def hurry(self) -> None:
        """More copies than there are staging areas, and a consumer behind each, before the device has run any."""
        for _ in range(4):
            self.plan_this(*self.truth(), known=True, on_device=False, look=False)
            self.consume(self.around[-1])
        self.check(self.around[-1])

    def consume(self, made: Made) -> None:
        """Queues a look at what the buffers hold: what comes later must not have touched it by then."""
        self.device.submit(lambda: self.consumed.append((made, held(made.plan))))

    def copy(self) -> None:
        self.plan()

    def copy_or_launch(self) -> None:
        self.plan(on_device=True)

    def launch(self) -> None:
        self.plan(known=False)

    def deferred(self) -> None:
        self.plan(deferred=True)

    def again(self) -> None:
        """Plans the latest batch once more, where an answer of "nothing" would be wrong unless it is held."""
        if self.around:
            last = self.around[-1]
            self.plan_this(last.query_lens, last.seq_lens, known=True, on_device=False)

    def refresh(self) -> None:
        """Refreshes some plan that is around, held or not."""
        possible = [made for made in self.around if made.arrays]
        if possible:
            made = possible[int(self.rng.integers(len(possible)))]
            self.planner.refresh(made.plan)
            self.check(made)

    def remake(self) -> None:
        """The device's lengths have changed."""
        possible = [made for made in self.around if made.arrays]
        if possible:
            made = possible[-1]
            self.device.advance(self.device.submitted)
            made.seq_lens = [length + 1 for length in made.seq_lens]
            made.plan.batch.device_seq_lens[:] = made.seq_lens
            self.planner.remake(made.plan)
            self.check(made)

    def capture(self) -> None:
        """Captures a graph; one that was abandoned is never replayed."""
        rows = int(self.rng.choice([3, 6, 12]))
        dummy = mlaplan.Batch(np.zeros(MAX_REQUESTS + 1, np.int32), None, rows, True, *self.persistent)
        plan = self.planner.plan(dummy, deferred=True)
        with self.device.record() as graph:
            self.planner.refresh(plan)
            self.planner.refresh(plan)
        assert len(graph.ops) == 1
        self.graphs[rows] = graph

    def replay(self) -> None:
        """Replays a graph over other values."""
        query_lens, seq_lens = self.truth()
        fitting = [rows for rows in self.graphs if rows >= sum(query_lens)]
        if not fitting:
            return
        idle = [0] * (MAX_REQUESTS - len(query_lens))
        query_lens, seq_lens = query_lens + idle, seq_lens + idle
        self.device.advance(self.device.submitted)
        self.persistent[0][:], self.persistent[1][:] = starts(query_lens), seq_lens
        handed = mlaplan.Batch(starts(query_lens), None, fitting[0], True, *self.persistent)
        made = Made(self.planner.plan(handed, deferred=True), query_lens, seq_lens, arrays=True)
        self.graphs[fitting[0]].replay()
        self.check(made)

    def decode(self) -> None:
        """Decodes a plan that is around, which makes it if it is not held."""
        possible = [made for made in self.around if made.arrays]
        if not possible:
            return
        made = possible[int(self.rng.integers(len(possible)))]
        rows = made.plan.padded_rows
        self.planner.decode(
            made.plan, np.ones((rows, 2, 8)), np.ones((8, 8)), np.zeros((rows, TOPK), np.int32),
            np.zeros((MAX_REQUESTS, 2), np.int32), block_size=4,
        )  # fmt: skip
        self.check(made)

    def lose(self) -> None:
        """The buffers lose their content."""
        self.device.advance(self.device.submitted)
        self.planner._arena[...] = -99
        for constants in self.planner._constants:
            for array in constants:
                array[...] = 77
        self.planner.invalidate()


KINDS = ("copy", "hurry", "copy_or_launch", "launch", "deferred", "again", "refresh", "remake", "capture", "replay",
         "decode", "lose")  # fmt: skip
MODES = ("before", "after", "half")
RECOVERIES = ("retry", "again", "refresh", "go on")


def history(seed: int, length: int) -> list[Call]:
    """Random calls; the first ones fill the planner's hands."""
    rng = np.random.default_rng(seed)
    kinds = ["copy", "copy_or_launch", *rng.choice(KINDS, length - 2).tolist()]
    return [(kind, int(rng.integers(2**32))) for kind in [*kinds, "again", "copy"]]


def run(calls: list[Call], fault: Fault, recovery: str, **settings: Any) -> bool:
    """Runs a history; a failed call is followed by another. Whether a call failed."""
    try:
        world = World(fault, **settings)
    except Injected:
        world = World(fault, **settings)  # what was half made is gone
        fault.at = None
    failed = fault.at is None
    for kind, seed in calls:
        try:
            world.call(kind, seed)
        except Injected:  # noqa: PERF203 - each call may be the one that fails
            failed = True
            if recovery == "retry":
                world.call(kind, seed)
            elif recovery != "go on":
                world.call(recovery, seed)
    return failed


def every_fault(calls: list[Call], recoveries: tuple[str, ...] | None = None, **settings: Any) -> int:
    """Lets every operation of a history fail in every way; returns how many failures there were."""
    counted = Fault()
    run(calls, counted, "go on", **settings)
    names = counted.names
    assert {"allocate", "staging", "array", "upload"} <= set(names)
    failures = 0
    for at, name in enumerate(names, 1):
        for turn, mode in enumerate(MODES if name == "upload" else MODES[:2]):
            for recovery in recoveries or (RECOVERIES[(at + turn) % len(RECOVERIES)],):
                assert run(calls, Fault(at, mode), recovery, **settings), (at, name, mode)
                failures += 1
    return failures


@pytest.mark.parametrize(
    ("seed", "delayed", "maker"),
    [(1, False, "core"), (2, True, "core"), (3, False, "device"), (4, True, "device"), (5, True, "core")],
)
def test_whatever_fails_the_next_plans_are_right(seed: int, delayed: bool, maker: str) -> None:
    assert every_fault(history(seed, 16), seed=seed, delayed=delayed, maker=maker) > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 30))
def test_whatever_fails_in_long_histories_the_next_plans_are_right(seed: int) -> None:
    settings = {"delayed": bool(seed % 2), "maker": "device" if seed % 4 > 1 else "core"}
    assert every_fault(history(seed, 40), RECOVERIES, seed=seed, **settings) > 500


def test_every_kind_of_operation_and_call_is_met() -> None:
    names: set[str] = set()
    kinds: set[str] = set()
    for seed, delayed in ((1, False), (2, True), (3, False), (4, True), (5, True)):
        fault = Fault()
        calls = history(seed, 16)
        run(calls, fault, "go on", seed=seed, delayed=delayed, maker="device" if seed in {3, 4} else "core")
        names |= set(fault.names)
        kinds |= {kind for kind, _ in calls}
    assert names >= {
        "allocate",
        "empty",
        "array",
        "store",
        "staging",
        "upload",
        "plan",
        "run",
        "record",
        "done",
        "wait",
    }
    assert kinds == set(KINDS)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_planner_that_cannot_be_made_leaves_nothing_behind(mode: str) -> None:
    counted = Fault()
    World(counted, seed=0, delayed=False, maker="core")
    assert counted.seen > 5
    for at in range(1, counted.seen + 1):
        with pytest.raises(Injected):
            World(Fault(at, mode), seed=0, delayed=False, maker="core")
    World(Fault(), seed=0, delayed=False, maker="core").call("copy", 3)


def test_memory_that_runs_out_in_a_decode_leaves_the_plan_held() -> None:
    fault = Fault()
    world = World(fault, seed=0, delayed=False, maker="core")
    world.call("copy_or_launch", 5)
    fault.at = fault.seen + 1
    launches = world.planner.stats.launches
    with pytest.raises(Injected, match="empty"):
        world.call("decode", 5)
    world.call("decode", 5)
    assert world.planner.stats.launches == launches + 3  # slots, decode and merge: the plan was there
