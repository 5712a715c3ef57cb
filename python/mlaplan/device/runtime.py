"""What torch has no call for, or a dear one, asked of the CUDA or HIP runtime that torch has loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

_HOST_TO_DEVICE = 1  # the same number in both runtimes
_PATTERN = 0x5A5A_1234


def _function(name: str) -> Callable[..., int] | None:
    """Returns a function of the runtime, None where it cannot be found.

    It must be of the very library that torch runs on: a second copy of the runtime would know none of its streams.
    """
    try:
        if torch.version.hip is None:
            # What is loaded under this name already is what the loader gives back.
            library, symbol = f"libcudart.so.{(torch.version.cuda or '12').split('.')[0]}", "cuda" + name
        else:
            # The name that others link against may lead to another copy, so the file is named.
            lines = Path("/proc/self/maps").read_text().splitlines()
            (library,) = {line.split(maxsplit=5)[-1] for line in lines if "/libamdhip64.so" in line}
            symbol = "hip" + name
        function: Callable[..., int] = getattr(ctypes.CDLL(library), symbol)
    except (OSError, AttributeError, ValueError):
        return None
    return function


def capture_id_function() -> Callable[[int], int | None]:
    """Returns a function that gives the number of the capture on a raw stream, None where the runtime does not tell.

    Newer runtimes take more out-pointers than older ones; null for those is right in each.
    """
    function = _function("StreamGetCaptureInfo")
    if function is None:
        return lambda _stream: None
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)

    def ask(stream: int) -> int | None:
        outcome = function(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None, None)
        return number.value if outcome == 0 else None

    return ask


def copy_function(device: torch.device) -> Callable[[int, int, int, int], bool]:
    """Returns a function that queues a copy from pinned memory: target, source, bytes, raw stream.

    It answers whether the copy was queued. It is not where another device is current, for then the handle of the
    default stream means another stream. The function is tried before it is handed out; where it does not copy, what is
    returned always answers no.
    """
    function = _function("MemcpyAsync")
    if function is None:
        return lambda _target, _source, _count, _stream: False
    # One for this use, since what it takes is written to the object.
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]  # type: ignore[attr-defined]
    current, index = torch._C._cuda_getDevice, device.index  # noqa: SLF001  (the public way asks twice)

    def copy(target: int, source: int, count: int, stream: int) -> bool:
        return current() == index and function(target, source, count, _HOST_TO_DEVICE, stream) == 0

    with torch.cuda.device(device):
        source = torch.full((64,), _PATTERN, dtype=torch.int32, pin_memory=True)
        target = torch.zeros(64, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device)
        queued = copy(target.data_ptr(), source.data_ptr(), 256, stream.cuda_stream)
        stream.synchronize()
        if not queued or not torch.equal(target.cpu(), source):
            return lambda _target, _source, _count, _stream: False
    return copy
