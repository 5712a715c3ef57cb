"""Continuous batching over a request log: what a serving engine would hand to the planner, step by step.

The order of things is vLLM's v1 scheduler: first come first served, running requests before waiting ones,
prompts in chunks, decodes in front of prefills in the packed batch, and the request admitted last put back
when the KV blocks run out. No model runs: how many drafts are accepted is drawn from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlaplan.workload.blocks import BlockPool
from mlaplan.workload.log import Request

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

LENGTHS = ("exact", "bound", "device")

# A quarter of a gigabyte of 32-bit numbers each: far above any engine, and low enough that a slip is named.
_MOST_BLOCKS = 1 << 26
_MOST_ENTRIES = 1 << 26


def default_capture_sizes(largest: int = 512) -> tuple[int, ...]:
    """Returns vLLM's default capture sizes: 1, 2, 4, in eights below 256, in sixteens up to `largest`."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16))
    return tuple(size for size in sizes if size <= largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and habits of the simulated engine.

    Attributes:
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Most query tokens in one step.
        num_speculative_tokens: Draft tokens K; a decode has 1 + K query tokens.
        acceptance_rate: Chance of each draft to be accepted, given that those before it were.
        lengths: What the host knows of `seq_lens`: "exact", "bound" (drafts in flight count as accepted) or
            "device" (nothing).
        steps_in_flight: Steps whose outcome the host has not seen yet; counts for "bound" only.
        capture_sizes: Row counts of captured graphs; rounded up to multiples of 1 + K, as vLLM does. Empty
            for none.
        block_size: Tokens in a KV block.
        num_kv_blocks: Blocks in the pool; block 0 is kept back for invalid slots.
        max_model_len: Longest request, prompt and output together; longer ones are refused and counted.
        step_ms: Length of a step on the simulated clock.
        load: Factor on the arrival rate: 2 halves the time between arrivals.
        seed: Seed of the accepted drafts.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_speculative_tokens: int = 0
    acceptance_rate: float = 0.7
    lengths: str = "exact"
    steps_in_flight: int = 1
    capture_sizes: tuple[int, ...] = field(default_factory=default_capture_sizes)
    block_size: int = 64
    num_kv_blocks: int = 32_768
    max_model_len: int = 163_840
    step_ms: float = 30.0
    load: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": self.decode_tokens,
            "num_speculative_tokens": 0,
            "steps_in_flight": 1,
            "block_size": 1,
            "max_model_len": 1,
            "seed": 0,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if value < smallest:
                raise ValueError(f"{name} is {value}, must be at least {smallest}")
        self._check_pool()
        if not 0.0 <= self.acceptance_rate <= 1.0:
            raise ValueError(f"acceptance_rate is {self.acceptance_rate}, must be between 0 and 1")
        for name, number in (("step_ms", self.step_ms), ("load", self.load)):
            if not (number > 0 and math.isfinite(number)):
                raise ValueError(f"{name} is {number}, must be positive and finite")
        if self.lengths not in LENGTHS:
            raise ValueError(f"lengths is {self.lengths!r}, known are {', '.join(LENGTHS)}")
        for position, size in enumerate(self.capture_sizes):
            if size < 1:
                raise ValueError(f"capture_sizes[{position}] is {size}, must be at least 1")

    def _check_pool(self) -> None:
        if self.num_kv_blocks > _MOST_BLOCKS:
            raise ValueError(f"num_kv_blocks is {self.num_kv_blocks}, must be at most {_MOST_BLOCKS}")
        if self.num_kv_blocks - 1 < self.table_width:
            raise ValueError(
                f"num_kv_blocks is {self.num_kv_blocks}, must be at least {self.table_width + 1}: a request "
                f"of max_model_len {self.max_model_len} with its drafts, and block 0"
            )
        if self.max_num_seqs * self.table_width > _MOST_ENTRIES:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs}, must be at most {_MOST_ENTRIES // self.table_width} for a "
                f"max_model_len of {self.max_model_len}: their block table would have more than {_MOST_ENTRIES} entries"
            )

    @property
    def decode_tokens(self) -> int:
        """Query tokens of a decode, 1 + K."""
        return 1 + self.num_speculative_tokens

    @property
    def max_rejects(self) -> int:
        """How far the host's bound of a length may lie above the truth."""
        return self.num_speculative_tokens * self.steps_in_flight

    @property
    def table_width(self) -> int:
        """Columns of the block table; drafts may pass `max_model_len`."""
        return -(-(self.max_model_len + self.num_speculative_tokens) // self.block_size)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Capture sizes in rows: whole decodes, and none beyond what the largest decode batch needs."""
        per_request = self.decode_tokens
        sizes = sorted({-(-size // per_request) * per_request for size in self.capture_sizes})
        most = min(self.max_num_seqs * per_request, self.max_num_batched_tokens)
        needed = [size for size in sizes if size < most] + [size for size in sizes if size >= most][:1]
        return tuple(needed)

    @property
    def max_rows(self) -> int:
        """Most rows of a step, padding included."""
        return max(self.max_num_batched_tokens, *self.graph_sizes, 1)


@dataclass(slots=True)
class SchedulerStats:
    """What the scheduler did so far.

    Attributes:
        admitted: Requests that were given a place for the first time.
        finished: Requests that got all of their tokens.
        refused: Requests longer than `max_model_len`, which were skipped.
        preemptions: Times that a request was put back to be computed again.
        new_tokens: Tokens generated.
        idle_jumps: Times that the clock skipped to the next arrival.
    """

    admitted: int = 0
    finished: int = 0
    refused: int = 0
    preemptions: int = 0
    new_tokens: int = 0
    idle_jumps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One batch. Decodes come first, then prefills.

    Attributes:
        index: Number of the step, from 0.
        time_ms: Simulated time at which it starts.
        query_start_loc: int32 (R + 1,), where each request's query tokens start.
        seq_lens: int32 (R,), the true KV lengths, this step's tokens included: what the device holds.
        lengths: What the host knows: "exact", "bound" or "device".
        host_seq_lens: int32 (R,), the host's lengths, or None where it knows nothing. With "bound",
            `host_seq_lens - max_rejects <= seq_lens <= host_seq_lens`, and equal for prefills.
        max_rejects: Most tokens that `host_seq_lens` may be too many; 0 unless `lengths` is "bound".
        padded_rows: Rows with those that a captured graph adds; the number of rows where none fits.
        num_decodes: How many requests, from the front, are decodes.
        keys: int64 (R,), position of each request in the log.
        places: int64 (R,), which of the engine's `max_num_seqs` places each request holds.
        new_tokens: int32 (R,), tokens that the step will have generated for each request.
    """

    index: int
    time_ms: float
    query_start_loc: Int32Array
    seq_lens: Int32Array
    lengths: str
    host_seq_lens: Int32Array | None
    max_rejects: int
    padded_rows: int
    num_decodes: int
    keys: Int64Array
    new_tokens: Int32Array
    places: Int64Array
    _scheduler: Scheduler

    @property
    def num_requests(self) -> int:
        """Requests in the batch, R."""
        return len(self.seq_lens)

    @property
    def rows(self) -> int:
        """Live rows: query tokens of all requests."""
        return int(self.query_start_loc[-1])

    @property
    def is_pure_decode(self) -> bool:
        """Whether no prompt is in the batch."""
        return self.num_decodes == self.num_requests

    @property
    def block_table(self) -> Int32Array:
        """int32 (R, width), KV block of each `block_size` tokens of a request.

        Entries behind a request's blocks are what an earlier tenant left there, as on the device. It is
        gathered on demand and only while the step is the scheduler's latest.

        Raises:
            RuntimeError: The scheduler has moved on.
        """
        return self._scheduler.block_table(self)


class _Waiting(NamedTuple):
    """A request that waits for a place. `generated` is above 0 for one that was put back."""

    key: int
    prompt: int
    generated: int
    target: int


class Scheduler(Iterator[Step]):
    """Turns requests into steps. Equal configurations and logs give equal steps; memory does not grow."""

    def __init__(self, config: SchedulerConfig, requests: Iterable[Request]) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self._requests = enumerate(requests)
        self._head: tuple[float, _Waiting] | None = None
        self._put_back: list[_Waiting] = []  # the one to resume next is last; at most max_num_seqs
        self._rng = np.random.default_rng(config.seed)
        self._capture = np.array(config.graph_sizes, dtype=np.int64)
        self._now = 0.0
        self._index = 0
        self._last: Step | None = None

        # One place per running request; `_running` lists the occupied ones in order of admission.
        places = config.max_num_seqs
        self._pool = BlockPool(config.num_kv_blocks, places, config.table_width, config.block_size)
        self._running = np.zeros(places, dtype=np.int64)
        self._num_running = 0
        self._free_places = list(range(places - 1, -1, -1))
        self._key = np.zeros(places, dtype=np.int64)
        self._prompt = np.zeros(places, dtype=np.int64)
        self._to_prefill = np.zeros(places, dtype=np.int64)  # prompt, and what was generated before a preemption
        self._computed = np.zeros(places, dtype=np.int64)
        self._generated = np.zeros(places, dtype=np.int64)
        self._target = np.zeros(places, dtype=np.int64)
        self._rejects = np.zeros((config.steps_in_flight, places), dtype=np.int64)

    def __next__(self) -> Step:
        """Returns the next batch that is not empty."""
        if self._last is not None:
            self._apply(self._last)
            self._last = None
            self._now += self.config.step_ms
        while True:
            places, tokens, num_decodes = self._schedule()
            if len(places):
                self._last = self._step(places, tokens, num_decodes)
                self._index += 1
                return self._last
            if self._peek() is None:
                raise StopIteration
            if self._head is not None:
                self._now = self._head[0]
            self.stats.idle_jumps += 1

    def block_table(self, step: Step) -> Int32Array:
        """Returns the block table of the latest step; see `Step.block_table`."""
        if step is not self._last:
            raise RuntimeError(f"block_table of step {step.index}: the scheduler has moved on to another step")
        return self._pool.table[step.places]

    def num_blocks(self, step: Step) -> Int64Array:
        """Returns how many entries of each row of the latest step's block table belong to the request."""
        if step is not self._last:
            raise RuntimeError(f"num_blocks of step {step.index}: the scheduler has moved on to another step")
        return self._pool.counts[step.places]

    # A step takes three parts: who runs, what that looks like, and what comes of it.

    def _schedule(self) -> tuple[Int64Array, Int64Array, int]:
        """Chooses the places that run, decodes first, and the query tokens of each."""
        config = self.config
        decodes, preempted = self._schedule_decodes()
        budget = config.max_num_batched_tokens - len(decodes) * config.decode_tokens
        prefills: list[int] = []
        chunks: list[int] = []

        # Only the last running request can be in its prompt: nothing is admitted behind one that has not
        # finished it, because such a one has used up the budget.
        tail = self._prefilling_tail()
        if tail is not None and budget > 0:
            chunk = min(int(self._to_prefill[tail] - self._computed[tail]), budget)
            if self._pool.grow(tail, int(self._computed[tail]) + chunk):
                prefills.append(tail)
                chunks.append(chunk)
                budget -= chunk
            else:
                self._preempt_last()
                preempted = True
        while budget > 0 and not preempted and self._free_places:
            admitted = self._admit(budget)
            if admitted is None:
                break
            prefills.append(admitted[0])
            chunks.append(admitted[1])
            budget -= admitted[1]

        places = np.concatenate((decodes, np.array(prefills, dtype=np.int64)))
        tokens = np.full(len(places), config.decode_tokens, dtype=np.int64)
        tokens[len(decodes) :] = chunks
        return places, tokens, len(decodes)

    def _schedule_decodes(self) -> tuple[Int64Array, bool]:
        """Finds the decodes that fit and gives them their blocks, putting back the latest if need be."""
        per_request = self.config.decode_tokens
        most = self.config.max_num_batched_tokens // per_request
        preempted = False
        while True:
            running = self._running[: self._num_running]
            decoding = running[:-1] if self._prefilling_tail() is not None else running
            decodes = decoding[:most].copy()
            if self._pool.grow_many(decodes, self._computed[decodes] + per_request):
                return decodes, preempted
            self._preempt_last()
            preempted = True

    def _prefilling_tail(self) -> int | None:
        if not self._num_running:
            return None
        tail = int(self._running[self._num_running - 1])
        return tail if self._computed[tail] < self._to_prefill[tail] else None

    def _admit(self, budget: int) -> tuple[int, int] | None:
        """Gives the next waiting request a place; returns the place and its first chunk."""
        waiting = self._peek()
        if waiting is None or not (self._put_back or self._arrived()):
            return None
        to_prefill = waiting.prompt + waiting.generated
        chunk = min(to_prefill, budget)
        place = self._free_places[-1]
        if not self._pool.grow(place, chunk):
            return None
        self._free_places.pop()
        if self._put_back:
            self._put_back.pop()
        else:
            self._head = None
            self.stats.admitted += 1
        self._key[place] = waiting.key
        self._prompt[place] = waiting.prompt
        self._to_prefill[place] = to_prefill
        self._computed[place] = 0
        self._generated[place] = waiting.generated
        self._target[place] = waiting.target
        self._rejects[:, place] = 0
        self._running[self._num_running] = place
        self._num_running += 1
        return place, chunk

    def _peek(self) -> _Waiting | None:
        """Returns who is next in line, arrived or not. Only the head of the log is ever held."""
        if self._put_back:
            return self._put_back[-1]
        while self._head is None:
            entry = next(self._requests, None)
            if entry is None:
                return None
            key, request = entry
            if request.input_tokens + request.output_tokens > self.config.max_model_len:
                self.stats.refused += 1
                continue
            waiting = _Waiting(key, request.input_tokens, 0, request.output_tokens)
            self._head = (request.arrival_ms / self.config.load, waiting)
        return self._head[1]

    def _arrived(self) -> bool:
        return self._head is not None and self._head[0] <= self._now

    def _preempt_last(self) -> None:
        self._num_running -= 1
        place = int(self._running[self._num_running])
        self._put_back.append(
            _Waiting(
                int(self._key[place]),
                int(self._prompt[place]),
                int(self._generated[place]),
                int(self._target[place]),
            )
        )
        self._vacate(place)
        self.stats.preemptions += 1

    def _vacate(self, place: int) -> None:
        self._pool.release(place)
        self._free_places.append(place)

    def _step(self, places: Int64Array, tokens: Int64Array, num_decodes: int) -> Step:
        config = self.config
        query_start_loc = np.zeros(len(places) + 1, dtype=np.int32)
        np.cumsum(tokens, out=query_start_loc[1:])
        seq_lens = (self._computed[places] + tokens).astype(np.int32)
        host: Int32Array | None = None
        if config.lengths == "exact":
            host = seq_lens.copy()
        elif config.lengths == "bound":
            host = seq_lens.copy()
            host[:num_decodes] += self._rejects[:, places[:num_decodes]].sum(axis=0).astype(np.int32)
        rows = int(query_start_loc[-1])
        padded = rows
        if num_decodes == len(places):
            position = int(np.searchsorted(self._capture, rows))
            padded = int(self._capture[position]) if position < len(self._capture) else rows
        return Step(
            index=self._index,
            time_ms=self._now,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            lengths=config.lengths,
            host_seq_lens=host,
            max_rejects=config.max_rejects if config.lengths == "bound" else 0,
            padded_rows=padded,
            num_decodes=num_decodes,
            keys=self._key[places],
            new_tokens=self._outcome(places, tokens, num_decodes),
            places=places,
            _scheduler=self,
        )

    def _outcome(self, places: Int64Array, tokens: Int64Array, num_decodes: int) -> Int32Array:
        """Draws how many tokens the step generates for each request."""
        missing = self._target[places] - self._generated[places]
        made = np.zeros(len(places), dtype=np.int64)
        drafts = self.config.num_speculative_tokens
        accepted = self._rng.random((num_decodes, drafts)) < self.config.acceptance_rate
        # A draft counts only when all of those before it were accepted.
        made[:num_decodes] = 1 + np.logical_and.accumulate(accepted, axis=1).sum(axis=1)
        prefills = places[num_decodes:]
        made[num_decodes:] = self._computed[prefills] + tokens[num_decodes:] == self._to_prefill[prefills]
        new_tokens: Int32Array = np.minimum(made, missing).astype(np.int32)
        return new_tokens

    def _apply(self, step: Step) -> None:
        """Brings the running requests to where the step leaves them."""
        places, made, n = step.places, step.new_tokens.astype(np.int64), step.num_decodes
        tokens = np.diff(step.query_start_loc).astype(np.int64)
        self._generated[places] += made
        self._computed[places[:n]] += made[:n]
        self._computed[places[n:]] += tokens[n:]
        flight = self._rejects[step.index % self.config.steps_in_flight]
        flight[:] = 0
        flight[places[:n]] = tokens[:n] - made[:n]
        self.stats.new_tokens += int(made.sum())

        running = self._running[: self._num_running]
        prompt_done = self._computed[running] >= self._to_prefill[running]
        finished = prompt_done & (self._generated[running] >= self._target[running])
        if finished.any():
            leaving = running[finished].tolist()
            kept = running[~finished]
            self._running[: len(kept)] = kept
            self._num_running = len(kept)
            self.stats.finished += len(leaving)
            for place in leaving:
                self._vacate(place)


def rows_unchanged(before: Step | None, step: Step, topk: int) -> bool:
    """Whether every row of a pure decode step is as long as in the step before it: there is nothing to plan.

    A row's length is `min(context + i + 1, topk)`, so it is enough to compare, per request, the number of
    query tokens and the context clamped to `topk - 1`.
    """
    if before is None or not step.is_pure_decode or step.num_requests != before.num_requests:
        return False
    if not np.array_equal(before.query_start_loc, step.query_start_loc):
        return False
    queries = np.diff(step.query_start_loc)
    now: Any = np.minimum(step.seq_lens - queries, topk - 1)
    then: Any = np.minimum(before.seq_lens - queries, topk - 1)
    return bool(np.array_equal(now, then))
