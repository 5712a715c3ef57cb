"""Counters for Prometheus, with the real library and without it, and the line in the log once per interval."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlaplan
from mlaplan import metrics
from mlaplan.metrics import Collector, Reporter, Totals, export, line_of, numbers_of
from mlaplan.stats import Stats
from planning import batch, planner

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of its own, and no planners of other tests."""
    monkeypatch.setattr(metrics, "_TOTALS", Totals())
    return prometheus_client.CollectorRegistry()


def some_steps(made: mlaplan.Planner, count: int = 5) -> None:
    for _ in range(count):
        made.plan(batch([1], [3]))
    made.refresh(made.plan(batch([1], [3], on_device=True), deferred=True))


def test_the_librarys_own_text_holds_what_stats_say(registry: Any) -> None:
    made = planner()
    assert export(made, registry, labels={"rank": "3"})
    some_steps(made)
    stats = made.stats
    value = registry.get_sample_value
    for action, times in stats.actions.items():
        assert value("mlaplan_steps_total", {"rank": "3", "action": action}) == times
    for reason, times in stats.reasons.items():
        assert value("mlaplan_reasons_total", {"rank": "3", "reason": reason}) == times
    for name in ("launches", "copies", "bytes_copied", "allocations", "waits", "read_backs"):
        assert value(f"mlaplan_{name}_total", {"rank": "3"}) == getattr(stats, name), name
    text = prometheus_client.generate_latest(registry).decode()
    assert "# TYPE mlaplan_steps_total counter" in text.splitlines()
    assert 'mlaplan_steps_total{action="nothing",rank="3"} 4.0' in text


def test_it_is_served_as_a_scrape_sees_it(registry: Any) -> None:
    made = planner()
    export(made, registry)
    some_steps(made)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert 'mlaplan_steps_total{action="copy"} 1.0' in text
    assert "mlaplan_self_checks_total 0.0" in text


def test_planners_are_summed_and_registered_once(registry: Any) -> None:
    first, second = planner(), planner()
    for made in (first, second, first):
        export(made, registry)
        some_steps(made)
    assert registry.get_sample_value("mlaplan_steps_total", {"action": "nothing"}) == 4 + 4 + 4
    assert len({id(collector) for collector in registry._collector_to_names}) == 1


def test_sums_do_not_fall_when_a_planner_is_gone_and_it_is_not_kept(registry: Any) -> None:
    made = planner()
    export(made, registry)
    some_steps(made)
    before = registry.get_sample_value("mlaplan_copies_total")
    assert before == 1
    known = metrics._TOTALS._seen[0][0]
    del made
    gc.collect()
    assert known() is None
    for _ in range(2):
        assert registry.get_sample_value("mlaplan_copies_total") == before
    made = planner()
    export(made, registry)
    some_steps(made)
    assert registry.get_sample_value("mlaplan_copies_total") == before + 1


def test_self_checks_are_counted(registry: Any) -> None:
    made = planner()
    export(made, registry)
    with made.self_check(1):
        plan = made.plan(batch([1], [3]))
        plan.arrays.request_ids[0] = 4
        made.plan(batch([1], [3]))
        assert registry.get_sample_value("mlaplan_self_checks_total") == 1
        assert registry.get_sample_value("mlaplan_self_check_differences_total") == 1
    assert registry.get_sample_value("mlaplan_self_checks_total") == 2, "the last one when the checks end"
    assert registry.get_sample_value("mlaplan_self_check_differences_total") == 2


def test_scrapes_from_another_thread_while_planning(registry: Any) -> None:
    made = planner()
    export(made, registry)
    errors: list[BaseException] = []
    done = threading.Event()

    def scrape() -> None:
        before = 0.0
        try:
            while not done.is_set():
                now = sum(
                    sample.value
                    for family in registry.collect()
                    for sample in family.samples
                    if sample.name == "mlaplan_steps_total"
                )
                assert now >= before
                before = now
        except BaseException as error:  # noqa: BLE001  (told to the test)
            errors.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for turn in range(300):
        made.plan(batch([1] * (turn % 5 + 1), [turn % 9 + 1] * (turn % 5 + 1), on_device=turn % 2 == 0))
    done.set()
    thread.join()
    assert not errors
    assert sum(made.stats.actions.values()) == 300


def test_a_reading_caught_in_the_middle_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planner()
    some_steps(made)
    wanted, right = numbers_of(made), made.stats
    answers: Iterator[Stats | Exception] = iter([RuntimeError("changed"), KeyError(7), right])

    def stats(_self: Any) -> Stats:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(mlaplan.Planner, "stats", property(stats))
    assert numbers_of(made) == wanted


def test_without_the_library_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    made = planner()
    assert export(made) is False
    assert made.observer is None


def test_the_library_is_imported_when_it_is_asked_for_and_not_before(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys, mlaplan, mlaplan.metrics, mlaplan.recorder, mlaplan.selfcheck\n"
        "mlaplan.metrics.Reporter(1.0).tick()\n"
        "assert 'prometheus_client' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)


def test_describing_needs_no_numbers() -> None:
    class Counted(Totals):
        def read(self) -> Counter[tuple[str, str]]:
            raise AssertionError("asked for numbers")

    names = [family.name for family in Collector(Counted()).describe()]
    assert names[:2] == ["mlaplan_steps", "mlaplan_reasons"]
    assert len(names) == len(set(names)) == 10


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(metrics, "time", made)
    return made


def test_one_line_per_interval_at_most(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    made = planner()
    with caplog.at_level(logging.INFO, "mlaplan"):
        reporter = Reporter(10.0)
        reporter.add(made)
        for turn in range(1000):
            clock.now = 100 + turn * 0.05
            made.plan(batch([1], [3]))
            reporter.tick()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert lines[0] == (
        "mlaplan: 201 plans in 10.0 s: 0.5% copy, 99.5% nothing; 0 launches, 1 copies, 0 waits, 0 read-backs"
    )
    assert lines[1].startswith("mlaplan: 200 plans in 10.0 s: 100.0% nothing; 0 launches, 0 copies")


def test_an_interval_without_a_step_says_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mlaplan"):
        reporter = Reporter(10.0)
        reporter.add(planner())
        clock.now = 500.0
        reporter.tick()
    assert not caplog.records
    assert line_of(Counter(), 3.0) is None


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_an_interval_is_above_nothing(interval: float) -> None:
    with pytest.raises(ValueError, match="interval_s is"):
        Reporter(interval)
