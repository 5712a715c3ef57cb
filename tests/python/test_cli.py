"""The command line end to end: what it prints, what it finds, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import checks, cli, runner
from mlaplan.batch import Exact
from mlaplan.planner import Planner

_LOG = "arrival_ms,input_tokens,output_tokens\n" + "".join(
    f"{150 * index},{(index * 977) % 400 + 1},{index % 37 + 1}\n" for index in range(60)
)

_SMALL = ("--steps", "60", "--decode-every", "20", "--max-num-seqs", "16", "--max-num-batched-tokens", "128",
          "--num-cus", "16", "--topk", "256", "--device", "cpu", "--max-model-len", "4096",
          "--num-kv-blocks", "400")  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.csv"
    path.write_text(_LOG)
    return str(path)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = cli.main(["run", *_SMALL, *arguments, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


@pytest.mark.parametrize("lengths", ["exact", "bound", "device"])
@pytest.mark.parametrize("spec_tokens", ["0", "3"])
@pytest.mark.parametrize("deferred", [(), ("--deferred",)])
def test_a_run_passes_whatever_the_host_knows(
    capsys: pytest.CaptureFixture[str], log: str, lengths: str, spec_tokens: str, deferred: tuple[str, ...]
) -> None:
    status, document, errors = _run(
        capsys, log, "--lengths", lengths, "--spec-tokens", spec_tokens, "--seed", "5", *deferred
    )
    assert (status, errors) == (0, "")
    assert document["checks"]["passed"] is True
    assert document["checks"]["plans"] == document["workload"]["steps"] == 60
    assert document["checks"]["decodes"] == 3
    assert document["differences"] == []
    actions = {name: document["decisions"][name] for name in ("nothing", "copy", "launch", "deferred")}
    assert sum(actions.values()) == 60
    assert (actions["deferred"] > 0) == bool(deferred)
    if lengths == "device":
        assert actions["copy"] == actions["nothing"] == 0
    if lengths == "exact" and not deferred:
        assert actions["launch"] == 0
    done = document["cost"]
    assert done["launches"] == actions["launch"] + actions["deferred"]
    assert done["copies"] == actions["copy"]
    assert done["read_backs"] == done["allocations"] == done["waits"] == 0
    assert done["plan_us_p50"] > 0
    assert done["finish_ratio_max"] >= done["finish_ratio_mean"] - 1e-9 >= 1.0 - 2e-9


def test_equal_seeds_give_equal_reports(capsys: pytest.CaptureFixture[str]) -> None:
    def settled() -> dict[str, Any]:
        _, document, _ = _run(capsys, "--spec-tokens", "2", "--lengths", "bound")
        for section, name in (("cost", "plan_us_p50"), ("cost", "plan_us_p99"), ("checks", "seconds")):
            del document[section][name]
        return document

    assert settled() == settled()


def test_checks_can_be_thinned_out(capsys: pytest.CaptureFixture[str], log: str) -> None:
    status = cli.main(["run", log, *_SMALL, "--check-every", "7", "--decode-every", "0", "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert status == 0
    assert (checks["plans"], checks["decodes"]) == (9, 0)


def test_the_table_says_what_json_says(capsys: pytest.CaptureFixture[str], log: str) -> None:
    assert cli.main(["run", log, *_SMALL]) == 0
    text = capsys.readouterr().out
    for part in (
        "Workload",
        "Decisions",
        "Cost of planning",
        "Checks",
        "all passed",
        "lower bound",
        "host time",
    ):
        assert part in text


def test_a_log_that_ends_ends_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("0,10,3\n0,20,2\n")
    status, document, _ = _run(capsys, str(path))
    assert status == 0
    assert document["workload"]["steps"] == 3
    assert document["workload"]["finished"] == 2


def _spoil_plan(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None], at: int) -> None:
    """Lets `spoil` at the arrays of one step, behind the planner's back."""
    original = Planner.plan
    calls = iter(range(1_000_000))

    def plan(self: Planner, batch: Any, *, deferred: bool = False) -> Any:
        made = original(self, batch, deferred=deferred)
        if next(calls) == at:
            spoil(made)
        return made

    monkeypatch.setattr(Planner, "plan", plan)


