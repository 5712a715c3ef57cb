"""vLLM's own attention code on a GPU without ROCm, and what stands in for aiter there.

`load` takes a folder with the Python files of a vLLM wheel, and beside them `stubs.py`, which serves packages that are
not needed, and `oot_platform.py`, which sets a platform without vLLM's compiled extension. It calls mlaplan's plugin
as vLLM does, so builder and impl are in place by the plugin's own doing. The CPU tests' engines are used as they are.

Without a GPU everything runs on CPU tensors in Triton's interpreter (`TRITON_INTERPRET=1 VLLM_TARGET_DEVICE=cpu`), for
the sake of the scripts themselves.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import sys
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(_TESTS / "vllm"), str(_TESTS / "python")]

import rocm_stand_ins  # noqa: E402

import mlaplan  # noqa: E402
from mlaplan.layout import PlanArrays  # noqa: E402

CPU = not torch.cuda.is_available()
DEVICE = torch.device("cpu") if CPU else torch.device("cuda", torch.cuda.current_device())
_BACKEND = "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse"
# Third-party packages that the builder's imports ask for and never use, and parts of vLLM that pull in more of them.
_UNUSED = (
    "aiohttp",
    "anyio",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "cpuinfo",
    "einops",
    "fastapi",
    "httpx2",
    "llguidance",
    "msgspec",
    "openai",
    "openai_harmony",
    "partial_json_parser",
    "prometheus_client",
    "pybase64",
    "starlette",
    "tvm_ffi",
    "uvloop",
    "xgrammar",
    "zmq",
    "vllm.reasoning",
    "vllm.parser",
    "vllm.tool_parsers",
    "vllm.entrypoints",
    "vllm.renderers",
    "vllm.v1.structured_output",
    "vllm.multimodal",
)


def load(folder: Path) -> ModuleType:
    """Imports the stock backend module of the slice, with mlaplan's plugin called before.

    Args:
        folder: Where `vllm/`, `stubs.py` and `oot_platform.py` are.

    Returns:
        The module.
    """
    if not (folder / "vllm" / "__init__.py").is_file() or not (folder / "stubs.py").is_file():
        sys.exit(f"{folder} is no slice of vLLM: vllm/, stubs.py and oot_platform.py are expected there")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in ("MLAPLAN_DISABLE", "MLAPLAN_MODE", "MLAPLAN_ALWAYS_REBUILD", "MLAPLAN_ARCH"):
        os.environ.pop(name, None)
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("regex", re)
    importlib.import_module("stubs").install(_UNUSED)
    if CPU:
        if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("VLLM_TARGET_DEVICE") != "cpu":
            sys.exit("without a GPU set TRITON_INTERPRET=1 VLLM_TARGET_DEVICE=cpu")
        rocm_stand_ins.prepare()
    AITER.install()
    platform = importlib.import_module("oot_platform").install()
    type(platform).num_compute_units = classmethod(lambda _cls, _device_id=0: AITER.num_cus)
    rocm = ModuleType("vllm.platforms.rocm")
    # Only the fallback of long prefills to a Triton kernel of vLLM's hangs on it, which is not what is looked at.
    rocm.on_gfx942 = lambda: False  # type: ignore[attr-defined]
    rocm.on_gfx950 = rocm.on_mi3xx = lambda: True  # type: ignore[attr-defined]
    sys.modules["vllm.platforms.rocm"] = rocm

    log = logging.getLogger("vllm.mlaplan")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.propagate = False
    importlib.import_module("mlaplan.vllm").register()
    backend = importlib.import_module(_BACKEND)
    _connect()
    builder = backend.ROCMAiterMLASparseBackend.get_builder_cls()
    impl = backend.ROCMAiterMLASparseBackend.get_impl_cls()
    if (builder.__name__, impl.__name__) != ("PlannedBuilder", "PlannedImpl"):
        sys.exit(f"the plugin is not active: the backend hands out {builder.__name__} and {impl.__name__}")
    engines = importlib.import_module("engines")
    engines.CPU = DEVICE  # where its builders put their buffers
    assert (builder, impl) == engines.OURS
    gc.freeze()  # so that a collection before each capture has little to look at
    return backend


def _connect() -> None:
    """Leads vLLM's decode call to the stand-in, past the operator that is registered on ROCm alone."""
    if CPU:
        rocm_stand_ins.connect()
        return
    ops = importlib.import_module("vllm._aiter_ops")

    def decode(q: Any, kv: Any, o: Any, sm_scale: float, qo_indptr: Any, longest: int, *rest: Any, **kw: Any) -> None:
        ops._rocm_aiter_mla_decode_fwd_impl(  # noqa: SLF001  (what the operator runs)
            q, kv, o, qo_indptr, longest, *rest, sm_scale=sm_scale, **kw
        )

    ops.rocm_aiter_ops.mla_decode_fwd = staticmethod(decode)


