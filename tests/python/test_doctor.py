"""`mlaplan doctor`: what it says where all is well, and that nothing broken on the machine can break it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import mlaplan
from mlaplan import cli, doctor
from mlaplan.doctor import Probe, run_probe, self_test
from mlaplan.planner import Planner
from mlaplan.vllm import release

_OTHER_SWITCHES = ("VLLM_PLUGINS", "CU_NUM", "GPU_ARCHS")

_AITER = """\
class dtypes:
    fp8 = "fp8"
def get_mla_metadata_info_v1(batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True,
                             num_kv_splits=32, intra_batch_mode=False, max_split_per_batch=-1): ...
def get_mla_metadata_v1(seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k,
                        is_causal, work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map,
                        reduce_partial_map, page_size=1, kv_granularity=16, max_split_per_batch=-1, dtype_q=None,
                        dtype_kv=None): ...
"""
_MLA = "def mla_decode_fwd(q, kv_buffer, o, work_meta_data=None, return_lse=False): ...\n"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AITER_", "MLAPLAN_", "VLLM_")) or name in _OTHER_SWITCHES:
            monkeypatch.delenv(name)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose modules this process and its children find first."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(doctor.examine, "__kwdefaults__", {"probe": True, "seconds": 0.0})
    status = cli.main(["doctor", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_a_healthy_host_is_reported_and_ends_with_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, document = report(capsys, monkeypatch, "--quick")
    assert status == 0
    assert list(document) == ["versions", "gpu", "aiter", "vllm", "environment", "self_test"]
    versions = document["versions"]
    assert versions["mlaplan"] == mlaplan.__version__
    assert versions["build"] in ("debug", "release")
    assert versions["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert versions["numpy"].count(".") >= 1
    assert "ROCm/clr#279" in document["gpu"]["graph_replays"]
    assert document["vllm"]["entry_point"] == "mlaplan.vllm:register"
    assert document["self_test"] | {"seconds": 0} == {"passed": True, "steps": 18, "seconds": 0, "error": None}


def test_the_text_can_be_pasted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MLA_USE_OPUS", "a\x1b[31m\nb" + "c" * 900)
    monkeypatch.setenv("CU_NUM", "80")
    monkeypatch.setattr(doctor.examine, "__kwdefaults__", {"probe": True, "seconds": 0.0})
    assert cli.main(["doctor", "--quick"]) == 0
    text = capsys.readouterr().out
    for title in ("Versions", "GPU", "aiter", "vLLM plugin", "Environment switches", "Self-test on the host"):
        assert f"\n{title}\n" in f"\n{text}"
    assert all(line.isprintable() and len(line) < 420 for line in text.splitlines())
    assert "a [31m b" in text
    assert any(line.split() == ["CU_NUM", "80"] for line in text.splitlines())


def test_nothing_heavy_is_loaded_here() -> None:
    code = (
        "import sys; from mlaplan import cli, doctor; doctor.examine.__kwdefaults__['seconds'] = 0.0;"
        "cli.main(['doctor', '--quick']);"
        "print([name for name in ('torch', 'triton', 'vllm', 'aiter', 'matplotlib') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 18, 18), (0.5, 19, 60)])
def test_the_self_test_runs_as_long_as_asked(
    monkeypatch: pytest.MonkeyPatch, seconds: float, least: int, most: int
) -> None:
    """By a clock that a tenth of a second passes on whenever it is looked at."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) / 10)
    test = self_test(seconds)
    assert test.passed
    assert least <= test.steps <= most
    assert test.seconds >= seconds


@pytest.mark.parametrize("after", [0, 11])
def test_a_wrong_plan_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    original = Planner.refresh
    calls = iter(range(1000))

    def refresh(self: Planner, plan: Any) -> Any:
        result = original(self, plan)
        if next(calls) == after:
            plan.arrays.kv_indptr[1] += 1
        return result

    monkeypatch.setattr(Planner, "refresh", refresh)
    status, document = report(capsys, monkeypatch, "--quick")
    assert status == 1
    test = document["self_test"]
    assert (test["passed"], test["steps"]) == (False, after + 1)
    assert "kv_indptr[1] is" in test["error"]


def test_an_error_in_the_self_test_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: Any, **__: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(Planner, "plan", plan)
    status, document = report(capsys, monkeypatch, "--quick")
    assert (status, document["self_test"]["error"]) == (1, "MemoryError: none left")


