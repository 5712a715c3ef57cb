"""The installed plugin, in processes of its own: found by vLLM, active on every path, and harmless."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OURS, STOCK = "mlaplan.vllm", "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse"


def _is_installed() -> bool:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(point.name == "mlaplan" and point.value == "mlaplan.vllm:register" for point in points)


installed = pytest.mark.skipif(
    not _is_installed(), reason="mlaplan is not installed by pip here: make test-vllm does it"
)


def child(case: str, path: Path | None = None, **environment: str) -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MLAPLAN_")} | environment
    if path is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(path), variables.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("plugin_child.py")), case],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(results[-1].removeprefix("RESULT "))
    return result


def assert_stock(result: dict[str, Any]) -> None:
    for name in ("builder", "impl", "direct_builder", "direct_impl", "after_clear"):
        assert result[name] == STOCK, name


@installed
@pytest.mark.timeout(300)
def test_active_on_every_path() -> None:
    result = child("active")
    assert result["imported_by_plugin"] is False
    assert result["path"] == "mlaplan.vllm.backend.PlannedBackend"
    assert result["name"] == "ROCM_AITER_MLA_SPARSE"
    assert result["builder"] == result["direct_builder"] == result["after_clear"] == f"{OURS}.builder"
    assert result["impl"] == result["direct_impl"] == f"{OURS}.impl"
    assert result["model_file"] == f"{OURS}.builder" or result["model_file"].startswith("not importable")
    assert result["lines"] == []


@installed
@pytest.mark.timeout(300)
def test_inert_with_the_kill_switch() -> None:
    result = child("active", MLAPLAN_DISABLE="1")
    assert_stock(result)
    assert STOCK in result["path"]
    assert result["lines"] == ["mlaplan is not active: MLAPLAN_DISABLE is set"]


@installed
@pytest.mark.timeout(300)
def test_unknown_switch_is_named_and_harmless() -> None:
    result = child("active", MLAPLAN_MODE="fast")
    assert_stock(result)
    assert result["lines"] == [
        "mlaplan is not active: ValueError: MLAPLAN_MODE is 'fast', known are graph, build, classic"
    ]


@installed
@pytest.mark.timeout(300)
def test_unknown_vllm_keeps_its_own_builder() -> None:
    result = child("unknown vllm")
    assert_stock(result)
    assert result["lines"] == [
        "mlaplan is not active, vLLM's own builder is used: vLLM 0.99 is not known, 0.30 to 0.33 are"
    ]


@installed
@pytest.mark.timeout(300)
def test_broken_aiter_is_not_our_business(tmp_path: Path) -> None:
    (tmp_path / "aiter.py").write_text("raise OSError('libaiter.so: undefined symbol')\n")
    result = child("broken aiter", tmp_path)
    assert result["builder"] == f"{OURS}.builder"
    assert result["lines"] == []


@installed
@pytest.mark.timeout(300)
def test_broken_install_of_ours_leaves_the_stock_builder() -> None:
    result = child("broken builder")
    assert result["builder"] == STOCK
    assert any(line.startswith("mlaplan is not active") for line in result["lines"])


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    assert child("unused")["imported"] == []
