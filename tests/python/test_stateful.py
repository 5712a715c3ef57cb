"""One planner over long random histories: after every step the device holds what a plan from nothing would hold.

The history mixes everything that can come between two steps: batches that grow, shrink and empty, padding, prefill
chunks, drafts, lengths known exactly, by a bound or not at all, deferred plans that are refreshed, replayed through a
graph or dropped, buffers discarded, refused calls, and copies that are late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan.device import HostDevice
from mlaplan.device.host import HostGraph
from mlaplan.layout import Layout, PlanArrays
from mlaplan.reference.plan import plan as plan_from_nothing

STEPS = int(os.environ.get("MLAPLAN_STATEFUL_STEPS", "100000"))
COSTS = mlaplan.CostTable(block_tokens=4, block=3, piece=5, whole=7, slot=1, merge=1)
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"capture_sizes": (3, 6, 12)},
    "folded": {"fold": 2, "split_budget": 4},
    "no budget": {"num_cus": 20, "split_budget": -1},
    "one slot": {"num_cus": 1, "staging_slots": 1},
    "balanced": {"policy": "balanced", "cost_table": COSTS, "capture_sizes": (3, 6, 12)},
    "balanced, folded, no budget": {"policy": "balanced", "cost_table": COSTS, "fold": 2, "split_budget": -1},
    "invariant": {"policy": "invariant", "cost_table": COSTS, "fold": 2, "piece_tokens": 5},
}


@dataclass
class World:
    """Requests that come, grow and go; the truth behind every batch."""

    rng: np.random.Generator
    topk: int
    max_requests: int
    max_rows: int
    contexts: list[int] = field(default_factory=list)

    def step(self) -> tuple[np.ndarray, np.ndarray]:
        """Moves on by one step and returns the device's `query_start_loc` and `seq_lens`."""
        rng = self.rng
        event = rng.random()
        if event < 0.02:
            self.contexts = []
        if event < 0.25 and len(self.contexts) < self.max_requests:
            start = int(
                rng.choice([0, 0, self.topk - 2, self.topk, 5 * self.topk, int(rng.integers(0, 2 * self.topk))])
            )
            self.contexts.insert(int(rng.integers(0, len(self.contexts) + 1)), start)
        if event > 0.85 and self.contexts:
            self.contexts.pop(int(rng.integers(0, len(self.contexts))))
        queries = []
        room = self.max_rows
        drafts = int(rng.choice([0, 0, 0, 3]))
        for context in self.contexts:
            query = int(rng.integers(2, 9)) if context == 0 or rng.random() < 0.03 else 1 + drafts
            queries.append(min(query, room))
            room -= queries[-1]
        query_lens = np.array(queries, np.int32)
        seq_lens = np.array(self.contexts, np.int32) + query_lens
        if rng.random() < 0.9:  # else the same batch comes again
            self.contexts = [int(c + q - rng.integers(0, min(q, 2) + (drafts > 0))) if q else c
                             for c, q in zip(self.contexts, queries, strict=True)]  # fmt: skip
        return np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32), seq_lens.astype(np.int32)


