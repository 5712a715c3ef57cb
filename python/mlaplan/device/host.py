"""The host as a device: NumPy arrays and the reference ops."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan.device.base import Counters, Ops
from mlaplan.device.ring import StagingRing
from mlaplan.reference.decode import decode
from mlaplan.reference.merge import merge
from mlaplan.reference.plan import plan as reference_plan
from mlaplan.reference.slots import slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from mlaplan._types import Int32Array
    from mlaplan.layout import PlanArrays, PlanParams

# NumPy has no bf16, and the reference is exact anyway.
_DTYPES = {"float64": np.float64, "float32": np.float64, "fp16": np.float64, "bf16": np.float64, "int32": np.int32}


class HostGraph:
    """Ops recorded by `HostDevice.record`, to be run again."""

    def __init__(self, device: HostDevice) -> None:
        """Makes an empty graph."""
        self._device = device
        self.ops: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Queues the recorded ops once more; no planner hears of it."""
        for op in self.ops:
            self._device.submit(op)


class _Marker:
    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self._at = 0

    def record(self) -> None:
        self._at = self._device.submitted

    def done(self) -> bool:
        return self._device.completed >= self._at

    def wait(self) -> None:
        if not self.done():
            self._device.counters.waits += 1
            self._device.advance(self._at)


class HostDevice:
    """NumPy arrays, and the reference ops as kernels.

    Args:
        delayed: Queue what is asked for, as a GPU's stream does, until something waits. Makes a missing guard visible.
    """

    name = "cpu"
    ops = Ops(slots=slots, decode=decode, merge=merge)
    backend = "reference"
    num_cus: int | None = None

    def __init__(self, *, delayed: bool = False) -> None:
        """Makes a device that holds nothing."""
        self.counters = Counters()
        self.submitted = 0
        self.completed = 0
        self._delayed = delayed
        self._queue: deque[Callable[[], None]] = deque()
        self._graph: HostGraph | None = None

    def submit(self, op: Callable[[], None]) -> None:
        """Queues an op, or runs it at once where nothing is delayed."""
        if not self._delayed:
            # Past the queue: an interrupt between two of its lines would leave it an op behind for ever.
            op()
            return
        self._queue.append(op)
        self.submitted += 1

    def advance(self, until: int) -> None:
        """Runs queued ops up to number `until`."""
        while self.completed < until:
            # Counted first: an op that raises has still left the queue.
            self.completed += 1
            self._queue.popleft()()

    @contextmanager
    def record(self) -> Iterator[HostGraph]:
        """Captures ops into a graph instead of running them."""
        if self._graph is not None:
            raise RuntimeError("a graph is being captured already")
        self._graph = HostGraph(self)
        try:
            yield self._graph
        finally:
            self._graph = None

    def allocate(self, words: int) -> Int32Array:
        """See `Device.allocate`."""
        self.counters.allocations += 1
        return np.zeros(words, np.int32)

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """See `Device.empty`. Every floating-point array is float64 here."""
        self.counters.allocations += 1
        return np.empty(shape, _DTYPES[dtype])

    def array(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `Device.array`."""
        self.counters.allocations += 1
        return np.array(values)

    def store(self, array: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """See `Device.store`."""
        self.advance(self.submitted)
        array[...] = values

    def view(self, buffer: Int32Array, offset: int, shape: tuple[int, ...]) -> Int32Array:
        """See `Device.view`."""
        return buffer[offset : offset + int(np.prod(shape))].reshape(shape)

    def address(self, array: npt.NDArray[Any]) -> int:
        """See `Device.address`."""
        return int(array.ctypes.data)

    def staging(self, slots: int, words: int) -> StagingRing:
        """See `Device.staging`."""
        areas = [np.zeros(words, np.int32) for _ in range(max(slots, 2))]
        return StagingRing(areas, areas, (_Marker(self), _Marker(self)))

    def upload(self, staging: StagingRing, slot: int, buffer: Int32Array, words: int) -> None:
        """See `Device.upload`."""
        source = staging.sources[slot]

        def copy() -> None:
            buffer[:words] = source[:words]

        self.submit(copy)
        self.counters.copies += 1
        self.counters.bytes_copied += 4 * words
        staging.queued(slot)

    def check_sizes(self, num_rows: int, params: PlanParams) -> None:
        """See `Device.check_sizes`. The reference has no limits of its own."""

    def plan(self, query_start_loc: Int32Array, seq_lens: Int32Array, arrays: PlanArrays, params: PlanParams) -> None:
        """See `Device.plan`."""
        self.run(reference_plan, query_start_loc, seq_lens, arrays, params)

    def run(self, op: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """See `Device.run`."""
        self.counters.launches += 1

        def launch() -> None:
            op(*args, **kwargs)

        if self._graph is not None:
            self._graph.ops.append(launch)
        else:
            self.submit(launch)

    def capture(self) -> HostGraph | None:
        """See `Device.capture`."""
        return self._graph

    def check(self, argument: str, array: Any, entries: int) -> None:
        """See `Device.check`."""
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != 1:
            kind = (
                f"{array.dtype} of {array.ndim} dimensions" if isinstance(array, np.ndarray) else type(array).__name__
            )
            raise TypeError(f"{argument} must be a one-dimensional int32 NumPy array on the host device, not {kind}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{argument} must be contiguous")
        if array.size != entries:
            raise ValueError(f"{argument} has {array.size} entries, expected {entries}")

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self.counters.waits += 1
        self.advance(self.submitted)

    def snapshot(self, array: Int32Array) -> Int32Array:
        """See `Device.snapshot`."""
        made = self.allocate(array.shape[0])

        def copy() -> None:
            made[...] = array

        self.submit(copy)
        return made

    def to_host(self, array: Int32Array) -> Int32Array:
        """See `Device.to_host`."""
        self.counters.read_backs += 1
        self.advance(self.submitted)
        return np.array(array)
