"""Recorder, self-check, statistics and Prometheus beside vLLM's own builder plumbing, set up by the environment."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import OURS, Engine, Inputs, Sizes, Step
from test_first_use import capture

from mlaplan import cli, metrics
from mlaplan.recorder import Recorder
from mlaplan.selfcheck import SelfCheck
from mlaplan.trace import StepRecord, TraceReader
from mlaplan.vllm import watching
from mlaplan.vllm.settings import Settings, Watch

SIZES = Sizes(capture_sizes=(1, 2, 4, 8))


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RECORD", "RECORD_BYTES", "RECORD_LENGTHS", "CHECK_EVERY", "DUMP", "LOG_STATS", "METRICS"):
        monkeypatch.delenv(f"MLAPLAN_{name}", raising=False)
    monkeypatch.setattr(watching, "_REPORTERS", {})


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.mlaplan")
    return caplog


def engine(sizes: Sizes = SIZES) -> tuple[Engine, Inputs]:
    inputs = Inputs(sizes, np.random.default_rng(0))
    return Engine(OURS, sizes, inputs), inputs


def listener(made: Engine, kind: type) -> Any:
    observer = made.planner.observer
    found = [each for each in observer.listeners if isinstance(each, kind)]
    assert len(found) == 1
    return found[0]


def replay_steps(made: Engine, inputs: Inputs, graph: Any, count: int, spoil: Any = None) -> None:
    """Steps of two requests through a captured graph, as a runner makes them."""
    for turn in range(count):
        metadata = made.build(inputs.write(Step(query_lens=[1, 1], seq_lens=[50 + turn, 200])))
        graph.replay()
        if spoil is not None:
            spoil(turn, metadata)


def test_off_is_off() -> None:
    made, inputs = engine()
    graph, _ = capture(made, inputs, 2, 2, 1)
    replay_steps(made, inputs, graph, 50)
    assert made.planner.observer is None
    assert made.planner.stats.read_backs == 0


@pytest.mark.parametrize("mode", ["graph", "build"])
def test_steps_are_recorded_into_the_folder_that_was_named(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAPLAN_MODE", mode)
    monkeypatch.setenv("MLAPLAN_RECORD", str(tmp_path))
    monkeypatch.setenv("MLAPLAN_RECORD_LENGTHS", "1")
    made, inputs = engine()
    for turn in range(20):
        made.forward(made.build(inputs.write(Step(query_lens=[1, 3], seq_lens=[50 + turn, 200]))), 4)
    recorder = listener(made, Recorder)
    recorder.close()
    (path,) = tmp_path.iterdir()
    assert recorder.path == path
    reader = TraceReader(path)
    steps = [record for record in reader.records() if isinstance(record, StepRecord)]
    assert [step.action for step in steps] == ["deferred"] * 20
    assert [step.device_seq_lens.tolist() for step in steps] == [[50 + turn, 200] for turn in range(20)]  # type: ignore[union-attr]
    assert all(step.device_query_start_loc.tolist() == [0, 1, 4] for step in steps)  # type: ignore[union-attr]
    assert {"vllm", "torch"} <= set(reader.header.versions)
    assert cli.main(["replay", str(path), "--json"]) == 0


def test_without_being_told_to_nothing_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPLAN_RECORD", str(tmp_path))
    made, inputs = engine()
    graph, _ = capture(made, inputs, 2, 2, 1)
    before = made.planner.stats.launches
    replay_steps(made, inputs, graph, 30)
    assert made.planner.stats.read_backs == 0
    assert made.planner.stats.launches == before
    listener(made, Recorder).close()


@pytest.mark.parametrize("mode", ["graph", "build", "classic"])
def test_right_buffers_are_silent(mode: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MLAPLAN_MODE", mode)
    monkeypatch.setenv("MLAPLAN_CHECK_EVERY", "3")
    made, inputs = engine()
    for turn in range(30):
        made.forward(made.build(inputs.write(Step(query_lens=[1, 3], seq_lens=[50 + turn, 200]))), 4)
    checked = listener(made, SelfCheck)
    checked.close()
    assert (checked.checks, checked.differences, checked.skipped) == (10, 0, 0)
    assert not [record for record in log.records if record.levelno > logging.INFO]


def test_a_corrupted_replay_is_found_and_proven(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLAPLAN_CHECK_EVERY", "4")
    monkeypatch.setenv("MLAPLAN_DUMP", str(tmp_path))
    made, inputs = engine()
    graph, _ = capture(made, inputs, 2, 2, 1)
    checked = listener(made, SelfCheck)
    replay_steps(made, inputs, graph, 40)
    assert checked.checks > 5
    assert checked.differences == 0
    assert list(tmp_path.iterdir()) == []

    def spoil(_turn: int, metadata: Any) -> None:
        metadata.paged_kv_indptr[1] += 16

    replay_steps(made, inputs, graph, 40, spoil)
    checked.close()
    assert checked.differences == 10
    errors = [record for record in log.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    (dump,) = tmp_path.iterdir()
    assert str(dump) in errors[0].getMessage()
    assert cli.main(["replay", str(dump)]) == 1
    assert "row 0, request 0: kv_indptr[1]" in capsys.readouterr().err


def test_graphs_captured_without_a_warm_up_are_no_difference(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """With `cudagraph_num_of_warmups` 0, as where nothing is compiled, a plan becomes a node and does not run."""
    monkeypatch.setenv("MLAPLAN_CHECK_EVERY", "1")
    made, inputs = engine()
    for rows in (8, 4, 2, 1):
        metadata = made.build(inputs.write(Step(query_lens=[1] * rows, seq_lens=[1] * rows, capture=True)))
        with made.planner.device.record() as graph:
            made.forward(metadata, rows)
    metadata = made.build(inputs.write(Step(query_lens=[1], seq_lens=[70])))
    graph.replay()
    checked = listener(made, SelfCheck)
    checked.close()
    assert (checked.checks, checked.skipped, checked.differences) == (1, 4, 0)
    assert not [record for record in log.records if record.levelno > logging.INFO]


def test_what_cannot_be_set_up_is_said_and_the_planner_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLAPLAN_RECORD", str(tmp_path / "none"))
    monkeypatch.setenv("MLAPLAN_CHECK_EVERY", "1")
    monkeypatch.setenv("MLAPLAN_DUMP", str(tmp_path / "none"))
    made, inputs = engine()
    made.forward(made.build(inputs.write(Step(query_lens=[1], seq_lens=[9]))), 1)
    assert made.planner.observer is None
    assert made.planner.stats.steps == 1
    said = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert [text.split(":")[1].strip() for text in said] == ["no recorder", "no self-check"]
    assert not (tmp_path / "none").exists()


def test_statistics_once_per_interval_and_off_by_a_switch(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)

    def lines(made: Engine, inputs: Inputs) -> list[str]:
        log.clear()
        for turn in range(100):
            clock.now += 0.5
            made.forward(made.build(inputs.write(Step(query_lens=[1], seq_lens=[9 + turn]))), 1)
        return [record.getMessage() for record in log.records if "plans in" in record.getMessage()]

    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "20")
    found = lines(*engine())
    assert len(found) == 2
    assert found[0].startswith("mlaplan: 39 plans in 20.0 s: 100.0% deferred; 39 launches, 0 copies, 0 waits, 0 read")
    monkeypatch.setenv("MLAPLAN_LOG_STATS", "0")
    made, inputs = engine()
    assert made.builder._serving.reporter is None
    assert lines(made, inputs) == []


def test_counters_are_in_the_librarys_own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    monkeypatch.setattr(metrics, "_TOTALS", metrics.Totals())
    monkeypatch.setattr(metrics, "_REGISTERED", type(metrics._REGISTERED)())
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setenv("MLAPLAN_METRICS", "0")
    engine()
    assert list(registry.collect()) == []
    monkeypatch.delenv("MLAPLAN_METRICS")
    made, inputs = engine()
    engine()
    made.forward(made.build(inputs.write(Step(query_lens=[1], seq_lens=[9]))), 1)
    assert registry.get_sample_value("mlaplan_steps_total", {"rank": "0", "action": "deferred"}) == 1
    assert registry.get_sample_value("mlaplan_launches_total", {"rank": "0"}) == 1


def test_switches_are_read_and_wrong_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environment().watch == Watch()
    for name, value in {
        "RECORD": "x", "RECORD_BYTES": "100000", "RECORD_LENGTHS": "1", "CHECK_EVERY": "500", "DUMP": "y",
        "LOG_STATS": "2.5", "METRICS": "off",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MLAPLAN_{name}", value)
    assert Watch.from_environment() == Watch("x", 100_000, True, 500, "y", 2.5, False)
    for name, value in (
        ("RECORD_BYTES", "7"), ("RECORD_BYTES", "1e9"), ("CHECK_EVERY", "-1"), ("CHECK_EVERY", "often"),
        ("LOG_STATS", "-1"), ("LOG_STATS", "nan"), ("LOG_STATS", "inf"), ("RECORD_LENGTHS", "2"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(f"MLAPLAN_{name}", value)
            with pytest.raises(ValueError, match=f"MLAPLAN_{name} is '{value}'"):
                Watch.from_environment()
    monkeypatch.delenv("MLAPLAN_LOG_STATS")
    for text, seconds in (("30", 30.0), ("0", 10.0), ("-3", 10.0), ("soon", 10.0), ("nan", 10.0)):
        monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", text)
        assert Watch.from_environment().log_stats_s == seconds
