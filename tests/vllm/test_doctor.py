"""`mlaplan doctor` beside the vLLM that is installed, in a process of its own as an operator runs it."""

from __future__ import annotations

from mlaplan.doctor import run_probe


def test_the_installed_vllm_is_recognised() -> None:
    found, error = run_probe("vllm")
    assert error is None
    assert found["builder"] == "recognised"
