"""Plans the steps of a trace again, as recorded or with other settings, and says what comes out differently."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan.batch import Batch, Exact, UpperBound
from mlaplan.checks import Difference
from mlaplan.device import Counters
from mlaplan.layout import Layout
from mlaplan.planner import Planner
from mlaplan.selfcheck import compare, difference_of
from mlaplan.trace.records import DumpRecord, EventRecord, Record, StepRecord, TraceError

if TYPE_CHECKING:
    from mlaplan._types import Int32Array
    from mlaplan.config import PlannerConfig
    from mlaplan.costs import CostTable
    from mlaplan.plan import Plan
    from mlaplan.trace.file import TraceReader

MOST_WORDS = 1 << 27  # of one plan's arrays; 512 MiB
MOST_DIFFERENCES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What to do otherwise than it was recorded.

    Attributes:
        settings: Settings of the planner by name, as in `PlannerConfig`.
        lengths: What the host knows of the lengths: "exact", "bound" or "device" (nothing); None as recorded. Steps
            whose lengths nobody recorded stay as they are.
        max_rejects: How far a bound may be too large; None as recorded.
        deferred: Whether plans are deferred; None as recorded.
        steps: Most steps to plan; None for all.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    lengths: str | None = None
    max_rejects: int | None = None
    deferred: bool | None = None
    steps: int | None = None

    @property
    def changes(self) -> bool:
        """Whether anything but the number of steps is otherwise."""
        return bool(self.settings) or any(
            value is not None for value in (self.lengths, self.max_rejects, self.deferred)
        )


@dataclass(slots=True)
class Replayed:
    """What planning a trace came to.

    Attributes:
        device: Where it was planned.
        config: The planner's settings.
        steps: Steps planned.
        stopped: Whether there may be more of them in the trace.
        requests: Requests in them, summed over steps.
        rows: Live rows, summed over steps.
        recorded_actions: How often each action was recorded.
        recorded_ns: Recorded host time of each call.
        actions: How often each action was decided now.
        same: Steps with the recorded action and reasons.
        first_other: The first step that was decided otherwise, with its decision; None where there is none.
        operations: What planning asked the device for.
        graph_plans: Deferred plans that were left to graphs, so nothing was launched for them.
        plan_us: Host time of each call.
        finish: Finish time of each plan whose lengths are known.
        bound: Its lower bound.
        blind: Steps whose lengths nobody recorded: nothing can be said of their schedules.
        compared: Plans compared with one from nothing.
        differences: Those that differ, the first few.
        dumps: Dumps in the trace.
        dump_differences: The first difference of each dump that is not the plan it should be.
    """

    device: str
    config: PlannerConfig
    steps: int = 0
    stopped: bool = False
    requests: int = 0
    rows: int = 0
    recorded_actions: Counter[str] = field(default_factory=Counter)
    recorded_ns: array[float] = field(default_factory=lambda: array("d"))
    actions: Counter[str] = field(default_factory=Counter)
    same: int = 0
    first_other: tuple[StepRecord, str, tuple[str, ...]] | None = None
    operations: Counters = field(default_factory=Counters)
    graph_plans: int = 0
    plan_us: array[float] = field(default_factory=lambda: array("d"))
    finish: array[float] = field(default_factory=lambda: array("d"))
    bound: array[float] = field(default_factory=lambda: array("d"))
    blind: int = 0
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    dumps: int = 0
    dump_differences: list[Difference] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Finish times over their lower bounds, both summed."""
        return sum(self.finish) / sum(self.bound) if sum(self.bound) else 1.0

    @property
    def worst_ratio(self) -> float:
        """The largest ratio of a plan."""
        return max((f / b for f, b in zip(self.finish, self.bound, strict=True) if b), default=1.0)


def replay(
    reader: TraceReader,
    what_if: WhatIf | None = None,
    *,
    device: Any = "cpu",
    check_every: int = 1,
    costs: CostTable | None = None,
    watch: Callable[[Iterable[Record]], Iterator[Record]] | None = None,
) -> Replayed:
    """Plans the steps of a trace, and compares its dumps with plans made from nothing.

    Args:
        reader: The trace. What it cannot read afterwards is in `reader.damage`.
        what_if: What to do otherwise.
        device: Where to plan, see `mlaplan.device.make_device`.
        check_every: Compare every so many plans with one from nothing; 0 for none.
        costs: What to price every schedule by, against a bound for all compute units, so that schedules of two policies
            can be compared; None for each policy's own, see `Plan.quality`.
        watch: Wraps the iterator of records, for a progress bar.

    Returns:
        Counts, times and differences.

    Raises:
        TraceError: A step or a dump does not belong to the trace's settings.
        ValueError: `what_if` asks for settings that do not hold.
        ImportError: The device needs a package that is not installed.
    """
    what_if = what_if or WhatIf()
    planner = make_planner(reader.header.config, what_if.settings, device)
    loop = _Loop(planner, reader.header.config, what_if, check_every, costs)
    records = reader.records()
    for record in records if watch is None else watch(records):
        if what_if.steps is not None and loop.result.steps >= what_if.steps and isinstance(record, StepRecord):
            loop.result.stopped = True
            break
        loop.take(record)
    loop.end()
    return loop.result