def test_an_aiter_that_is_known_is_described(modules: Path) -> None:
    write(modules, {"aiter/__init__.py": "print('loading')\n" + _AITER, "aiter/mla.py": _MLA})
    found, error = run_probe("aiter")
    assert error is None
    assert found["head_rules"] == "0.1.16"
    assert found["dtypes"] == "dtype_q, dtype_kv"
    assert found["decode_signature"] == "q, kv_buffer, o, work_meta_data, return_lse"
    assert found["planner_signature"].startswith("seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens")
    assert "max_split_per_batch" in found["sizing_signature"]


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("raise RuntimeError('no\\nGPU')", "RuntimeError: no GPU"),
        ("syntax error here", "SyntaxError"),
        ("import os; os.abort()", "ended with status -6"),
        ("import sys; sys.stderr.write('worn out'); sys.exit(7)", "ended with status 7: worn out"),
        ("import os; os._exit(0)", "ended with status 0: no word"),
        ("print('mlaplan-probe {'); import os, sys; sys.stdout.flush(); os._exit(3)", "ended with status 3"),
        ("x = 1", "AttributeError"),
        (_AITER.replace("work_metadata_ptrs, ", ""), "not an order of arguments that is known"),
    ],
)
def test_a_broken_aiter_does_not_break_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, modules: Path, source: str, word: str
) -> None:
    write(modules, {"aiter/__init__.py": source, "aiter/mla.py": _MLA})
    monkeypatch.setattr(doctor, "_is_there", lambda name: name == "aiter")
    status, document = report(capsys, monkeypatch)
    assert status == 0
    assert word in document["aiter"]["state"]


def test_a_library_that_hangs_is_left_behind_with_what_it_started(modules: Path, tmp_path: Path) -> None:
    trace = tmp_path / "alive"
    write_text = f"pathlib.Path({str(trace)!r}).write_text(str(i))"
    child = f"import time, pathlib\nfor i in range(600):\n {write_text}\n time.sleep(0.05)"
    source = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)\n"
    write(modules, {"aiter/__init__.py": source})
    begin = time.monotonic()
    assert run_probe("aiter", timeout=3) == Probe({}, "no answer in 3 s")
    assert time.monotonic() - begin < 30
    assert trace.exists()
    time.sleep(0.3)
    before = trace.read_text()
    time.sleep(0.3)
    assert trace.read_text() == before


def vllm_of(version: str, fields: set[str]) -> dict[str, str]:
    """A vLLM of the oldest form, whose metadata has these fields."""
    lines = ["from dataclasses import dataclass", "class ROCMAiterMLASparseBackend: ..."]
    lines += ["@dataclass", "class ROCMAiterMLASparseMetadata:", *(f"    {name}: object" for name in sorted(fields))]
    lines += ["class ROCMAiterMLASparseMetadataBuilder:"]
    lines += ["    def __init__(self, kv_cache_spec, layer_names, vllm_config, device): ..."]
    lines += ["    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ..."]
    lines += ["class ROCMAiterMLASparseImpl:"]
    lines += ["    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ..."]
    module = release.BACKEND_MODULE.replace(".", "/") + ".py"
    parents = [str(Path(module).parents[at] / "__init__.py") for at in range(len(Path(module).parents) - 2)]
    return {
        **dict.fromkeys(parents, ""),
        "vllm/__init__.py": f"__version__ = {version!r}\n",
        module: "\n".join(lines) + "\n",
    }


def test_vllm_is_recognised_by_the_plugins_own_test(modules: Path) -> None:
    known = set(release._PLANNED | release._PLAIN)
    write(modules, vllm_of("0.30.1", known))
    assert run_probe("vllm") == Probe({"version": "0.30.1", "builder": "recognised"}, None)
    write(modules, vllm_of("0.99.0", known))
    assert "vLLM 0.99 is not known" in run_probe("vllm").found["builder"]
    write(modules, vllm_of("0.30.1", known | {"surprise"}))
    assert "surprise" in run_probe("vllm").found["builder"]
    (modules / release.BACKEND_MODULE.replace(".", "/")).with_suffix(".py").unlink()
    assert "ModuleNotFoundError" in str(run_probe("vllm").error)


