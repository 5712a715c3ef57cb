"""What all kernel tests share: where they run, random numbers, and the reference vectors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))  # helpers shared by the test files of this folder

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process can either interpret kernels or compile them: what it cannot do is skipped."""
    interpreter_only = pytest.mark.skip(reason="runs in test_interpreter.py, in a process with TRITON_INTERPRET=1")
    compiler_only = pytest.mark.skip(reason="compiles kernels, and TRITON_INTERPRET=1 is set")
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        interprets = item.get_closest_marker("interpret") is not None
        if interprets and not INTERPRETED:
            item.add_marker(interpreter_only)
        if not interprets and INTERPRETED:
            item.add_marker(compiler_only)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Torch device of the test: the CPU in the interpreter, a GPU otherwise."""
    torch = pytest.importorskip("torch")
    if request.node.get_closest_marker("interpret"):
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device: the compiled kernels were not run")
    return "cuda"
