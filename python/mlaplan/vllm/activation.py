"""Puts our builder and impl in the place of vLLM's, where this vLLM is one that we know."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

from mlaplan.vllm import hook, live
from mlaplan.vllm.release import BACKEND_MODULE, Stock, unknown_release
from mlaplan.vllm.settings import LOG

ENUM_NAME = "ROCM_AITER_MLA_SPARSE"
BACKEND_PATH = "mlaplan.vllm.backend.PlannedBackend"
# Wakes a sleeping server: afterwards device memory may hold anything.
_ALLOCATOR_MODULE = "vllm.device_allocator.cumem"
_REPLACED = "_mlaplan_replaced"


def activate() -> None:
    """Arranges the replacement. Imports no attention backend.

    Raises:
        Exception: Whatever vLLM's registry raises if it is not what we know.
    """
    hook.after_import(BACKEND_MODULE, _replace_classes)
    hook.after_import(_ALLOCATOR_MODULE, _invalidate_on_wake_up)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    member = AttentionBackendEnum[ENUM_NAME]
    if member.is_overridden() and member.get_path() != BACKEND_PATH:
        # Somebody chose a class of their own. If it derives from the stock class it still gets our builder.
        LOG.info("mlaplan leaves the override of %s alone: %s", ENUM_NAME, member.get_path())
        return
    register_backend(member, BACKEND_PATH)


def _replace_classes(module: ModuleType) -> None:
    """Makes the stock backend class hand out our builder and impl.

    On the class itself, because some models name it and never ask the registry.
    """
    reason = unknown_release(module, _vllm_version())
    if reason is not None:
        LOG.warning("mlaplan is not active, vLLM's own builder is used: %s", reason)
        return
    stock = Stock.of(module)
    if _REPLACED in vars(stock.backend):
        return
    setattr(stock.backend, _REPLACED, True)
    stock.backend.get_builder_cls = staticmethod(lambda: _ours("builder", "PlannedBuilder", stock.builder))
    stock.backend.get_impl_cls = staticmethod(lambda: _ours("impl", "PlannedImpl", stock.impl))


def _ours(module: str, name: str, stock: type) -> type:
    """Our class, or the stock one where ours cannot be imported."""
    try:
        imported: Any = __import__(f"mlaplan.vllm.{module}", fromlist=[name])
        cls: type = getattr(imported, name)
    except Exception as error:  # noqa: BLE001  (a broken install of ours must not stop the server)
        LOG.warning("mlaplan is not active: %s: %s", type(error).__name__, error)
        return stock
    return cls


def _invalidate_on_wake_up(module: ModuleType) -> None:
    allocator = module.CuMemAllocator
    if _REPLACED in vars(allocator):
        return
    wake_up = allocator.wake_up

    def wake_up_and_invalidate(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = wake_up(self, *args, **kwargs)
        live.invalidate()
        return result

    setattr(allocator, _REPLACED, True)
    allocator.wake_up = wake_up_and_invalidate


def _vllm_version() -> tuple[int, int] | None:
    """Major and minor number of the vLLM that is running, None where it does not say."""
    text = str(getattr(sys.modules.get("vllm"), "__version__", ""))
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
