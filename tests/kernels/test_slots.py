"""The slots kernel equals the reference, and no index leads it out of an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlaplan.kernels.slots import slots
from mlaplan.reference import slots as reference

Int32Array = np.ndarray[Any, np.dtype[np.int32]]

_GUARD = -0x5EED
_MARGIN = 50


def _random_inputs(rng: np.random.Generator, rows: int, topk: int, *, wild: bool) -> dict[str, Any]:
    """Inputs with some indices that are no slots; with `wild`, most of them."""
    requests, width, block_size = (
        int(rng.integers(1, 9)),
        int(rng.integers(1, 12)),
        int(rng.choice([1, 3, 16, 64])),
    )
    lengths = rng.integers(0, topk + 1, rows) * (rng.random(rows) < 0.9)
    most = 3 if wild else 1
    request_ids = rng.integers(-most if wild else 0, requests * most, rows)
    topk_indices = rng.integers(-2 * most, width * block_size * most + 1, (rows, topk))
    block_table = rng.integers(-2, 1000, (requests, width))
    if wild:
        for values in (topk_indices, block_table, request_ids):
            where = rng.random(values.shape) < 0.2
            values[where] = rng.choice([-(1 << 31), (1 << 31) - 1], int(where.sum()))
    return {
        "topk_indices": topk_indices.astype(np.int32),
        "block_table": block_table.astype(np.int32),
        "request_ids": request_ids.astype(np.int32),
        "kv_indptr": np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        "block_size": block_size,
        "num_rows": rows,
    }


def _strided(array: Int32Array, device: str) -> Any:
    """The same values as every second column of a wider tensor."""
    wide = torch.full((array.shape[0], 2 * array.shape[1] + 3), 77, dtype=torch.int32, device=device)
    wide[:, : 2 * array.shape[1] : 2] = torch.from_numpy(array).to(device)
    return wide[:, : 2 * array.shape[1] : 2]


def _check(inputs: dict[str, Any], device: str, *, strided: bool) -> None:
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    numbers = {name: value for name, value in inputs.items() if name not in arrays}
    total = int(inputs["kv_indptr"][inputs["num_rows"]])
    expected = np.full(total + 2 * _MARGIN, _GUARD, np.int32)
    reference.slots(**inputs, kv_indices=expected[_MARGIN : _MARGIN + total])
    words = torch.full((total + 2 * _MARGIN,), _GUARD, dtype=torch.int32, device=device)
    tensors = {
        name: _strided(value, device) if strided and value.ndim == 2 else torch.from_numpy(value).to(device)
        for name, value in arrays.items()
    }
    slots(**tensors, **numbers, kv_indices=words[_MARGIN : _MARGIN + total])
    assert np.array_equal(words.cpu().numpy(), expected)


@pytest.mark.interpret
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_random_batches_interpreted(device: str, rng: np.random.Generator, wild: bool, strided: bool) -> None:
    for _ in range(20):
        _check(_random_inputs(rng, int(rng.integers(1, 7)), 70, wild=wild), device, strided=strided)


@pytest.mark.interpret
def test_a_short_index_array_bounds_the_writes(device: str, rng: np.random.Generator) -> None:
    """Where `kv_indptr` asks for more than `kv_indices` holds, what is behind it stays."""
    inputs = _random_inputs(rng, 5, 64, wild=False)
    inputs["kv_indptr"] = np.array([0, 64, 128, 192, 256, 1 << 30], np.int32)
    words = torch.full((300,), _GUARD, dtype=torch.int32, device=device)
    tensors = {k: torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    slots(**tensors, kv_indices=words[:200])
    assert (words[:200] != _GUARD).all()
    assert (words[200:] == _GUARD).all()


@pytest.mark.interpret
def test_refusals(device: str) -> None:
    rows, table = (
        torch.zeros(3, dtype=torch.int32, device=device),
        torch.zeros((2, 2), dtype=torch.int32, device=device),
    )
    with pytest.raises(ValueError, match="topk_indices has 2 rows"):
        slots(table, table, rows, rows, rows, block_size=1, num_rows=3)
    with pytest.raises(ValueError, match="request_ids has 3 entries and kv_indptr 2"):
        slots(table, table, rows, rows[:2], rows, block_size=1, num_rows=2)
    with pytest.raises(ValueError, match="block_size is 0"):
        slots(table, table, rows, rows, rows, block_size=0, num_rows=2)


@pytest.mark.gpu
@pytest.mark.parametrize("wild", [False, True])
def test_random_batches(device: str, rng: np.random.Generator, wild: bool) -> None:
    for strided in (False, True):
        for rows in (1, 7, 256):
            _check(_random_inputs(rng, rows, 2048, wild=wild), device, strided=strided)
