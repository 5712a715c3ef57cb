"""No decode: for an engine that plans with mlaplan and decodes by itself. Owns no memory."""

from __future__ import annotations

from typing import Any, NoReturn

from mlaplan.backends.base import UnsupportedError
from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device
from mlaplan.plan import Plan


class NoBackend:
    """Refuses to decode."""

    name = "none"
    makes_schedule = False

    def prepare(self, config: PlannerConfig, device: Device) -> PlannerConfig:
        """See `Backend.prepare`: the settings hold as they are."""
        del device
        return config

    def needs_schedule(self, padded_rows: int) -> bool:
        """See `Backend.needs_schedule`: whoever decodes may read it."""
        return padded_rows >= 0

    def make_schedule(self, plan: Plan) -> NoReturn:
        """See `Backend.make_schedule`: here the planner makes them."""
        raise UnsupportedError(f"backend {self.name!r} makes no schedules; asked for {plan.padded_rows} rows")

    def decode(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """See `Backend.decode`."""
        raise UnsupportedError("backend is 'none': this planner plans, and somebody else decodes")

    def describe(self) -> dict[str, Any]:
        """See `Backend.describe`."""
        return {"backend": self.name}
