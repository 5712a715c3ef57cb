"""Decode by Triton kernels, on any GPU that Triton compiles for; they consume what aiter's kernels consume."""

from __future__ import annotations

from typing import Any

from mlaplan.backends.base import UnsupportedError
from mlaplan.backends.reference import ReferenceBackend
from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device


class PortableBackend(ReferenceBackend):
    """The `decode` and `merge` ops of a GPU."""

    name = "portable"

    def prepare(self, config: PlannerConfig, device: Device) -> PlannerConfig:
        """See `Backend.prepare`."""
        if config.q_dtype == "fp8":
            raise UnsupportedError("q_dtype is 'fp8', but the portable kernel takes bf16 or fp16 queries")
        return super().prepare(config, device)

    def _factors(self, fp8_scales: tuple[Any, Any]) -> dict[str, float]:
        q_scale, kv_scale = fp8_scales
        if q_scale is not None:
            raise UnsupportedError("fp8_scales has a factor of queries, which are not fp8 here")
        if kv_scale is None:
            return {}
        if not isinstance(kv_scale, (int, float)):
            raise UnsupportedError(
                f"the KV factor is a {type(kv_scale).__name__}, must be a number: reading an array would wait"
            )
        return {"k_scale": float(kv_scale)}
