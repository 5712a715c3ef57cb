"""What a planner has done: decisions counted, and the device's counters beside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlaplan._core import Decision
    from mlaplan.device import Counters


@dataclass(frozen=True, slots=True)
class Stats:
    """What a planner has done since it was made.

    Attributes:
        steps: Plans asked for.
        actions: How often each action was decided.
        reasons: How often each reason counted.
        launches: Ops run on the device, refreshes and decodes included.
        copies: Uploads from the host.
        bytes_copied: Bytes of those uploads.
        allocations: Device arrays made.
        waits: Times the host waited for the device.
        read_backs: Times device memory was read by the host.
    """

    steps: int
    actions: dict[str, int]
    reasons: dict[str, int]
    launches: int
    copies: int
    bytes_copied: int
    allocations: int
    waits: int
    read_backs: int


class Tally:
    """Counts decisions by action and reasons: one number to look up a step, spelled out when somebody asks."""

    __slots__ = ("_examples", "_times")

    def __init__(self) -> None:
        """Counts nothing yet."""
        self._times: dict[int, int] = {}
        self._examples: dict[int, Decision] = {}

    def add(self, decision: Decision) -> None:
        """Counts a decision."""
        key = decision.key
        try:
            self._times[key] += 1
        except KeyError:
            # In this order: an interrupt in between must not leave a number without its meaning.
            self._examples[key] = decision
            self._times[key] = 1

    def stats(self, counters: Counters) -> Stats:
        """Returns the sums, beside what the device has counted."""
        actions: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for key, times in self._times.items():
            example = self._examples[key]
            actions[example.action] += times
            for reason in example.reasons:
                reasons[reason] += times
        return Stats(
            steps=sum(actions.values()),
            actions=dict(actions),
            reasons=dict(reasons),
            launches=counters.launches,
            copies=counters.copies,
            bytes_copied=counters.bytes_copied,
            allocations=counters.allocations,
            waits=counters.waits,
            read_backs=counters.read_backs,
        )
