"""The public API under histories that hypothesis makes up and shrinks, compared with plans from nothing on the way.

`test_stateful.py` walks far through likely histories; this goes through unlikely ones: any order of calls, any device
settings, plans refreshed, remade or decoded long after others were made, graphs recorded in between, refused calls.
`MLAPLAN_HYPOTHESIS_PROFILE=slow` runs 25 times as many of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.device import HostDevice
from mlaplan.device.host import HostGraph
from mlaplan.layout import PlanArrays
from planning import assert_holds, batch, ints, planner, starts

TOPK, MAX_ROWS, MAX_REQUESTS = 24, 14, 5
HEADS, HEAD_DIM, V_DIM = 2, 8, 4
BLOCK_SIZE, BLOCKS = 4, 9

Requests = list[tuple[int, int]]
contexts = st.one_of(st.integers(0, 4), st.integers(TOPK - 6, TOPK + 6), st.sampled_from([900, 2**31 - 40]))
requests_of = st.lists(st.tuples(st.integers(0, 5), contexts), max_size=MAX_REQUESTS).filter(
    lambda some: sum(query_len for query_len, _ in some) <= MAX_ROWS
)
seeds = st.integers(0, 2**32 - 1)


@dataclass
class Made:
    """A plan and the truth behind it."""

    plan: mlaplan.Plan
    query_lens: list[int]
    seq_lens: list[int]


class Api(RuleBasedStateMachine):
    """One planner, plans that are still around, and a graph for some row classes."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        delayed=st.booleans(),
        num_cus=st.sampled_from([1, 7, 20]),
        fold=st.sampled_from([1, 2]),
        budget=st.sampled_from([None, -1, 1, 4]),
        maker=st.sampled_from(["core", "core", "device"]),
        slots=st.integers(2, 3),
        capture_sizes=st.sampled_from([(), (3, 6, 12)]),
    )
    def make(
        self,
        delayed: bool,
        num_cus: int,
        fold: int,
        budget: int | None,
        maker: str,
        slots: int,
        capture_sizes: tuple[int, ...],
    ) -> None:
        self.device = HostDevice(delayed=delayed)
        self.planner = planner(
            self.device, max_rows=MAX_ROWS, max_requests=MAX_REQUESTS, topk=TOPK, num_cus=num_cus, fold=fold,
            split_budget=budget, schedule_maker=maker, staging_slots=slots, capture_sizes=capture_sizes,
            min_tokens_per_split=4, heads=HEADS, head_dim=HEAD_DIM, v_head_dim=V_DIM,
        )  # fmt: skip
        self.around: list[Made] = []
        self.held: Made | None = None  # what the buffers hold
        self.believed: Made | None = None  # the same, where the host can know it
        self.look = True
        self.graphs: dict[int, HostGraph] = {}
        self.constants = [[array.copy() for array in group] for group in self.planner._constants]
        self.persistent = (np.zeros(MAX_REQUESTS + 1, np.int32), np.zeros(MAX_REQUESTS, np.int32))

    @rule(
        requests=requests_of,
        kind=st.sampled_from(["exact", "exact", "bound", "none", "moved"]),
        rejects=st.integers(0, 4),
        padding=st.integers(0, 4),
        on_device=st.booleans(),
        deferred=st.booleans(),
        look=st.booleans(),
        seed=seeds,
    )
    def plan(
        self,
        requests: Requests,
        kind: str,
        rejects: int,
        padding: int,
        on_device: bool,
        deferred: bool,
        look: bool,
        seed: int,
    ) -> None:
        """Plans a batch, the host knowing all of it, a bound, nothing, or not even the boundaries."""
        rng = np.random.default_rng(seed)
        query_lens = [query_len for query_len, _ in requests]
        seq_lens = [query_len + context for query_len, context in requests]
        qsl, lengths = starts(query_lens), np.array(seq_lens, np.int32)
        on_device = on_device or deferred or kind != "exact"
        told = qsl.copy()
        known: mlaplan.Exact | mlaplan.UpperBound | None = mlaplan.Exact(lengths.copy()) if kind == "exact" else None
        if kind == "bound":
            known = mlaplan.UpperBound(lengths + rng.integers(0, rejects + 1, len(lengths), dtype=np.int32), rejects)
        if kind == "moved" and len(query_lens) > 1:  # only the total is the device's
            told[1:-1] = np.sort(rng.integers(0, qsl[-1] + 1, len(told) - 2))
        handed = mlaplan.Batch(
            told, known, min(int(qsl[-1]) + padding, MAX_ROWS), kind != "moved",
            qsl.copy() if on_device else None, lengths.copy() if on_device else None,
        )  # fmt: skip
        self.remember(Made(self.planner.plan(handed, deferred=deferred), query_lens, seq_lens), look)
        told[:] = -1  # the scheduler uses its arrays again at once

    @precondition(lambda self: self.around)
    @rule(step=st.integers(0, 1), on_device=st.booleans(), look=st.booleans())
    def plan_again(self, step: int, on_device: bool, look: bool) -> None:
        """The last batch once more, each sequence perhaps longer by a token."""
        last = self.around[-1]
        qsl = starts(last.query_lens)
        lengths = np.array(last.seq_lens, np.int32) + np.int32(step)
        device = (qsl.copy(), lengths.copy()) if on_device else (None, None)
        handed = mlaplan.Batch(qsl, mlaplan.Exact(lengths), last.plan.padded_rows, True, *device)
        believed = self.believed
        made = Made(self.planner.plan(handed), last.query_lens, lengths.tolist())
        if step == 0 and believed is last:
            assert made.plan.decision.action == "nothing"
        self.remember(made, look)

    def remember(self, made: Made, look: bool) -> None:
        deferred = made.plan.decision.action == "deferred"
        self.seen[made.plan.decision.action] += 1
        self.around = [*self.around[-3:], made]
        self.look = look
        self.held = None if deferred else made
        self.believed = made if made.plan.lengths_known else None

    @precondition(lambda self: self.around)
    @rule(which=st.integers(0, 3), layers=st.integers(1, 3), look=st.booleans())
    def refresh(self, which: int, layers: int, look: bool) -> None:
        """Several layers ask for a plan: one launch at most."""
        made = self.around[which % len(self.around)]
        self.believed = self.believed if made is self.held else None
        before = self.device.counters.launches
        self.look = look

        def run() -> None:
            for _ in range(layers):
                self.planner.refresh(made.plan)

        if self.possible(made, run):
            assert self.device.counters.launches - before <= (made is not self.held)
            self.held = made
            self.seen["refresh"] += 1

    @precondition(lambda self: self.around)
    @rule(which=st.integers(0, 3), step=st.integers(-2, 2), look=st.booleans())
    def remake(self, which: int, step: int, look: bool) -> None:
        """The device changed the lengths of a plan, as between two draft steps."""
        made = self.around[which % len(self.around)]
        if not made.plan.batch.on_device:
            return
        self.device.synchronize()
        pairs = zip(made.seq_lens, made.query_lens, strict=True)
        made.seq_lens = [min(max(seq_len + step, query_len), 2**31 - 1) for seq_len, query_len in pairs]
        made.plan.batch.device_seq_lens[:] = made.seq_lens
        self.planner.remake(made.plan)
        self.held, self.believed, self.look = made, None, look
        self.seen["remake"] += 1

    @rule(which=st.integers(0, 20), layers=st.integers(1, 3), requests=requests_of)
    def record(self, which: int, layers: int, requests: Requests) -> None:
        """Captures a graph for a row class; nothing ran, so its plan refreshed afterwards is made then."""
        classes = self.planner.config.row_classes
        rows = classes[which % len(classes)]
        dummy = mlaplan.Batch(np.zeros(MAX_REQUESTS + 1, np.int32), None, rows, True, *self.persistent)
        plan = self.planner.plan(dummy, deferred=True)
        with self.device.record() as graph:
            for _ in range(layers):
                self.planner.refresh(plan)
        assert len(graph.ops) == 1
        self.graphs[rows] = graph
        self.held = self.believed = None
        if 0 < sum(query_len for query_len, _ in requests) <= rows:
            truth = self.fill_persistent(requests)
            self.planner.refresh(plan)
            self.held = Made(plan, *truth)
        self.seen["record"] += 1

    @precondition(lambda self: self.graphs)
    @rule(which=st.integers(0, 20), requests=requests_of, look=st.booleans())
    def replay(self, which: int, requests: Requests, look: bool) -> None:
        """Replays a graph over what the persistent buffers hold by then."""
        rows = sorted(self.graphs)[which % len(self.graphs)]
        if sum(query_len for query_len, _ in requests) > rows:
            return
        query_lens, seq_lens = self.fill_persistent(requests)
        handed = mlaplan.Batch(starts(query_lens), None, rows, True, *self.persistent)
        plan = self.planner.plan(handed, deferred=True)
        self.graphs[rows].replay()
        self.held, self.believed, self.look = Made(plan, query_lens, seq_lens), None, look
        self.seen["replay"] += 1

    def fill_persistent(self, requests: Requests) -> tuple[list[int], list[int]]:
        requests = requests + [(0, 0)] * (MAX_REQUESTS - len(requests))
        query_lens = [query_len for query_len, _ in requests]
        seq_lens = [query_len + context for query_len, context in requests]
        self.device.synchronize()
        self.persistent[0][:] = starts(query_lens)
        self.persistent[1][:] = seq_lens
        return query_lens, seq_lens

    @rule(value=st.sampled_from([-99, 0, 2**31 - 1]))
    def invalidate(self, value: int) -> None:
        """The buffers lose their content."""
        self.device.synchronize()
        self.planner._arena[...] = value
        for constants in self.planner._constants:
            for array in constants:
                array[...] = 99
        self.planner.invalidate()
        self.held = self.believed = None

    @precondition(lambda self: self.around)
    @rule(which=st.integers(0, 3), seed=seeds)
    def decode(self, which: int, seed: int) -> None:
        """Decodes a plan, which makes it if the buffers hold another."""
        made, rng = self.around[which % len(self.around)], np.random.default_rng(seed)
        self.believed = self.believed if made is self.held else None
        rows = made.plan.padded_rows
        q = rng.standard_normal((rows, HEADS, HEAD_DIM))
        kv_cache = rng.standard_normal((BLOCKS * BLOCK_SIZE, HEAD_DIM))
        indices = rng.integers(-1, 3 * BLOCK_SIZE + 1, (rows, TOPK), dtype=np.int32)
        table = rng.integers(0, BLOCKS, (MAX_REQUESTS, 3), dtype=np.int32)
        found: list[Any] = []

        def run() -> None:
            found.extend(self.planner.decode(made.plan, q, kv_cache, indices, table, block_size=BLOCK_SIZE))

        if not self.possible(made, run):
            return
        self.held, self.look = made, True
        out, lse = (self.device.to_host(array) for array in found)
        wanted = attention(made, q, kv_cache, indices, table)
        np.testing.assert_allclose(out, wanted[0], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(lse, wanted[1], rtol=1e-9, atol=1e-12)
        self.seen["decode"] += 1

    @rule(which=st.integers(0, 5), deferred=st.booleans())
    def refuse(self, which: int, deferred: bool) -> None:
        """A refused call changes nothing; what was held still is."""
        bad: list[Any] = [
            mlaplan.Batch(ints(0, 3, 1)),
            mlaplan.Batch(ints(0, 3), mlaplan.Exact(ints(2))),
            mlaplan.Batch(ints(0, 300), mlaplan.Exact(ints(900)), None, True, ints(0, 300), ints(900)),
            mlaplan.Batch(np.zeros(MAX_REQUESTS + 2, np.int32)),
            mlaplan.Batch(ints(0, 1), None, 1, True, None, ints(9)),
            mlaplan.Batch(ints(0, 1), mlaplan.UpperBound(ints(9), -1)),
        ]
        self.device.synchronize()
        before = self.planner._arena.tobytes(), self.planner.stats
        with pytest.raises(ValueError, match=r"query_start_loc|seq_lens|max_|device"):
            self.planner.plan(bad[which], deferred=deferred)
        assert (self.planner._arena.tobytes(), self.planner.stats) == before
        self.seen["refuse"] += 1

    def possible(self, made: Made, call: Any) -> bool:
        """Calls; without device arrays a plan that is not held any more may be refused, and must be if it is lost."""
        if made.plan.batch.on_device:
            call()
            return True
        try:
            call()
        except mlaplan.PlanError as error:
            assert "device_query_start_loc and device_seq_lens are needed" in str(error)  # noqa: PT017 - may succeed
            assert made is not self.held
            self.seen["stale"] += 1
            return False
        return True

    @invariant()
    def holds_the_plan_from_nothing(self) -> None:
        made = getattr(self, "held", None)
        if made is None or not self.look:
            return
        arrays = [self.device.to_host(array) for array in made.plan.arrays]
        arrays[4] = arrays[4][: arrays[2][-1]]
        assert_holds(made.plan, made.query_lens, made.seq_lens, PlanArrays(*arrays))
        constants = zip(made.plan.constants, self.constants[made.plan.decision.row_class], strict=True)
        assert all(np.array_equal(array, right) for array, right in constants)
        self.seen["compared"] += 1

    def teardown(self) -> None:
        if hasattr(self, "planner"):
            self.device.synchronize()
            self.look = True
            self.holds_the_plan_from_nothing()


def attention(made: Made, q: Any, kv_cache: Any, indices: Int32Array, table: Int32Array) -> tuple[Any, Any]:
    """Output and LSE from the definition, row by row and head by head."""
    out = np.zeros((len(q), HEADS, V_DIM))
    lse = np.full((len(q), HEADS), -np.inf)
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(made.query_lens, made.seq_lens, strict=True)):
        for i in range(query_len):
            slots = []
            for position in indices[row, : min(seq_len - query_len + i + 1, TOPK)].tolist():
                inside = 0 <= position < table.shape[1] * BLOCK_SIZE
                block, offset = divmod(position, BLOCK_SIZE)
                slots.append(table[request, block] * BLOCK_SIZE + offset if inside else 0)
            keys = kv_cache[slots]
            for head in range(HEADS):
                weights = np.exp(keys @ q[row, head] * HEAD_DIM**-0.5)
                out[row, head] = weights @ keys[:, :V_DIM] / weights.sum()
                lse[row, head] = np.log(weights.sum())
            row += 1
    return out, lse


WAYS = "nothing copy launch deferred refresh remake record replay decode refuse stale compared"


def test_no_order_of_calls_leaves_another_plan_than_the_one_from_nothing() -> None:
    Api.seen.clear()
    profile = settings.default
    assert profile
    run_state_machine_as_test(Api, settings=settings(max_examples=5 * profile.max_examples))
    # The histories are only worth something if every way was taken.
    assert not set(WAYS.split()) - set(Api.seen)


def test_a_plan_refreshed_after_a_loss_finds_its_constants_again() -> None:
    made = planner(max_rows=8)
    plan = made.plan(batch([1, 5], [1, 5], on_device=True))
    before = [array.copy() for array in plan.constants]
    for array in plan.constants:
        array[...] = 99
    made.invalidate()
    made.refresh(plan)
    assert all(np.array_equal(array, right) for array, right in zip(plan.constants, before, strict=True))
