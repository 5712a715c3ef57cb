"""The self-check: a buffer that is wrong is found, reported once and proven by a dump; off, nothing is ever read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import cli
from mlaplan.device import HostDevice
from mlaplan.graphs import DecodeGraphs, DecodeInputs
from mlaplan.selfcheck import SelfCheck
from mlaplan.trace import DumpRecord, StepRecord, TraceReader
from planning import batch, ints, planner, starts
from torch_host import TorchHostDevice


def spoil_later(plan: mlaplan.Plan, name: str, *index: int) -> None:
    """What a faulty replay does: an entry changes behind the planner's back, in the order of the device's work."""
    device: Any = plan.planner.device
    array = getattr(plan.arrays, name)

    def spoil() -> None:
        array[index] += 1

    device.submit(spoil)


WAYS: dict[str, dict[str, Any]] = {
    "copy": {},
    "copy with device arrays": {"on_device": True},
    "launch": {"on_device": True, "lengths": None},
    "deferred": {"on_device": True},
    "bound": {"lengths": mlaplan.UpperBound(ints(60, 50), 3)},
}


def take(made: mlaplan.Planner, way: str, lengths: list[int], rows: int = 64) -> mlaplan.Plan:
    """One step of two requests, made."""
    if way == "bound":
        lengths = [60, 50]
    plan = made.plan(batch([2, 1], lengths, rows, **WAYS[way]), deferred=way == "deferred")
    made.refresh(plan) if way == "deferred" else None
    return plan


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("delayed", [False, True])
def test_right_buffers_are_silent(way: str, delayed: bool, caplog: pytest.LogCaptureFixture) -> None:
    made = planner(HostDevice(delayed=delayed))
    with made.self_check(3) as checked:
        for length in range(5, 35):
            take(made, way, [length, length + 1])
    assert (checked.checks, checked.skipped, checked.differences) == (10, 0, 0)
    assert checked.first is None
    assert not caplog.records
    assert made.observer is None
    assert made.stats.read_backs == 10 * (5 if way in ("copy", "bound") else 7)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    ("name", "index", "row", "of_request"),
    [
        ("request_ids", (1,), 1, 0),
        ("kv_indptr", (3,), 2, 1),
        ("kv_indptr", (64,), 63, None),
        ("work_indptr", (1,), 1, 0),
        ("reduce_indptr", (2,), 1, 0),
        ("work_info", (0, 5), 0, 0),
    ],
)
def test_a_wrong_entry_is_found_reported_once_and_proven(
    way: str,
    name: str,
    index: tuple[int, ...],
    row: int,
    of_request: int | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dump = tmp_path / "difference.trace"
    made = planner(HostDevice(delayed=True))
    checked = made.self_check(2, dump=dump)
    for step in range(12):
        plan = take(made, way, [9 + step, 11 + step])
        if step in (5, 7, 9):
            spoil_later(plan, name, *index)
    checked.close()
    assert checked.checks == 6
    assert checked.differences >= 1, "later steps may write over it"
    first = checked.first
    assert first is not None
    assert (first.step, first.array, first.index) == (5, name, index)
    assert first.actual == first.expected + 1
    assert (first.row, first.request) == (row, of_request)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"{name}[{', '.join(map(str, index))}] is {first.actual}" in caplog.text
    assert str(dump) in caplog.text
    assert checked.dump == dump
    assert cli.main(["replay", str(dump), "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["dumps"]["dumps"] == 1
    assert document["dumps"]["equal"] == 0
    assert document["dumps"]["differences"] == [{**first.as_dict(), "index": list(index)}]
    assert document["replayed"]["num_differences"] == 0, "plans made now are right: the fault is not in planning"
    assert document["replayed"]["same"] == 6
    assert "dump of step 5, row" in captured.err
    steps = [record for record in TraceReader(dump).records() if isinstance(record, StepRecord)]
    assert [step.index for step in steps] == list(range(6))


def test_the_dump_of_a_fault_in_planning_tells_it_from_one_in_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planner that plans wrongly does so again in the replay."""
    dump = tmp_path / "wrong.trace"
    original = mlaplan.Planner._copy

    def wrong(self: mlaplan.Planner, some: mlaplan.Batch, *rest: Any) -> mlaplan.Plan:
        made = original(self, some, *rest)
        made.arrays.kv_indptr[1] += 1
        return made

    monkeypatch.setattr(mlaplan.Planner, "_copy", wrong)
    made = planner()
    plan = take(made, "copy", [9, 11])
    difference = made.check(plan, dump=dump)
    assert difference is not None
    assert cli.main(["replay", str(dump), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["replayed"]["num_differences"] == 1
    assert document["replayed"]["differences"][0]["array"] == document["dumps"]["differences"][0]["array"]


def test_off_means_that_nothing_is_read() -> None:
    made = planner(HostDevice(delayed=True))
    for length in range(5, 300):
        take(made, "deferred" if length % 2 else "launch", [length % 60 + 3, 9])
    assert made.observer is None
    assert made.stats.read_backs == 0


def test_between_two_checks_nothing_is_read() -> None:
    made = planner(HostDevice(delayed=True))
    with made.self_check(100) as checked:
        for length in range(99):
            take(made, "launch", [length + 3, 9])
        assert (made.stats.read_backs, made.stats.waits) == (0, 0)
    assert checked.checks == 0


def test_inputs_that_are_written_again_before_the_next_step_do_no_harm() -> None:
    """A runner fills its persistent arrays for the next step before it plans it."""
    made = planner(HostDevice(delayed=True))
    boundaries, lengths = starts([1, 1]), ints(5, 6)
    some = mlaplan.Batch(starts([1, 1]), None, None, False, boundaries, lengths)
    with made.self_check(1) as checked:
        for turn in range(20):
            made.device.store(boundaries, starts([1 + turn % 2, 1]))
            made.device.store(lengths, ints(5 + turn, 9))
            made.refresh(made.plan(some, deferred=True))
    assert (checked.checks, checked.differences) == (20, 0)


def graph_rig(device: HostDevice) -> tuple[mlaplan.Planner, DecodeInputs, DecodeGraphs]:
    made = planner(device, backend="reference")
    inputs = DecodeInputs(
        query_start_loc=device.allocate(5), seq_lens=device.allocate(4),
        q=np.ones((4, 2, 8)), kv_cache=np.ones((64, 8)), topk_indices=np.zeros((4, 16), np.int32),
        block_table=np.ones((4, 8), np.int32), out=np.zeros((4, 2, 4)), lse=np.zeros((4, 2)),
    )  # fmt: skip
    graphs = DecodeGraphs(made, inputs, block_size=8)
    graphs.capture(4, 4)
    return made, inputs, graphs


def replay_step(made: mlaplan.Planner, inputs: DecodeInputs, graphs: DecodeGraphs, lengths: list[int]) -> mlaplan.Plan:
    made.device.store(inputs.query_start_loc, starts([1, 1, 1, 0]))
    made.device.store(inputs.seq_lens, np.array(lengths, np.int32))
    plan = made.plan(graphs.batch(4, 4), deferred=True)
    graphs.replay(plan, 4)
    return plan


@pytest.mark.parametrize("delayed", [False, True])
def test_replays_are_looked_at_and_a_corrupted_one_is_found(delayed: bool) -> None:
    """ROCm/clr#279: eager is right, and replays give garbage; a plan alone cannot show that, the buffers can."""
    made, inputs, graphs = graph_rig(HostDevice(delayed=delayed))
    with made.self_check(2) as checked:
        for turn in range(20):
            replay_step(made, inputs, graphs, [5 + turn, 20, 3, 0])
    assert (checked.checks, checked.differences) == (10, 0)
    with made.self_check(2) as checked:
        for turn in range(20):
            plan = replay_step(made, inputs, graphs, [5 + turn, 20, 3, 0])
            if turn == 13:
                array = plan.arrays.kv_indptr

                def corrupt(array: Any = array) -> None:
                    array[2:] += 16

                made.device.submit(corrupt)  # type: ignore[attr-defined]
    assert (checked.checks, checked.differences) == (10, 1)
    assert checked.first is not None
    assert (checked.first.step, checked.first.array, checked.first.index) == (13, "kv_indptr", (2,))
    assert (checked.first.row, checked.first.request) == (1, 1)


def test_a_graph_captured_without_its_plan_is_found() -> None:
    """Replays then read the plan of whatever ran before them."""
    made, inputs, graphs = graph_rig(HostDevice())
    graph: Any = graphs._graphs[4, 4]
    del graph.ops[0]
    with made.self_check(1) as checked:
        replay_step(made, inputs, graphs, [9, 20, 3, 0])
    assert checked.differences == 1


def test_on_demand_right_behind_a_replay() -> None:
    made, inputs, graphs = graph_rig(HostDevice(delayed=True))
    plan = replay_step(made, inputs, graphs, [5, 20, 3, 0])
    assert made.check(plan) is None
    plan.arrays.work_info[0, 4] += 16
    difference = made.check(plan)
    assert difference is not None
    assert (difference.array, difference.index) == ("work_info", (0, 4))
    assert made.stats.read_backs == 14


def test_on_demand_writes_a_dump_even_of_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ROCm/aiter#4638: outputs differ from run to run; a dump of the right plan clears the plan of it."""
    made = planner(fold=2)
    plan = take(made, "copy", [9, 30])
    assert made.check(plan, dump=tmp_path / "right.trace") is None
    with pytest.raises(FileExistsError):
        made.check(plan, dump=tmp_path / "right.trace")
    step, dump = TraceReader(tmp_path / "right.trace").records()
    assert isinstance(step, StepRecord)
    assert isinstance(dump, DumpRecord)
    assert np.array_equal(dump.arrays.request_ids, plan.arrays.request_ids)
    assert dump.arrays.work_info.shape == (plan.num_works, 8)
    assert cli.main(["replay", str(tmp_path / "right.trace"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dumps"] == {"dumps": 1, "equal": 1, "differences": []}


def test_on_demand_refuses_what_it_cannot_tell() -> None:
    made, other = planner(), planner()
    plan = take(made, "launch", [5, 6])
    with pytest.raises(ValueError, match="another planner"):
        other.check(plan)
    with made.device.record(), pytest.raises(RuntimeError, match="while a graph is captured"):
        made.check(plan)
    with pytest.raises(ValueError, match="every is 0"):
        SelfCheck(made, 0)


def draft_loop(made: mlaplan.Planner, lengths: Any, plan: mlaplan.Plan) -> None:
    device: Any = made.device

    def grow() -> None:
        lengths[:] += 1

    for _ in range(3):
        made.remake(plan)
        device.run(grow)


def test_plans_that_the_device_makes_again_are_skipped() -> None:
    made = planner(HostDevice())
    boundaries, lengths = starts([1, 1]), ints(5, 6)
    some = mlaplan.Batch(starts([1, 1]), None, None, False, boundaries, lengths)
    with made.self_check(1) as checked:
        for _ in range(4):
            draft_loop(made, lengths, made.plan(some, deferred=True))
            made.refresh(made.plan(some, deferred=True))
    assert (checked.checks, checked.skipped, checked.differences) == (4, 4, 0)


def test_a_draft_loop_in_a_graph_is_never_taken_for_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    made = planner(HostDevice())
    boundaries, lengths = starts([1, 1]), ints(5, 6)
    some = mlaplan.Batch(starts([1, 1]), None, None, False, boundaries, lengths)
    with caplog.at_level(logging.INFO, "mlaplan"), made.self_check(1) as checked:
        plan = made.plan(some, deferred=True)
        with made.device.record() as graph:
            draft_loop(made, lengths, plan)
        for _ in range(5):
            made.plan(some, deferred=True)
            graph.replay()
    assert (checked.checks, checked.differences) == (0, 0)
    assert checked.skipped == 6
    assert len(caplog.records) == 1


def test_steps_in_captures_and_invalidated_ones_are_skipped() -> None:
    made = planner(HostDevice())
    some = batch([1], [5], on_device=True, lengths=None)
    with made.self_check(1) as checked:
        with made.device.record():
            made.refresh(made.plan(some, deferred=True))
        made.refresh(made.plan(some, deferred=True))
        made.invalidate()
        made.refresh(made.plan(some, deferred=True))
    assert (checked.checks, checked.skipped, checked.differences) == (1, 2, 0)


def test_a_dump_that_cannot_be_written_is_said_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = planner()
    checked = made.self_check(1, dump=tmp_path / "none" / "a.trace")
    plan = take(made, "launch", [5, 6])
    plan.arrays.request_ids[0] = 5
    assert take(made, "launch", [5, 6]).decision.action == "launch"
    assert checked.differences == 1
    assert checked.dump is None
    assert "no dump: FileNotFoundError" in caplog.text


@pytest.mark.parametrize("policy", ["aiter", "balanced", "invariant"])
def test_every_policy_is_checked_with_its_own_plan(policy: str) -> None:
    made = planner(policy=policy)
    with made.self_check(1) as checked:
        for length in range(5, 40, 7):
            take(made, "copy", [length, 60])
            take(made, "launch", [length, 61])
    assert (checked.checks, checked.differences) == (10, 0)


def test_tensors_are_checked_too() -> None:
    import torch

    made = planner(TorchHostDevice(), backend="none")
    boundaries, lengths = (torch.from_numpy(values) for values in (starts([1, 2]), ints(9, 12)))
    some = mlaplan.Batch(starts([1, 2]), None, None, True, boundaries, lengths)
    with made.self_check(1) as checked:
        made.refresh(made.plan(some, deferred=True))
        plan = made.plan(some)
        plan.arrays.kv_indptr[1] = 7
    assert (checked.checks, checked.differences) == (2, 1)
