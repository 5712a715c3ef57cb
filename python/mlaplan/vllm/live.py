"""The planners that are alive in this process."""

from __future__ import annotations

import weakref
from typing import Protocol


class Invalidates(Protocol):
    """What can be told that the device's memory changed behind its back."""

    def invalidate(self) -> None:
        """Forgets what the device holds."""


_LIVE: weakref.WeakSet[Invalidates] = weakref.WeakSet()


def add(planner: Invalidates) -> None:
    """Remembers a planner for as long as somebody else does."""
    _LIVE.add(planner)


def invalidate() -> int:
    """Invalidates every live planner and returns how many there are."""
    planners = list(_LIVE)
    for planner in planners:
        planner.invalidate()
    return len(planners)
