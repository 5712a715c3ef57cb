"""Decode by Triton kernels, on any GPU that Triton compiles for; they consume what aiter's kernels consume."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlaplan.backends.base import UnsupportedError
from mlaplan.backends.reference import ReferenceBackend
from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device

if TYPE_CHECKING:
    from mlaplan.kernels.target import Tile


def tile_of(config: PlannerConfig) -> Tile:
    """How the decode kernel cuts the work of resolved settings, on the current GPU."""
    from mlaplan.kernels.target import gpu_kind, tile_for

    kind = gpu_kind()
    is_hopper_shape = config.q_dtype == config.kv_dtype and (config.head_dim, config.v_head_dim) == (576, 512)
    if kind == "hopper" and not is_hopper_shape:
        kind = "cuda"  # as `kernels.decode_hopper.takes` has it
    return tile_for(kind, config.heads // (config.fold or 1), 1 if config.kv_dtype == "fp8" else 2)


def slots_that_fill(config: PlannerConfig, device_cus: int) -> int:
    """Slots with which every compute unit has one program of the decode kernel.

    A slot has a program for each block of heads. With more slots than this a short row cut into many pieces takes two
    rounds of the GPU (H200, 128 heads, 16 full rows: 48.8 us on 132 slots, 34.2 us on 66).

    Args:
        config: Resolved settings.
        device_cus: Compute units of the GPU.
    """
    programs = -(-(config.heads // (config.fold or 1)) // tile_of(config).heads)
    return max(1, device_cus // programs)


class PortableBackend(ReferenceBackend):
    """The `decode` and `merge` ops of a GPU."""

    name = "portable"
    _merge_options = MappingProxyType({"after_decode": True})

    def prepare(self, config: PlannerConfig, device: Device) -> PlannerConfig:
        """See `Backend.prepare`."""
        if config.q_dtype == "fp8":
            raise UnsupportedError("q_dtype is 'fp8', but the portable kernel takes bf16 or fp16 queries")
        if config.policy == "invariant":
            # Else the number of rows would decide the order in which the pieces of a row are summed up.
            self._merge_options = MappingProxyType({**self._merge_options, "one_cut": True})
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
