"""`mlaplan compare`: both builders hold the same plans, and what each asks of the device is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import cli, comparison_chart
from mlaplan.compare import IN_GRAPH, PLANNED, STRAIGHTFORWARD, compare
from mlaplan.device import HostDevice
from mlaplan.runner import RunOptions
from mlaplan.straightforward import Straightforward
from mlaplan.workload import SchedulerConfig
from planning import definition, from_nothing, starts

_SMALL = ("--steps", "60", "--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--num-cus", "16", "--topk",
          "256", "--max-model-len", "4096", "--num-kv-blocks", "400", "--check-every", "1")  # fmt: skip


def options(**more: Any) -> RunOptions:
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=128, max_model_len=4096, num_kv_blocks=400, **more
    )
    return RunOptions(steps=80, device="cpu", scheduler=scheduler, topk=256, num_cus=16, check_every=1)


def test_the_straightforward_builder_holds_the_definition(rng: np.random.Generator) -> None:
    config = mlaplan.PlannerConfig(max_rows=64, max_requests=16, topk=16, num_cus=20, arch=None).resolved(None)
    builder = Straightforward(config, HostDevice())
    changed, key, expected_changes = 0, None, 0
    for _ in range(300):
        if rng.random() < 0.6 or key is None:
            queries = rng.integers(0, 4, rng.integers(1, 9)).tolist()
            lengths = [query + int(rng.integers(0, 25)) for query in queries]
        else:
            lengths = [length + int(rng.integers(0, 2)) for length in lengths]
        boundaries, seq_lens = starts(queries), np.array(lengths, np.int32)
        changed += builder.build(boundaries, boundaries, seq_lens)
        ids, rows = definition(queries, lengths, 16)
        expected_changes += key != (queries, rows)
        key = (queries, rows)
        wanted = from_nothing(boundaries, seq_lens, 64, config.params)
        for name, found, want in zip(wanted._fields, builder.arrays, wanted, strict=True):
            if name == "work_info":
                found, want = found[: wanted.work_indptr[-1]], want[: wanted.work_indptr[-1]]  # noqa: PLW2901
            assert np.array_equal(found, want), name
        assert builder.arrays.request_ids[: len(ids)].tolist() == ids
    # The key looks at lengths and not at rows: a request without query tokens may change it for nothing.
    assert expected_changes <= changed < 300
    counted = builder.counters
    assert (counted.read_backs, counted.copies, counted.launches) == (300, 600, changed)


@pytest.mark.parametrize("lengths", ["exact", "bound", "device"])
def test_three_ways_hold_the_same_plans(lengths: str) -> None:
    result = compare(options(num_speculative_tokens=2, lengths=lengths))
    assert (result.steps, result.checked) == (80, 80)
    sides = {side.name: side for side in result.sides}
    assert list(sides) == [STRAIGHTFORWARD, PLANNED, IN_GRAPH]
    assert [side.wrong for side in result.sides] == [None] * 3
    assert all(len(side.host_us) == 80 and min(side.host_us) > 0 for side in result.sides)
    straight, planned, graph = result.sides
    assert (straight.total("read_backs"), straight.total("copies")) == (80, 160)
    assert straight.total("launches") == straight.total("waits") > 0
    for side in (planned, graph):
        assert side.total("read_backs") == side.total("waits") == 0
    assert planned.total("launches") + planned.total("copies") <= 80
    assert graph.total("launches") + graph.total("copies") < planned.total("launches") + planned.total("copies")
    if lengths == "device":
        assert planned.total("launches") == 80
    if lengths == "exact":
        assert planned.total("launches") == 0


@pytest.mark.parametrize("side", [0, 1, 2])
def test_a_wrong_plan_is_found(side: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mlaplan import compare as module

    way = (module._Straightforward, module._Planned, module._InGraph)[side]
    original = way._holds

    def spoiled(self: Any, step: Any, prepared: Any) -> bool:
        if step.index == 7:
            arrays = self._builder.arrays if side == 0 else self._last.arrays
            arrays.kv_indptr[1] += 1
            if side == 2:  # the graph's node would write it anew
                self._planner.refresh = lambda _plan: None
        return original(self, step, prepared)

    monkeypatch.setattr(way, "_holds", spoiled)
    assert cli.main(["compare", *_SMALL, "--json"]) == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    wrong = [numbers["wrong_step"] for numbers in document["sides"].values()]
    # The way in graphs looks at its arrays as the planned way does, so what is spoiled there is spoiled in both.
    assert [index for index, step in enumerate(wrong) if step == 7] == ([1, 2] if side == 1 else [side])
    assert f"step 7: {list(document['sides'])[side]} does not hold the plan" in captured.err


def test_table_json_and_chart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "chart.svg"
    assert cli.main(["compare", *_SMALL, "--output", str(target)]) == 0
    captured = capsys.readouterr()
    for part in ("straightforward", "mlaplan, in graphs", "host time, median", "read-backs per step", "all right"):
        assert part in captured.out
    assert f"wrote {target}" in captured.err
    text = target.read_text()
    assert text.startswith("<?xml")
    assert cli.main(["compare", *_SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["steps"], document["checked"]) == (60, 60)
    assert document["sides"]["straightforward"]["read_backs_per_step"] == 1
    assert document["sides"]["mlaplan"]["host_us_p50"] > 0


def test_the_chart_draws_what_was_counted() -> None:
    pytest.importorskip("matplotlib")
    result = compare(options())
    time_axes, count_axes = comparison_chart.draw(result).axes
    medians = [line.get_label() for line in time_axes.get_lines()]
    assert [str(label).split(":")[0] for label in medians] == [side.name for side in result.sides]
    bars: list[Any] = list(count_axes.patches)
    widths = [round(bar.get_width() * result.steps) for bar in bars]
    names = ("launches", "copies", "read_backs", "waits")
    assert widths == [side.total(name) for side in result.sides for name in names]
    result.steps = 0
    with pytest.raises(ValueError, match="nothing to draw"):
        comparison_chart.draw(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "chart.pdf"], "must end in .svg or .png"),
        (["--steps", "0"], "steps is 0"),
        (["--topk", "0"], "topk is 0"),
        (["missing.csv"], "missing.csv"),
    ],
)
def test_wrong_use_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_columns_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mlaplan import report

    monkeypatch.setattr(report, "_has_rich", lambda: False)
    report.render_columns("title", ["one", "another"], [("first", ["1", "22"]), ("b", ["333", "4"])])
    assert capsys.readouterr().out == "title  one  another\nfirst    1       22\nb      333        4\n"
