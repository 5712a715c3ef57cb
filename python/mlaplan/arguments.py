"""Checks of what a decode is called with, before anything is launched."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaplan.config import PlannerConfig
    from mlaplan.plan import Plan


def check_decode(
    plan: Plan,
    config: PlannerConfig,
    kind: type[Any],
    q: Any,
    kv_cache: Any,
    topk_indices: Any,
    block_table: Any,
    block_size: Any,
) -> None:
    """Checks the inputs of `Planner.decode`, which describes them.

    Args:
        plan: The plan.
        config: The planner's settings.
        kind: The device's type of array.
        q: Queries.
        kv_cache: KV slots.
        topk_indices: Token positions.
        block_table: KV blocks.
        block_size: Slots of a block.

    Raises:
        TypeError: An argument has the wrong kind or dtype.
        ValueError: A shape does not fit the plan.
    """
    rows, dim, topk = plan.padded_rows, config.head_dim, config.topk
    _check_array("q", q, kind, 3, _is_float)
    _check_array("kv_cache", kv_cache, kind, 2, _is_float)
    _check_array("topk_indices", topk_indices, kind, 2, _is_int32)
    _check_array("block_table", block_table, kind, 2, _is_int32)
    _expect_shape("q", q, (rows, config.heads, dim), "(padded_rows, heads, head_dim)")
    if kv_cache.shape[1] != dim or kv_cache.shape[0] < 1:
        raise ValueError(f"kv_cache has shape {tuple(kv_cache.shape)}, expected (num_slots, head_dim = {dim})")
    if topk_indices.shape[0] < rows or topk_indices.shape[1] < topk:
        shape = tuple(topk_indices.shape)
        raise ValueError(f"topk_indices has shape {shape}, expected at least (padded_rows, topk) = {(rows, topk)}")
    requests = len(plan.batch.query_start_loc) - 1
    if block_table.shape[0] < requests:
        shape = tuple(block_table.shape)
        raise ValueError(f"block_table has shape {shape}, expected a row for each of {requests} requests")
    if isinstance(block_size, bool) or not hasattr(block_size, "__index__"):
        raise TypeError(f"block_size must be a whole number, not {type(block_size).__name__}")
    if not 1 <= block_size <= 2**31 - 1:
        value = block_size if abs(block_size) < 2**64 else "huge"  # thousands of digits have no text
        raise ValueError(f"block_size is {value}, must be 1 to 2147483647")


def check_outputs(plan: Plan, config: PlannerConfig, kind: type[Any], out: Any, lse: Any) -> None:
    """Checks the arrays that `Planner.decode` was given to write into, None aside.

    Args:
        plan: The plan.
        config: The planner's settings.
        kind: The device's type of array.
        out: Array for the output.
        lse: Array for the LSE.

    Raises:
        TypeError: An argument has the wrong kind or dtype.
        ValueError: A shape does not fit the plan, or the array is read-only.
    """
    rows, heads = plan.padded_rows, config.heads
    if out is not None:
        _check_array("out", out, kind, 3, _is_float)
        _expect_shape("out", out, (rows, heads, config.v_head_dim), "(padded_rows, heads, v_head_dim)")
    if lse is not None:
        _check_array("lse", lse, kind, 2, _is_float)
        _expect_shape("lse", lse, (rows, heads), "(padded_rows, heads)")
    for name, array in (("out", out), ("lse", lse)):
        flags = getattr(array, "flags", None)
        if flags is not None and not flags.writeable:
            raise ValueError(f"{name} is read-only")


def check_scales(fp8_scales: Any) -> None:
    """Checks that there is one factor for the queries and one for KV; the backend checks what they are.

    Args:
        fp8_scales: Factors.

    Raises:
        TypeError: It is no pair.
    """
    if not isinstance(fp8_scales, tuple) or len(fp8_scales) != 2:
        raise TypeError(f"fp8_scales must be a pair of factors or None, not {fp8_scales!r:.60}")


def finite(name: str, value: Any) -> float:
    """Returns a number as it is.

    Raises:
        TypeError: It is no number.
        ValueError: It is NaN or infinite.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, must be finite")
    return number


def _check_array(name: str, array: Any, kind: type[Any], dimensions: int, allowed: Any) -> None:
    if not isinstance(array, kind):
        raise TypeError(f"{name} must be a {kind.__module__}.{kind.__name__}, not {type(array).__name__}")
    if not allowed(array.dtype):
        wanted = "int32" if allowed is _is_int32 else "of a floating-point dtype"
        raise TypeError(f"{name} must be {wanted}, not {array.dtype}")
    if len(array.shape) != dimensions:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {dimensions} dimensions")


def _expect_shape(name: str, array: Any, wanted: tuple[int, ...], words: str) -> None:
    if tuple(array.shape) != wanted:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {words} = {wanted}")


@lru_cache
def _is_int32(dtype: Any) -> bool:
    return str(dtype).rsplit(".", maxsplit=1)[-1] == "int32"


@lru_cache
def _is_float(dtype: Any) -> bool:
    # NumPy's names and torch's: "float64", "torch.bfloat16", "torch.float8_e4m3fnuz".
    return str(dtype).rsplit(".", maxsplit=1)[-1].startswith(("float", "bfloat"))