def make_planner(recorded: PlannerConfig, settings: dict[str, Any], device: Any) -> Planner:
    """Returns a planner with recorded settings and a few others, for plans that nobody decodes from.

    Raises:
        TraceError: The recorded settings ask for more memory than a replay takes.
        ValueError: The settings do not hold.
    """
    maker = "core" if recorded.schedule_maker == "aiter" else recorded.schedule_maker
    config = replace(recorded, **{"backend": "none", "schedule_maker": maker, "staging_slots": 2, **settings})
    check_size(config)
    return Planner(config, device=device)


def check_size(config: PlannerConfig) -> None:
    """Refuses settings whose arrays pass `MOST_WORDS`.

    Raises:
        TraceError: They do.
    """
    params = config.resolved(None).params
    layout = Layout.of(config.row_classes[-1], num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
    if layout.words > MOST_WORDS:
        raise TraceError(f"a plan has up to {layout.words:,} words, a replay takes at most {MOST_WORDS:,}")


class _Loop:
    """The state of a replay between two records."""

    def __init__(
        self,
        planner: Planner,
        recorded: PlannerConfig,
        what_if: WhatIf,
        check_every: int,
        costs: CostTable | None,
    ) -> None:
        self.result = Replayed(planner.device.name, planner.config)
        self._planner = planner
        self._recorded = recorded.resolved(None)
        self._what_if = what_if
        self._check_every = check_every
        self._costs = None if costs is None else costs.core
        self._last: tuple[StepRecord, Plan] | None = None  # what has not been looked at yet
        self._plan: Plan | None = None  # what events are about
        self._unmade = False  # whether the last plan is deferred and nobody has refreshed it yet
        self._again = False

    def take(self, record: Record) -> None:
        """Takes the next record."""
        if isinstance(record, StepRecord):
            self.end()
            self._step(record)
        elif isinstance(record, EventRecord):
            self._event(record)
        else:
            self._dump(record)

    def end(self) -> None:
        """Looks at the last plan, after whatever happened to it."""
        if self._last is None:
            return
        (step, plan), self._last = self._last, None
        truth = step.truth
        if truth is None:
            self.result.blind += 1
            return
        if self._unmade:
            if not plan.batch.on_device:
                return
            # The recorded one was made by a graph, which is not the host's doing and is not counted.
            self.result.graph_plans += 1
            self._planner.refresh(plan)
        finish, bound = self._priced(plan)
        self.result.finish.append(finish)
        self.result.bound.append(bound)
        if self._check_every and (self.result.steps - 1) % self._check_every == 0:
            finding = compare(self._planner, plan, step.index, *truth, "asked for")
            self.result.compared += 1
            if finding.difference is not None and len(self.result.differences) < MOST_DIFFERENCES:
                self.result.differences.append(finding.difference)

    def _priced(self, plan: Plan) -> tuple[float, float]:
        """Finish time and lower bound of a plan."""
        if self._costs is None:
            return plan.quality()
        self._planner.refresh(plan)
        _, indptr, work_indptr, _, work_info = (self._planner.device.to_host(array) for array in plan.arrays)
        works = np.ascontiguousarray(work_info[: work_indptr[-1]]).reshape(-1)
        finish = self._costs.finish_time(work_indptr, works)
        params = self._planner.params
        return finish, self._costs.lower_bound(np.diff(indptr), params.num_cus, fold=params.fold)

    def _step(self, step: StepRecord) -> None:
        result, planner = self.result, self._planner
        deferred = step.deferred if self._what_if.deferred is None else self._what_if.deferred
        try:
            batch = batch_of(step, planner, self._what_if, deferred=deferred)
            before = _numbers(planner)
            begin = time.perf_counter_ns()
            plan = planner.plan(batch, deferred=deferred)
            result.plan_us.append((time.perf_counter_ns() - begin) / 1000)
            self._count(before)
            self._unmade = deferred
            if deferred and not step.deferred:  # nobody recorded who made it
                self._refresh(plan)
        except (TypeError, ValueError) as error:
            raise TraceError(f"step {step.index} cannot be planned: {error}") from error
        self._last, self._plan = (step, plan), plan
        result.steps += 1
        result.requests += step.num_requests
        result.rows += plan.decision.rows
        result.recorded_actions[step.action] += 1
        result.recorded_ns.append(step.host_ns)
        result.actions[plan.decision.action] += 1
        if (plan.decision.action, plan.decision.reasons) == (step.action, step.reasons):
            result.same += 1
        elif result.first_other is None:
            result.first_other = step, plan.decision.action, plan.decision.reasons

    def _event(self, event: EventRecord) -> None:
        plan = self._plan
        if event.what == "invalidated":
            self.end()  # afterwards the buffers hold nothing
            self._planner.invalidate()
        elif event.what.startswith("remade"):
            self._again = True
        elif plan is not None:
            if self._again and plan.batch.on_device:
                plan.generation = -1
            self._again = False
            if event.what == "refreshed" and plan.batch.on_device:
                self._refresh(plan)

    def _refresh(self, plan: Plan) -> None:
        before = _numbers(self._planner)
        self._planner.refresh(plan)
        self._count(before)
        self._unmade = False

    def _dump(self, dump: DumpRecord) -> None:
        params = self._recorded.params
        if (dump.num_cus, dump.fold) != (params.num_cus, params.fold):
            raise TraceError(
                f"the dump of step {dump.index} has {dump.num_cus} compute units and fold {dump.fold}, "
                f"the trace {params.num_cus} and {params.fold}"
            )
        if dump.arrays.request_ids.size not in self._recorded.row_classes:
            raise TraceError(
                f"the dump of step {dump.index} is of {dump.arrays.request_ids.size} rows, which is no class"
            )
        self.result.dumps += 1
        different = difference_of(dump, params)
        if different is not None:
            self.result.dump_differences.append(different)

    def _count(self, before: dict[str, int]) -> None:
        done = self.result.operations
        for name, number in _numbers(self._planner).items():
            setattr(done, name, getattr(done, name) + number - before[name])


def batch_of(step: StepRecord, planner: Planner, what_if: WhatIf, *, deferred: bool = False) -> Batch:
    """Returns a recorded step's batch, with what its host is to know.

    Args:
        step: The step.
        planner: On whose device its arrays are made, where it had any or needs them.
        what_if: What the host knows otherwise.
        deferred: Whether the plan is deferred, which needs them.
    """
    truth = step.truth
    lengths = _as_recorded(step, what_if.max_rejects)
    if what_if.lengths is not None and truth is not None:
        lengths = _as_asked(step, truth[1], what_if)
    # What the host knew then may not do under other settings.
    unsure = what_if.changes and isinstance(lengths, UpperBound)
    on_device = (step.has_device_boundaries and step.has_device_lengths) or deferred or lengths is None or unsure
    arrays: dict[str, Any] = {}
    if on_device:
        boundaries, true_lengths = truth or (step.query_start_loc, step.lengths)
        if true_lengths is None:
            true_lengths = np.diff(boundaries)  # as short as lengths can be; nobody looks at this plan
        arrays = {
            "device_query_start_loc": planner.device.array(np.ascontiguousarray(boundaries, np.int32)),
            "device_seq_lens": planner.device.array(np.ascontiguousarray(true_lengths, np.int32)),
        }
    return Batch(step.query_start_loc, lengths, step.padded_rows, step.boundaries_exact, **arrays)


def _as_recorded(step: StepRecord, max_rejects: int | None) -> Exact | UpperBound | None:
    if step.lengths is None:
        return None
    if step.kind == "exact":
        return Exact(step.lengths)
    return UpperBound(step.lengths, step.max_rejects if max_rejects is None else max_rejects)


def _as_asked(step: StepRecord, true_lengths: Int32Array, what_if: WhatIf) -> Exact | UpperBound | None:
    if what_if.lengths == "device":
        return None
    if what_if.lengths == "exact":
        return Exact(true_lengths)
    rejects = step.max_rejects if what_if.max_rejects is None else what_if.max_rejects
    excess = np.zeros_like(true_lengths)
    if step.kind == "bound" and step.lengths is not None:
        excess = np.clip(step.lengths - true_lengths, 0, rejects).astype(np.int32)
    return UpperBound(true_lengths + excess, rejects)


def _numbers(planner: Planner) -> dict[str, int]:
    counters = planner.device.counters
    return {entry.name: getattr(counters, entry.name) for entry in fields(counters)}
