"""What a trace holds: steps, what happened between them, and dumps of the buffers. `docs/traces.md` has the format.

A record is two int32 words, its tag and the length of what follows, and then int32 words. Records of one chunk share a
table of decisions, and a step's arrays may be differences to those of the step before it in the chunk, so a chunk is
read whole and needs no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from mlaplan._types import Int32Array
from mlaplan.layout import PlanArrays

STEP, EVENT, DUMP = 1, 2, 3
KINDS = ("unknown", "exact", "bound")
EVENTS = ("refreshed", "refreshed in a graph", "remade", "remade in a graph", "invalidated")
SOURCES = ("asked for", "self-check")

_EXACT_BOUNDARIES, _DEVICE_BOUNDARIES, _DEVICE_LENGTHS, _DEFERRED, _DELTA, _TRUTH = (1 << bit for bit in range(6))
_STEP_WORDS, _EVENT_WORDS, _DUMP_WORDS = 16, 5, 9
_NONE = -(2**31)  # where a number may be missing
_INT32_MAX = 2**31 - 1


class TraceError(ValueError):
    """A file that is no trace, or holds what no trace holds. The message names the file and what is wrong."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepRecord:
    """One call of `Planner.plan`: what it was given, and what was decided. For R requests.

    Attributes:
        index: Number of the step since recording began, from 0.
        time_us: When it was, in microseconds since recording began.
        host_ns: Host time of the call, in nanoseconds; 2^31 - 1 for 2.1 s and more.
        query_start_loc: The host's boundaries. Shape (R + 1,), int32.
        kind: What the host knew of the lengths: "exact", "bound" or "unknown".
        lengths: The host's lengths or bounds. Shape (R,), int32; None where it knew none.
        max_rejects: How far a bound may be too large; 0 for other kinds.
        padded_rows: Rows that the consumer sees, as given; None for no padding.
        boundaries_exact: Whether the host's boundaries are the device's.
        has_device_boundaries: Whether the device's `query_start_loc` was given.
        has_device_lengths: Whether the device's `seq_lens` was given.
        deferred: Whether the plan was left to its first consumer.
        action: The action decided on.
        reasons: Why.
        rows: Live rows as the host counts them.
        row_class: Position of the row class among the planner's.
        num_works: Works of the schedule where the host made it, else None.
        split_budget: Split budget where the host made the schedule, else None; -1 for no limit.
        device_query_start_loc: What the device's boundaries held, where somebody read them. Shape (R + 1,), int32.
        device_seq_lens: What the device's lengths held. Shape (R,), int32.
    """

    index: int
    time_us: int
    host_ns: int
    query_start_loc: Int32Array
    kind: str
    lengths: Int32Array | None
    max_rejects: int
    padded_rows: int | None
    boundaries_exact: bool
    has_device_boundaries: bool
    has_device_lengths: bool
    deferred: bool
    action: str
    reasons: tuple[str, ...]
    rows: int
    row_class: int
    num_works: int | None
    split_budget: int | None
    device_query_start_loc: Int32Array | None = None
    device_seq_lens: Int32Array | None = None

    @property
    def num_requests(self) -> int:
        """Requests of the batch, R."""
        return self.query_start_loc.size - 1

    @property
    def truth(self) -> tuple[Int32Array, Int32Array] | None:
        """Boundaries and lengths that the plan should be of: the device's, or the host's where they are exact."""
        if self.device_query_start_loc is not None and self.device_seq_lens is not None:
            return self.device_query_start_loc, self.device_seq_lens
        if self.lengths is not None and self.kind == "exact" and self.boundaries_exact:
            return self.query_start_loc, self.lengths
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """What happened to a planner outside `plan`.

    Attributes:
        index: Steps before it.
        time_us: When it was, in microseconds since recording began.
        what: One of `EVENTS`.
    """

    index: int
    time_us: int
    what: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DumpRecord:
    """What the buffers held for one step, read back from the device. For R requests and a class of P rows.

    Attributes:
        index: Number of the step.
        source: One of `SOURCES`.
        query_start_loc: The boundaries that the plan should be of. Shape (R + 1,), int32.
        seq_lens: The lengths that the plan should be of. Shape (R,), int32.
        num_cus: Compute units of the arrays.
        fold: Planner rows per row of the arrays.
        arrays: What was found; `work_info` as far as works were found or expected.
    """

    index: int
    source: str
    query_start_loc: Int32Array
    seq_lens: Int32Array
    num_cus: int
    fold: int
    arrays: PlanArrays


Record: TypeAlias = StepRecord | EventRecord | DumpRecord


class _Fields(NamedTuple):
    """The fixed words of a step."""

    index_low: int
    index_high: int
    time_low: int
    time_high: int
    flags: int
    kind: int
    max_rejects: int
    padded_rows: int
    decision: int
    rows: int
    row_class: int
    num_works: int
    split_budget: int
    num_requests: int
    host_ns: int
    spare: int


