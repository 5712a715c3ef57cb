"""Which of the decode's forms a GPU gets, and how it cuts its work."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, NamedTuple

# Releases whose Gluon the Hopper form was written for; it is experimental there, and others get the form for all.
_GLUON_RELEASES = ("3.6", "3.7")


class Tile(NamedTuple):
    """How the kernel cuts its work.

    Attributes:
        heads: Query heads that one program handles, a power of two from 16.
        tokens: KV rows per step, a power of two from 16.
        num_warps: Warps or waves of a program; on Hopper those that hold the sums.
        num_stages: Steps whose loads are in flight; on Hopper the buffers of the ring.
    """

    heads: int
    tokens: int
    num_warps: int
    num_stages: int


def tile_for(backend: str, group: int, kv_bytes: int) -> Tile:
    """Returns the tile for `group` heads per planner row and KV of that many bytes, within shared memory.

    A step of 32 bfloat16 KV rows takes 36 KiB of shared memory; H200 has 227 KiB. On Hopper, whose form takes 16-bit KV
    only, two buffers of 64 rows take 144 KiB and 64 queries 72 KiB. On gfx942 and gfx950 registers decide: steps of 32
    rows of 16 bits spill with Triton 3.9, and steps of 16 with none from 3.6 to 3.9 (`tests/kernels/test_offline.py`).
    Steps of 16 rows of 8 bits gave NaN in emulation on gfx942, those of 32 did not.

    Args:
        backend: "hip", "hopper" or "cuda", as `gpu_kind` says.
        group: Heads per planner row.
        kv_bytes: Bytes of an entry of the KV pool.
    """
    if backend == "hip":
        return Tile(heads=16, tokens=16 if kv_bytes > 1 else 32, num_warps=4, num_stages=1)
    if backend == "hopper" and kv_bytes > 1:
        heads = 16 if group <= 16 else 32 if group <= 32 else 64
        return Tile(heads=heads, tokens=64, num_warps=4 if heads == 16 else 8, num_stages=2)
    if group <= 16:
        return Tile(heads=16, tokens=64 if kv_bytes > 1 else 32, num_warps=4, num_stages=2)
    if group <= 32:
        return Tile(heads=32, tokens=32, num_warps=8, num_stages=3)
    return Tile(heads=64, tokens=32, num_warps=8, num_stages=3)


def gpu_kind(array: Any = None) -> str:
    """Returns "hip", "hopper" or "cuda": the GPU that holds a tensor, or the current one.

    A Hopper GPU is a "cuda" one where this Triton lacks what its form is written in. A tensor of the CPU counts as
    "cuda": kernels run in Triton's interpreter then.
    """
    import torch

    if torch.version.hip:
        return "hip"
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return "cuda"
    index = getattr(getattr(array, "device", None), "index", None)
    return _cuda_kind(torch.cuda.current_device() if index is None else index)


@functools.cache
def _cuda_kind(index: int) -> str:
    import torch
    import triton

    release = triton.__version__.split("+")[0].rpartition(".")[0]
    has_gluon = release in _GLUON_RELEASES and importlib.util.find_spec("triton.experimental.gluon") is not None
    return "hopper" if has_gluon and torch.cuda.get_device_capability(index) == (9, 0) else "cuda"
