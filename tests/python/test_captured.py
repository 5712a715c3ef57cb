"""Runs whose pure decodes go through captured graphs; on the host a graph replays the reference ops."""

from __future__ import annotations

import numpy as np
import pytest

import mlaplan
from mlaplan.device.host import HostGraph
from mlaplan.graphs import DecodeGraphs, DecodeInputs
from mlaplan.runner import RunOptions, RunResult, run
from mlaplan.workload import SchedulerConfig


def graphed(spec_tokens: int = 0) -> RunResult:
    scheduler = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=512, num_speculative_tokens=spec_tokens, seed=3)
    return run(RunOptions(device="cpu", steps=200, topk=32, scheduler=scheduler, graphs=True, decode_every=12))


@pytest.mark.parametrize("spec_tokens", [0, 3])
def test_replayed_steps_hold_their_plans_and_attend_right(spec_tokens: int) -> None:
    result = graphed(spec_tokens)
    assert result.passed, result.differences
    assert result.replays > 20
    assert result.decodes_checked > 10
    assert result.actions["deferred"] == result.replays
    assert result.operations.copies <= result.steps - result.replays


def test_a_replay_that_does_not_happen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []
    replay = HostGraph.replay

    def sometimes(graph: HostGraph) -> None:
        replayed.append(graph)
        if len(replayed) < 30:
            replay(graph)

    monkeypatch.setattr(HostGraph, "replay", sometimes)
    result = graphed()
    assert len(replayed) >= 30
    assert not result.passed


def inputs(planner: mlaplan.Planner) -> DecodeInputs:
    device, config = planner.device, planner.config
    return DecodeInputs(
        query_start_loc=device.allocate(3),
        seq_lens=device.allocate(2),
        q=device.empty((2, config.heads, config.head_dim), "bf16"),
        kv_cache=device.array(np.zeros((8, config.head_dim))),
        topk_indices=device.view(device.allocate(2 * config.topk), 0, (2, config.topk)),
        block_table=device.view(device.allocate(2), 0, (2, 1)),
        out=device.empty((2, config.heads, config.v_head_dim), "bf16"),
        lse=device.empty((2, config.heads), "float32"),
    )


def test_only_a_deferred_plan_of_a_captured_size_is_replayed() -> None:
    config = mlaplan.PlannerConfig(max_rows=2, max_requests=2, topk=4, head_dim=8, v_head_dim=4)
    planner = mlaplan.Planner(config, "cpu")
    graphs = DecodeGraphs(planner, inputs(planner), block_size=4)
    graphs.capture(2, 2)
    known = mlaplan.Batch(np.array([0, 1, 2], np.int32), mlaplan.Exact(np.array([3, 4], np.int32)))
    with pytest.raises(ValueError, match="must be deferred"):
        graphs.replay(planner.plan(known), 2)
    with pytest.raises(KeyError):
        graphs.replay(planner.plan(graphs.batch(1, 2), deferred=True), 2)
    planner.plan(known)
    graphs.replay(planner.plan(graphs.batch(2, 2), deferred=True), 2)
    assert planner.plan(known).decision.action == "copy"  # a replay leaves nothing that the host knows
