"""A straightforward builder and mlaplan over the same log, step by step: host time and what is asked of the device."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan.device import HostDevice, make_device
from mlaplan.planner import Planner
from mlaplan.runner import RunOptions, batch_of, planner_config, requests_of
from mlaplan.selfcheck import expected
from mlaplan.straightforward import Straightforward
from mlaplan.workload import Scheduler, Step

if TYPE_CHECKING:
    from mlaplan.device import Device
    from mlaplan.layout import PlanArrays

OPERATIONS = ("launches", "copies", "read_backs", "waits")
STRAIGHTFORWARD, PLANNED, IN_GRAPH = "straightforward", "mlaplan", "mlaplan, in graphs"


@dataclass(slots=True)
class Side:
    """One way of planning.

    Attributes:
        name: Its name.
        host_us: Host time of each step, in microseconds.
        operations: What each step asked of the device, by kind: `OPERATIONS`.
        wrong: First step whose arrays did not hold the plan, None where there is none.
    """

    name: str
    host_us: array[float] = field(default_factory=lambda: array("d"))
    operations: dict[str, array[int]] = field(default_factory=lambda: {name: array("q") for name in OPERATIONS})
    wrong: int | None = None

    def total(self, operation: str) -> int:
        """How often something was asked of the device."""
        return sum(self.operations[operation])


@dataclass(slots=True)
class Comparison:
    """What a log came to.

    Attributes:
        device: Where the arrays lay.
        sides: The ways of planning, in the same order for every comparison.
        steps: Steps.
        checked: Steps after which the arrays were compared with a plan from nothing.
    """

    device: str
    sides: tuple[Side, ...]
    steps: int = 0
    checked: int = 0


def where(result: Comparison) -> str:
    """Says where a comparison was made, and what its times leave out."""
    return "the host; work and waits of a device are not timed" if result.device == "cpu" else result.device


def compare(options: RunOptions, *, watch: Callable[[Iterable[Step]], Iterator[Step]] | None = None) -> Comparison:
    """Plans a log's steps in three ways, one after the other in each step.

    On the host device work for the device is queued and run outside of what is timed, for the host's time is what is
    compared; a wait counts there and costs nothing. On a GPU everything is in the time that it takes.

    Args:
        options: The log and the engine; see `RunOptions`. `check_every` says how often arrays are compared.
        watch: Wraps the iterator of steps, for a progress bar.

    Returns:
        Times and counts.

    Raises:
        OSError: The log cannot be opened.
        LogError: The log is not valid.
        ValueError: The planner cannot be made with these options.
        ImportError: The device needs a package that is not installed.
    """
    ways = [_make(options, way) for way in (_Straightforward, _Planned, _InGraph)]
    result = Comparison(ways[0].device.name, tuple(way.side for way in ways))
    steps: Iterator[Step] = itertools.islice(Scheduler(options.scheduler, requests_of(options)), options.steps)
    for step in steps if watch is None else watch(steps):
        due = bool(options.check_every) and step.index % options.check_every == 0
        for way in ways:
            way.step(step, check=due)
        result.steps += 1
        result.checked += due
    return result


def _make(options: RunOptions, way: type[_Way]) -> _Way:
    """Each way has a device of its own, so that what one has queued is not what another waits for."""
    device = make_device(options.device)
    return way(options, HostDevice(delayed=True) if device.name == "cpu" else device)


class _Way:
    """One way of planning, timed."""

    name = ""

    def __init__(self, options: RunOptions, device: Device) -> None:
        self.device = device
        self.side = Side(self.name)
        # As the planner completes the settings: what is installed decides some of them.
        self._config = Planner(planner_config(options), device=device).config

    def step(self, step: Step, *, check: bool) -> None:
        """Plans a step, adds what it took, and looks at the arrays if asked."""
        before = self._counts()
        prepared = self._prepare(step)
        self._drain()
        begin = time.perf_counter_ns()
        self._plan(prepared)
        self.side.host_us.append((time.perf_counter_ns() - begin) / 1000)
        for name, number in self._counts().items():
            self.side.operations[name].append(number - before[name])
        self._drain()
        if check and self.side.wrong is None and not self._holds(step, prepared):
            self.side.wrong = step.index

    def _drain(self) -> None:
        if isinstance(self.device, HostDevice):
            self.device.advance(self.device.submitted)
        else:
            waits = self.device.counters.waits
            self.device.synchronize()
            self.device.counters.waits = waits

    def _counts(self) -> dict[str, int]:
        raise NotImplementedError

    def _prepare(self, step: Step) -> Any:
        raise NotImplementedError

    def _plan(self, prepared: Any) -> None:
        raise NotImplementedError

    def _holds(self, step: Step, prepared: Any) -> bool:
        raise NotImplementedError

    def _equal(self, step: Step, arrays: PlanArrays) -> bool:
        found = [self.device.to_host(array) for array in arrays]
        wanted = expected(step.query_start_loc, step.seq_lens, found[0].size, self._config.params)
        works = int(wanted.work_indptr[-1])
        pairs = zip(found[:4], wanted[:4], strict=True)
        return all(map(np.array_equal, *zip(*pairs, strict=True))) and np.array_equal(
            found[4][:works], wanted.work_info[:works]
        )


class _Straightforward(_Way):
    name = STRAIGHTFORWARD

    def __init__(self, options: RunOptions, device: Device) -> None:
        super().__init__(options, device)
        self._builder = Straightforward(self._config, device)

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self._builder.counters, name) for name in OPERATIONS}

    def _prepare(self, step: Step) -> Any:
        return step.query_start_loc, self.device.array(step.query_start_loc), self.device.array(step.seq_lens)

    def _plan(self, prepared: Any) -> None:
        if self._builder.build(*prepared):
            self._builder.counters.waits += 1
            if not isinstance(self.device, HostDevice):
                self.device.synchronize()

    def _holds(self, step: Step, prepared: Any) -> bool:
        del prepared
        return self._equal(step, self._builder.arrays)


class _Planned(_Way):
    name = PLANNED

    def __init__(self, options: RunOptions, device: Device) -> None:
        super().__init__(options, device)
        self._planner = Planner(planner_config(options), device=device)
        self._last: Any = None

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self.device.counters, name) for name in OPERATIONS}

    def _prepare(self, step: Step) -> Any:
        return batch_of(step, self._planner), step

    def _plan(self, prepared: Any) -> None:
        self._last = self._planner.plan(prepared[0])

    def _holds(self, step: Step, prepared: Any) -> bool:
        del prepared
        reads = self.device.counters.read_backs
        equal = self._equal(step, self._last.arrays)
        self.device.counters.read_backs = reads
        return equal


class _InGraph(_Planned):
    """As an engine with captured graphs: a pure decode's plan is left to its graph, whose replay makes it."""

    name = IN_GRAPH

    def _plan(self, prepared: Any) -> None:
        batch, step = prepared
        self._last = self._planner.plan(batch, deferred=step.is_pure_decode)

    def _holds(self, step: Step, prepared: Any) -> bool:
        launches = self.device.counters.launches
        self._planner.refresh(self._last)  # what the graph's first node does
        self._drain()
        self.device.counters.launches = launches
        return super()._holds(step, prepared)
