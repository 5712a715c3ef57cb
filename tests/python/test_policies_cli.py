"""The option `--policy`: every command that plans takes it, and says what it did."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mlaplan import cli
from mlaplan.costs import CostTable
from mlaplan.explain import Question, explain
from mlaplan.reference.plan import schedule
from policy_cases import parameters


@pytest.mark.parametrize("policy", ["balanced", "invariant"])
def test_a_log_runs_under_every_policy(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "40", "--num-cus", "24", "--topk", "256", "--policy", policy, "--decode-every", "10"]
    assert cli.main(["run", *arguments, "--piece-tokens", "64", "--max-num-seqs", "8", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks["plans"] > 0
    assert checks["decodes"] > 0
    assert checks["num_differences"] == 0


@pytest.mark.parametrize("costs", ["aiter", "gfx942 fp8 64"])
@pytest.mark.parametrize(
    "settings", [{"policy": "balanced"}, {"policy": "invariant", "piece_tokens": 200}, {"policy": "aiter"}]
)
def test_explain_shows_the_schedule_of_the_policy(
    settings: dict[str, Any], costs: str, rng: np.random.Generator
) -> None:
    for _ in range(10):
        lengths = rng.integers(0, 2049, int(rng.integers(1, 30))).astype(np.int32)
        ids = np.arange(len(lengths), dtype=np.int32)
        explained = explain(
            Question(row_lengths=lengths, request_ids=ids, num_cus=50, fold=2, costs=costs, **settings)
        )  # fmt: skip
        params = parameters(table=CostTable.named(costs), num_cus=50, fold=2, **settings)
        made = schedule(lengths, params)
        assert [work.tile for work in explained.works] == made.work_info[:, 0].tolist()
        assert [work.kv_end - work.kv_start for work in explained.works] == (
            made.work_info[:, 5] - made.work_info[:, 4]
        ).tolist()
        slots = np.repeat(np.arange(50), np.diff(made.work_indptr))
        assert [work.slot for work in explained.works] == slots.tolist()
        if settings["policy"] == "balanced":
            assert 0 < explained.finish_time <= made.limit + CostTable.named(costs).slot


def test_explain_names_the_policy_and_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "2048", "100x40", "--policy", "balanced", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["policy"] == "balanced"
    assert plan["blocks_per_slot"] is None
    assert cli.main(["explain", "2048x8", "--policy", "invariant", "--piece-tokens", "512", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["works"] == 32
    assert plan["split_budget"] == -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "invariant", "--budget", "4"], "split_budget is 4, but policy 'invariant'"),
        (["--policy", "invariant", "--piece-tokens", "0"], "piece_tokens"),
        (["--policy", "balanced", "--costs", "a100"], "a100"),
    ],
)
def test_explain_refuses_what_does_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "2048x8", *arguments]) == 2
    assert message in capsys.readouterr().err
