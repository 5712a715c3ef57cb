"""One entry of the host's boundaries: what NumPy's view of the tensor would give, whatever the tensor is like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mlaplan.vllm.builder import _entry_of

VALUES = np.random.default_rng(0).integers(-(2**31), 2**31, 64).astype(np.int32)
ARRAYS = {
    "whole": torch.from_numpy(VALUES),
    "slice": torch.from_numpy(VALUES)[5:40],
    "empty": torch.from_numpy(VALUES)[:0],
    "one": torch.from_numpy(VALUES)[63:],
    "strided": torch.from_numpy(VALUES)[::3],
    "column": torch.from_numpy(VALUES).view(8, 8)[:, 2],
    "every entry the same": torch.from_numpy(VALUES)[7:8].expand(20),
    "int64": torch.from_numpy(VALUES.astype(np.int64)),
    "int16": torch.from_numpy((VALUES >> 16).astype(np.int16)),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_entry_is_what_numpy_says(kind: str) -> None:
    array = ARRAYS[kind]
    wanted = array.numpy()
    for index in range(len(wanted)):
        found = _entry_of(array, index)
        assert type(found) is int
        assert found == wanted[index]


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_entry_that_is_not_there_is_not_read(kind: str) -> None:
    array = ARRAYS[kind]
    for index in (array.numel(), array.numel() + 1, 1 << 40, -array.numel() - 1):
        with pytest.raises(IndexError):
            _entry_of(array, index)


def test_memory_of_another_device_is_not_read() -> None:
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        _entry_of(torch.empty(4, dtype=torch.int32, device="meta"), 0)


def test_what_is_read_is_what_lies_there_now() -> None:
    array = torch.zeros(3, dtype=torch.int32)
    for value in (1, 7, -3):
        array[2] = value
        assert _entry_of(array, 2) == value
