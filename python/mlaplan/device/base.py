"""The seam: where a plan's arrays live, how data gets there and how an op runs. Everything above is written once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from mlaplan._types import Int32Array
    from mlaplan.device.ring import StagingRing
    from mlaplan.layout import PlanParams


@dataclass(slots=True)
class Counters:
    """What a device was asked to do since it was made.

    Attributes:
        launches: Ops run.
        copies: Uploads from the host.
        bytes_copied: Bytes of those uploads.
        allocations: Device arrays made.
        waits: Times the host waited for the device.
        read_backs: Times device memory was read by the host.
    """

    launches: int = 0
    copies: int = 0
    bytes_copied: int = 0
    allocations: int = 0
    waits: int = 0
    read_backs: int = 0


@dataclass(frozen=True, slots=True)
class Ops:
    """A device's ops beside `plan`: functions of the same name and arguments in `reference` and `kernels`."""

    slots: Callable[..., None]
    decode: Callable[..., None]
    merge: Callable[..., None]


class Graph(Protocol):
    """Recorded work that runs again without the host's doing it over."""

    def replay(self) -> None:
        """Queues the recorded work."""


class Device(Protocol):
    """A place where arrays live and ops run in the order they were asked for.

    Arrays are the device's own kind (NumPy, torch). What is asked for runs later than the call returns, but in order.
    """

    name: str
    counters: Counters
    ops: Ops
    backend: str
    num_cus: int | None

    def allocate(self, words: int) -> Any:
        """Returns a new int32 array of `words` zeros."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Returns a new array with any content; dtype is "float32", "bf16", "fp16" or "int32"."""

    def array(self, values: npt.NDArray[Any]) -> Any:
        """Returns a device copy of a host array."""

    def store(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Writes host values to a device array of the same shape, casting them; for simulated inputs, may wait."""

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...]) -> Any:
        """Returns a view of `buffer` that starts at word `offset`."""

    def address(self, array: Any) -> int:
        """Address of an array's first entry, for kernels that take addresses."""

    def staging(self, slots: int, words: int) -> StagingRing:
        """Returns a ring of `slots` host areas, at least 2, of `words` int32 words, for asynchronous copies."""

    def upload(self, staging: StagingRing, slot: int, buffer: Any, words: int) -> None:
        """Queues a copy of the first `words` words of a slot to the start of `buffer`, and marks the slot as in use."""

    def check_sizes(self, num_rows: int, params: PlanParams) -> None:
        """Checks that the `plan` op can make plans of so many rows.

        Raises:
            ValueError: It cannot; the message names what is too large.
        """

    def plan(self, query_start_loc: Any, seq_lens: Any, arrays: Any, params: Any) -> None:
        """Queues the `plan` op, one launch."""

    def run(self, op: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Queues any other op, one launch."""

    def record(self) -> AbstractContextManager[Graph]:
        """Captures what is asked for into a graph, instead of running it."""

    def capture(self) -> object | None:
        """An object that stands for the graph being captured, None when nothing is captured."""

    def check(self, argument: str, array: Any, entries: int) -> None:
        """Checks an int32 input of a plan.

        Raises:
            TypeError: It is not a one-dimensional int32 array of this device.
            ValueError: It is not contiguous or does not have `entries` entries.
        """

    def synchronize(self) -> None:
        """Waits until everything asked for has run."""

    def snapshot(self, array: Any) -> Any:
        """Queues a copy of an int32 array and returns it: for checks of what a step was given."""

    def to_host(self, array: Any) -> Int32Array:
        """Waits, and returns a host copy: for checks and pictures, never for planning."""
