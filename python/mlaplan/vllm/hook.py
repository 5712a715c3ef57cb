"""Runs an action once a module has been imported, by whomever and whenever.

A plugin must not import an attention backend itself: the function also runs in processes that never need one, and too
early in those that do.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from mlaplan.vllm.settings import LOG

Action = Callable[[ModuleType], None]


class _PostImport(importlib.abc.MetaPathFinder):
    """A finder that finds nothing itself: it lets the others find a watched module and acts after its loader ran."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec that the other finders have for a watched module, its loader extended; otherwise None."""
        action = self.actions.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _act_after(spec.loader, action)
                return spec
        return None


_HOOK = _PostImport()


def after_import(name: str, action: Action) -> None:
    """Calls `action(module)` when `name` has been imported; at once if it has been already.

    A later call for the same name replaces the action. What the action raises is logged and goes no further: the
    module stays as it is.
    """
    _HOOK.actions[name] = action
    if _HOOK not in sys.meta_path:
        sys.meta_path.insert(0, _HOOK)
    module = sys.modules.get(name)
    if module is None:
        return
    if getattr(module.__spec__, "_initializing", False):
        LOG.warning("mlaplan is not active: %s was being imported when the plugin was called", name)
        return
    _guarded(action, module)


def _act_after(loader: importlib.abc.Loader, action: Action) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _guarded(action, module)

    # On the loader object, which belongs to this one spec: its type and all its other methods stay what they are.
    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]
    except AttributeError:
        LOG.warning("mlaplan is not active: modules loaded by %s cannot be watched", type(loader).__name__)


def _guarded(action: Action, module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:  # noqa: BLE001  (an import of vLLM must not fail because of us)
        LOG.warning("mlaplan is not active: %s: %s", type(error).__name__, error)
