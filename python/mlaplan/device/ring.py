"""Host areas that copies are made from, each guarded until its copy has run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlaplan._types import Int32Array


class Marker(Protocol):
    """A point in a device's queue."""

    def record(self) -> None:
        """Sets the point behind everything asked for so far."""

    def done(self) -> bool:
        """Whether the device has passed the point; True where it was never set."""

    def wait(self) -> None:
        """Waits until the device has passed the point."""


class StagingRing:
    """A few host areas that are filled in turn.

    The host may run thousands of operations ahead of the device, so an area may only be written again when the copy
    from it has run. `reserve` answers that without waiting. Setting a marker costs part of a copy, so there are
    two groups of areas with a marker each: it is set when the first area of the other group is asked for, behind
    every copy of its own.

    Attributes:
        areas: The areas, int32, all of one size, at least two.
        ready: The next area if it is known to be free, else None.
        sources: What the device copies from, one per area: the same memory as the device's kind of array.
        queue: The queue that the device copied on last, as the device names it.
    """

    def __init__(self, areas: Sequence[Int32Array], sources: Sequence[Any], markers: tuple[Any, Any]) -> None:
        """Makes a ring whose areas are all free.

        Args:
            areas: The areas.
            sources: The same memory for the device.
            markers: One marker per group.
        """
        self.areas = tuple(areas)
        self.sources = tuple(sources)
        self._markers = markers
        self.queue: Any = None
        self._per_group = -(-len(self.areas) // 2)
        self.ready: Int32Array | None = self.areas[0]
        self._next = 0
        self._unmarked: Marker | None = None

    def reserve(self) -> Int32Array | None:
        """Returns the next area if its last copy has run, None if it may not have."""
        if self.ready is None and (self._next % self._per_group or self._enter().done()):
            self.ready = self.areas[self._next]
        return self.ready

    def wait(self) -> Int32Array:
        """Returns the next area, after waiting for its last copy."""
        area = self.reserve()
        if area is None:
            self._enter().wait()
            area = self.ready = self.areas[self._next]
        return area

    def take(self) -> int:
        """Returns the number of the area that is ready, from which the device is about to copy."""
        slot = self._next
        self.ready = None  # first, for it may be none but the next one's, whenever an interrupt comes
        self._next = (slot + 1) % len(self.areas)
        return slot

    def queued(self, slot: int) -> None:
        """Says that a copy from the area was queued."""
        self._unmarked = self._markers[slot // self._per_group]

    @property
    def markers(self) -> tuple[Any, Any]:
        """The two markers."""
        return self._markers

    def _enter(self) -> Any:
        """Sets the marker of the group that is full, once; returns that of the group that comes next."""
        if self._unmarked is not None:
            self._unmarked.record()
            self._unmarked = None
        return self._markers[self._next // self._per_group]
