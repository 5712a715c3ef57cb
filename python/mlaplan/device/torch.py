"""A GPU through torch and Triton, CUDA and ROCm by one path; beside the kernels the only module to import them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mlaplan.device import runtime
from mlaplan.device.base import Counters, Ops
from mlaplan.device.ring import StagingRing
from mlaplan.kernels.decode import decode
from mlaplan.kernels.launch import CompiledLaunch
from mlaplan.kernels.merge import merge
from mlaplan.kernels.plan import check_sizes, plan_launch
from mlaplan.kernels.slots import slots

if TYPE_CHECKING:
    import numpy.typing as npt

    from mlaplan._types import Int32Array
    from mlaplan.layout import PlanArrays, PlanParams

# Compiled launches that are kept; captured graphs and steady steps use a handful.
_KEPT_LAUNCHES = 1024

# Looked up once: each is asked for in every step.
_Tensor, _INT32 = torch.Tensor, torch.int32

_DTYPES = {
    "float32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
}


# Torch names no public way to the handle that takes less than the 7 us of a stream object.
_raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # noqa: SLF001


class _Marker:
    """An event on the stream that was last copied on."""

    def __init__(self, device: TorchDevice) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._used = False

    def record(self) -> None:
        self._event.record(self.stream)
        self._used = True

    def done(self) -> bool:
        return not self._used or bool(self._event.query())

    def wait(self) -> None:
        if not self.done():
            self._device.counters.waits += 1
            self._event.synchronize()


class TorchDevice:
    """Arrays are torch tensors of one GPU; ops are Triton kernels on its current stream."""

    backend = "portable"

    def __init__(self, name: str) -> None:
        """Opens a GPU.

        Args:
            name: "cuda" or "cuda:N", on ROCm as well.

        Raises:
            ValueError: There is no such GPU.
        """
        if not torch.cuda.is_available():
            raise ValueError(f"device is {name!r}, but torch sees no GPU")
        self.device = torch.device(name)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._index = self.device.index
        if self._index >= torch.cuda.device_count():
            raise ValueError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} GPUs")
        self.name = str(self.device)
        self.ops = Ops(slots=slots, decode=decode, merge=merge)
        self.num_cus: int | None = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.counters = Counters()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._noted: set[tuple[int, int]] = set()
        self._launches: dict[tuple[int, int, int, int], tuple[CompiledLaunch | None, PlanArrays]] = {}
        self._capture_id = runtime.capture_id_function()
        self._copy = runtime.copy_function(self.device)

    def stream(self) -> torch.cuda.Stream:
        """The current stream's object, made once per stream: asking torch for it costs 7 us."""
        handle = _raw_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self.device)
        return stream

    def allocate(self, words: int) -> torch.Tensor:
        """See `Device.allocate`."""
        self.counters.allocations += 1
        return torch.zeros(words, dtype=torch.int32, device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """See `Device.empty`."""
        self.counters.allocations += 1
        return torch.empty(shape, dtype=_DTYPES[dtype], device=self.device)

    def array(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """See `Device.array`."""
        self.counters.allocations += 1
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def store(self, array: torch.Tensor, values: npt.NDArray[Any]) -> None:
        """See `Device.store`."""
        array.copy_(torch.from_numpy(values))

    def view(self, buffer: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """See `Device.view`."""
        return buffer[offset : offset + int(np.prod(shape))].view(shape)

    def address(self, array: torch.Tensor) -> int:
        """See `Device.address`."""
        return array.data_ptr()

    def staging(self, slots: int, words: int) -> StagingRing:
        """See `Device.staging`. The areas are pinned, so that a copy does not wait for the host."""
        sources = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(max(slots, 2))]
        return StagingRing([source.numpy() for source in sources], sources, (_Marker(self), _Marker(self)))

    def upload(self, staging: StagingRing, slot: int, buffer: torch.Tensor, words: int) -> None:
        """See `Device.upload`.

        Torch's own copy costs twice what the runtime's does. It is made for the first copy of an area on a stream: it
        notes that stream in torch's pinned allocator, which keeps the area until what is queued there has run.
        """
        source, handle = staging.sources[slot], _raw_stream(self._index)
        if staging.queue != handle:
            self._enter_stream(staging, handle)
        self.counters.copies += 1
        self.counters.bytes_copied += 4 * words
        noted = (source.data_ptr(), handle)
        if noted not in self._noted or not self._copy(buffer.data_ptr(), noted[0], 4 * words, handle):
            buffer[:words].copy_(source[:words], non_blocking=True)
            self._noted.add(noted)
        staging.queued(slot)

    def _enter_stream(self, staging: StagingRing, handle: int) -> None:
        """Goes on copying on another stream, behind what was copied so far: one buffer is written, one event waits."""
        stream = self.stream()
        for marker in staging.markers:
            if marker.stream is not None:
                stream.wait_stream(marker.stream)
            marker.stream = stream
        staging.queue = handle

    def check_sizes(self, num_rows: int, params: PlanParams) -> None:
        """See `Device.check_sizes`."""
        check_sizes(num_rows, params)

    def plan(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, arrays: PlanArrays, params: PlanParams
    ) -> None:
        """See `Device.plan`.

        A planner's arrays and params are one pair for ever, so a launch is kept compiled for them and repeated over
        whatever inputs come. Triton compiles for an address's alignment, hence the remainders in the key.
        """
        self.counters.launches += 1
        boundaries, lengths, requests = query_start_loc.data_ptr(), seq_lens.data_ptr(), seq_lens.numel()
        key = (id(arrays), requests, boundaries % 16, lengths % 16)
        known = self._launches.get(key)
        if known is None:
            compiled = CompiledLaunch.prepare(plan_launch(query_start_loc, seq_lens, arrays, params), 2)
            if len(self._launches) >= _KEPT_LAUNCHES:
                self._launches.clear()
            # The arrays are kept too, so that their id stays theirs.
            self._launches[key] = (compiled, arrays)
            return
        compiled = known[0]
        if compiled is not None:
            try:
                compiled.run(_raw_stream(self._index), boundaries, lengths)
            except TypeError:
                # Raised before anything is launched, by a Triton whose launcher takes other arguments.
                self._launches[key] = (None, arrays)
            else:
                return
        plan_launch(query_start_loc, seq_lens, arrays, params).run()

    def run(self, op: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """See `Device.run`."""
        self.counters.launches += 1
        op(*args, **kwargs)

    @contextmanager
    def record(self) -> Iterator[torch.cuda.CUDAGraph]:
        """See `Device.record`. What is recorded must have run once before, so that nothing is compiled meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph

    def capture(self) -> object | None:
        """See `Device.capture`.

        The object is the capture's number where the runtime tells it, else a new object at each call: then every
        `refresh` under capture is a node, which costs time and is right.
        """
        if not torch.cuda.is_current_stream_capturing():
            return None
        number = self._capture_id(_raw_stream(self._index))
        return object() if number is None else _Capture.get(number)

    def check(self, argument: str, array: Any, entries: int) -> None:
        """See `Device.check`."""
        if (
            type(array) is _Tensor
            and array.dtype is _INT32
            and array.dim() == 1
            and array.is_cuda
            and array.get_device() == self._index
            and array.numel() == entries
            and array.is_contiguous()
        ):
            return
        self._refuse(argument, array, entries)

    def _refuse(self, argument: str, array: Any, entries: int) -> None:
        """Says what is wrong with an input; subclasses of tensors are looked at here as well, and may be right."""
        if not isinstance(array, torch.Tensor) or array.dtype != torch.int32 or array.dim() != 1:
            kind = (
                f"{array.dtype} of {array.dim()} dimensions"
                if isinstance(array, torch.Tensor)
                else type(array).__name__
            )
            raise TypeError(f"{argument} must be a one-dimensional int32 tensor, not {kind}")
        if array.device != self.device:
            raise ValueError(f"{argument} is on {array.device}, expected {self.device}")
        if not array.is_contiguous():
            raise ValueError(f"{argument} must be contiguous")
        if array.shape[0] != entries:
            raise ValueError(f"{argument} has {array.shape[0]} entries, expected {entries}")

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        self.counters.waits += 1
        torch.cuda.synchronize(self.device)

    def snapshot(self, array: torch.Tensor) -> torch.Tensor:
        """See `Device.snapshot`."""
        self.counters.allocations += 1
        return array.clone()

    def to_host(self, array: torch.Tensor) -> Int32Array:
        """See `Device.to_host`."""
        self.counters.read_backs += 1
        # NumPy has no bf16; float32 holds every one.
        return (array.float() if array.dtype == torch.bfloat16 else array).cpu().numpy()


class _Capture:
    """The object that stands for one capture; one per number, so that `is` compares."""

    _last: tuple[int, object] = (0, object())

    @classmethod
    def get(cls, number: int) -> object:
        if cls._last[0] != number:
            cls._last = (number, object())
        return cls._last[1]
