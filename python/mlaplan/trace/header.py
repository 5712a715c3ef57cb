"""The header of a trace: what a plan depends on beside the batch, and which versions made it."""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan import _core
from mlaplan.config import PlannerConfig
from mlaplan.costs import CostTable
from mlaplan.trace.records import TraceError

if TYPE_CHECKING:
    from mlaplan.planner import Planner

# Looked up among what is loaded, never imported.
_LIBRARIES = ("torch", "triton", "vllm", "aiter")
_COSTS = ("block_tokens", "block", "piece", "whole", "slot", "merge", "cut")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a trace says once.

    Attributes:
        config: The planner's settings, number of compute units and fold included.
        device: Name of the device.
        backend: Name of the backend.
        versions: Version by name, mlaplan's and those of the libraries that were loaded.
        created_s: When recording began, in seconds since 1970.
        note: Free text: what made the trace.
    """

    config: PlannerConfig
    device: str = "cpu"
    backend: str = "none"
    versions: dict[str, str] = field(default_factory=dict)
    created_s: int = 0
    note: str = ""

    @classmethod
    def of(cls, planner: Planner, note: str = "") -> Header:
        """Returns the header for a planner's trace."""
        return cls(
            config=planner.config,
            device=planner.device.name,
            backend=planner.backend.name,
            versions=_versions(),
            created_s=int(time.time()),
            note=note,
        )

    def as_document(self) -> dict[str, Any]:
        """Returns the header for JSON."""
        settings = {entry.name: _plain(getattr(self.config, entry.name)) for entry in fields(self.config)}
        return {
            "config": settings,
            "device": self.device,
            "backend": self.backend,
            "versions": self.versions,
            "created_s": self.created_s,
            "note": self.note,
        }

    @classmethod
    def from_document(cls, document: Any) -> Header:
        """Returns the header that a document describes.

        Raises:
            TraceError: It describes none, or settings that this version does not know.
        """
        if not isinstance(document, dict) or not isinstance(document.get("config"), dict):
            raise TraceError("the header names no settings")
        settings = dict(document["config"])
        unknown = sorted(set(settings) - {entry.name for entry in fields(PlannerConfig)})
        if unknown:
            raise TraceError(f"the header has settings that mlaplan {_core.__version__} does not know: {unknown[0]!r}")
        try:
            config = PlannerConfig(**{name: _live(value) for name, value in settings.items()})
        except (TypeError, ValueError) as error:
            raise TraceError(f"the header's settings do not hold: {error}") from error
        versions = document.get("versions")
        created = document.get("created_s")
        return cls(
            config=config,
            device=str(document.get("device", ""))[:100],
            backend=str(document.get("backend", ""))[:100],
            versions={str(k): str(v)[:100] for k, v in versions.items()} if isinstance(versions, dict) else {},
            created_s=created if isinstance(created, int) else 0,
            note=str(document.get("note", ""))[:1000],
        )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, CostTable):
        return {name: getattr(value, name) for name in _COSTS if hasattr(value, name)}
    return value


def _live(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict):
        return CostTable(**value)  # `cut` may be missing, in traces from before there was one: it is 0, as it was then
    return value


def _versions() -> dict[str, str]:
    found = {"mlaplan": _core.__version__, "python": platform.python_version(), "numpy": np.__version__}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
