"""Counters of live planners, for Prometheus and for a line in the log once per interval.

Nothing here is on a planner's path: numbers are read when somebody asks for them. `prometheus_client` is imported when
it is asked for, and needed for nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mlaplan.observer import LOG

if TYPE_CHECKING:
    from mlaplan.planner import Planner

# Name, and what it counts. Labels are few: four actions and fifteen reasons at most.
_COUNTERS = {
    "launches": "Ops launched on the device by planners and their decodes, nodes of replayed graphs not counted.",
    "copies": "Uploads from the host.",
    "bytes_copied": "Bytes of those uploads.",
    "allocations": "Device arrays made.",
    "waits": "Times the host waited for the device.",
    "read_backs": "Times device memory was read by the host.",
    "self_checks": "Comparisons of the buffers with a plan from nothing.",
    "self_check_differences": "Comparisons that differed: the buffers did not hold the plan.",
}
_ATTEMPTS = 10


class Totals:
    """Sums over planners, which never fall: what a planner had counted when it was last looked at stays.

    Safe to use from any thread.
    """

    def __init__(self) -> None:
        """Knows no planner yet."""
        self._seen: list[tuple[weakref.ref[Planner], Counter[tuple[str, str]]]] = []
        self._gone: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, planner: Planner) -> None:
        """Counts a planner in, for as long as it lives. Planners that share a device object count its work twice."""
        with self._lock:
            if all(known() is not planner for known, _ in self._seen):
                self._seen.append((weakref.ref(planner), Counter()))

    def read(self) -> Counter[tuple[str, str]]:
        """Returns the sums, by what is counted and its label ("" where there is none)."""
        with self._lock:
            alive = []
            total: Counter[tuple[str, str]] = Counter()
            for known, seen in self._seen:
                planner = known()
                if planner is None:
                    self._gone.update(seen)
                    continue
                seen.update(_difference(numbers_of(planner), seen))
                total.update(seen)
                alive.append((known, seen))
            self._seen = alive
            total.update(self._gone)
            return total


def _difference(now: Counter[tuple[str, str]], before: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    return Counter({key: value - before[key] for key, value in now.items() if value > before[key]})


def numbers_of(planner: Planner) -> Counter[tuple[str, str]]:
    """Returns what a planner has counted, by name and label.

    May be called from a thread that does not plan: a reading that is caught in the middle of a step is made again.
    """
    for attempt in range(_ATTEMPTS):
        try:
            stats = planner.stats
        except (RuntimeError, KeyError):  # a dictionary changed while it was read
            if attempt + 1 == _ATTEMPTS:
                raise
            continue
        break
    numbers: Counter[tuple[str, str]] = Counter()
    for action, times in stats.actions.items():
        numbers["steps", action] += times
    for reason, times in stats.reasons.items():
        numbers["reasons", reason] += times
    for name in ("launches", "copies", "bytes_copied", "allocations", "waits", "read_backs"):
        numbers[name, ""] += getattr(stats, name)
    numbers["self_checks", ""], numbers["self_check_differences", ""] = planner.self_checks
    return numbers


class Collector:
    """A collector for `prometheus_client`, whose registry asks it for numbers when it is scraped."""

    def __init__(self, totals: Totals, labels: dict[str, str] | None = None) -> None:
        """Makes a collector.

        Args:
            totals: What to export.
            labels: Labels that every number gets, the rank for instance.
        """
        self._totals = totals
        self._labels = labels or {}

    def describe(self) -> Iterable[Any]:
        """Returns the families without numbers, so that a registry need not ask for those when it takes us in."""
        return self._families(Counter())

    def collect(self) -> Iterator[Any]:
        """Yields the families of numbers."""
        yield from self._families(self._totals.read())

    def _families(self, numbers: Counter[tuple[str, str]]) -> list[Any]:
        from prometheus_client.core import CounterMetricFamily

        names, values = list(self._labels), list(self._labels.values())
        families = []
        for name, label, text in (
            ("steps", "action", "Plans asked for, by what was done."),
            ("reasons", "reason", "Reasons of those decisions; a decision may have several."),
        ):
            family = CounterMetricFamily(f"mlaplan_{name}", text, labels=[*names, label])
            for (what, which), value in sorted(numbers.items()):
                if what == name:
                    family.add_metric([*values, which], value)
            families.append(family)
        for name, text in _COUNTERS.items():
            family = CounterMetricFamily(f"mlaplan_{name}", text, labels=names)
            family.add_metric(values, numbers[name, ""])
            families.append(family)
        return families


_TOTALS = Totals()
_REGISTERED: weakref.WeakSet[Any] = weakref.WeakSet()


def export(planner: Planner, registry: Any = None, *, labels: dict[str, str] | None = None) -> bool:
    """Exports a planner's counters to Prometheus, summed over all planners of the process that were exported.

    In prometheus_client's multiprocess mode other processes do not see them: custom collectors belong to their process.

    Args:
        planner: A planner; it is not kept alive.
        registry: A `prometheus_client.CollectorRegistry`; None for the library's own. The collector is registered there
            once, whatever the number of planners.
        labels: Labels that every number gets; those of the first call for a registry hold.

    Returns:
        False where `prometheus_client` is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return False
    registry = REGISTRY if registry is None else registry
    _TOTALS.add(planner)
    if registry not in _REGISTERED:
        registry.register(Collector(_TOTALS, labels))
        _REGISTERED.add(registry)
    return True


class Reporter:
    """Says in the log what planners did, at most once per interval. One for a process, told of every step."""

    def __init__(self, interval_s: float, log: logging.Logger = LOG) -> None:
        """Begins an interval.

        Args:
            interval_s: Seconds between two lines, above 0.
            log: Where to.

        Raises:
            ValueError: The interval is not above 0.
        """
        if not interval_s > 0:
            raise ValueError(f"interval_s is {interval_s}, must be above 0")
        self._interval = interval_s
        self._log = log
        self._totals = Totals()
        self._begin = time.monotonic()
        self._due = self._begin + interval_s
        self._before: Counter[tuple[str, str]] = Counter()

    def add(self, planner: Planner) -> None:
        """Counts a planner in."""
        self._totals.add(planner)

    def tick(self) -> None:
        """Writes a line if the interval is over; a clock's reading otherwise."""
        now = time.monotonic()
        if now < self._due:
            return
        numbers = self._totals.read()
        text = line_of(_difference(numbers, self._before), now - self._begin)
        self._begin, self._due, self._before = now, now + self._interval, numbers
        if text is not None:
            self._log.info("%s", text)


def line_of(numbers: Counter[tuple[str, str]], seconds: float) -> str | None:
    """Returns the numbers of an interval as a line; None where there was no step."""
    actions = {label: value for (name, label), value in numbers.items() if name == "steps"}
    steps = sum(actions.values())
    if not steps:
        return None
    shares = ", ".join(f"{100 * value / steps:.1f}% {label}" for label, value in sorted(actions.items()))
    done = ", ".join(
        f"{numbers[name, '']:,} {name.replace('_', '-')}" for name in ("launches", "copies", "waits", "read_backs")
    )
    checked = ""
    if numbers["self_checks", ""]:
        checked = f", {numbers['self_checks', '']:,} self-checks, {numbers['self_check_differences', '']:,} differ"
    return f"mlaplan: {steps:,} plans in {seconds:.1f} s: {shares}; {done}{checked}"