def _add(name: str, *index: int) -> Callable[[Any], None]:
    def spoil(plan: Any) -> None:
        getattr(plan.arrays, name)[index] += 1

    return spoil


def _add_behind_the_batch(plan: Any) -> None:
    plan.arrays.kv_indptr[-1] += 1


@pytest.mark.parametrize(
    ("spoil", "array", "index", "row"),
    [
        (_add("request_ids", 0), "request_ids", [0], 0),
        (_add("kv_indptr", 1), "kv_indptr", [1], 0),
        (_add("work_indptr", 1), "work_indptr", [1], None),
        (_add("reduce_indptr", 1), "reduce_indptr", [1], 0),
        (_add("work_info", 0, 5), "work_info", [0, 5], 0),
        (_add_behind_the_batch, "kv_indptr", None, None),
    ],
)
def test_a_wrong_entry_is_found_and_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    log: str,
    spoil: Callable[[Any], None],
    array: str,
    index: list[int] | None,
    row: int | None,
) -> None:
    _spoil_plan(monkeypatch, spoil, at=17)
    # Without decodes: a wrong plan may well break the one that runs on it.
    status, document, errors = _run(capsys, log, "--decode-every", "0")
    assert status == 1
    first = document["differences"][0]
    assert (first["step"], first["array"]) == (17, array)
    assert first["actual"] == first["expected"] + 1
    if index is not None:
        assert first["index"] == index
    if row is not None:
        assert first["row"] == row
        assert f"row {row}" in errors
    assert document["checks"]["passed"] is False
    assert document["checks"]["num_differences"] == len(document["differences"])
    assert "step 17, " in errors or "step 17: " in errors
    assert f"is {first['actual']}, should be {first['expected']}" in errors


def test_a_bound_taken_for_a_length_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    original = runner.batch_of

    def trusting(step: Any, planner: Planner) -> Any:
        batch = original(step, planner)
        return mlaplan.Batch(
            batch.query_start_loc,
            Exact(batch.lengths.bound),  # type: ignore[union-attr]
            padded_rows=batch.padded_rows,
            device_query_start_loc=planner.device.array(step.query_start_loc),
            device_seq_lens=planner.device.array(batch.lengths.bound),  # type: ignore[union-attr]
        )

    monkeypatch.setattr(runner, "batch_of", trusting)
    status, document, _ = _run(capsys, log, "--spec-tokens", "3", "--lengths", "bound")
    assert status == 1
    assert document["differences"][0]["array"] == "kv_indptr"


@pytest.mark.parametrize("what", ["out", "lse", "padding"])
def test_a_wrong_decode_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log: str, what: str
) -> None:
    original = Planner.decode

    def decode(self: Planner, plan: Any, *arguments: Any, **keywords: Any) -> Any:
        out, lse = original(self, plan, *arguments, **keywords)
        out, lse = np.array(out), np.array(lse)
        if what == "out":
            out[0, 0, 0] += 1e-2
        elif what == "lse":
            lse[0, 0] += 1e-2
        elif plan.padded_rows > plan.rows:
            out[-1, 0, 0] = 1e-9
        return out, lse

    monkeypatch.setattr(Planner, "decode", decode)
    status, document, errors = _run(capsys, log, "--decode-every", "1", "--load", "2")
    assert status == 1
    first = document["differences"][0]
    assert first["array"] == ("decode lse" if what == "lse" else "decode out")
    assert first["row"] == first["index"][0]
    assert "decode" in errors


