"""Backends: who sizes and decodes behind one Protocol. Nothing here imports torch, Triton or aiter."""

from __future__ import annotations

from dataclasses import replace

from mlaplan.backends.base import Backend, BackendUnavailableError, UnsupportedError, partial_capacity
from mlaplan.calibration import cost_table_for
from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device

__all__ = ["Backend", "BackendUnavailableError", "UnsupportedError", "make_backend", "partial_capacity"]


def make_backend(config: PlannerConfig, device: Device) -> tuple[Backend, PlannerConfig]:
    """Returns the backend that `config` names, prepared, and the settings to plan with.

    Args:
        config: Settings, resolved or not; the backend "auto" stands for the device's own.
        device: Where the arrays live.

    Returns:
        The backend, and `config` with the backend's fold and release, for what is installed decides those, and with
        the cost table of its kernel where the policy needs one and none was given.

    Raises:
        UnsupportedError: The settings cannot run there; the message gives the reason.
        BackendUnavailableError: What the backend runs on is missing.
        mlaplan.calibration.CalibrationError: What `mlaplan tune` stored for the device is damaged.
    """
    name = device.backend if config.backend == "auto" else config.backend
    backend: Backend
    counts_units = config.num_cus is None and device.num_cus is not None
    config = config.resolved(device.num_cus)
    if name == "aiter":
        from mlaplan.backends.aiter import AiterBackend

        backend = AiterBackend(config.schedule_maker)
    elif name == "none":
        from mlaplan.backends.none import NoBackend

        backend = NoBackend()
    elif name == "portable":
        from mlaplan.backends.portable import PortableBackend, slots_that_fill

        if counts_units:
            config = replace(config, num_cus=slots_that_fill(config, device.num_cus or 1))
        backend = PortableBackend()
    else:
        from mlaplan.backends.reference import ReferenceBackend

        backend = ReferenceBackend()
    config = backend.prepare(config, device)
    if config.policy != "aiter" and config.cost_table is None:
        config = replace(config, cost_table=cost_table_for(config, backend.name, device))
    return backend, config
