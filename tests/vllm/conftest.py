from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

# Looked for, not imported: Triton reads at its import whether kernels are interpreted.
if importlib.util.find_spec("vllm") is None:
    pytest.skip("these tests need vLLM: make test-vllm", allow_module_level=True)
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import rocm_stand_ins

rocm_stand_ins.prepare()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch and vLLM about themselves
    importlib.import_module("vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse")
    rocm_stand_ins.connect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.vllm)


@pytest.fixture(autouse=True)
def _fresh_aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLAPLAN_DISABLE", "MLAPLAN_MODE", "MLAPLAN_ALWAYS_REBUILD", "MLAPLAN_ARCH"):
        monkeypatch.delenv(name, raising=False)
    rocm_stand_ins.AITER.num_cus = 304
    rocm_stand_ins.AITER.plans.clear()
    rocm_stand_ins.AITER.decodes.clear()
    rocm_stand_ins.AITER.waits = 0
