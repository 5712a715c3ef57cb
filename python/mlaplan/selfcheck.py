"""Compares what the buffers hold with a plan made from nothing: on demand, or every so many steps of a service.

Both read device memory and wait for the device, so they are outside the hot path, off by default, and counted in
`Stats.read_backs`. A difference is what a fault of planning, of a kernel or of the runtime looks like: some ROCm 7.2
releases corrupt graph replays (ROCm/clr#279), and only a look at the buffers tells that from a wrong plan.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mlaplan.batch import Exact, UpperBound
from mlaplan.checks import Difference, first_difference
from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.observer import LOG, unwatch, watch
from mlaplan.recorder import step_record
from mlaplan.reference.plan import plan as reference_plan
from mlaplan.trace.file import write_trace
from mlaplan.trace.header import Header
from mlaplan.trace.records import DumpRecord, Record, StepRecord

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlaplan._types import Int32Array
    from mlaplan.plan import Plan
    from mlaplan.planner import Planner

_RECENT = 16  # steps that a dump holds in front of the one that differs
_UNTOUCHED = -7


class Finding(NamedTuple):
    """What a comparison came to.

    Attributes:
        difference: The first difference, None where all is equal.
        dump: What the buffers held.
    """

    difference: Difference | None
    dump: DumpRecord


class _Pending(NamedTuple):
    """A step whose buffers are looked at when the next one comes."""

    plan: Plan
    step: int
    query_start_loc: Any
    seq_lens: Any


def check(planner: Planner, plan: Plan, *, dump: str | os.PathLike[str] | None = None) -> Difference | None:
    """Compares what the buffers hold now with a plan from nothing of what the device's boundaries and lengths hold now.

    For a replayed graph: call it behind the replay, before the arrays it was fed through are written again. Where the
    batch has no device arrays the host's lengths are taken for the truth.

    Args:
        planner: Whose buffers.
        plan: Its latest plan, which was made: by `plan`, by `refresh` or by a replay.
        dump: File to write what was found into, equal or not; must not be there yet. `mlaplan replay` reads it.

    Returns:
        The first difference, with the request's position in the batch; None where all is equal.

    Raises:
        ValueError: The plan is another planner's, or nobody knows its lengths.
        RuntimeError: A graph is being captured.
        OSError: The dump cannot be written.
    """
    if plan.planner is not planner:
        raise ValueError("plan belongs to another planner, whose buffers it describes")
    if planner.device.capture() is not None:
        raise RuntimeError("device memory cannot be read while a graph is captured")
    truth = _truth(plan)
    if truth is None:
        raise ValueError("the batch has neither device arrays nor lengths: nothing says what the plan should be")
    to_host = planner.device.to_host if plan.batch.on_device else np.array
    finding = compare(planner, plan, 0, to_host(truth[0]), to_host(truth[1]), "asked for")
    if dump is not None:
        _write(planner, dump, [step_record(plan, 0, 0, plan.decision.action == "deferred", 0), finding.dump])
    return finding.difference


def compare(
    planner: Planner, plan: Plan, index: int, query_start_loc: Int32Array, seq_lens: Int32Array, source: str
) -> Finding:
    """Reads a plan's arrays back and compares them with a plan from nothing.

    Args:
        planner: Whose buffers.
        plan: Whose arrays.
        index: Number of the step, for the report.
        query_start_loc: Boundaries that the plan should be of, on the host. Shape (R + 1,), int32.
        seq_lens: Lengths that it should be of, on the host. Shape (R,), int32.
        source: Who asks, see `mlaplan.trace.records.SOURCES`.
    """
    params = planner.params
    found = PlanArrays(*(planner.device.to_host(array) for array in plan.arrays))
    wanted = expected(query_start_loc, seq_lens, found.request_ids.size, params)
    # As many works as are right, and as many as the buffers claim, if they can hold them.
    works = min(max(int(wanted.work_indptr[-1]), int(found.work_indptr[-1])), found.work_info.shape[0])
    dump = DumpRecord(
        index=index,
        source=source,
        query_start_loc=np.ascontiguousarray(query_start_loc, np.int32),
        seq_lens=np.ascontiguousarray(seq_lens, np.int32),
        num_cus=params.num_cus,
        fold=params.fold,
        arrays=found._replace(work_info=found.work_info[:works]),
    )
    return Finding(difference_of(dump, params), dump)


def expected(query_start_loc: Int32Array, seq_lens: Int32Array, rows: int, params: PlanParams) -> PlanArrays:
    """Returns the arrays of a plan made from nothing.

    Args:
        query_start_loc: Boundaries. Shape (R + 1,), int32.
        seq_lens: Lengths. Shape (R,), int32.
        rows: Rows of the class.
        params: What the plan depends on beside the batch.
    """
    layout = Layout.of(rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
    arrays = PlanArrays(*(np.full(shape, _UNTOUCHED, np.int32) for shape in layout.shapes))
    reference_plan(query_start_loc, seq_lens, arrays, params)
    return arrays


def difference_of(dump: DumpRecord, params: PlanParams) -> Difference | None:
    """Returns the first difference between a dump and a plan made from nothing; None where all is equal."""
    wanted = expected(dump.query_start_loc, dump.seq_lens, dump.arrays.request_ids.size, params)
    different = first_difference(dump.arrays, wanted, params.fold)
    if different is None:
        return None
    name, index, row = different
    have, want = getattr(dump.arrays, name), getattr(wanted, name)
    request = None
    boundaries = np.maximum.accumulate(np.clip(dump.query_start_loc, 0, None))
    if row is not None and row < boundaries[-1]:
        request = int(np.searchsorted(boundaries[1:], row, side="right"))
    actual = int(have[index]) if index[0] < have.shape[0] else 0
    return Difference(dump.index, name, index, row, actual, int(want[index]), request)


class SelfCheck:
    """Looks at the buffers every so many steps, when the next step comes: then eager work and replays are behind them.

    The boundaries and lengths of such a step are copied on the device when it is planned, and again when `refresh`
    makes its plan, and read back with the buffers. The first difference is reported with one line in the log and, if a
    file is named, a dump that `mlaplan replay` reads; later ones are counted.

    A step is skipped, and counted, if a graph is being captured, if its plan became a node of a graph, if nobody knows
    its lengths, if an older plan was made again, or if its own was, from lengths that the device changed
    (`Planner.remake`). Where a graph does that to itself, as a draft loop captured in one graph does, the host cannot
    know which lengths the last plan is of, so from such a capture on every step is skipped; `Planner.check` still works
    there.

    Attributes:
        every: Steps from one check to the next.
        checks: Comparisons made.
        skipped: Steps that were due and could not be compared.
        differences: Comparisons that differed.
        first: The first difference.
        dump: File of the dump, once it is written.
    """

    def __init__(
        self,
        planner: Planner,
        every: int,
        *,
        dump: str | os.PathLike[str] | None = None,
        log: logging.Logger = LOG,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Begins to check.

        Args:
            planner: Whose buffers.
            every: Steps from one check to the next, at least 1.
            dump: File to write the first difference into; it must not be there yet.
            log: Where to report.
            reading: Makes a context for whatever waits for the device, where an engine forbids that elsewhere.

        Raises:
            ValueError: `every` is below 1.
        """
        if every < 1:
            raise ValueError(f"every is {every}, must be at least 1")
        self.every = every
        self.checks = self.skipped = self.differences = 0
        self.first: Difference | None = None
        self.dump: Path | None = None
        self._target = None if dump is None else Path(dump)
        self._planner = planner
        self._log = log
        self._reading = reading
        self._steps = 0
        self._pending: _Pending | None = None
        self._recent: deque[StepRecord] = deque(maxlen=_RECENT)
        self._remade_in_graphs = False
        watch(planner, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Looks at a step that is due, and ends the checks."""
        try:
            self.before()
        finally:
            unwatch(self._planner, self)

    def before(self) -> None:
        """See `Listener.before`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        device = self._planner.device
        if self._remade_in_graphs or device.capture() is not None:
            self.skipped += 1
            return
        to_host = device.to_host if pending.plan.batch.on_device else np.array
        with self._reading():
            boundaries, lengths = to_host(pending.query_start_loc), to_host(pending.seq_lens)
            finding = compare(self._planner, pending.plan, pending.step, boundaries, lengths, "self-check")
        self.checks += 1
        made, differed = self._planner.self_checks
        self._planner.self_checks = made + 1, differed + (finding.difference is not None)
        if finding.difference is not None:
            self.differences += 1
            if self.first is None:
                self.first = finding.difference
                self._report(finding)

    def dropped(self) -> None:
        """See `Listener.dropped`."""
        self._pending = None

    def failed(self) -> None:
        """See `Listener.failed`."""

    def planned(self, plan: Plan, deferred: bool, host_ns: int) -> None:  # noqa: FBT001
        """See `Listener.planned`."""
        index, self._steps = self._steps, self._steps + 1
        if self._target is not None and self.first is None:
            self._recent.append(step_record(plan, index, 0, deferred, host_ns))
        if self._steps % self.every:
            return
        truth = None if self._planner.device.capture() is not None else _truth(plan)
        if truth is None:
            self.skipped += 1
            return
        # The arrays that a step is fed through are written again before the next one is planned.
        snapshot = self._planner.device.snapshot if plan.batch.on_device else np.array
        self._pending = _Pending(plan, index, snapshot(truth[0]), snapshot(truth[1]))

    def refreshed(self, plan: Plan) -> None:
        """See `Listener.refreshed`.

        A plan is of what the device's arrays hold when it is made, which may be another batch than when it was planned.
        Where another plan was made, or this one only became a node of a graph, the buffers do not hold the step's.
        """
        pending = self._pending
        if pending is None:
            return
        if plan is not pending.plan or plan.captured is not None:
            self._pending = None
            self.skipped += 1
            return
        snapshot = self._planner.device.snapshot
        boundaries, lengths = snapshot(plan.device_query_start_loc), snapshot(plan.device_seq_lens)
        self._pending = pending._replace(query_start_loc=boundaries, seq_lens=lengths)

    def remade(self, plan: Plan) -> None:
        """See `Listener.remade`."""
        if plan.planner.device.capture() is not None and not self._remade_in_graphs:
            self._remade_in_graphs = True
            self._log.info("mlaplan: no self-checks: a graph makes plans of lengths that it changes itself")
        if self._pending is not None:
            self._pending = None
            self.skipped += 1

    def invalidated(self) -> None:
        """See `Listener.invalidated`. What the buffers hold by then is nobody's fault."""
        if self._pending is not None:
            self._pending = None
            self.skipped += 1

    def _report(self, finding: Finding) -> None:
        where = "no dump was asked for"
        if self._target is not None:
            # The step after the one that differs is not planned yet: this is the last of the recent ones.
            *earlier, last = self._recent
            boundaries, lengths = finding.dump.query_start_loc, finding.dump.seq_lens
            last = replace(last, device_query_start_loc=boundaries, device_seq_lens=lengths)
            try:
                _write(self._planner, self._target, [*earlier, last, finding.dump])
                self.dump, where = self._target, f"dump in {self._target}"
            except (OSError, ValueError) as error:
                where = f"no dump: {type(error).__name__}: {error}"
        self._log.error(
            "mlaplan: the buffers do not hold the plan of the lengths on the device: %s (%s; reported once)",
            finding.difference,
            where,
        )


def _truth(plan: Plan) -> tuple[Any, Any] | None:
    """Boundaries and lengths that a plan should be of: the device's where the batch has them, else the host's."""
    batch = plan.batch
    if batch.on_device:
        return batch.device_query_start_loc, batch.device_seq_lens
    if isinstance(batch.lengths, Exact):
        return batch.query_start_loc, batch.lengths.seq_lens
    if isinstance(batch.lengths, UpperBound):
        # Every row of it is as long as topk allows, or there would be no plan without device arrays.
        return batch.query_start_loc, batch.lengths.bound
    return None


def _write(planner: Planner, path: str | os.PathLike[str], records: list[Record]) -> None:
    steps = sum(isinstance(record, StepRecord) for record in records)
    write_trace(path, Header.of(planner, "self-check"), records, steps=steps)
