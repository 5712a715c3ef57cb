"""Watches what an interpreted kernel loads and stores, and names accesses that nothing puts in order.

On a GPU the lanes of a block belong to threads, which thread has a lane differs from one load or store to the next,
and only a barrier puts accesses of different threads in order. So between two barriers no word of 32 bits may be
written by one access and touched by another one, and nothing that one program writes may be touched by another
program of the launch.

NVIDIA's racecheck asks the same of shared memory; it does not look at global memory.

The interpreter runs one access after the other and so gives the right result either way. This is stricter than the
hardware, where a reduction or a scan often holds a barrier of its own: no promise of Triton's says that it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder

_KERNELS = str(Path("mlaplan") / "kernels")
_MOST = 20


@dataclass
class Watch:
    """What was seen, and which barriers do not count.

    Attributes:
        skipped: Source lines whose barriers are taken for none.
        conflicts: One line per pair of accesses without an order, of the first few.
        barriers: Source lines of all barriers that were reached.
        accesses: Loads and stores that were watched.
    """

    skipped: frozenset[str] = frozenset()
    conflicts: list[str] = field(default_factory=list)
    barriers: set[str] = field(default_factory=set)
    accesses: int = 0
    _program: Any = None
    _wrote: dict[int, str] = field(default_factory=dict)
    _read: dict[int, str] = field(default_factory=dict)
    _before: dict[int, Any] = field(default_factory=dict)

    def program(self, number: Any) -> None:
        """Another program of the launch begins, or the first one of another launch."""
        if number == (0, 0, 0):
            self._before = {}
        self._program = number
        self._wrote, self._read = {}, {}

    def barrier(self) -> None:
        place = _place()
        self.barriers.add(place)
        if place not in self.skipped:
            self._wrote, self._read = {}, {}

    def load(self, addresses: Any) -> None:
        self.accesses += 1
        place = _place()
        for address in addresses.tolist():
            if address in self._wrote:
                self._report(f"{place} reads what {self._wrote[address]} wrote")
            if self._before.get(address, self._program) != self._program:
                self._report(f"{place} reads what another program wrote")
            self._read[address] = place

    def store(self, addresses: Any, values: Any) -> None:
        self.accesses += 1
        place = _place()
        of_this: dict[int, Any] = {}
        for address, value in zip(addresses.tolist(), values.tolist(), strict=True):
            if address in self._wrote:
                self._report(f"{place} writes what {self._wrote[address]} wrote")
            if address in self._read:
                self._report(f"{place} writes what {self._read[address]} read")
            if of_this.setdefault(address, value) != value:
                self._report(f"{place} writes two values to one word")
            if self._before.setdefault(address, self._program) != self._program:
                self._report(f"{place} writes what another program wrote")
        self._wrote.update(dict.fromkeys(of_this, place))

    def _report(self, conflict: str) -> None:
        if conflict not in self.conflicts and len(self.conflicts) < _MOST:
            self.conflicts.append(conflict)


def _place() -> str:
    """The line of the kernel's source that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _KERNELS in frame.f_code.co_filename:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "somewhere"


@contextmanager
def watching(*, skipped: frozenset[str] = frozenset()) -> Iterator[Watch]:
    """Watches every interpreted launch inside.

    Atomics are let through: they are in order with each other, and no kernel here mixes them with other accesses.
    """
    watch = Watch(skipped)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    begin = InterpreterBuilder.set_grid_idx

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if ptrs.get_element_ty().primitive_bitwidth == 64:
            addresses = np.concatenate((addresses, addresses + 4))
        watch.load(addresses)
        return load(self, ptrs, mask, *rest)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        where = np.broadcast_to(mask.data, ptrs.data.shape)
        addresses, values = ptrs.data[where], np.broadcast_to(value.data, ptrs.data.shape)[where]
        if ptrs.get_element_ty().primitive_bitwidth == 64:
            addresses, values = np.concatenate((addresses, addresses + 4)), np.concatenate((values, values))
        watch.store(addresses, values)
        return store(self, ptrs, value, mask, *rest)

    def watched_begin(self: Any, *index: int) -> Any:
        watch.program(index)
        return begin(self, *index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
        patch.setattr(InterpreterBuilder, "set_grid_idx", watched_begin)
        patch.setattr(InterpreterBuilder, "create_barrier", lambda _self: watch.barrier())
        yield watch
