"""Ctrl-C at every line: an interrupt may come between any two lines of a call, and what comes next must be right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan.device import HostDevice
from planning import assert_holds, batch, ints, planner

_PACKAGE = str(Path(mlaplan.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt in front of the n-th line that runs inside the package; without a number it counts."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen = 0

    def __enter__(self) -> Interrupt:  # noqa: PYI034 - Self needs Python 3.11
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        # How a capture begins and ends is the runtime's affair; the host's stand-in for it is no planner.
        if not frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_name == "record":
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self._trace


class World:
    """A planner that holds a plan and has made others."""

    def __init__(self, maker: str) -> None:
        self.device = HostDevice()
        self.planner = planner(
            self.device, max_rows=8, max_requests=4, num_cus=5, staging_slots=2, schedule_maker=maker
        )
        self.older = self.planner.plan(batch([2], [5], on_device=True))
        self.waiting = self.planner.plan(batch([1, 1], [3, 30], on_device=True), deferred=True)
        self.held = self.planner.plan(batch([1, 2], [9, 40], on_device=True))

    def rights(self, turn: int) -> None:
        """Calls that are tempted to do nothing, in an order that depends on the turn; all must leave their plan."""
        calls: list[Callable[[], None]] = [
            lambda: assert_holds(self.planner.plan(batch([1, 2], [9, 40])), [1, 2], [9, 40]),
            lambda: assert_holds(self.planner.plan(batch([3], [50], on_device=True)), [3], [50]),
            lambda: self._refresh(self.older, [2], [5]),
            lambda: self._refresh(self.held, [1, 2], [9, 40]),
            lambda: self._refresh(self.waiting, [1, 1], [3, 30]),
            self._graph,
            lambda: self._decode(self.held, [1, 2], [9, 40]),
        ]
        for call in calls[turn % len(calls) :] + calls[: turn % len(calls)]:
            call()
        steps = self.planner.stats.steps
        assert self.planner.plan(batch([1], [1])).constants.qo_indptr[:3].tolist() == [0, 1, 2]
        assert self.planner.stats.steps == steps + 1

    def _refresh(self, plan: mlaplan.Plan, query_lens: list[int], seq_lens: list[int]) -> None:
        self.planner.refresh(plan)
        assert_holds(plan, query_lens, seq_lens)

    def _graph(self) -> None:
        boundaries, lengths = ints(0, 0), ints(0)
        handed = mlaplan.Batch(ints(0, 1), None, None, True, boundaries, lengths)
        plan = self.planner.plan(handed, deferred=True)
        with self.device.record() as graph:
            self.planner.refresh(plan)
        assert len(graph.ops) == 1
        boundaries[1], lengths[0] = 1, 7
        graph.replay()
        assert_holds(plan, [1], [7])

    def _decode(self, plan: mlaplan.Plan, query_lens: list[int], seq_lens: list[int]) -> None:
        decode(self.planner, plan)
        assert_holds(plan, query_lens, seq_lens)


def decode(made: mlaplan.Planner, plan: mlaplan.Plan) -> None:
    """Decodes ones."""
    rows = plan.padded_rows
    made.decode(plan, np.ones((rows, 2, 8)), np.ones((8, 8)), np.zeros((rows, 16), np.int32),
                np.zeros((4, 2), np.int32), block_size=4)  # fmt: skip


def capture(world: World) -> None:
    """Captures a refresh."""
    with world.device.record():
        world.planner.refresh(world.waiting)


def lose(world: World) -> None:
    """Loses the constants and plans again, which restores them."""
    for array in world.planner._constants[0]:
        array[...] = 77
    world.planner.invalidate()
    world.planner.plan(batch([1, 2], [9, 40]))


CALLS: dict[str, Callable[[World], object]] = {
    "nothing": lambda world: world.planner.plan(batch([1, 2], [9, 40])),
    "copy": lambda world: world.planner.plan(batch([1, 2], [9, 41])),
    "copy of an older plan": lambda world: world.planner.plan(batch([2], [5])),
    "launch": lambda world: world.planner.plan(batch([1, 2], [9, 42], on_device=True, lengths=None)),
    "deferred": lambda world: world.planner.plan(batch([1], [9], on_device=True), deferred=True),
    "refresh": lambda world: world.planner.refresh(world.waiting),
    "refresh of an older plan": lambda world: world.planner.refresh(world.older),
    "remake": lambda world: world.planner.remake(world.held),
    "decode": lambda world: decode(world.planner, world.waiting),
    "capture": capture,
    "invalidate": lambda world: world.planner.invalidate(),
    "loss": lose,
}


# A copy passes through the ring, where the order of two lines matters: always all of its lines.
EVERY = [(name, 4) for name in CALLS] + [
    pytest.param(name, 1, marks=() if name.startswith("copy") else pytest.mark.slow) for name in CALLS
]


@pytest.mark.parametrize(("name", "every"), EVERY)
@pytest.mark.parametrize("maker", ["core", "device"])
def test_an_interrupt_at_any_line_leaves_the_next_plans_right(name: str, maker: str, every: int) -> None:
    counted = Interrupt()
    world = World(maker)
    with counted:
        CALLS[name](world)
    assert counted.seen > 3
    for at in range(1 + (len(name) + len(maker)) % every, counted.seen + 1, every):
        world = World(maker)
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            CALLS[name](world)
        if name == "loss":
            world.planner.invalidate()  # as whoever was interrupted in handling a loss has to
        world.rights(at)
