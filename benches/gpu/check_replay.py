"""Captured plans replayed over random device inputs, each compared on the device with a plan from nothing.

One graph per row class holds the plan node alone. Before each replay the persistent `query_start_loc` and `seq_lens`
get the next step of a random history: lengths that grow across topk, requests that join and leave, padding, drafts
trimmed on the device, dummy batches of capture time. The plan from nothing is the Rust core's, made for the same step
and copied to a second set of buffers; a kernel counts the entries that differ. The host looks at the count once, at
the end.

`--mixed` mixes eager, replayed and dropped plans on one planner; `--streams` runs two planners on two streams.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from common import parser, publish, table

import mlaplan

SETTINGS = {
    "16 heads, 304 CUs": {"num_cus": 304},
    "fold 8, 256 CUs": {"num_cus": 256, "fold": 8},
    "budget -1, 80 CUs": {"num_cus": 80, "split_budget": -1},
    "topk 512, 20 CUs": {"num_cus": 20, "topk": 512, "fold": 2},
}


@dataclass
class Case:
    """One step of a history, as the device and as the core see it."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    padded_rows: int


class History:
    """Requests that come, grow and go, for at most `requests` requests and `rows` rows."""

    def __init__(self, rng: np.random.Generator, topk: int, requests: int, rows: int) -> None:
        self.rng, self.topk, self.requests, self.rows = rng, topk, requests, rows
        self.contexts = np.zeros(0, np.int64)

    def step(self) -> Case:
        """Returns the next step."""
        rng = self.rng
        if rng.random() < 0.02:  # a dummy batch of capture time: lengths equal query lengths
            count = int(rng.integers(1, self.requests + 1))
            query = np.full(count, max(1, int(rng.integers(1, 5))))
            query = query[np.cumsum(query) <= self.rows]
            return self._case(query, query)
        if rng.random() < 0.3:
            joining = int(rng.integers(0, max(2, self.requests // 4)))
            starts = rng.choice(
                [1, self.topk - 3, self.topk, 8 * self.topk, int(rng.integers(1, 2 * self.topk))], joining
            )
            self.contexts = np.concatenate([self.contexts, starts])[: self.requests]
        if rng.random() < 0.2 and len(self.contexts):
            self.contexts = self.contexts[rng.random(len(self.contexts)) < 0.7]
        drafts = int(rng.choice([0, 0, 1, 3]))
        query = np.full(len(self.contexts), 1 + drafts)
        if rng.random() < 0.2:  # drafts trimmed on the device
            query = rng.integers(0, 2 + drafts, len(query))
        query = np.where(np.cumsum(query) <= self.rows, query, 0)
        seq_lens = self.contexts + query
        self.contexts = self.contexts + np.maximum(query - rng.integers(0, 1 + drafts, len(query)), query > 0)
        return self._case(query, seq_lens)

    def _case(self, query: np.ndarray, seq_lens: np.ndarray) -> Case:
        boundaries = np.concatenate([[0], np.cumsum(query)])
        rows = int(boundaries[-1])
        return Case(
            boundaries.astype(np.int32), seq_lens.astype(np.int32), int(self.rng.integers(max(rows, 1), self.rows + 1))
        )


class Side:
    """A planner whose plans are made on the device, and one whose plans come from the core."""

    def __init__(self, settings: dict, rows: int, seed: int) -> None:
        config = mlaplan.PlannerConfig(max_rows=rows, max_requests=rows, arch=None, **settings)
        self.device = mlaplan.Planner(config, "cuda")
        fresh = mlaplan.PlannerConfig(max_rows=rows, max_requests=rows, arch=None, always_rebuild=True, **settings)
        self.core = mlaplan.Planner(fresh, "cuda")
        self.history = History(np.random.default_rng(seed), config.topk, rows, rows)
        self.rows = rows
        self.persistent = [
            torch.zeros(rows + 1, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, dtype=torch.int32, device="cuda"),
        ]
        # Like the planner's own ring: an area is not written again before its copy has run.
        self.areas = [torch.zeros(2 * rows + 1, dtype=torch.int32, pin_memory=True) for _ in range(64)]
        self.events = [torch.cuda.Event() for _ in self.areas]
        self.at = 0
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.ways = dict.fromkeys(("replayed", "refreshed", "eager", "dropped"), 0)

    def feed(self, case: Case) -> None:
        """Writes a step into the persistent inputs; idle requests last, empty."""
        area, event = self.areas[self.at % 64], self.events[self.at % 64]
        event.synchronize()
        self.at += 1
        host = area.numpy()
        count = len(case.seq_lens)
        host[: count + 1] = case.query_start_loc
        host[count + 1 : self.rows + 1] = case.query_start_loc[-1]
        host[self.rows + 1 : self.rows + 1 + count] = case.seq_lens
        host[self.rows + 1 + count :] = 0
        self.persistent[0].copy_(area[: self.rows + 1], non_blocking=True)
        self.persistent[1].copy_(area[self.rows + 1 :], non_blocking=True)
        event.record()

    def deferred(self, padded_rows: int) -> mlaplan.Plan:
        """A deferred plan of whatever the inputs hold."""
        boundaries, seq_lens = self.persistent
        batch = mlaplan.Batch(
            np.zeros(self.rows + 1, np.int32),
            padded_rows=padded_rows,
            device_query_start_loc=boundaries,
            device_seq_lens=seq_lens,
        )
        return self.device.plan(batch, deferred=True)

    def capture(self) -> None:
        """Captures the plan node for every row class."""
        self.device.refresh(self.deferred(1))
        for rows in self.device.config.row_classes:
            self.device.refresh(self.deferred(rows))
            plan = self.deferred(rows)
            with self.device.device.record() as graph:
                for _layer in range(3):
                    self.device.refresh(plan)
            self.graphs[rows] = graph

    def step(self, *, mixed: bool) -> None:
        """One step, compared on the device."""
        case = self.history.step()
        self.feed(case)
        way = self.history.rng.choice(["replayed", "refreshed", "eager", "dropped"]) if mixed else "replayed"
        self.ways[way] += 1
        if way == "eager":
            lengths = mlaplan.Exact(case.seq_lens) if self.history.rng.random() < 0.7 else None
            count = len(case.seq_lens)
            device = {
                "device_query_start_loc": self.persistent[0][: count + 1],
                "device_seq_lens": self.persistent[1][:count],
            }
            plan = self.device.plan(mlaplan.Batch(case.query_start_loc, lengths, case.padded_rows, **device))
        else:
            plan = self.deferred(case.padded_rows)
            if way == "replayed":
                self.graphs[len(plan.arrays.request_ids)].replay()
            elif way == "refreshed":
                self.device.refresh(plan)
            else:
                return
        self.compare(plan, case)

    def compare(self, plan: mlaplan.Plan, case: Case) -> None:
        """Counts entries that differ from the core's plan of the same step."""
        wanted = self.core.plan(mlaplan.Batch(case.query_start_loc, mlaplan.Exact(case.seq_lens), case.padded_rows))
        assert wanted.num_works is not None
        for name, actual, expected in zip(plan.arrays._fields, plan.arrays, wanted.arrays, strict=True):
            used = slice(wanted.num_works) if name == "work_info" else slice(None)
            self.wrong += (actual[used] != expected[used]).sum()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--replays", type=int, default=100_000)
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--mixed", action="store_true")
    options.add_argument("--streams", action="store_true")
    arguments = options.parse_args()
    lines = []
    failed = False
    for number, (name, settings) in enumerate(SETTINGS.items()):
        begin = time.perf_counter()
        sides = [
            Side(settings, arguments.rows, arguments.seed + number + 100 * side)
            for side in range(1 + arguments.streams)
        ]
        for side in sides:
            side.capture()
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in sides]
        each = arguments.replays // len(SETTINGS) // len(sides)
        for _ in range(each):
            for side, stream in zip(sides, streams, strict=True):
                with torch.cuda.stream(stream):
                    side.step(mixed=arguments.mixed)
        torch.cuda.synchronize()
        wrong = sum(int(side.wrong) for side in sides)
        failed |= wrong > 0
        ways = {way: sum(side.ways[way] for side in sides) for way in sides[0].ways}
        lines.append([name, len(sides), *ways.values(), wrong, f"{time.perf_counter() - begin:.0f} s"])
    header = ["planner", "streams", "replayed", "refreshed", "eager", "dropped", "entries that differ", "time"]
    publish("Replayed plans against plans from nothing", table(header, lines), arguments.out)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
