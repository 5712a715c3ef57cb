"""What a worker process of vLLM does with its plugins; run by `test_plugin.py`, prints what came of it as JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

BACKEND_MODULE = "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse"


class Lines(logging.Handler):
    """Keeps what we log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(case: str) -> dict[str, Any]:
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent / "python")]
    if case == "unused":
        import mlaplan.vllm

        assert mlaplan.vllm.register is not None
        return {"imported": [name for name in ("torch", "vllm", "triton") if name in sys.modules]}
    import rocm_stand_ins

    rocm_stand_ins.prepare()
    if case == "broken aiter":
        del sys.modules["aiter"], sys.modules["aiter.mla"]  # leaves the one on the path, which raises
    import vllm

    if case == "unknown vllm":
        vllm.__version__ = "0.99.0"
    lines = Lines()
    logging.getLogger("vllm.mlaplan").addHandler(lines)
    logging.getLogger("vllm.mlaplan").setLevel(logging.INFO)
    from vllm import plugins

    plugins.load_general_plugins()
    plugins.load_general_plugins()
    found: dict[str, Any] = {"imported_by_plugin": BACKEND_MODULE in sys.modules}
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum.ROCM_AITER_MLA_SPARSE
    if case == "broken builder":
        sys.modules["mlaplan.vllm.builder"] = None  # type: ignore[assignment]
    chosen = member.get_class()
    stock = sys.modules[BACKEND_MODULE].ROCMAiterMLASparseBackend
    found |= {
        "path": member.get_path(),
        "name": chosen.get_name(),
        "builder": chosen.get_builder_cls().__module__,
        "impl": chosen.get_impl_cls().__module__,
        "direct_builder": stock.get_builder_cls().__module__,
        "direct_impl": stock.get_impl_cls().__module__,
    }
    member.clear_override()
    found["after_clear"] = member.get_class().get_builder_cls().__module__
    if case == "active":
        found["model_file"] = _builder_of_the_model_that_names_the_stock_class()
    found["lines"] = lines.lines
    return found


def _builder_of_the_model_that_names_the_stock_class() -> str:
    try:
        from vllm.models.deepseek_v32.amd import rocm

    except ImportError as error:
        return f"not importable here: {error}"
    return str(rocm.ROCMAiterMLASparseBackend.get_builder_cls().__module__)


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1])))  # noqa: T201  (read by the parent)
