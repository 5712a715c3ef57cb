"""Who watches a planner: recorders and self-checks. A planner that nobody watches pays one comparison a step."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mlaplan.batch import Batch
    from mlaplan.plan import Plan
    from mlaplan.planner import Planner

LOG = logging.getLogger("mlaplan")


class Listener(Protocol):
    """What is told of a planner's steps."""

    def before(self) -> None:
        """A step is about to be planned: the buffers still hold what the step before left."""

    def planned(self, plan: Plan, deferred: bool, host_ns: int) -> None:  # noqa: FBT001
        """A step was planned."""

    def refreshed(self, plan: Plan) -> None:
        """A plan was made on the device, or its making became a node of a graph."""

    def remade(self, plan: Plan) -> None:
        """A plan is about to be made again, from lengths that the device changed."""

    def failed(self) -> None:
        """A step was not planned: an exception ended it."""

    def invalidated(self) -> None:
        """The planner was told to forget what the device holds."""

    def dropped(self) -> None:
        """Something that the listener raised ended its listening."""


class Observer:
    """Stands in front of `Planner.plan` while somebody listens.

    A listener that raises is dropped with one line in the log: it may never disturb planning.

    Attributes:
        listeners: Who listens. May change in the middle of a step, by a signal's handler for instance.
        planning: Whether the planner is to plan by itself: its own method asks an observer first.
    """

    def __init__(self, planner: Planner) -> None:
        """Watches nothing yet."""
        self._planner = planner
        self.listeners: tuple[Listener, ...] = ()
        self.planning = False

    def plan(self, batch: Batch, *, deferred: bool) -> Plan:
        """Plans a batch, and tells the listeners; as `Planner.plan`."""
        planner = self._planner
        self._tell("before")
        try:
            self.planning = True
            begin = time.perf_counter_ns()
            plan = planner.plan(batch, deferred=deferred)
            host_ns = time.perf_counter_ns() - begin
        except BaseException:
            self.planning = False
            self._tell("failed")
            raise
        self.planning = False
        self._tell("planned", plan, deferred, host_ns)
        return plan

    def refreshed(self, plan: Plan) -> None:
        """Tells the listeners of a plan made on the device."""
        self._tell("refreshed", plan)

    def remade(self, plan: Plan) -> None:
        """Tells the listeners of `Planner.remake`."""
        self._tell("remade", plan)

    def invalidated(self) -> None:
        """Tells the listeners of `Planner.invalidate`."""
        self._tell("invalidated")

    def _tell(self, what: str, *arguments: object) -> None:
        for listener in self.listeners:
            try:
                getattr(listener, what)(*arguments)
            except Exception as error:  # noqa: BLE001, PERF203  (watching must not disturb what is watched)
                self.drop(listener)
                with suppress(Exception):
                    listener.dropped()
                LOG.warning("mlaplan: %s is off: %s: %s", type(listener).__name__, type(error).__name__, error)

    def drop(self, listener: Listener) -> None:
        """Tells a listener nothing any more; with the last one the observer steps aside."""
        self.listeners = tuple(other for other in self.listeners if other is not listener)
        if not self.listeners and self._planner.observer is self:
            self._planner.observer = None


def watch(planner: Planner, listener: Listener) -> None:
    """Tells a listener of every step from here on."""
    if planner.observer is None:
        planner.observer = Observer(planner)
    planner.observer.listeners += (listener,)


def unwatch(planner: Planner, listener: Listener) -> None:
    """Tells a listener nothing any more; does nothing if it was not told before."""
    if planner.observer is not None:
        planner.observer.drop(listener)
