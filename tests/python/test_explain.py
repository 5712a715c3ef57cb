"""`mlaplan explain`: its numbers against the reference op and counts by hand, and the command end to end."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from mlaplan import cli
from mlaplan.explain import Explanation, Question, Work, document_of, explain, sections_of
from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference.plan import plan as reference_plan
from mlaplan.report import plain_text
from mlaplan.workload import Scheduler, SchedulerConfig, generated_log


def question(lengths: list[int], **settings: Any) -> Question:
    return Question(
        row_lengths=np.array(lengths, np.int32), request_ids=np.arange(len(lengths), dtype=np.int32), **settings
    )


def reference(asked: Question) -> PlanArrays:
    """The arrays of the reference op for a batch of one query token per row."""
    rows = asked.row_lengths.size
    shapes = Layout.of(rows, num_cus=asked.num_cus, fold=asked.fold).shapes
    arrays = PlanArrays(*(np.full(shape, -7, np.int32) for shape in shapes))
    params = PlanParams(
        topk=asked.topk,
        num_cus=asked.num_cus,
        fold=asked.fold,
        split_budget=asked.split_budget,
        min_tokens_per_split=asked.min_tokens_per_split,
    )
    reference_plan(np.arange(rows + 1, dtype=np.int32), asked.row_lengths, arrays, params)
    return arrays


QUESTIONS = st.builds(
    question,
    st.lists(st.integers(1, 300) | st.just(300), min_size=1, max_size=40),
    topk=st.just(300),
    num_cus=st.integers(1, 40),
    fold=st.sampled_from((1, 2, 8)),
    split_budget=st.sampled_from((None, -1, 1, 2, 7)),
    min_tokens_per_split=st.sampled_from((16, 128)),
    costs=st.sampled_from(("aiter", "bf16 16", "gfx942 fp8 64")),
)


@given(QUESTIONS)
def test_works_are_those_of_the_reference_plan(asked: Question) -> None:
    arrays = reference(asked)
    expected = []
    for slot, (first, end) in enumerate(pairwise(arrays.work_indptr.tolist())):
        for tile, partial, _, _, start, stop, _, _ in arrays.work_info[first:end].tolist():
            row_start = int(arrays.kv_indptr[tile // asked.fold])
            place = None if partial == -1 else partial
            expected.append((slot, tile, place, start - row_start, stop - row_start))
    works = explain(asked).works
    assert [(w.slot, w.tile, w.partial, w.kv_start, w.kv_end) for w in works] == expected


@given(QUESTIONS)
def test_each_token_of_each_planner_row_is_worked_on_once(asked: Question) -> None:
    explanation = explain(asked)
    pieces: dict[int, list[Work]] = defaultdict(list)
    for work in explanation.works:
        assert work.row == work.tile // asked.fold
        pieces[work.tile].append(work)
    assert sorted(pieces) == list(range(asked.row_lengths.size * asked.fold))
    for tile, works in pieces.items():
        works.sort(key=lambda work: work.kv_start)
        ends = [0, *(work.kv_end for work in works)]
        assert [work.kv_start for work in works] == ends[:-1]
        assert ends[-1] == asked.row_lengths[tile // asked.fold]
    cut = {tile: works for tile, works in pieces.items() if any(w.partial is not None for w in works)}
    assert [(m.tile, m.row, m.pieces, m.first_slot, m.last_slot) for m in explanation.merges] == [
        (tile, tile // asked.fold, len(w), min(x.slot for x in w), max(x.slot for x in w))
        for tile, w in sorted(cut.items())
    ]
    assert all(len(works) == 1 for tile, works in pieces.items() if tile not in cut)


@given(QUESTIONS)
def test_time_runs_without_gaps_from_the_slots_cost_to_the_finish(asked: Question) -> None:
    explanation = explain(asked)
    table = mlaplan.CostTable.named(asked.costs)
    now: dict[int, int] = {}
    for work in explanation.works:
        tokens = work.kv_end - work.kv_start
        blocks = (tokens + table.block_tokens - 1) // table.block_tokens
        assert work.fixed == (table.whole if work.partial is None else table.piece)
        assert work.cost == work.fixed + blocks * table.block
        assert work.start == now.get(work.slot, table.slot)
        now[work.slot] = work.end
    assert explanation.finish_time == max(now.values())
    assert explanation.slots_used == len(now) <= explanation.num_slots <= asked.num_cus
    assert explanation.lower_bound_all <= explanation.lower_bound <= explanation.finish_time
    assert explanation.ratio == explanation.finish_time / explanation.lower_bound >= 1


def test_one_full_row_by_hand() -> None:
    # Budget 2048 / 128 = 16 slots. 128 blocks on 16 slots: 8 each and 16 to begin with, 24 at best; aiter's rule gives
    # a slot 9 blocks, so 14 slots take 9 and the last takes 2.
    explanation = explain(question([2048]))
    assert (explanation.split_budget, explanation.num_slots, explanation.slots_used) == (16, 16, 15)
    assert (explanation.finish_time, explanation.lower_bound) == (25, 24)
    assert [work.cost for work in explanation.works] == [25] * 14 + [18]
    assert [(merge.tile, merge.pieces) for merge in explanation.merges] == [(0, 15)]


def test_what_padding_would_cost() -> None:
    # The figures of the project's design: 256 slots alone, 36 with 504 padding rows planned with them.
    explanation = explain(question([2048] * 8, padding=504, split_budget=-1))
    padded = explanation.with_padding
    assert padded is not None
    assert (explanation.slots_used, padded.slots_used) == (256, 36)
    assert (explanation.finish_time, padded.finish_time) == (20, 47)
    assert padded.is_safe
    assert explain(question([2048] * 8, split_budget=-1)).with_padding is None


def test_padding_that_makes_it_faster_is_explained() -> None:
    explanation = explain(question([2048, 2048, 700], padding=4))
    assert explanation.with_padding is not None
    assert explanation.with_padding.finish_time < explanation.finish_time
    assert "the budget counts padding rows too" in plain_text(sections_of(explanation))


def test_an_empty_row_gets_no_work_and_an_empty_batch_no_time() -> None:
    explanation = explain(question([100, 0, 100]))
    assert {work.row for work in explanation.works} == {0, 2}
    assert "empty, no work" in plain_text(sections_of(explanation))
    for nothing in (explain(question([])), explain(question([0, 0], costs="bf16 16"))):
        assert (nothing.works, nothing.merges, nothing.slots_used, nothing.lower_bound) == ((), (), 0, 0)
        assert nothing.ratio == 1
        assert "Rows" in plain_text(sections_of(nothing)) or not nothing.rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"padding": -1}, "padding is -1"),
        ({"topk": 50}, r"row_lengths\[0\] is 100, must be at most topk, 50"),
        ({"num_cus": 0}, "num_cus is 0"),
        ({"fold": 0}, "fold is 0"),
        ({"split_budget": 0}, "max_split_per_batch is 0"),
        ({"min_tokens_per_split": 0}, "min_tokens_per_split is 0"),
        ({"costs": "gold"}, "gold"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(question([100], **settings))


def test_many_rows_have_no_line_each_but_stand_in_json() -> None:
    explanation = explain(question([64] * 33))
    assert [section.key for section in sections_of(explanation)] == ["plan", "time"]
    assert len(document_of(explanation)["rows"]) == 33


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(["explain", *arguments])
    except SystemExit as stop:
        status = int(str(stop.code))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, errors = run(capsys, "2048", "2048", "700", "--padding", "4", "--num-cus", "304")
    assert (status, errors) == (0, "")
    for part in ("split budget", "rule: longest row 2,048 // 128", "lower bound", "row 2", "padding rows", "merged"):
        assert part in text


def same(document: dict[str, Any], explanation: Explanation) -> bool:
    wanted: dict[str, Any] = json.loads(json.dumps(document_of(explanation)))
    return {key: document[key] for key in wanted} == wanted


@pytest.mark.parametrize(("budget", "meaning"), [("rule", None), ("-1", -1), ("5", 5)])
def test_json_holds_the_whole_plan(capsys: pytest.CaptureFixture[str], budget: str, meaning: int | None) -> None:
    arguments = ("300x3", "9000", "--topk", "400", "--num-cus", "20", "--fold", "2", "--budget", budget, "--json")
    status, text, _ = run(capsys, *arguments)
    assert status == 0
    asked = question([300, 300, 300, 400], topk=400, num_cus=20, fold=2, split_budget=meaning)
    assert same(json.loads(text), explain(asked))


def test_contexts_and_queries_make_rows(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = run(capsys, "--contexts", "5000", "10", "--queries", "1", "3", "--json")
    assert status == 0
    rows = json.loads(text)["rows"]
    assert [(row["request"], row["length"]) for row in rows] == [(0, 2048), (1, 11), (1, 12), (1, 13)]
    _, text, _ = run(capsys, "--contexts", "5", "6", "--queries", "2", "--json")
    assert [row["length"] for row in json.loads(text)["rows"]] == [6, 7, 7, 8]


@pytest.mark.parametrize(("number", "drafts"), [(0, 0), (37, 3)])
def test_a_step_of_a_log_is_the_schedulers(capsys: pytest.CaptureFixture[str], number: int, drafts: int) -> None:
    config = SchedulerConfig(num_speculative_tokens=drafts)
    step = next(step for step in Scheduler(config, generated_log(0)) if step.index == number)
    status, text, _ = run(capsys, "--step", str(number), "--spec-tokens", str(drafts), "--json")
    assert status == 0
    document = json.loads(text)
    lengths = mlaplan.row_lengths(step.query_start_loc, step.seq_lens, 2048)
    asked = Question(
        row_lengths=lengths,
        request_ids=mlaplan.request_ids(step.query_start_loc),
        padding=step.padded_rows - step.rows,
    )
    assert same(document, explain(asked))
    assert document["step"]["action"] == "copy"
    assert ("first plan" in document["step"]["reasons"]) == (number == 0)


def test_a_step_without_known_lengths_is_launched_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run(capsys, "--step", "20", "--lengths", "device", "--json")
    assert json.loads(text)["step"]["action"] == "launch"


def test_an_unchanged_step_needs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("0,3000,50\n")
    _, text, _ = run(capsys, "--log", str(log), "--step", "20", "--json")
    document = json.loads(text)
    assert document["step"] | {"log": ""} == {
        "step": 20,
        "log": "",
        "requests": 1,
        "action": "nothing",
        "reasons": "unchanged",
    }
    assert document["rows"] == [{"row": 0, "request": 0, "length": 2048}]
    status, _, errors = run(capsys, "--log", str(log), "--step", "900")
    assert status == 2
    assert "the log ends after" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of LENGTH, --contexts, --step; none given"),
        (["5", "--step", "1"], "LENGTH and --step given"),
        (["5", "--log", "x.csv"], "--log goes with --step"),
        (["5", "--queries", "2"], "--queries goes with --contexts"),
        (["many"], "length 'many' must be a number"),
        (["5x"], "length '5x'"),
        (["\u0665"], "must be a number of tokens"),
        (["9999999999"], "length '9999999999'"),
        (["5x9999999"], "more than 1,048,576 rows"),
        (["5", "--topk", "0"], "topk is 0"),
        (["5", "--padding", "-3"], "padding is -3"),
        (["5", "--num-cus", "0"], "num_cus is 0"),
        (["5", "--fold", "-1"], "fold is -1"),
        (["5", "--budget", "all"], "budget is 'all'"),
        (["5", "--budget", "0"], "is 0, must"),
        (["5", "--costs", "gold"], "gold"),
        (["--contexts", "-4"], "contexts[0] is -4"),
        (["--contexts", "4", "5", "--queries", "1", "2", "3"], "queries has 3 numbers, expected 2"),
        (["--step", "-1"], "step is -1"),
        (["--step", "1", "--log", "missing.csv"], "missing.csv"),
        (["--step", "1", "--load", "0"], "load is 0.0"),
        (["5", "--output", "plan.pdf"], "ending must be one of .svg, .png, .html"),
        (["0", "--output", "plan.svg"], "no works"),
        (["5", "--output", "nowhere/plan.svg"], "nowhere"),
    ],
)
def test_wrong_use_is_named_and_ends_with_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text, errors = run(capsys, *arguments)
    assert (status, text) == (2, "")
    assert message in errors
    assert list(tmp_path.iterdir()) == []