class StandIn(rocm_stand_ins.FakeAiter):
    """A planner that computes aiter's schedule or only launches something, and the portable decode.

    Attributes:
        planning: "schedule": the host core's schedule, uploaded. "launch": one small launch and no schedule, to
            time what surrounds aiter's planner.
        decoding: "portable", or "none" to time what surrounds the decode.
        calls: Calls of the planner.
    """

    planning = "schedule"
    decoding = "portable"
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self._scratch: dict[tuple[int, ...], torch.Tensor] = {}
        self._launched: Any = None

    @wraps(rocm_stand_ins.FakeAiter._plan)  # noqa: SLF001  (for its signature)
    def _plan(
        self, qo: Any, kv: Any, last: Any, heads: int, _kv_heads: int, _causal: object, *out: Any, **given: Any
    ) -> None:
        del qo, last
        self.calls += 1
        if self.planning == "launch":
            if self._launched is None:
                self._launched = torch.zeros(self.num_cus + 1, dtype=torch.int32, device=DEVICE)
            self._launched.fill_(1)
            return
        made = mlaplan.schedule(
            kv.cpu().numpy(),
            num_cus=self.num_cus,
            max_split_per_batch=given["max_split_per_batch"],
            fold=heads // 16,  # bf16 on gfx942
        )
        pointers, info, indptr, reduce_indptr, final_map, partial_map = out
        pointers.copy_(torch.tensor([indptr.data_ptr(), info.data_ptr()], dtype=torch.uint64))
        bounds = np.full(reduce_indptr.shape[0], made.num_partials, np.int32)
        bounds[: made.reduce_indptr.size] = made.reduce_indptr
        for array, values in (
            (indptr, made.work_indptr),
            (info, made.work_info),
            (reduce_indptr, bounds),
            (final_map, made.reduce_final_map),
            (partial_map, made.reduce_partial_map),
        ):
            array[: values.shape[0]].copy_(torch.from_numpy(np.array(values)))

    @wraps(rocm_stand_ins.FakeAiter._decode)  # noqa: SLF001
    def _decode(self, q: Any, kv: Any, o: Any, *arrays: Any, **given: Any) -> tuple[Any, None]:
        _, kv_indptr, kv_indices, _, _ = arrays
        if given.get("work_indptr") is None:
            o.zero_()
        elif self.decoding == "portable":
            self._attend(q, kv.view(-1, q.shape[-1]), o, kv_indptr, kv_indices, given)
        return o, None

    def _attend(self, q: Any, kv: Any, o: Any, kv_indptr: Any, kv_indices: Any, given: dict[str, Any]) -> None:
        from mlaplan.kernels.decode import decode
        from mlaplan.kernels.merge import merge

        rows, heads, _ = q.shape
        fold, width = heads // 16, o.shape[-1]
        final_map, partial_map = given["reduce_final_map"], given["reduce_partial_map"]
        partials = partial_map.shape[0]
        plan = PlanArrays(None, kv_indptr, given["work_indptr"], given["reduce_indptr"], given["work_info_set"])
        lse = self._memory(4096, heads)[:rows]
        partial_out = self._memory(partials, heads // fold, width)
        partial_lse = self._memory(partials, heads // fold)
        decode(
            q, kv, kv_indices, plan, fold=fold, scale=given["sm_scale"], v_dim=width,
            out=o, lse=lse, partial_out=partial_out, partial_lse=partial_lse,
        )  # fmt: skip
        merge(
            partial_out, partial_lse, plan, reduce_partial_map=partial_map, reduce_final_map=final_map,
            # Outputs are compared bit for bit, and the stock builder's arrays are longer than ours.
            out=o, lse=lse, fold=fold, one_cut=True,
        )  # fmt: skip

    def _memory(self, *shape: int) -> Any:
        """Scratch of a shape, made once: everything runs on one stream."""
        if shape not in self._scratch:
            self._scratch[shape] = torch.zeros(shape, dtype=torch.float32, device=DEVICE)
        return self._scratch[shape]


AITER = StandIn()
