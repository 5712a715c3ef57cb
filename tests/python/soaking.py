"""Real logs through a planner for as long as one likes: what it decides and holds, step after step, and its memory.

`make soak` runs a million steps of each log and writes `docs/results`; `test_soak.py` runs a few thousand.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.device import HostDevice
from mlaplan.layout import Layout, PlanArrays
from mlaplan.reference.plan import plan as plan_from_nothing
from mlaplan.workload import Request, Scheduler, SchedulerConfig, Step, read_log

TOPK, NUM_CUS, MAX_ROWS = 2048, 304, 8192
_STAGING_BUSY = "staging busy"


@dataclass(frozen=True, slots=True)
class Stretch:
    """One way to serve a log: engine, what the host knows, and how plans are asked for.

    Attributes:
        engine: Settings of the simulated engine.
        delayed: The device runs behind the host, by up to 40 operations.
        deferred: Pure decodes are planned deferred and refreshed by their consumer.
        arrays: Batches that the host knows come with device arrays as well.
    """

    engine: SchedulerConfig
    delayed: bool = False
    deferred: bool = False
    arrays: bool = True


def _engine(seqs: int, load: float, drafts: int = 0, lengths: str = "exact", tokens: int = 2048) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=seqs, load=load, num_speculative_tokens=drafts, lengths=lengths,
                           max_num_batched_tokens=tokens)  # fmt: skip


STRETCHES = (
    Stretch(_engine(1, 1.0)),
    Stretch(_engine(8, 1.0), arrays=False),
    Stretch(_engine(256, 1.0, tokens=MAX_ROWS), delayed=True),
    Stretch(_engine(8, 0.2, 3, "bound")),
    Stretch(_engine(32, 1.0), arrays=False),
    Stretch(_engine(8, 1.0, 0, "bound"), delayed=True),
    Stretch(_engine(64, 2.0)),
    Stretch(_engine(32, 1.0, 3, "device")),
    Stretch(_engine(256, 0.2), delayed=True),
    Stretch(_engine(4, 1.0, 3)),
    Stretch(_engine(6, 1.0, 3, "bound"), delayed=True),
    Stretch(_engine(32, 1.0), deferred=True),
    Stretch(_engine(2, 1.0, 3), arrays=False),
    Stretch(_engine(16, 1.0), delayed=True),
    Stretch(_engine(256, 1.0, 3, "bound", MAX_ROWS)),
    Stretch(_engine(8, 0.5), arrays=False),
    Stretch(_engine(1, 1.0, 3, "bound"), delayed=True),
    Stretch(_engine(8, 1.0, 0, "device"), deferred=True, delayed=True),
    Stretch(_engine(48, 1.5, 3)),
    Stretch(_engine(3, 1.0), delayed=True),
)


@dataclass(slots=True)
class Tally:
    """What a soak has seen.

    Attributes:
        steps: Steps planned.
        requests: Requests of them, summed up.
        rows: Live rows of them, summed up.
        turns: Times that the log was begun anew.
        actions: Decisions by action.
        rows_compared: Steps whose rows were compared with the definition.
        plans_compared: Steps whose whole plan was compared with one from nothing.
        differences: What was wrong, the first ten.
        memory: Resident bytes at a step, sampled.
        allocations: Device arrays made after the planners were.
        seconds: Wall time.
    """

    steps: int = 0
    requests: int = 0
    rows: int = 0
    turns: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    rows_compared: int = 0
    plans_compared: int = 0
    differences: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    allocations: int = 0
    seconds: float = 0.0

    def settled(self) -> list[tuple[int, int]]:
        """Samples behind the first time through all stretches, by when every size has been met."""
        return [sample for sample in self.memory if sample[0] >= self.steps // 4]

    def slope(self) -> float:
        """Growth of memory in bytes per 1,000 steps: least squares over the settled samples."""
        samples = np.array(self.settled(), np.float64)
        return float(np.polyfit(samples[:, 0], samples[:, 1], 1)[0] * 1000) if len(samples) > 2 else 0.0


def around(requests: list[Request], seed: int, tally: Tally) -> Iterator[Request]:
    """A log without end: from a place that the seed says, and from its start again behind its end."""
    place = seed * 7919 % len(requests)
    period = requests[-1].arrival_ms + 1000.0
    origin, turn = requests[place].arrival_ms, 0
    while True:
        request = requests[place]
        yield request._replace(arrival_ms=request.arrival_ms - origin + turn * period)
        place += 1
        if place == len(requests):
            place, turn = 0, turn + 1
            tally.turns += 1


class Witness:
    """A planner, and what `docs/design.md` says that it must decide and hold."""

    def __init__(self, *, delayed: bool, tally: Tally, every: int, policy: str = "aiter") -> None:
        sizes = {size for stretch in STRETCHES for size in stretch.engine.graph_sizes}
        self.device = HostDevice(delayed=delayed)
        self.planner = mlaplan.Planner(
            mlaplan.PlannerConfig(
                max_rows=MAX_ROWS, max_requests=512, topk=TOPK, num_cus=NUM_CUS, policy=policy,
                capture_sizes=tuple(sorted(sizes)),
            ),
            self.device,
        )  # fmt: skip
        self._delayed = delayed
        self._tally = tally
        self._every = every
        self._held: Any = None
        self._rng = np.random.default_rng(1)
        self._made = self.device.counters.allocations
        self._wanted = {
            rows: PlanArrays(*(np.zeros(shape, np.int32) for shape in self._shapes(rows)))
            for rows in self.planner.config.row_classes
        }

    def _shapes(self, rows: int) -> Any:
        params = self.planner.params
        return Layout.of(rows, num_cus=NUM_CUS, fold=params.fold, pieces=params.pieces).shapes

    def step(self, step: Step, stretch: Stretch) -> None:
        """Plans a step and looks at what came of it."""
        known = step.host_seq_lens is not None and (step.max_rejects == 0 or self._saturated(step))
        arrays = stretch.arrays or not known
        deferred = stretch.deferred and step.is_pure_decode
        batch = mlaplan.Batch(
            step.query_start_loc.copy(), self._lengths(step), step.padded_rows, True,
            step.query_start_loc.copy() if arrays else None, step.seq_lens.copy() if arrays else None,
        )  # fmt: skip
        plan = self.planner.plan(batch, deferred=deferred)
        self._judge(step, plan, known=known, deferred=deferred, arrays=arrays)
        if deferred:
            self.planner.refresh(plan)
        # The scheduler uses its arrays again at once.
        batch.query_start_loc[:] = -1
        if self._delayed:
            late = int(self._rng.integers(0, 40))
            self.device.advance(max(self.device.completed, self.device.submitted - late))
        whole = self._tally.steps % self._every == 0
        if whole or not self._delayed:
            self.device.advance(self.device.submitted)
            self._compare(step, plan, whole=whole)
        self._tally.steps += 1
        self._tally.requests += step.num_requests
        self._tally.rows += step.rows

    def allocations(self) -> int:
        """Device arrays made since the planner was."""
        return self.device.counters.allocations - self._made

    @staticmethod
    def _lengths(step: Step) -> mlaplan.Exact | mlaplan.UpperBound | None:
        if step.host_seq_lens is None:
            return None
        if step.lengths == "exact":
            return mlaplan.Exact(step.host_seq_lens)
        return mlaplan.UpperBound(step.host_seq_lens, step.max_rejects)

    @staticmethod
    def _saturated(step: Step) -> bool:
        queries = np.diff(step.query_start_loc)
        assert step.host_seq_lens is not None
        return bool((step.host_seq_lens - step.max_rejects - queries + 1 >= TOPK).all())

    def _judge(self, step: Step, plan: mlaplan.Plan, *, known: bool, deferred: bool, arrays: bool) -> None:
        """Compares the action with the table of section 3 of the design."""
        rows = next(size for size in self.planner.config.row_classes if size >= step.padded_rows)
        queries = np.diff(step.query_start_loc)
        fingerprint = (rows, queries.tobytes(), np.minimum(step.seq_lens - queries, TOPK - 1).tobytes())
        if deferred:
            wanted, holds = "deferred", None
        elif not known:
            wanted, holds = "launch", None
        else:
            wanted, holds = ("nothing" if fingerprint == self._held else "copy"), fingerprint
        found = plan.decision.action
        # A launch instead of a wait: the values are the host's all the same.
        instead = self._delayed and arrays and wanted == "copy" and found == "launch"
        if found != wanted and not (instead and _STAGING_BUSY in plan.decision.reasons):
            self._differs(f"step {step.index}: action is {found} {plan.decision.reasons}, should be {wanted}")
        if len(plan.arrays.request_ids) != rows:
            self._differs(f"step {step.index}: class of {len(plan.arrays.request_ids)} rows, should be {rows}")
        self._tally.actions[f"{found} instead of copy" if found != wanted else found] += 1
        self._held = holds

    def _compare(self, step: Step, plan: mlaplan.Plan, *, whole: bool) -> None:
        """Compares rows with the definition, and at times the whole plan with one from nothing."""
        arrays = plan.arrays
        ids, indptr = rows_of(step, len(arrays.request_ids))
        self._tally.rows_compared += 1
        if not (np.array_equal(arrays.request_ids, ids) and np.array_equal(arrays.kv_indptr, indptr)):
            self._differs(f"step {step.index}: rows differ from the definition")
        if not whole:
            return
        wanted = self._wanted[len(ids)]
        plan_from_nothing(step.query_start_loc, step.seq_lens, wanted, self.planner.params)
        works = int(wanted.work_indptr[-1])
        self._tally.plans_compared += 1
        for name in PlanArrays._fields:
            have, want = getattr(arrays, name), getattr(wanted, name)
            end = works if name == "work_info" else None
            if not np.array_equal(have[:end], want[:end]):
                self._differs(f"step {step.index}: {name} differs from a plan from nothing")

    def _differs(self, text: str) -> None:
        if len(self._tally.differences) < 10:
            self._tally.differences.append(text)


def rows_of(step: Step, size: int) -> tuple[Int32Array, Int32Array]:
    """Request of each row and the running sum of row lengths, for a class of `size` rows."""
    queries = np.diff(step.query_start_loc)
    request = np.repeat(np.arange(len(queries), dtype=np.int32), queries)
    within = np.arange(step.rows, dtype=np.int32) - np.repeat(step.query_start_loc[:-1], queries)
    lengths = np.minimum((step.seq_lens - queries)[request] + within + 1, TOPK)
    ids, indptr = np.zeros(size, np.int32), np.zeros(size + 1, np.int32)
    ids[: step.rows] = request
    indptr[1 : step.rows + 1] = np.cumsum(lengths)
    indptr[step.rows + 1 :] = indptr[step.rows]
    return ids, indptr


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(log: Path, steps: int, *, every: int = 20, rounds: int = 4, policy: str = "aiter", watch: Any = None) -> Tally:
    """Takes a log through all stretches, several times with other seeds, with the same planners all the way.

    Args:
        log: Request log.
        steps: Steps in all, shared out evenly.
        every: Every n-th step's whole plan is compared.
        rounds: Times through the stretches.
        policy: Policy of the planners.
        watch: Called with the tally after each stretch.
    """
    requests = list(read_log(log))
    tally = Tally()
    witnesses = {
        delayed: Witness(delayed=delayed, tally=tally, every=every, policy=policy) for delayed in (False, True)
    }
    pieces = rounds * len(STRETCHES)
    begin = time.monotonic()
    for piece in range(pieces):
        stretch = STRETCHES[piece % len(STRETCHES)]
        witness = witnesses[stretch.delayed]
        scheduler = Scheduler(stretch.engine, around(requests, piece, tally))
        until = steps * (piece + 1) // pieces
        while tally.steps < until:
            witness.step(next(scheduler), stretch)
        witness.planner.device.synchronize()
        del scheduler
        gc.collect()  # so that a sample says what is held, and not what waits to be collected
        tally.memory.append((tally.steps, resident()))
        tally.allocations = sum(each.allocations() for each in witnesses.values())
        tally.seconds = time.monotonic() - begin
        if watch is not None:
            watch(tally)
    return tally


def line_of(name: str, tally: Tally) -> str:
    """A row of the table of results."""
    settled = [size for _, size in tally.settled()]
    mib = 2**20
    return (
        f"| {name} | {tally.steps:,} | {tally.turns} | {tally.requests:,} | {tally.rows:,} | {tally.rows_compared:,} | "
        f"{tally.plans_compared:,} | {len(tally.differences)} | {settled[0] / mib:.1f} to {settled[-1] / mib:.1f} "
        f"({min(settled) / mib:.1f} to {max(settled) / mib:.1f}) | {tally.slope():+.0f} | {tally.allocations} | "
        f"{tally.seconds / 60:.0f} |"
    )


_HEAD = (
    "log", "steps", "turns", "requests", "rows", "rows compared", "whole plans compared", "differences",
    "resident MiB, first to last (least to most)", "bytes per 1,000 steps", "device arrays made", "minutes",
)  # fmt: skip

_ABOUT = """\
Each log goes through {stretches} ways of serving it, several times with other seeds: 1 to 256 requests at once, loads
from 0.2 to 2, 0 or 3 draft tokens, lengths exact, bounded or known to the device only, with device arrays and without,
deferred plans, and a device that runs behind the host. Behind its end a log begins anew. Two planners (a device that
keeps up, one that lags) serve all of it. Every decision is compared with the table in section 3 of the design; rows
with the definition in every step of the device that keeps up; whole plans with one from nothing in every {every}th.
"""

_MEMORY = """\
Resident memory of the whole process, sampled after each of the stretches behind the first quarter of the steps; the
slope is a least-squares fit. Device arrays are those made after the planners were.
"""


def report(tallies: dict[str, Tally], options: argparse.Namespace) -> str:
    """The page of results."""
    actions = sorted({action for tally in tallies.values() for action in tally.actions})
    counts = {name: [f"{tally.actions[action]:,}" for action in actions] for name, tally in tallies.items()}
    machine = f"{_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}"
    lines = [
        f"# Soak, {time.strftime('%Y-%m-%d', time.gmtime())}",
        "",
        f"{machine}, mlaplan {mlaplan.__version__} ({mlaplan._core.build_profile}), policy `{options.policy}`.",
        "Made by `make soak`.",
        "",
        _ABOUT.format(stretches=len(STRETCHES), every=options.every),
        _table(_HEAD, [line_of(name, tally) for name, tally in tallies.items()]),
        _MEMORY,
        _table(("log", *actions), [f"| {name} | {' | '.join(row)} |" for name, row in counts.items()]),
    ]
    if options.core is not None:
        lines += ["## The core alone", "", options.core.read_text()]
    for name, tally in tallies.items():
        lines += [f"* {name}: {difference}" for difference in tally.differences]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *rows]) + "\n"


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.machine()


def main() -> int:
    """Runs the logs and writes the page; returns 1 if something differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of each log (default: 1,000,000)")
    parser.add_argument("--every", type=int, default=20, help="whole plans compared (default: every 20th)")
    parser.add_argument("--policy", default="aiter", help="policy of the planners (default: aiter)")
    parser.add_argument("--core", type=Path, help="what the soak of the core printed")
    parser.add_argument("--out", type=Path, help="folder for the page; default: standard output")
    options = parser.parse_args()
    tallies = {}
    for log in options.logs:

        def watch(tally: Tally, name: str = log.stem) -> None:
            values = {each.name: getattr(tally, each.name) for each in fields(tally)}
            sys.stderr.write(f"{json.dumps({'log': name, **values, 'memory': tally.memory[-1:]})}\n")

        tallies[log.stem] = soak(log, options.steps, every=options.every, policy=options.policy, watch=watch)
    page = report(tallies, options)
    if options.out is None:
        sys.stdout.write(page)
    else:
        name = f"{time.strftime('%Y-%m-%d', time.gmtime())}-soak.md"
        (options.out / name).write_text(page)
    return 1 if any(tally.differences for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
