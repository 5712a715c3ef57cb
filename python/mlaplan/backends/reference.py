"""Decode by the device's own ops: on the host the reference in NumPy, what everything is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mlaplan.backends.base import UnsupportedError, partial_capacity
from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device
from mlaplan.plan import Plan


class ReferenceBackend:
    """The `decode` and `merge` ops of the host device, in float64, work by work."""

    name = "reference"
    makes_schedule = False
    _merge_options: Mapping[str, bool] = MappingProxyType({})

    def prepare(self, config: PlannerConfig, device: Device) -> PlannerConfig:
        """See `Backend.prepare`."""
        if device.backend != self.name:
            raise UnsupportedError(f"backend {self.name!r} does not run on device {device.name!r}")
        self._config, self._device = config, device
        params = config.params
        self._fold = params.fold
        if config.heads % params.fold != 0:
            raise UnsupportedError(f"heads is {config.heads}, must be a multiple of the fold, {params.fold}")
        partials = partial_capacity(config.max_rows * params.fold, params.num_cus, pieces=params.pieces)
        group = config.heads // params.fold
        self._partial_out = device.empty((partials, group, config.v_head_dim), "float32")
        self._partial_lse = device.empty((partials, group), "float32")
        return config

    def needs_schedule(self, padded_rows: int) -> bool:
        """See `Backend.needs_schedule`: always."""
        return padded_rows >= 0

    def make_schedule(self, plan: Plan) -> None:
        """See `Backend.make_schedule`: here the planner makes them."""
        raise UnsupportedError(f"backend {self.name!r} makes no schedules; asked for {plan.padded_rows} rows")

    def decode(
        self,
        plan: Plan,
        q: Any,
        kv_cache: Any,
        kv_indices: Any,
        *,
        scale: float,
        out: Any = None,
        lse: Any = None,
        fp8_scales: tuple[Any, Any] = (None, None),
    ) -> tuple[Any, Any]:
        """See `Backend.decode`."""
        config, device, rows = self._config, self._device, plan.padded_rows
        factors = self._factors(fp8_scales)
        if out is None:
            out = device.empty((rows, config.heads, config.v_head_dim), config.out_dtype)
        if lse is None:
            lse = device.empty((rows, config.heads), "float32")
        if rows == 0:
            return out, lse
        shared = {"out": out, "lse": lse, "fold": self._fold}
        device.run(
            device.ops.decode,
            q,
            kv_cache.reshape(-1, config.head_dim),
            kv_indices,
            plan.arrays,
            scale=scale,
            v_dim=config.v_head_dim,
            partial_out=self._partial_out,
            partial_lse=self._partial_lse,
            **shared,
            **factors,
        )
        device.run(
            device.ops.merge,
            self._partial_out,
            self._partial_lse,
            plan.arrays,
            reduce_partial_map=plan.constants.reduce_partial_map,
            reduce_final_map=plan.constants.reduce_final_map,
            **shared,
            **self._merge_options,
        )
        return out, lse

    def describe(self) -> dict[str, Any]:
        """See `Backend.describe`."""
        config = self._config
        return {
            "backend": self.name,
            "device": self._device.name,
            "num_cus": config.num_cus,
            "heads": config.heads,
            "fold": self._fold,
            "q_dtype": config.q_dtype,
            "kv_dtype": config.kv_dtype,
            "partial_rows": self._partial_lse.shape[0],
        }

    def _factors(self, fp8_scales: tuple[Any, Any]) -> dict[str, float]:
        """Further arguments of the `decode` op for scaled dtypes."""
        if any(scale is not None for scale in fp8_scales):
            raise UnsupportedError("fp8_scales is given, but the host has no fp8: scale before")
        return {}