def test_a_run_stops_when_everything_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    original = checks.check_plan

    def late(planner: Planner, plan: Any, step: Any) -> Any:
        plan.arrays.request_ids[0] = 99
        return original(planner, plan, step)

    monkeypatch.setattr(runner, "check_plan", late)
    status, document, errors = _run(capsys, log, "--decode-every", "0")
    assert status == 1
    assert document["workload"]["steps"] == len(document["differences"]) == runner.MAX_DIFFERENCES
    assert errors.count("request_ids[0] is 99, should be 0") == runner.MAX_DIFFERENCES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--steps", "0"], "steps is 0"),
        (["run", "--steps", "many"], "invalid int value: 'many'"),
        (["run", "--check-every", "-1"], "check_every is -1"),
        (["run", "--decode-every", "-1"], "decode_every is -1"),
        (["run", "--spec-tokens", "-1"], "num_speculative_tokens is -1"),
        (["run", "--acceptance-rate", "2"], "acceptance_rate is 2.0"),
        (["run", "--lengths", "guess"], "invalid choice: 'guess'"),
        (["run", "--load", "0"], "load is 0.0"),
        (["run", "--step-ms", "nan"], "step_ms is nan"),
        (["run", "--seed", "-5"], "seed is -5"),
        (["run", "--topk", "0"], "topk is 0"),
        (["run", "--heads", "0"], "heads is 0"),
        (["run", "--num-cus", "0"], "num_cus is 0"),
        (["run", "--split-budget", "0"], "split_budget is 0"),
        (["run", "--arch", "gfx1100"], "gfx1100"),
        (["run", "--q-dtype", "int3"], "q_dtype is 'int3'"),
        (["run", "--kv-dtype", "int3"], "kv_dtype is 'int3'"),
        (["run", "--device", "tpu"], "device is 'tpu'"),
        (["run", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["run", "--num-kv-blocks", "3"], "num_kv_blocks is 3"),
        (["run", "--colour"], "unrecognized arguments: --colour"),
        (["run", "missing.csv"], "missing.csv"),
        (["run", "."], "is a directory"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "command"),
    ],
)
def test_a_wrong_use_is_named_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    if arguments[:1] == ["run"] and "--device" not in arguments:
        arguments = [*arguments, "--device", "cpu"]  # looking for a GPU imports torch, which takes seconds
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    captured = capsys.readouterr()
    assert status == 2
    assert message in captured.err
    assert captured.out == ""


def test_a_bad_line_ends_with_2_and_its_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(_LOG.replace("\n300,", "\nsoon,"))
    assert cli.main(["run", str(path), *_SMALL]) == 2
    assert "line 4, column arrival_ms: 'soon' is not a number" in capsys.readouterr().err


def _mlaplan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlaplan", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_the_module_runs_as_a_program(log: str) -> None:
    version = _mlaplan("--version")
    assert (version.returncode, version.stdout) == (0, f"mlaplan {mlaplan.__version__}\n")
    for arguments in (["--help"], ["run", "--help"]):
        helped = _mlaplan(*arguments)
        assert helped.returncode == 0
        assert "examples:" in helped.stdout
        assert "mlaplan run requests.csv" in helped.stdout
    ran = _mlaplan("run", log, *_SMALL)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "all passed" in ran.stdout
    assert "\x1b[" not in ran.stdout


def test_a_run_on_the_host_imports_neither_torch_nor_triton(log: str) -> None:
    code = (
        "import sys; from mlaplan.cli import main; status = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'triton', 'vllm') if name in sys.modules]); sys.exit(status)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "run", log, *_SMALL],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["mooncake_conversation", "azure_conv_2023"])
@pytest.mark.parametrize(("lengths", "spec_tokens"), [("exact", "0"), ("bound", "3"), ("device", "3")])
def test_real_logs_pass(
    capsys: pytest.CaptureFixture[str], shared: Path, name: str, lengths: str, spec_tokens: str
) -> None:
    path = str(shared / "data" / f"{name}.csv")
    options = ("--steps", "120", "--decode-every", "1000", "--device", "cpu", "--json")
    status = cli.main(["run", path, "--lengths", lengths, "--spec-tokens", spec_tokens, *options])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    checks = json.loads(captured.out)["checks"]
    assert (checks["plans"], checks["decodes"], checks["num_differences"]) == (120, 1, 0)