def from_nothing(qsl: np.ndarray, seq_lens: np.ndarray, rows: int, params: mlaplan.PlanParams) -> PlanArrays:
    layout = Layout.of(rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
    arrays = PlanArrays(*(np.full(shape, -77, np.int32) for shape in layout.shapes))
    plan_from_nothing(qsl, seq_lens, arrays, params)
    return arrays


def differences(actual: PlanArrays, expected: PlanArrays) -> str:
    num_works = int(expected.work_indptr[-1])
    for name, got, want in zip(PlanArrays._fields, actual, expected, strict=True):
        used = slice(None) if name != "work_info" else slice(0, num_works)
        if not np.array_equal(got[used], want[used]):
            at = np.argwhere(got[used] != want[used])[0].tolist()
            return f"{name}{at} is {got[tuple(at)]}, from nothing it is {want[tuple(at)]}"
    return ""


class History:
    """One planner, its world, and a graph per class captured as an engine would."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = np.random.default_rng([seed, len(name)])
        self.world = World(self.rng, topk=24, max_requests=6, max_rows=14)
        self.device = HostDevice(delayed=bool(seed % 2))
        settings = {"num_cus": 7, "staging_slots": 3, "min_tokens_per_split": 4, "arch": None} | CONFIGS[name]
        config = mlaplan.PlannerConfig(max_rows=14, max_requests=6, topk=24, **settings)
        self.planner = mlaplan.Planner(config, self.device)
        self.params = self.planner.params
        self.persistent = (np.zeros(7, np.int32), np.zeros(6, np.int32))
        self.graphs = {rows: self.capture(rows) for rows in self.planner.config.row_classes}
        self.last: mlaplan.Batch | None = None

    def capture(self, rows: int) -> tuple[HostGraph, mlaplan.Plan]:
        dummy = self.batch(np.zeros(7, np.int32), None, rows, self.persistent)
        plan = self.planner.plan(dummy, deferred=True)
        with self.device.record() as graph:
            for _layer in range(3):
                self.planner.refresh(plan)
        assert len(graph.ops) == 1
        return graph, plan

    @staticmethod
    def batch(
        qsl: np.ndarray, lengths: Any, padded_rows: int | None, device: tuple[np.ndarray, np.ndarray], **more: bool
    ) -> mlaplan.Batch:
        return mlaplan.Batch(
            qsl, lengths, padded_rows, device_query_start_loc=device[0], device_seq_lens=device[1], **more
        )

    def lengths(self, seq_lens: np.ndarray) -> mlaplan.Exact | mlaplan.UpperBound | None:
        kind = self.rng.random()
        if kind < 0.6:
            return mlaplan.Exact(seq_lens.copy())
        if kind < 0.9:
            rejects = int(self.rng.integers(0, 5))
            bound = seq_lens + self.rng.integers(0, rejects + 1, len(seq_lens)).astype(np.int32)
            return mlaplan.UpperBound(bound.astype(np.int32), rejects)
        return None

    def step(self) -> str:
        """Runs one step; returns what differs, or nothing."""
        qsl, seq_lens = self.world.step()
        rows = int(qsl[-1])
        padded = int(self.rng.integers(rows, 15)) if self.rng.random() < 0.4 else None
        event = self.rng.random()
        if event < 0.05:
            self.discard()
        if event > 0.93:
            self.refuse()
        if 0.2 < event < 0.45:
            return self.deferred(qsl, seq_lens, padded)
        batch_qsl, more = qsl, {}
        if event > 0.9 and len(seq_lens) > 1:  # drafts were trimmed on the device: right total, wrong split
            batch_qsl, more = np.sort(np.concatenate([[0, rows], self.rng.integers(0, rows + 1, len(qsl) - 2)])), {
                "boundaries_exact": False}  # fmt: skip
        batch = self.batch(batch_qsl.astype(np.int32), self.lengths(seq_lens) if not more else None, padded,
                           (qsl, seq_lens), **more)  # fmt: skip
        plan = self.planner.plan(batch)
        # The host's arrays are reused by the scheduler at once; the device's live on until their work has run.
        batch.query_start_loc[:] = -1
        return self.compare(plan, qsl, seq_lens)

    def deferred(self, qsl: np.ndarray, seq_lens: np.ndarray, padded: int | None) -> str:
        way = self.rng.choice(["refresh", "replay", "drop", "late"])
        if way in {"refresh", "late"}:
            plan = self.planner.plan(self.batch(qsl, None, padded, (qsl, seq_lens)), deferred=True)
            if way == "late":  # another plan gets in between
                self.planner.plan(
                    self.batch(
                        np.array([0, 1], np.int32), None, None, (np.array([0, 1], np.int32), np.array([3], np.int32))
                    )
                )
            before = self.planner.stats.launches
            for _layer in range(3):
                self.planner.refresh(plan)
            assert self.planner.stats.launches == before + 1
            return self.compare(plan, qsl, seq_lens)
        # A replayed graph reads persistent buffers, idle requests last.
        self.device.synchronize()
        self.persistent[0][:] = rows = int(qsl[-1])
        self.persistent[0][: len(qsl)] = qsl
        self.persistent[1][:] = 0
        self.persistent[1][: len(seq_lens)] = seq_lens
        plan = self.planner.plan(
            self.batch(self.persistent[0].copy(), None, padded or rows, self.persistent), deferred=True
        )
        if way == "drop":
            return ""
        row_class = self.planner.config.row_classes[plan.decision.row_class]
        self.graphs[row_class][0].replay()
        return self.compare(plan, qsl, seq_lens)

    def compare(self, plan: mlaplan.Plan, qsl: np.ndarray, seq_lens: np.ndarray) -> str:
        if self.rng.random() < 0.3:
            self.device.synchronize()
        actual = PlanArrays(*(self.device.to_host(array) for array in plan.arrays))
        expected = from_nothing(qsl, seq_lens, len(actual.request_ids), self.params)
        return differences(actual, expected) or self.wrong_constants(plan)

    @staticmethod
    def wrong_constants(plan: mlaplan.Plan) -> str:
        held = plan.constants
        steps = np.arange(len(held.qo_indptr))
        right: dict[str, Any] = {
            "qo_indptr": steps,
            "kv_last_page_lens": np.ones(len(steps) - 1),
            "reduce_final_map": np.stack([steps[:-1], steps[1:]], axis=1),
            "reduce_partial_map": np.arange(len(held.reduce_partial_map)),
            "work_metadata_ptrs": [plan.arrays.work_indptr.ctypes.data, plan.arrays.work_info.ctypes.data],
        }
        wrong = [name for name, values in right.items() if not np.array_equal(getattr(held, name), values)]
        return f"constants {wrong}" if wrong else ""

    def discard(self) -> None:
        """Sleep mode: the buffers lose their content."""
        self.device.synchronize()
        for arrays in self.planner._arrays:
            for array in arrays:
                array[...] = -99
        for constants in self.planner._constants:
            for array in constants:
                array[...] = 99
        self.planner.invalidate()

    def refuse(self) -> None:
        """A refused call leaves buffers and keys as they were."""
        self.device.synchronize()
        before = self.planner._arena.tobytes()
        bad = [
            lambda: self.planner.plan(mlaplan.Batch(np.array([0, 3, 1], np.int32))),
            lambda: self.planner.plan(
                mlaplan.Batch(np.array([0, 3], np.int32), mlaplan.Exact(np.array([2], np.int32)))
            ),
            lambda: self.planner.plan(
                mlaplan.Batch(np.array([0, 300], np.int32), mlaplan.Exact(np.array([900], np.int32)))
            ),
            lambda: self.planner.plan(mlaplan.Batch(np.array([0, 1], np.int32))),
            lambda: self.planner.plan(mlaplan.Batch(np.array([0, 1], np.int32)), deferred=True),
        ]
        with pytest.raises(ValueError, match=r"query_start_loc|seq_lens|max_rows|device"):
            bad[int(self.rng.integers(0, len(bad)))]()
        assert self.planner._arena.tobytes() == before


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_step_of_a_random_history_holds_the_plan_from_nothing(name: str, seed: int) -> None:
    history = History(name, seed)
    for step in range(STEPS // (2 * len(CONFIGS))):
        found = history.step()
        assert not found, f"{name}, seed {seed}, step {step}: {found}"
    stats = history.planner.stats
    # The history is only worth something if every way was taken.
    assert set(stats.actions) == {"nothing", "copy", "launch", "deferred"}
    assert {"unchanged", "saturation proven by bound", "invalidated", "boundaries changed", "lengths changed",
            "made on the device before"} <= set(stats.reasons)  # fmt: skip


def test_a_refused_batch_keeps_the_held_plan() -> None:
    planner = mlaplan.Planner(mlaplan.PlannerConfig(max_rows=8, max_requests=4), "cpu")
    good = mlaplan.Batch(np.array([0, 2], np.int32), mlaplan.Exact(np.array([9], np.int32)))
    planner.plan(good)
    too_many_rows = mlaplan.Batch(np.array([0, 9], np.int32), mlaplan.Exact(np.array([9], np.int32)))
    unknown = mlaplan.Batch(np.array([0, 2], np.int32))
    too_short = mlaplan.Batch(np.array([0, 2], np.int32), mlaplan.Exact(np.array([1], np.int32)))
    for bad in (too_many_rows, unknown, too_short):
        with pytest.raises(ValueError, match=r"max_rows|device_query_start_loc|seq_lens"):
            planner.plan(bad)
        assert planner.plan(good).decision.action == "nothing"
