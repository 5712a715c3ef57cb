"""Backends: who sizes and decodes behind one Protocol. Nothing here imports torch, Triton or aiter."""

from __future__ import annotations

from mlaplan.backends.base import Backend, BackendUnavailableError, UnsupportedError, partial_capacity
from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device

__all__ = ["Backend", "BackendUnavailableError", "UnsupportedError", "make_backend", "partial_capacity"]


def make_backend(config: PlannerConfig, device: Device) -> tuple[Backend, PlannerConfig]:
    """Returns the backend that `config` names, prepared, and the settings to plan with.

    Args:
        config: Resolved settings; the backend "auto" stands for the device's own.
        device: Where the arrays live.

    Returns:
        The backend, and `config` with the backend's fold and release: what is installed decides those.

    Raises:
        UnsupportedError: The settings cannot run there; the message gives the reason.
        BackendUnavailableError: What the backend runs on is missing.
    """
    name = device.backend if config.backend == "auto" else config.backend
    backend: Backend
    if name == "aiter":
        from mlaplan.backends.aiter import AiterBackend

        backend = AiterBackend(config.schedule_maker)
    elif name == "none":
        from mlaplan.backends.none import NoBackend

        backend = NoBackend()
    elif name == "portable":
        from mlaplan.backends.portable import PortableBackend

        backend = PortableBackend()
    else:
        from mlaplan.backends.reference import ReferenceBackend

        backend = ReferenceBackend()
    return backend, backend.prepare(config, device)
