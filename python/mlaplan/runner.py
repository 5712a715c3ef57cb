"""A request log, planned step by step and compared with plans and attention from the definition.

Every step's plan is compared with one made from nothing out of the device's own boundaries and lengths; on
sampled steps the planned decode is compared with dense attention. `mlaplan run` prints what comes out.
"""

from __future__ import annotations

import itertools
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field, fields

import numpy as np

from mlaplan.batch import Batch, Exact, UpperBound
from mlaplan.captured import CapturedSteps
from mlaplan.checks import DecodeChecker, Difference, check_plan
from mlaplan.config import PlannerConfig
from mlaplan.device import Counters
from mlaplan.plan import Plan
from mlaplan.planner import Planner
from mlaplan.workload import (
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerStats,
    Step,
    generated_log,
    read_log,
    rows_unchanged,
)

MAX_DIFFERENCES = 10  # a run stops here: what follows a wrong plan is wrong as well


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to run.

    Attributes:
        log: Path of a request log, or None for the built-in one.
        steps: Most steps to run; a shorter log ends the run.
        device: "auto", "cpu" or "cuda".
        scheduler: The simulated engine.
        topk: Longest row, in tokens.
        heads: Query heads of a rank.
        arch: GPU architecture that the plan is for.
        num_cus: Compute units, or None for the architecture's.
        q_dtype: Type of the queries.
        kv_dtype: Type of the KV cache.
        split_budget: aiter's `max_split_per_batch`, or None for the work-per-split rule.
        policy: Who shares the work out, see `mlaplan.PlannerConfig`.
        piece_tokens: Tokens of a piece under the policy "invariant".
        deferred: Plan pure decodes deferred and refresh them, as an engine does that runs without graphs.
        graphs: Run pure decodes of capture sizes through captured graphs that make their own plan. None for yes on a
            GPU; on the host a graph decodes as slowly as the reference does.
        check_every: Compare the plan of every n-th step; 0 for none.
        decode_every: Decode every n-th step, or the next one small enough; 0 for none.
    """

    log: str | None = None
    steps: int = 2000
    device: str = "auto"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    topk: int = 2048
    heads: int = 16
    arch: str = "gfx942"
    num_cus: int | None = None
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    split_budget: int | None = None
    policy: str = "aiter"
    piece_tokens: int = 256
    deferred: bool = False
    graphs: bool | None = None
    check_every: int = 1
    decode_every: int = 100

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("check_every", 0), ("decode_every", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
            if value > sys.maxsize:
                raise ValueError(f"{name} is {value}, must be at most {sys.maxsize}")


@dataclass(slots=True)
class RunResult:
    """What happened.

    Attributes:
        device: Device that the plans lay on.
        seconds: Wall time of the whole run, checks included.
        scheduler: What the scheduler did.
        operations: What `plan` and `refresh` asked the device for, checks not counted.
        steps: Steps planned.
        requests: Requests in them, summed over steps.
        rows: Live rows, summed over steps.
        padded_rows: Rows with padding, summed over steps.
        pure_decodes: Steps without a prompt.
        unchanged: Pure decodes in which no row's length changed, by definition and not by the planner's word.
        actions: How often each action was taken.
        reasons: How often each reason was given, by action.
        plan_us: Host time of each `plan` call, in microseconds.
        finish_ratios: Finish time of each checked schedule over its lower bound.
        replays: Steps that a captured graph ran.
        plans_checked: Plans compared.
        decodes_checked: Steps decoded and compared.
        decode_rows_checked: Rows of them compared with dense attention.
        differences: What differed, at most `MAX_DIFFERENCES`.
    """

    device: str
    seconds: float = 0.0
    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    operations: Counters = field(default_factory=Counters)
    steps: int = 0
    requests: int = 0
    rows: int = 0
    padded_rows: int = 0
    pure_decodes: int = 0
    unchanged: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    plan_us: array[float] = field(default_factory=lambda: array("d"))
    finish_ratios: array[float] = field(default_factory=lambda: array("d"))
    replays: int = 0
    plans_checked: int = 0
    decodes_checked: int = 0
    decode_rows_checked: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no check differed."""
        return not self.differences


def run(
    options: RunOptions,
    planner: Planner | None = None,
    *,
    watch: Callable[[Iterable[Step]], Iterator[Step]] | None = None,
) -> RunResult:
    """Plans and checks the steps of a log.

    Args:
        options: What to run.
        planner: Who plans, as `make_planner` makes it; made here by default.
        watch: Wraps the iterator of steps, for a progress bar.

    Returns:
        Counts, times and differences.

    Raises:
        OSError: The log cannot be opened.
        LogError: The log is not valid.
        ValueError: The planner cannot be made with these options.
        ImportError: The device needs a package that is not installed.
    """
    begin = time.perf_counter()
    scheduler = Scheduler(options.scheduler, requests_of(options))
    planner = make_planner(options) if planner is None else planner
    result = RunResult(
        device=planner.device.name,
        scheduler=scheduler.stats,
    )
    steps: Iterator[Step] = itertools.islice(scheduler, options.steps)
    loop = _Loop(options, planner, result)
    for step in steps if watch is None else watch(steps):
        loop.step(step)
        if len(result.differences) >= MAX_DIFFERENCES:
            break
    result.seconds = time.perf_counter() - begin
    return result


def requests_of(options: RunOptions) -> Iterator[Request]:
    """Returns the requests to run: those of the log, or generated ones without end."""
    return generated_log(options.scheduler.seed) if options.log is None else read_log(options.log)


def make_planner(options: RunOptions) -> Planner:
    """Returns a planner for everything that the scheduler can come up with."""
    return Planner(planner_config(options), device=options.device)