GOOD = Probe({"builder": "recognised"}, None)
ROCM = Probe({"hip": "7.1.1", "state": "visible", "arch": "gfx942"}, None)


@pytest.mark.parametrize(
    ("environment", "vllm", "gpu", "active", "reason"),
    [
        ({}, GOOD, ROCM, "yes", "mode graph"),
        ({"MLAPLAN_MODE": "build"}, GOOD, ROCM, "yes", "mode build"),
        ({"VLLM_PLUGINS": "other,mlaplan"}, GOOD, ROCM, "yes", "mode graph"),
        ({"VLLM_PLUGINS": "other"}, GOOD, ROCM, "no", "VLLM_PLUGINS is 'other'"),
        ({"VLLM_PLUGINS": ""}, GOOD, ROCM, "no", "VLLM_PLUGINS is ''"),
        ({"MLAPLAN_DISABLE": "1"}, GOOD, ROCM, "no", "MLAPLAN_DISABLE is set"),
        ({"MLAPLAN_DISABLE": "maybe"}, GOOD, ROCM, "no", "MLAPLAN_DISABLE is 'maybe'"),
        ({"MLAPLAN_MODE": "wild"}, GOOD, ROCM, "no", "MLAPLAN_MODE is 'wild'"),
        ({}, Probe({"builder": "has another form"}, None), ROCM, "no", "has another form"),
        ({}, Probe({}, "ImportError: no"), ROCM, "unknown", "ImportError: no"),
        ({}, GOOD, Probe({"cuda": "13.0"}, None), "no", "no ROCm"),
    ],
)
def test_it_says_whether_the_plugin_would_be_active(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], vllm: Probe, gpu: Probe, active: str, reason: str
) -> None:
    monkeypatch.setattr(doctor, "_is_there", lambda _: True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    state = doctor._plugin_state(vllm, gpu)
    assert state[0] == active
    assert reason in state[1]


def test_without_vllm_or_entry_point_the_plugin_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_is_there", lambda _: False)
    assert doctor._plugin_state(GOOD, ROCM) == ("no", "vLLM is not installed")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert "entry point" in doctor._plugin_state(GOOD, ROCM)[1]


@pytest.mark.parametrize(
    ("file", "found", "caution"),
    [
        ("7.2.0-1", {}, True),
        ("7.2.3", {"arch": "gfx942:sramecc+"}, True),
        ("7.2.4", {"arch": "gfx942", "hip": "7.2.26100"}, False),
        ("7.2.10", {"arch": "gfx942"}, False),
        ("7.1.1", {"arch": "gfx942"}, False),
        ("7.13.0", {"arch": "gfx942"}, False),
        ("7.20", {"arch": "gfx942"}, False),
        (None, {"arch": "gfx942", "hip": "7.2.26015"}, True),
        (None, {"arch": "gfx942", "hip": "7.1.0", "hip_runtime": "7.2.26015"}, True),
        ("7.2.1", {"arch": "gfx950"}, False),
        (None, {"arch": "sm_90", "cuda": "13.0"}, False),
    ],
)
def test_runtimes_that_corrupt_replays_are_pointed_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str | None, found: dict[str, Any], caution: bool
) -> None:
    path = tmp_path / "version"
    if file is not None:
        path.write_text(file + "\n")
    monkeypatch.setattr(doctor, "_ROCM_FILE", path)
    said = doctor._replays(found)
    assert said.startswith("CAUTION") == caution
    assert "ROCm/clr#279" in said


def test_broken_metadata_is_no_more_than_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("torn")

    monkeypatch.setattr(importlib.metadata, "version", broken)
    monkeypatch.setattr(importlib.metadata, "entry_points", broken)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: broken_spec())
    status, document = report(capsys, monkeypatch)
    assert status == 0
    assert document["versions"]["numpy"] == "not installed"
    assert document["vllm"]["entry_point"] == "missing"


def broken_spec() -> None:
    raise ValueError("no __spec__")


def test_a_missing_interpreter_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "no child process" in str(run_probe("gpu").error)


def test_torch_is_asked_where_it_is_installed() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: the GPU probe was not run")
    found, error = run_probe("gpu")
    assert error is None
    assert found["cuda"] == torch.version.cuda
    assert found["state"] == ("visible" if torch.cuda.is_available() else "none visible")
