"""Runs launches as gfx942 and gfx950 machine code on the CPU, through the emulation harness in `shared/amd`.

The harness and the tinygrad checkout that it needs are no part of this repository. It checks every access of memory and
poisons what was not written.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_KERNEL_TESTS = _HERE.parent / "kernels"
sys.path[:0] = [str(_HERE), str(_KERNEL_TESTS)]

from mlaplan.kernels.launch import Launch

ARCHS = ("gfx942", "gfx950")

# Packs two halves into one register; used by float16 code, and checked by the results of that code.
_ALLOWED = ("V_PACK_B32_F16",)


def shared_folder() -> Path | None:
    """The folder `shared`, in the repository or a folder above it."""
    for folder in _HERE.parents:
        if (folder / "shared" / "amd" / "machine.py").is_file():
            return folder / "shared"
    return None


def missing() -> str:
    """Why nothing can be emulated here; empty if it can."""
    checkout = os.environ.get("TINYGRAD")
    if shared_folder() is None:
        return "no folder shared/amd in the repository or above it: AMD machine code was not run"
    if not checkout:
        return "TINYGRAD names no tinygrad checkout of August 2026: AMD machine code was not run"
    if not (Path(checkout) / "test" / "mockgpu" / "amd" / "emu.py").is_file():
        return f"TINYGRAD is {checkout}, which holds no test/mockgpu/amd/emu.py: AMD machine code was not run"
    if shutil.which("clang") is None:
        return "no clang on PATH: AMD machine code was not run"
    return ""


def connect() -> None:
    """Makes the harness importable. `missing()` must be empty."""
    folder = shared_folder()
    if folder is not None and str(folder / "amd") not in sys.path:
        sys.path.insert(0, str(folder / "amd"))


def run(launch: Launch, arch: str, types: dict[str, str] | None = None, *, order: int = 0) -> int:
    """Runs a launch of NumPy arrays, which it writes; returns the number of instructions executed.

    `order` 0 runs each wave to its next barrier; any other number shuffles the waves, odd ones every few instructions.
    """
    import triton_case  # type: ignore[import-not-found]

    options: dict[str, Any] = dict(launch.options)
    stats = triton_case.run_triton(
        launch.kernel,
        launch.grid,
        list(launch.args),
        launch.constants,
        arch,
        num_warps=options.pop("num_warps"),
        types=types,
        options=options,
        seed=order or None,
        step=37 if order % 2 else None,
        allow=_ALLOWED,
    )
    return int(stats.instructions)
