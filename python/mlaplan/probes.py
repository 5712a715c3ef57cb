"""What `mlaplan doctor` asks child processes: here torch, aiter and vLLM are really loaded."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import logging
import sys
from typing import Any


def answer(name: str) -> None:
    """Runs a probe and prints what it found as one line of JSON.

    Args:
        name: "gpu", "aiter" or "vllm".
    """
    found: dict[str, Any] = {}
    error = None
    try:
        found = {"gpu": gpu, "aiter": aiter, "vllm": vllm}[name]()
    except Exception as problem:  # noqa: BLE001  (whatever a library raises is the answer)
        error = " ".join(f"{type(problem).__name__}: {problem}".split())[:500]
    # A new line first: a library may have left one open.
    sys.stdout.write("\nmlaplan-probe " + json.dumps({"found": found, "error": error}) + "\n")
    sys.stdout.flush()


def gpu() -> dict[str, Any]:
    """What torch sees."""
    import torch

    found: dict[str, Any] = {"hip": torch.version.hip, "cuda": torch.version.cuda}
    if torch.version.hip is not None:
        found["hip_runtime"] = _hip_runtime()
    if not torch.cuda.is_available():
        return {**found, "state": "none visible"}
    properties = torch.cuda.get_device_properties(0)
    arch = getattr(properties, "gcnArchName", None) or "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    return {
        **found,
        "state": "visible",
        "device": properties.name,
        "arch": arch,
        "num_cus": properties.multi_processor_count,
        "count": torch.cuda.device_count(),
    }


def _hip_runtime() -> str | None:
    """Version of the HIP library that is loaded, which need not be the one torch was built for."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libamdhip64.so").hipRuntimeGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 10_000_000}.{version.value // 100_000 % 100}.{version.value % 100_000}"


def aiter() -> dict[str, Any]:
    """What the aiter backend reads of the installation."""
    from mlaplan.backends.aiter_release import read_release

    release = read_release()
    functions = {"sizing": release.sizing, "planner": release.planner, "decode": release.decode}
    return {
        "version": release.version,
        "head_rules": release.release or "newest known",
        "arch": release.arch or "unknown",
        "persistent_rows": release.persistent_rows,
        "dtypes": ", ".join(release.dtype_names),
        **{f"{name}_signature": ", ".join(inspect.signature(call).parameters) for name, call in functions.items()},
    }


def vllm() -> dict[str, Any]:
    """Whether the adapter knows this vLLM's builder, by the test that the plugin itself applies."""
    logging.disable(logging.WARNING)
    package = importlib.import_module("vllm")
    from mlaplan.vllm.activation import _vllm_version
    from mlaplan.vllm.release import BACKEND_MODULE, unknown_release

    reason = unknown_release(importlib.import_module(BACKEND_MODULE), _vllm_version())
    return {"version": str(getattr(package, "__version__", "unknown")), "builder": reason or "recognised"}
