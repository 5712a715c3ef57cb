"""Devices: where a plan's arrays live. `host` needs NumPy alone; `torch` is imported when a GPU is asked for."""

from __future__ import annotations

from typing import Any

from mlaplan.device.base import Counters, Device, Graph
from mlaplan.device.host import HostDevice

__all__ = ["Counters", "Device", "Graph", "HostDevice", "make_device"]


def make_device(device: Any) -> Device:
    """Returns the device that a name or object stands for.

    Args:
        device: "cpu" for the host; "cuda", "cuda:1" or a torch device for a GPU (ROCm's are named so too); "auto" for a
            GPU if torch is there and sees one, else the host; or a `Device`.

    Raises:
        ImportError: A GPU was asked for without torch and Triton.
        ValueError: The name means nothing.
    """
    if not isinstance(device, str) and hasattr(device, "counters"):
        made: Device = device
        return made
    name = str(device)
    if name == "cpu":
        return HostDevice()
    if name == "auto":
        return _gpu("cuda") if _gpu_visible() else HostDevice()
    if name.split(":", maxsplit=1)[0] == "cuda":
        return _gpu(name)
    raise ValueError(f"device is {name!r}, known are 'auto', 'cpu', 'cuda' and 'cuda:N'")


def _gpu(name: str) -> Device:
    try:
        from mlaplan.device.torch import TorchDevice
    except ImportError as error:
        message = f"device {name!r} needs torch and Triton: pip install 'mlaplan[gpu]' ({error})"
        raise ImportError(message) from error
    return TorchDevice(name)


def _gpu_visible() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
