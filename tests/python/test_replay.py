"""`mlaplan record` and `mlaplan replay`, and `explain` of a recorded step: end to end, and against what really ran."""

from __future__ import annotations

import json
import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import cli, replay
from mlaplan.layout import PlanArrays
from mlaplan.replay import WhatIf
from mlaplan.trace import DumpRecord, Header, StepRecord, TraceError, TraceReader, write_trace
from mlaplan.trace.why import why
from planning import batch, ints, planner, starts

_LOG = "arrival_ms,input_tokens,output_tokens\n" + "".join(
    f"{150 * index},{(index * 977) % 400 + 1},{index % 37 + 1}\n" for index in range(60)
)
_ENGINE = ("--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--max-model-len", "4096",
           "--num-kv-blocks", "400")  # fmt: skip
_SMALL = ("--steps", "60", *_ENGINE, "--num-cus", "16", "--topk", "256")


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.csv"
    path.write_text(_LOG)
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "steps.trace")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = cli.main([*arguments, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def record(capsys: pytest.CaptureFixture[str], log: str, trace: str, *more: str) -> dict[str, Any]:
    status, document, errors = run(capsys, "record", log, "--out", trace, *_SMALL, *more)
    assert (status, errors) == (0, "")
    return document["trace"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("lengths", ["exact", "bound", "device"])
@pytest.mark.parametrize("deferred", [(), ("--deferred",)])
def test_a_trace_replays_as_it_was_recorded(
    capsys: pytest.CaptureFixture[str], log: str, trace: str, lengths: str, deferred: tuple[str, ...]
) -> None:
    made = record(capsys, log, trace, "--spec-tokens", "2", "--lengths", lengths, *deferred)
    assert (made["steps"], made["full"]) == (60, False)
    status, document, errors = run(capsys, "replay", trace)
    assert (status, errors) == (0, "")
    replayed = document["replayed"]
    assert replayed["same"] == replayed["compared"] == document["trace"]["steps"] == 60
    for action in ("nothing", "copy", "launch", "deferred"):
        assert replayed[action] == document["recorded"][action]
    assert replayed["launches"] == replayed["launch"] + replayed["deferred"]
    assert replayed["copies"] == replayed["copy"]
    assert replayed["num_differences"] == replayed["read_backs"] == replayed["graph_plans"] == 0
    assert document["schedules"]["plans"] == 60
    assert document["schedules"]["ratio"] >= 1
    assert document["trace"]["damage"] == "none"
    assert document["dumps"]["dumps"] == 0


def test_record_sees_what_run_sees(capsys: pytest.CaptureFixture[str], log: str, trace: str) -> None:
    options = ("--spec-tokens", "3", "--lengths", "bound")
    record(capsys, log, trace, *options)
    _, ran, _ = run(capsys, "run", log, *_SMALL, *options, "--device", "cpu", "--decode-every", "0")
    _, replayed, _ = run(capsys, "replay", trace)
    for action in ("nothing", "copy", "launch", "deferred"):
        assert ran["decisions"][action] == replayed["recorded"][action]
    assert ran["cost"]["finish_ratio_max"] == pytest.approx(replayed["schedules"]["ratio_max"])
    assert ran["workload"]["rows"] == replayed["trace"]["rows"]


def settings_of(options: tuple[str, ...]) -> dict[str, Any]:
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    return {
        name[2:].replace("-", "_"): int(text) if text.lstrip("-").isdigit() else text for name, text in pairs.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--num-cus", "7"),
        ("--topk", "64"),
        ("--split-budget", "-1"),
        ("--split-budget", "2", "--num-cus", "40"),
        ("--policy", "balanced"),
        ("--policy", "invariant"),
        ("--schedule-maker", "device"),
    ],
)
def test_what_if_gives_what_such_a_planner_gives(
    capsys: pytest.CaptureFixture[str], log: str, trace: str, options: tuple[str, ...]
) -> None:
    record(capsys, log, trace)
    status, document, errors = run(capsys, "replay", trace, *options)
    assert (status, errors) == (0, "")
    assert document["replayed"]["compared"] == 60
    reader = TraceReader(trace)
    settings = {"backend": "none", **settings_of(options)}
    own = mlaplan.Planner(
        mlaplan.PlannerConfig(
            **{**{name: getattr(reader.header.config, name) for name in ("max_rows", "max_requests", "capture_sizes",
               "topk", "num_cus", "fold", "arch", "heads")}, **settings}
        ), "cpu",
    )  # fmt: skip
    finish, actions = 0, []
    for step in reader.records():
        assert isinstance(step, StepRecord)
        lengths = mlaplan.Exact(step.lengths) if step.lengths is not None else None
        on_device: dict[str, Any] = {
            "device_query_start_loc": step.device_query_start_loc,
            "device_seq_lens": step.device_seq_lens,
        }
        plan = own.plan(mlaplan.Batch(step.query_start_loc, lengths, step.padded_rows, **on_device))
        finish += round(plan.quality().finish_time)
        actions.append(plan.decision.action)
    if "--policy" not in options:
        assert document["schedules"]["finish_sum"] == finish
    assert {name: actions.count(name) for name in set(actions)} == {
        name: document["replayed"][name] for name in set(actions)
    }


def test_two_policies_are_priced_by_one_table(
    capsys: pytest.CaptureFixture[str], log: str, trace: str, tmp_path: Path
) -> None:
    """Whichever of the two was recorded: the same two schedules, the same two prices."""
    record(capsys, log, trace)
    other = str(tmp_path / "balanced.trace")
    record(capsys, log, other, "--policy", "balanced")
    assert cli.main(["replay", trace, "--policy", "balanced", "--json"]) == 0
    forth = json.loads(capsys.readouterr().out)["schedules"]
    assert cli.main(["replay", other, "--policy", "aiter", "--json"]) == 0
    back = json.loads(capsys.readouterr().out)["schedules"]
    reader = TraceReader(trace)
    config = replay.make_planner(reader.header.config, {"policy": "balanced"}, "cpu").config
    aiter = replay.replay(reader, costs=config.cost_table)
    assert back["finish_sum"] == round(sum(aiter.finish))
    assert forth["finish_sum"] < back["finish_sum"]
    assert forth["ratio"] >= 1
    assert [forth["policy"], back["policy"]] == ["balanced", "aiter"]


def test_other_knowledge_of_the_lengths(capsys: pytest.CaptureFixture[str], log: str, trace: str) -> None:
    record(capsys, log, trace, "--spec-tokens", "2", "--lengths", "bound")
    found = {}
    for name, options in {
        "exact": ("--lengths", "exact"),
        "device": ("--lengths", "device"),
        "bound": ("--lengths", "bound"),
        "wide bound": ("--lengths", "bound", "--max-rejects", "200"),
        "deferred": ("--deferred",),
    }.items():
        status, document, _ = run(capsys, "replay", trace, *options)
        assert status == 0, name
        assert document["replayed"]["compared"] == 60
        found[name] = document["replayed"]
    assert found["exact"]["launch"] == 0
    assert found["device"]["launch"] == 60
    assert found["bound"]["same"] == 60, "the recorded bounds are in the trace"
    assert found["wide bound"]["launch"] > found["bound"]["launch"]
    assert (found["deferred"]["deferred"], found["deferred"]["launches"]) == (60, 60)


def test_a_service_that_plans_in_graphs_is_replayed_without_launches(trace: str) -> None:
    made = planner()
    some = [batch([1, 1], [length, 9], 4, on_device=True, lengths=None) for length in range(3, 13)]
    with made.record(trace, read_lengths=True):
        for each in some:
            made.plan(each, deferred=True)
    found = replay.replay(TraceReader(trace))
    assert (found.graph_plans, found.operations.launches, found.compared) == (10, 0, 10)
    assert not found.differences
    with made.record(trace, overwrite=True):
        for each in some:
            made.plan(each, deferred=True)
    blind = replay.replay(TraceReader(trace))
    assert (blind.steps, blind.blind, blind.same, len(blind.finish)) == (10, 10, 10, 0)


def test_what_happens_between_steps_is_done_again(trace: str, rng: np.random.Generator) -> None:
    made = planner()
    actions = []
    with made.record(trace):
        for turn in range(120):
            some = batch([1, 1], [int(rng.integers(3, 5)), 9], on_device=bool(turn % 3))
            plan = made.plan(some, deferred=bool(turn % 3) and rng.random() < 0.3)
            actions.append(plan.decision.action)
            if rng.random() < 0.2:
                made.invalidate()
            if turn % 3 and rng.random() < 0.3:
                made.refresh(plan)
            if turn % 3 and rng.random() < 0.2:
                made.remake(plan)
    found = replay.replay(TraceReader(trace))
    assert (found.steps, found.same) == (120, 120), found.first_other
    assert set(actions) == {"nothing", "copy", "deferred"}


def test_dumps_say_where_the_buffers_are_wrong(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = planner()
    plan = made.plan(batch([2, 1], [9, 30], 4))
    held = PlanArrays(*(np.array(array) for array in plan.arrays))
    works = held.work_info[: plan.num_works]
    header = Header.of(made)
    right: dict[str, Any] = {
        "source": "self-check",
        "query_start_loc": starts([2, 1]),
        "seq_lens": ints(9, 30),
        "num_cus": 20,
        "fold": 1,
    }
    dumps: list[Any] = [
        DumpRecord(index=3, arrays=held._replace(work_info=works), **right),
        DumpRecord(index=4, arrays=held._replace(work_info=works[:-1]), **right),
        DumpRecord(index=5, arrays=held._replace(work_info=works), **{**right, "seq_lens": ints(9, 15)}),
    ]
    write_trace(trace, header, dumps, steps=0)
    status, document, errors = run(capsys, "replay", trace)
    assert status == 1
    assert (document["dumps"]["dumps"], document["dumps"]["equal"]) == (3, 1)
    first, second = document["dumps"]["differences"]
    assert (first["step"], first["array"], first["index"]) == (4, "work_info", [len(works) - 1, 0])
    assert (second["step"], second["array"], second["index"], second["row"], second["request"]) == (
        5, "kv_indptr", [3], 2, 1,
    )  # fmt: skip
    assert (second["actual"], second["expected"]) == (33, 32)
    assert errors.splitlines()[1].startswith("mlaplan replay: dump of step 5, row 2, request 1: kv_indptr[3] is 33")


@pytest.mark.parametrize(
    "wrong", [{"num_cus": 19}, {"fold": 2}, {"rows": 5}],
)  # fmt: skip
def test_a_dump_of_another_planner_is_refused(trace: str, wrong: dict[str, int]) -> None:
    made = planner()
    rows, cus, fold = wrong.get("rows", 4), wrong.get("num_cus", 20), wrong.get("fold", 1)
    shapes = ((rows,), (rows + 1,), (cus + 1,), (rows * fold + 1,), (1, 8))
    arrays = PlanArrays(*(np.zeros(shape, np.int32) for shape in shapes))
    dump = DumpRecord(index=0, source="asked for", query_start_loc=starts([1]), seq_lens=ints(3), num_cus=cus,
                      fold=fold, arrays=arrays)  # fmt: skip
    write_trace(trace, Header.of(made), [dump], steps=0)
    with pytest.raises(TraceError, match="dump of step 0"):
        replay.replay(TraceReader(trace))


def step(**changes: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "index": 0, "time_us": 0, "host_ns": 1, "query_start_loc": starts([1, 2]), "kind": "exact",
        "lengths": ints(9, 30), "max_rejects": 0, "padded_rows": None, "boundaries_exact": True,
        "has_device_boundaries": False, "has_device_lengths": False, "deferred": False, "action": "copy",
        "reasons": ("first plan",), "rows": 3, "row_class": 2, "num_works": 3, "split_budget": 1,
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": ints(9, -30)},
        {"query_start_loc": ints(0, 5, 3)},
        {"query_start_loc": ints(1, 2, 3)},
        {"query_start_loc": starts([40, 60]), "lengths": ints(50, 70)},
        {"padded_rows": 2},
        {"padded_rows": 65},
        {"kind": "bound", "max_rejects": 2**31 - 1},
    ],
)
def test_steps_that_no_planner_takes_are_named(
    trace: str, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    write_trace(trace, Header.of(planner()), [step(), step(index=7, **changes)], steps=2)
    assert cli.main(["replay", trace]) == 2
    captured = capsys.readouterr()
    assert "step 7 cannot be planned: " in captured.err
    assert captured.out == ""


def test_a_trace_that_asks_for_gigabytes_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = mlaplan.PlannerConfig(max_rows=1 << 24, max_requests=4, topk=100, num_cus=1 << 16, fold=128, arch=None)
    write_trace(trace, Header(config=config), [step()], steps=1)
    assert cli.main(["replay", trace]) == 2
    assert "a replay takes at most" in capsys.readouterr().err


def test_damage_is_told_and_the_part_before_it_replayed(
    capsys: pytest.CaptureFixture[str], log: str, trace: str
) -> None:
    made = planner()
    with made.record(trace):
        for turn in range(600):
            made.plan(batch([1], [turn % 9 + 1]))
    content = Path(trace).read_bytes()
    for cut, steps in ((len(content) - 3, 600), (len(content) // 2, 256)):
        Path(trace).write_bytes(content[:cut])
        status, document, errors = run(capsys, "replay", trace)
        assert status == 1
        assert document["trace"]["steps"] == steps
        assert f"{trace}: damaged from byte" in errors
    assert cli.main(["replay", log]) == 2
    assert "log.csv: not a trace of mlaplan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-cus", "0"), "num_cus is 0"),
        (("--topk", "-3"), "topk is -3"),
        (("--split-budget", "0"), "split_budget is 0"),
        (("--split-budget", "some"), "must be a whole number or 'rule'"),
        (("--policy", "fair"), "policy is 'fair'"),
        (("--lengths", "guess"), "invalid choice: 'guess'"),
        (("--max-rejects", "-1"), "max_rejects is -1"),
        (("--steps", "0"), "steps is 0"),
        (("--check-every", "-1"), "check_every is -1"),
        (("--device", "tpu"), "device is 'tpu'"),
    ],
)
def test_wrong_options_are_named(
    capsys: pytest.CaptureFixture[str], trace: str, options: tuple[str, ...], message: str
) -> None:
    write_trace(trace, Header.of(planner()), [step()], steps=1)
    try:
        status = cli.main(["replay", trace, *options])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    assert message in capsys.readouterr().err


def test_record_overwrites_only_when_asked(capsys: pytest.CaptureFixture[str], log: str, trace: str) -> None:
    record(capsys, log, trace)
    assert cli.main(["record", log, "--out", trace, *_SMALL]) == 2
    assert "is there already" in capsys.readouterr().err
    record(capsys, log, trace, "--force", "--steps", "5")
    assert cli.main(["record", log, "--out", str(Path(trace).parent / "no" / "a"), *_SMALL]) == 2
    assert cli.main(["record", log, "--out", trace, "--force", "--max-bytes", "7", *_SMALL]) == 2
    assert "max_bytes is 7" in capsys.readouterr().err
    status, document, _ = run(capsys, "replay", trace, "--steps", "3")
    assert (status, document["trace"]["steps"]) == (0, 3)


def test_the_table_says_what_json_says(capsys: pytest.CaptureFixture[str], log: str, trace: str) -> None:
    record(capsys, log, trace)
    assert cli.main(["replay", trace, "--num-cus", "9"]) == 0
    text = capsys.readouterr().out
    for part in ("Trace", "As recorded", "with other settings", "Schedules", "Dumps", "as recorded:", "lower bound"):
        assert part in text


def test_a_recorded_step_is_explained(capsys: pytest.CaptureFixture[str], log: str, trace: str) -> None:
    record(capsys, log, trace)
    steps = {each.index: each for each in TraceReader(trace).records() if isinstance(each, StepRecord)}
    for number in (0, 30, 59):
        status, document, _ = run(capsys, "explain", "--trace", trace, "--step", str(number))
        assert status == 0
        assert document["step"]["action"] == steps[number].action
        assert document["step"]["reasons"] == ", ".join(steps[number].reasons)
        assert document["plan"]["num_cus"] == 16
        assert document["plan"]["topk"] == 256
        assert document["plan"]["works"] == steps[number].num_works or steps[number].num_works is None
        lengths = mlaplan.row_lengths(steps[number].query_start_loc, steps[number].lengths, 256)  # type: ignore[arg-type]
        assert [row["length"] for row in document["rows"]] == lengths.tolist()
    assert cli.main(["explain", "--trace", trace, "--step", "60"]) == 2
    assert "has no step 60, its last one is 59" in capsys.readouterr().err
    assert cli.main(["explain", "--trace", trace]) == 2
    assert cli.main(["explain", "--trace", trace, "--log", log, "--step", "1"]) == 2


@pytest.mark.parametrize("policy", ["balanced", "invariant"])
def test_a_step_of_another_policy_is_explained_by_that_policy(
    policy: str, capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    made = planner(policy=policy, topk=64, piece_tokens=16)
    with made.record(trace):
        plan = made.plan(batch([2, 1], [90, 30], 4))
    status, document, _ = run(capsys, "explain", "--trace", trace, "--step", "0")
    assert status == 0
    assert document["plan"]["works"] == plan.num_works
    works = np.array(plan.arrays.work_info[: plan.num_works])
    lengths = works[:, 5] - works[:, 4]
    assert [work["kv_end"] - work["kv_start"] for work in document["works"]] == lengths.tolist()
    assert document["time"]["finish_time"] == plan.quality().finish_time


def test_a_dump_is_explained(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    made = planner()
    plan = made.plan(batch([2, 1], [9, 30], 4, on_device=True, lengths=None))
    plan.arrays.kv_indptr[1] = 3
    made.check(plan, dump=trace)
    status, document, _ = run(capsys, "explain", "--trace", trace, "--step", "0")
    assert status == 0
    assert document["step"]["dump"] is False
    assert [row["length"] for row in document["rows"]] == [8, 9, 16]
    assert document["plan"]["padding"] == 1


def test_a_step_that_nobody_knows_the_lengths_of_is_not_explained(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    made = planner()
    with made.record(trace):
        made.plan(batch([1], [3], on_device=True, lengths=None))
    assert cli.main(["explain", "--trace", trace, "--step", "0"]) == 2
    assert "nobody recorded the lengths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, "every request has the same query tokens and, up to topk (16), the same context"),
        ({}, {"lengths": ints(10, 30)}, "context below topk (16): request 0 8 to 9"),
        ({}, {"lengths": ints(9, 31)}, "every request has the same"),
        ({"lengths": ints(16, 30)}, {"lengths": ints(99, 30)}, "every request has the same"),
        ({"lengths": ints(15, 30)}, {"lengths": ints(99, 30)}, "context below topk (16): request 0 14 to 15"),
        ({"query_start_loc": starts([2, 1])}, {}, "query tokens: request 0 2 to 1, request 1 1 to 2"),
        ({"query_start_loc": starts([1]), "lengths": ints(9)}, {}, "2 requests after 1"),
        ({"row_class": 1}, {}, "row class 2 after 1"),
        ({}, {"kind": "unknown", "lengths": None}, "the host did not know the lengths"),
        ({}, {"boundaries_exact": False}, "the host did not know the boundaries"),
        ({"kind": "bound"}, {"kind": "bound", "max_rejects": 3}, "bound 9 less 3 rejects does not prove 16 tokens"),
        ({"kind": "bound"}, {}, "of another kind than before"),
    ],
)
def test_why_a_plan_was_or_was_not_remade(before: dict[str, Any], after: dict[str, Any], expected: str) -> None:
    assert expected in " / ".join(why(step(**before), step(**after), 16))
    assert why(None, step(**after), 16) == ["there is no step before it in the trace"]


def test_the_reasons_agree_with_the_planner(trace: str, rng: np.random.Generator) -> None:
    """Where the planner found nothing to do, nothing may have changed, and the other way round."""
    made = planner()
    with made.record(trace):
        for _ in range(300):
            made.plan(batch([1, 1], [int(rng.integers(14, 19)), int(rng.integers(15, 18))]))
    steps = [each for each in TraceReader(trace).records() if isinstance(each, StepRecord)]
    unchanged = 0
    for before, after in pairwise(steps):
        text = why(before, after, 16)
        assert (after.action == "nothing") == text[0].startswith("every request has the same"), (text, after)
        unchanged += after.action == "nothing"
    assert 20 < unchanged < 280


def test_what_if_says_whether_anything_is_otherwise() -> None:
    assert not WhatIf(steps=3).changes
    assert WhatIf(settings={"topk": 3}).changes
    assert WhatIf(deferred=False).changes
    assert WhatIf(max_rejects=0).changes


def test_the_format_is_the_documented_one(trace: str) -> None:
    """Read with nothing but the document's words."""
    made = planner()
    with made.record(trace, read_lengths=True):
        made.plan(batch([2, 1], [9, 30], 4, on_device=True))
    content = Path(trace).read_bytes()
    assert content[:12] == b"\x93mlaplan\x01\x00\x00\x00"
    chunks, at = [], 12
    while at < len(content):
        kind, size, stored, checksum = struct.unpack_from("<IIII", content, at)
        packed = content[at + 16 : at + 16 + stored]
        assert zlib.crc32(content[at : at + 12] + packed) == checksum
        unpacked = zlib.decompress(packed)
        assert len(unpacked) == size
        chunks.append((kind, unpacked))
        at += 16 + stored
    assert [kind for kind, _ in chunks] == [1, 2, 3]
    assert json.loads(chunks[0][1])["config"]["topk"] == 16
    (length,) = struct.unpack_from("<I", chunks[1][1])
    assert json.loads(chunks[1][1][4 : 4 + length]) == {"decisions": [["copy", ["first plan"]]]}
    words = np.frombuffer(chunks[1][1], "<i4", offset=4 + length).tolist()
    assert words[:2] == [1, len(words) - 2]
    fixed = dict(zip(("index", "index_high", "time", "time_high", "flags", "kind", "max_rejects", "padded_rows",
        "decision", "rows", "row_class", "num_works", "split_budget", "requests", "host_ns", "spare"),
        words[2:18], strict=True))  # fmt: skip
    assert fixed["flags"] == 1 + 2 + 4 + 32
    assert (fixed["kind"], fixed["padded_rows"], fixed["rows"], fixed["requests"]) == (1, 4, 3, 2)
    assert words[18:] == [0, 2, 3, 9, 30, 0, 0, 0, 0, 0]
    assert json.loads(chunks[2][1]) == {"steps": 1, "full": False, "dropped": 0}
