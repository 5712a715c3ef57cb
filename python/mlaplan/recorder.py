"""Records a planner's steps into a trace while it serves."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from mlaplan.batch import Exact, UpperBound
from mlaplan.observer import LOG, unwatch, watch
from mlaplan.trace.file import create, pack_end, pack_header, pack_records, write_all
from mlaplan.trace.header import Header
from mlaplan.trace.records import ChunkEncoder, EventRecord, StepRecord

if TYPE_CHECKING:
    from typing_extensions import Self

    from mlaplan.plan import Plan
    from mlaplan.planner import Planner

# A chunk is packed by the thread that plans: large enough to pack well, small enough to take a few milliseconds.
_CHUNK_WORDS = 1 << 16
_CHUNK_RECORDS = 256
_CHUNK_US = 5_000_000  # what a process that is killed may lose
_END_BYTES = 256  # kept free for the last chunk
_OPEN: weakref.WeakSet[Recorder] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for recorder in list(_OPEN):
        recorder.close()


class Recorder:
    """Writes what a planner is given and decides into a trace file, until it is closed or the file is full.

    No token content, only boundaries, lengths and decisions. Steps are kept in memory and written a chunk at a time.
    What goes wrong while writing ends the recording with one line in the log; planning goes on.

    Example:
        >>> import numpy as np, mlaplan, pathlib, tempfile
        >>> planner = mlaplan.Planner(mlaplan.PlannerConfig(max_rows=64, max_requests=64), device="cpu")
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "steps.trace"
        >>> with planner.record(path):
        ...     plan = planner.plan(mlaplan.Batch(np.array([0, 1], np.int32), mlaplan.Exact(np.array([9], np.int32))))
        >>> from mlaplan.trace import TraceReader
        >>> [(record.index, record.action) for record in TraceReader(path).records()]
        [(0, 'copy')]

    Attributes:
        steps: Steps seen.
        written: Steps in the file or, for `keep="last"`, kept for it.
        error: What ended the recording early; None where nothing did.
    """

    def __init__(
        self,
        planner: Planner,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 64 << 20,
        keep: str = "first",
        read_lengths: bool = False,
        overwrite: bool = False,
        log: logging.Logger = LOG,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Begins to record.

        Args:
            planner: Whose steps.
            path: The file; nothing else is written. Its folder must be there.
            max_bytes: Bytes that the file may have, at least 64 KiB.
            keep: Which steps to keep when there are too many: "first" stops at the end of the file, "last" holds the
                packed steps in memory and writes the file when recording ends.
            read_lengths: Also keep what the device's boundaries and lengths hold, read back in each step. The host then
                waits for the device in each step: for hunting faults.
            overwrite: Whether a file that is there may be replaced.
            log: Where to say that recording ended.
            reading: Makes a context for what `read_lengths` reads, where an engine forbids waits elsewhere.

        Raises:
            FileExistsError: The file is there, and may not be replaced.
            OSError: It cannot be written; symbolic links are refused.
            ValueError: An argument is out of range.
        """
        if keep not in ("first", "last"):
            raise ValueError(f"keep is {keep!r}, known are 'first' and 'last'")
        if max_bytes < 1 << 16:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least {1 << 16}")
        self.steps = self.written = 0
        self.error: Exception | None = None
        self.path = Path(path)
        self._planner = planner
        self._room = max_bytes - _END_BYTES
        self._ring = keep == "last"
        self._read_lengths = read_lengths
        self._log = log
        self._reading = reading
        self._process = os.getpid()
        self._begin = time.monotonic_ns()
        self._pending: list[StepRecord | EventRecord] = []
        self._pending_words = 0
        self._kept: deque[tuple[bytes, int]] = deque()
        head = pack_header(Header.of(planner))
        self._file: IO[bytes] | None = create(self.path, overwrite=overwrite)
        try:
            write_all(self._file, head)
        except OSError:
            self._file.close()
            raise
        self._room -= len(head)
        watch(planner, self)
        _OPEN.add(self)

    @property
    def recording(self) -> bool:
        """Whether steps are still recorded."""
        return self._file is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is left and ends the recording. Safe to call more than once; never raises."""
        if self._file is None:
            return
        if os.getpid() != self._process:
            # A forked copy: the file is the parent's.
            self._file = None
            unwatch(self._planner, self)
            return
        self._guarded(self._end)

    def __del__(self) -> None:
        """A planner that nobody holds any more takes its recorder along: what it kept is written first."""
        if getattr(self, "_file", None) is not None:
            self.close()

    def before(self) -> None:
        """See `Listener.before`."""

    def dropped(self) -> None:
        """See `Listener.dropped`."""
        self._stop()

    def failed(self) -> None:
        """See `Listener.failed`. What was refused changed nothing and is not kept."""

    def planned(self, plan: Plan, deferred: bool, host_ns: int) -> None:  # noqa: FBT001
        """See `Listener.planned`."""
        index, self.steps = self.steps, self.steps + 1
        self._add(step_record(plan, index, self._now(), deferred, host_ns, self._truth(plan)))

    def refreshed(self, plan: Plan) -> None:
        """See `Listener.refreshed`."""
        self._event("refreshed" if plan.captured is None else "refreshed in a graph")

    def remade(self, plan: Plan) -> None:
        """See `Listener.remade`."""
        self._event("remade" if plan.planner.device.capture() is None else "remade in a graph")

    def invalidated(self) -> None:
        """See `Listener.invalidated`."""
        self._event("invalidated")

    def _event(self, what: str) -> None:
        self._add(EventRecord(index=self.steps, time_us=self._now(), what=what))

    def _now(self) -> int:
        return (time.monotonic_ns() - self._begin) // 1000

    def _truth(self, plan: Plan) -> tuple[Any, Any]:
        device, batch = self._planner.device, plan.batch
        if not self._read_lengths or not batch.on_device or device.capture() is not None:
            return None, None
        with self._reading():
            return device.to_host(batch.device_query_start_loc), device.to_host(batch.device_seq_lens)

    def _add(self, record: StepRecord | EventRecord) -> None:
        if self._file is None or os.getpid() != self._process:
            self.close()
            return
        pending = self._pending
        pending.append(record)
        if isinstance(record, StepRecord):
            self._pending_words += 4 * record.query_start_loc.size
        if (
            len(pending) >= _CHUNK_RECORDS
            or self._pending_words >= _CHUNK_WORDS
            or record.time_us - pending[0].time_us > _CHUNK_US
        ):
            self._guarded(self._flush)

    def _guarded(self, action: Any) -> None:
        try:
            action()
        except (OSError, ValueError, MemoryError) as error:
            self._stop()
            self.error = error
            self._log.warning("mlaplan: recording to %s ended: %s: %s", self.path, type(error).__name__, error)

    def _flush(self) -> None:
        """Packs the chunk; writes it, or keeps it and drops the oldest."""
        if self._file is None or not self._pending:
            return
        encoder = ChunkEncoder()
        for record in self._pending:
            encoder.add(record)
        packed, steps = pack_records(encoder), sum(isinstance(record, StepRecord) for record in self._pending)
        self._pending, self._pending_words = [], 0
        if not self._ring and len(packed) > self._room:
            self._log.info("mlaplan: recording to %s ended, the file is full", self.path)
            self._finish(full=True)
            return
        self._room -= len(packed)
        if not self._ring:
            write_all(self._file, packed)
            self.written += steps
            return
        self.written += steps
        self._kept.append((packed, steps))
        while self._room < 0 and self._kept:
            dropped, lost = self._kept.popleft()
            self._room += len(dropped)
            self.written -= lost

    def _end(self) -> None:
        self._flush()
        self._finish(full=False)

    def _finish(self, *, full: bool) -> None:
        if self._file is None:
            return
        for packed, _ in self._kept:
            write_all(self._file, packed)
        dropped = self.steps - self.written if self._ring else 0
        write_all(self._file, pack_end(self.written, full=full, dropped=dropped))
        self._stop()

    def _stop(self) -> None:
        file, self._file = self._file, None
        self._pending, self._kept = [], deque()
        unwatch(self._planner, self)
        _OPEN.discard(self)
        if file is not None:
            with suppress(OSError):  # without a buffer there is nothing left to lose
                file.close()


def step_record(
    plan: Plan,
    index: int,
    time_us: int,
    deferred: bool,  # noqa: FBT001
    host_ns: int,
    truth: tuple[Any, Any] = (None, None),
) -> StepRecord:
    """Returns the record of a step, its arrays copied: the caller may write to them as soon as `plan` is back.

    Args:
        plan: The plan.
        index: Number of the step.
        time_us: When it was.
        deferred: Whether it was left to its consumer.
        host_ns: Host time of the call.
        truth: What the device's boundaries and lengths hold, None where nobody has looked.
    """
    batch, decision = plan.batch, plan.decision
    kind, lengths, max_rejects = "unknown", None, 0
    if isinstance(batch.lengths, Exact):
        kind, lengths = "exact", batch.lengths.seq_lens.copy()
    elif isinstance(batch.lengths, UpperBound):
        kind, lengths, max_rejects = "bound", batch.lengths.bound.copy(), int(batch.lengths.max_rejects)
    return StepRecord(
        index=index,
        time_us=time_us,
        host_ns=host_ns,
        query_start_loc=batch.query_start_loc.copy(),
        kind=kind,
        lengths=lengths,
        max_rejects=max_rejects,
        padded_rows=None if batch.padded_rows is None else int(batch.padded_rows),
        boundaries_exact=bool(batch.boundaries_exact),
        has_device_boundaries=batch.device_query_start_loc is not None,
        has_device_lengths=batch.device_seq_lens is not None,
        deferred=deferred,
        action=decision.action,
        reasons=decision.reasons,
        rows=decision.rows,
        row_class=decision.row_class,
        num_works=plan.num_works,
        split_budget=plan.split_budget,
        device_query_start_loc=truth[0],
        device_seq_lens=truth[1],
    )
