"""A device of CPU tensors: what a GPU's torch device is to the planner, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mlaplan.device.base import Ops
from mlaplan.device.host import HostDevice
from mlaplan.layout import PlanArrays, PlanParams
from mlaplan.reference.decode import decode
from mlaplan.reference.merge import merge
from mlaplan.reference.plan import plan as reference_plan
from mlaplan.reference.slots import slots

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32}


def _on_tensors(op: Callable[..., None]) -> Callable[..., None]:
    """The op on the memory of the tensors that it is given."""

    def run(*args: Any, **kwargs: Any) -> None:
        op(*map(_memory, args), **{name: _memory(value) for name, value in kwargs.items()})

    return run


def _memory(value: Any) -> Any:
    if isinstance(value, PlanArrays):
        return PlanArrays(*map(_memory, value))
    return value.numpy() if isinstance(value, torch.Tensor) else value


class TorchHostDevice(HostDevice):
    """CPU tensors and the reference ops."""

    name = "cpu tensors"
    backend = "aiter"
    ops = Ops(slots=_on_tensors(slots), decode=_on_tensors(decode), merge=_on_tensors(merge))

    def allocate(self, words: int) -> Any:
        self.counters.allocations += 1
        return torch.zeros(words, dtype=torch.int32)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        self.counters.allocations += 1
        # Not zeros: what nobody writes must show.
        return torch.full(shape, 77, dtype=_DTYPES[dtype])

    def array(self, values: npt.NDArray[Any]) -> Any:
        self.counters.allocations += 1
        return torch.from_numpy(np.array(values))

    def store(self, array: Any, values: npt.NDArray[Any]) -> None:
        """Writes host values to a tensor."""
        self.advance(self.submitted)
        array.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def view(self, buffer: Any, offset: int, shape: tuple[int, ...]) -> Any:
        return buffer[offset : offset + int(np.prod(shape))].view(shape)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def upload(self, staging: Any, slot: int, buffer: Any, words: int) -> None:
        super().upload(staging, slot, buffer.numpy(), words)

    def plan(self, query_start_loc: Any, seq_lens: Any, arrays: PlanArrays, params: PlanParams) -> None:
        self.run(_on_tensors(reference_plan), query_start_loc, seq_lens, arrays, params)

    def check(self, argument: str, array: Any, entries: int) -> None:
        super().check(argument, array.numpy(), entries)

    def to_host(self, array: Any) -> Any:
        return super().to_host(array.numpy())