def planner_config(options: RunOptions) -> PlannerConfig:
    """Returns the settings of that planner."""
    scheduler = options.scheduler
    return PlannerConfig(
        max_rows=scheduler.max_rows,
        # A graph has as many requests as its rows hold, idle ones included.
        max_requests=max(scheduler.max_num_seqs, max(scheduler.graph_sizes, default=0) // scheduler.decode_tokens),
        topk=options.topk,
        heads=options.heads,
        arch=options.arch,
        num_cus=options.num_cus,
        q_dtype=options.q_dtype,
        kv_dtype=options.kv_dtype,
        capture_sizes=scheduler.graph_sizes,
        split_budget=options.split_budget,
        policy=options.policy,
        piece_tokens=options.piece_tokens,
    )


def batch_of(step: Step, planner: Planner) -> Batch:
    """Returns a step's batch with what its host knows, and the truth on the device."""
    lengths: Exact | UpperBound | None = None
    if step.host_seq_lens is not None:
        if step.lengths == "exact":
            lengths = Exact(step.host_seq_lens)
        else:
            lengths = UpperBound(step.host_seq_lens, max_rejects=step.max_rejects)
    return Batch(
        step.query_start_loc,
        lengths,
        padded_rows=step.padded_rows,
        device_query_start_loc=planner.device.array(step.query_start_loc),
        device_seq_lens=planner.device.array(step.seq_lens),
    )


class _Loop:
    """The state of a run between two steps."""

    def __init__(self, options: RunOptions, planner: Planner, result: RunResult) -> None:
        self._options = options
        self._planner = planner
        self._result = result
        self._before: Step | None = None
        self._decode_due = False
        self._decoder = DecodeChecker(planner, options.scheduler.block_size, options.scheduler.seed)
        graphs = planner.device.name != "cpu" if options.graphs is None else options.graphs
        self._captured = CapturedSteps(planner, options.scheduler, self._decoder.cache) if graphs else None

    def step(self, step: Step) -> None:
        """Plans a step, counts it and checks it."""
        options, result = self._options, self._result
        if options.decode_every and step.index % options.decode_every == 0:
            self._decode_due = True
        decodes = self._decode_due and self._decoder.fits(step)
        self._decode_due &= not decodes
        if self._captured is not None and self._captured.takes(step):
            plan, difference = self._replay(self._captured, step, decodes=decodes)
        else:
            plan, difference = self._run(step, decodes=decodes)
        self._count(step, plan)
        if difference is not None:
            result.differences.append(difference)

    def _run(self, step: Step, *, decodes: bool) -> tuple[Plan, Difference | None]:
        """Plans a step and decodes it eagerly, if it decodes."""
        batch = batch_of(step, self._planner)
        plan = self._plan(batch, deferred=self._options.deferred and step.is_pure_decode)
        difference = self._check_plan(plan, step)
        if not decodes:
            return plan, difference
        decoded, rows = self._decoder.check(plan, step)
        self._count_decode(rows)
        return plan, difference or decoded

    def _replay(self, captured: CapturedSteps, step: Step, *, decodes: bool) -> tuple[Plan, Difference | None]:
        """Replays a step's graph, which makes the plan and decodes."""
        values = self._decoder.inputs(step) if decodes else None
        batch = captured.load(step, values)
        plan = self._plan(batch, deferred=True, refresh=False)
        out, lse = captured.replay(plan, step)
        self._result.replays += 1
        difference = self._check_plan(plan, step)
        if values is None:
            return plan, difference
        decoded, rows = self._decoder.compare(step, values, out, lse)
        self._count_decode(rows)
        return plan, difference or decoded

    def _plan(self, batch: Batch, *, deferred: bool, refresh: bool = True) -> Plan:
        before = astuple(self._planner.device.counters)
        begin = time.perf_counter_ns()
        plan = self._planner.plan(batch, deferred=deferred)
        self._result.plan_us.append((time.perf_counter_ns() - begin) / 1000)
        if deferred and refresh:
            self._planner.refresh(plan)
        self._count_operations(before)
        return plan

    def _check_plan(self, plan: Plan, step: Step) -> Difference | None:
        options, result = self._options, self._result
        if not options.check_every or step.index % options.check_every != 0:
            return None
        difference = check_plan(self._planner, plan, step)
        result.plans_checked += 1
        if difference is None:
            result.finish_ratios.append(plan.quality().ratio)
        return difference

    def _count_decode(self, rows: int) -> None:
        self._result.decodes_checked += 1
        self._result.decode_rows_checked += rows

    def _count_operations(self, before: tuple[int, ...]) -> None:
        """Adds what planning asked the device for; checks ask for more, which is not the planner's doing."""
        after = self._planner.device.counters
        for counter, old in zip(fields(after), before, strict=True):
            more = getattr(after, counter.name) - old
            if more:
                setattr(
                    self._result.operations,
                    counter.name,
                    getattr(self._result.operations, counter.name) + more,
                )

    def _count(self, step: Step, plan: Plan) -> None:
        result = self._result
        result.steps += 1
        result.requests += step.num_requests
        result.rows += step.rows
        result.padded_rows += step.padded_rows
        result.pure_decodes += step.is_pure_decode
        result.unchanged += rows_unchanged(self._before, step, self._options.topk)
        result.actions[plan.decision.action] += 1
        for reason in plan.decision.reasons:
            result.reasons[plan.decision.action, reason] += 1
        self._before = step


def percentile(values: array[float], share: float) -> float | None:
    """Returns a percentile of what was measured, or None where nothing was."""
    return float(np.percentile(np.frombuffer(values, dtype=np.float64), share)) if values else None
