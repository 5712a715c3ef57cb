"""The soak in short, and that it would find something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
import soaking
from mlaplan.planner import Planner
from mlaplan.workload import Request


@pytest.mark.parametrize(
    ("name", "policy", "steps"),
    [
        ("azure_conv_2023", "aiter", 1600),
        ("mooncake_conversation", "aiter", 1600),
        ("azure_conv_2023", "balanced", 800),
        ("mooncake_conversation", "invariant", 800),
    ],
)
def test_real_logs_are_decided_and_planned_right_and_memory_stays(
    shared: Path, name: str, policy: str, steps: int
) -> None:
    tally = soaking.soak(shared / "data" / f"{name}.csv", steps, rounds=2, policy=policy)
    assert tally.differences == []
    assert (tally.steps, tally.plans_compared, tally.allocations) == (steps, steps // 20, 0)
    assert tally.rows_compared > steps // 2
    assert {"nothing", "copy", "launch", "deferred"} <= set(tally.actions)
    settled = [size for _, size in tally.settled()]
    # A batch that is larger than any before may still come; a plan kept in each step would be hundreds of megabytes.
    assert max(settled) - settled[0] < 48 << 20


def test_a_log_goes_on_behind_its_end_at_the_same_pace() -> None:
    log = [Request(float(100 * number), number + 1, 5) for number in range(7)]
    tally = soaking.Tally()
    stream = soaking.around(log, 3, tally)
    requests = [next(stream) for _ in range(30)]
    assert [request.input_tokens for request in requests[:9]] == [7, 1, 2, 3, 4, 5, 6, 7, 1]
    arrivals = [request.arrival_ms for request in requests]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert tally.turns == 5


def _wrong_length(plan: Any, _planner: Planner) -> None:
    plan.arrays.kv_indptr[-1] += 1


def _wrong_work(plan: Any, _planner: Planner) -> None:
    plan.arrays.work_info[0, 5] += 1


def _forgetful(_plan: Any, made: Planner) -> None:
    made._step.invalidate()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(_wrong_length, "rows differ"), (_wrong_work, "work_info differs"), (_forgetful, "should be nothing")],
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoil: Any, words: str) -> None:
    log = tmp_path / "log.csv"
    log.write_text("".join(f"{500 * number},{3000 + number},40\n" for number in range(200)))
    original = Planner.plan

    def plan(self: Planner, batch: mlaplan.Batch, *, deferred: bool = False) -> mlaplan.Plan:
        made = original(self, batch, deferred=deferred)
        if not deferred and self.device.submitted == 0 and made.decision.action == "copy":  # type: ignore[attr-defined]
            spoil(made, self)
        return made

    monkeypatch.setattr(Planner, "plan", plan)
    tally = soaking.soak(log, 400, every=1, rounds=1)
    assert any(words in difference for difference in tally.differences), tally.differences


def test_the_page_says_what_was_seen() -> None:
    import argparse

    tally = soaking.Tally(steps=4000, rows=9, memory=[(step, 50 << 20) for step in range(0, 4001, 100)])
    tally.actions["copy"] = 4000
    options = argparse.Namespace(policy="aiter", every=20, core=None)
    page = soaking.report({"some log": tally}, options)
    assert "| some log | 4,000 |" in page
    assert tally.slope() == pytest.approx(0.0, abs=1e-3)
    tally.memory = [(step, (50 << 20) + 7 * step) for step in range(0, 4001, 100)]
    assert tally.slope() == pytest.approx(7000.0)
    tally.differences.append("step 3: something")
    assert "* some log: step 3: something" in soaking.report({"some log": tally}, options)


def test_rows_of_a_step_are_those_of_the_definition() -> None:
    starts, lengths = np.array([0, 1, 4], np.int32), np.array([9, 5000], np.int32)

    class Step:
        query_start_loc, seq_lens, rows = starts, lengths, 4

    ids, indptr = soaking.rows_of(Step(), 6)  # type: ignore[arg-type]
    assert ids.tolist() == [0, 1, 1, 1, 0, 0]
    assert indptr.tolist() == [0, 9, 2057, 4105, 6153, 6153, 6153]