class ChunkEncoder:
    """Turns records into the words of one chunk."""

    def __init__(self) -> None:
        """Begins an empty chunk."""
        self.decisions: list[tuple[str, tuple[str, ...]]] = []
        self.words = 0
        self._parts: list[Int32Array] = []
        self._decision_of: dict[tuple[str, tuple[str, ...]], int] = {}
        self._before: tuple[Int32Array, Int32Array | None] | None = None

    def add(self, record: Record) -> None:
        """Appends a record.

        Raises:
            ValueError: A number of it has no place in 32 or 64 bits.
        """
        if isinstance(record, StepRecord):
            tag, parts = STEP, self._step(record)
        elif isinstance(record, EventRecord):
            fields = (*_split(record.index), *_split(record.time_us), EVENTS.index(record.what))
            tag, parts = EVENT, [np.array(fields, np.int32)]
        else:
            tag, parts = DUMP, _dump_words(record)
        length = sum(part.size for part in parts)
        self._parts += [np.array((tag, length), np.int32), *parts]
        self.words += 2 + length

    def take(self) -> Int32Array:
        """Returns the words of the chunk. Shape (words,), int32."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.int32)

    def _step(self, record: StepRecord) -> list[Int32Array]:
        decision = (record.action, record.reasons)
        if decision not in self._decision_of:
            self._decision_of[decision] = len(self.decisions)
            self.decisions.append(decision)
        boundaries, lengths, before = record.query_start_loc, record.lengths, self._before
        delta = before is not None and before[0].size == boundaries.size and (before[1] is None) == (lengths is None)
        self._before = boundaries, lengths
        truth = record.device_query_start_loc is not None and record.device_seq_lens is not None
        flags = (
            _EXACT_BOUNDARIES * record.boundaries_exact
            | _DEVICE_BOUNDARIES * record.has_device_boundaries
            | _DEVICE_LENGTHS * record.has_device_lengths
            | _DEFERRED * record.deferred
            | _DELTA * delta
            | _TRUTH * truth
        )
        fields = _Fields(
            *_split(record.index),
            *_split(record.time_us),
            flags=flags,
            kind=KINDS.index(record.kind),
            max_rejects=record.max_rejects,
            padded_rows=_or_none(record.padded_rows),
            decision=self._decision_of[decision],
            rows=record.rows,
            row_class=record.row_class,
            num_works=_or_none(record.num_works),
            split_budget=_or_none(record.split_budget),
            num_requests=record.num_requests,
            host_ns=min(record.host_ns, _INT32_MAX),
            spare=0,
        )
        parts = [np.array(fields, np.int32), boundaries]
        if lengths is not None:
            parts.append(lengths)
        if delta and before is not None:
            # In int32 with wrap-around, so that every pair of arrays has a difference and gets its values back.
            parts[1] = boundaries - before[0]
            if lengths is not None and before[1] is not None:
                parts[2] = lengths - before[1]
        if record.device_query_start_loc is not None and record.device_seq_lens is not None:
            # As differences to the host's: mostly zeros, or the same few numbers.
            parts.append(record.device_query_start_loc - boundaries)
            parts.append(record.device_seq_lens - lengths if lengths is not None else record.device_seq_lens)
        return parts


def decode_chunk(words: Int32Array, decisions: list[tuple[str, tuple[str, ...]]]) -> Iterator[Record]:
    """Yields the records of a chunk.

    Args:
        words: The chunk's words. Shape (words,), int32.
        decisions: Its table of decisions.

    Raises:
        TraceError: The words are no records.
    """
    position = 0
    before: tuple[Int32Array, Int32Array | None] | None = None
    while position < words.size:
        if words.size - position < 2:
            raise TraceError("a record ends in its first word")
        tag, length = int(words[position]), int(words[position + 1])
        position += 2
        if not 0 <= length <= words.size - position:
            raise TraceError(f"a record has {length} words, {words.size - position} are left")
        part = _Words(words[position : position + length])
        position += length
        if tag == STEP:
            step = _read_step(part, decisions, before)
            before = step.query_start_loc, step.lengths
            yield step
        elif tag == EVENT:
            yield _read_event(part)
        elif tag == DUMP:
            yield _read_dump(part)
        else:
            raise TraceError(f"a record has tag {tag}, known are 1, 2 and 3")
        part.end()


class _Words:
    """The words of one record, taken from the front."""

    def __init__(self, words: Int32Array) -> None:
        self._words = words
        self._at = 0

    def take(self, count: int, what: str) -> Int32Array:
        if not 0 <= count <= self._words.size - self._at:
            raise TraceError(f"{what} has {count} words, {self._words.size - self._at} are left in the record")
        taken = self._words[self._at : self._at + count]
        self._at += count
        return taken

    def end(self) -> None:
        if self._at != self._words.size:
            raise TraceError(f"a record has {self._words.size - self._at} words too many")


def _read_step(
    part: _Words, decisions: list[tuple[str, tuple[str, ...]]], before: tuple[Int32Array, Int32Array | None] | None
) -> StepRecord:
    fields = _Fields(*part.take(_STEP_WORDS, "a step").tolist())
    requests = _in_range("requests", fields.num_requests, 0, _INT32_MAX - 1)
    kind = KINDS[_in_range("kind of lengths", fields.kind, 0, len(KINDS) - 1)]
    action, reasons = decisions[_in_range("decision", fields.decision, 0, len(decisions) - 1)]
    boundaries = part.take(requests + 1, "query_start_loc")
    lengths = None if kind == "unknown" else part.take(requests, "lengths")
    if fields.flags & _DELTA:
        if before is None or before[0].size != boundaries.size or (before[1] is None) != (lengths is None):
            raise TraceError("a step is a difference to a step that is not there")
        boundaries = boundaries + before[0]
        if lengths is not None and before[1] is not None:
            lengths = lengths + before[1]
    device_boundaries = device_lengths = None
    if fields.flags & _TRUTH:
        device_boundaries = part.take(requests + 1, "the device's query_start_loc") + boundaries
        device_lengths = part.take(requests, "the device's seq_lens")
        if lengths is not None:
            device_lengths = device_lengths + lengths
    return StepRecord(
        index=_join(fields.index_low, fields.index_high),
        time_us=_join(fields.time_low, fields.time_high),
        host_ns=_in_range("host time", fields.host_ns, 0, _INT32_MAX),
        query_start_loc=boundaries,
        kind=kind,
        lengths=lengths,
        max_rejects=_in_range("max_rejects", fields.max_rejects, 0, _INT32_MAX),
        padded_rows=None if fields.padded_rows == _NONE else fields.padded_rows,
        boundaries_exact=bool(fields.flags & _EXACT_BOUNDARIES),
        has_device_boundaries=bool(fields.flags & _DEVICE_BOUNDARIES),
        has_device_lengths=bool(fields.flags & _DEVICE_LENGTHS),
        deferred=bool(fields.flags & _DEFERRED),
        action=action,
        reasons=reasons,
        rows=_in_range("rows", fields.rows, 0, _INT32_MAX),
        row_class=_in_range("row class", fields.row_class, 0, _INT32_MAX),
        num_works=None if fields.num_works == _NONE else fields.num_works,
        split_budget=None if fields.split_budget == _NONE else fields.split_budget,
        device_query_start_loc=device_boundaries,
        device_seq_lens=device_lengths,
    )


def _read_event(part: _Words) -> EventRecord:
    low, high, time_low, time_high, what = part.take(_EVENT_WORDS, "an event").tolist()
    name = EVENTS[_in_range("event", what, 0, len(EVENTS) - 1)]
    return EventRecord(index=_join(low, high), time_us=_join(time_low, time_high), what=name)


def _dump_words(record: DumpRecord) -> list[Int32Array]:
    arrays = record.arrays
    works = arrays.work_info.size // 8
    source = SOURCES.index(record.source)
    sizes = (record.seq_lens.size, arrays.request_ids.size, record.num_cus, record.fold, works)
    fixed = np.array((*_split(record.index), source, 0, *sizes), np.int32)
    return [fixed, record.query_start_loc, record.seq_lens, *(array.reshape(-1) for array in arrays)]


def _read_dump(part: _Words) -> DumpRecord:
    low, high, source, _, requests, rows, num_cus, fold, works = part.take(_DUMP_WORDS, "a dump").tolist()
    for name, value in (("requests", requests), ("works", works)):
        _in_range(name, value, 0, 1 << 28)
    for name, value, most in (("rows", rows, 1 << 24), ("compute units", num_cus, 1 << 16), ("fold", fold, 128)):
        _in_range(name, value, 1, most)
    boundaries = part.take(requests + 1, "query_start_loc")
    seq_lens = part.take(requests, "seq_lens")
    sizes = (rows, rows + 1, num_cus + 1, rows * fold + 1, 8 * works)
    flat = [part.take(size, name) for size, name in zip(sizes, PlanArrays._fields, strict=True)]
    return DumpRecord(
        index=_join(low, high),
        source=SOURCES[_in_range("source", source, 0, len(SOURCES) - 1)],
        query_start_loc=boundaries,
        seq_lens=seq_lens,
        num_cus=num_cus,
        fold=fold,
        arrays=PlanArrays(flat[0], flat[1], flat[2], flat[3], flat[4].reshape(works, 8)),
    )


def _in_range(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise TraceError(f"{name} is {value}, must be {least} to {most}")
    return value


def _or_none(value: int | None) -> int:
    return _NONE if value is None else value


def _split(value: int) -> tuple[int, int]:
    """A number of 62 bits as two that are not negative, of 31 bits each."""
    if not 0 <= value < 1 << 62:
        raise ValueError(f"{value} has no place in 62 bits")
    return value & _INT32_MAX, value >> 31


def _join(low: int, high: int) -> int:
    if low < 0 or high < 0:
        raise TraceError("a number of 62 bits is negative")
    return high << 31 | low
