"""The merge kernel equals the reference, and leaves rows alone that were not cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from decode_cases import Batch, lse_error, make_batch, relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlaplan.kernels import merge as module
from mlaplan.kernels.merge import merge
from mlaplan.layout import PlanArrays
from mlaplan.reference import merge as reference

# Half a unit in the last place of each output type.
_ROUNDING = {"float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_LSE_ERROR = 1e-5
_OLD = 7.0


def _check(
    batch: Batch, rng: np.random.Generator, device: str, dtype: str, v_dim: int = 512, *, one_cut: bool = False
) -> None:
    """Merges random partials, of which some count for nothing, into outputs that hold old values."""
    group, partials, guard = batch.group, batch.num_partials, 2
    partial_out = rng.standard_normal((partials, group, v_dim)).astype(np.float32)
    partial_lse = rng.normal(0.0, 30.0, (partials, group)).astype(np.float32)
    partial_lse[rng.random(partial_lse.shape) < 0.2] = -np.inf
    partial_map, final_map = batch.maps
    # Any order of locations is a legal one.
    partial_map = rng.permutation(partial_map)
    out = np.full((batch.num_rows, batch.heads, v_dim), _OLD)
    lse = np.full((batch.num_rows, batch.heads), _OLD)
    maps: dict[str, Any] = {"reduce_partial_map": partial_map, "reduce_final_map": final_map}
    reference.merge(partial_out, partial_lse, batch.arrays, **maps, out=out, lse=lse, fold=batch.params.fold)

    def to(array: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(array).to(device)

    got_out = torch.full((batch.num_rows + guard, *out.shape[1:]), _OLD, dtype=getattr(torch, dtype), device=device)
    got_lse = torch.full((batch.num_rows + guard, batch.heads), _OLD, dtype=torch.float32, device=device)
    merge(
        to(partial_out),
        to(partial_lse),
        PlanArrays(*(to(array) for array in batch.arrays)),
        **{name: to(array) for name, array in maps.items()},
        out=got_out[: batch.num_rows],
        lse=got_lse[: batch.num_rows],
        fold=batch.params.fold,
        one_cut=one_cut,
    )
    assert (got_out[batch.num_rows :] == _OLD).all()
    assert (got_lse[batch.num_rows :] == _OLD).all()
    values = got_out[: batch.num_rows].double().cpu().numpy()
    untouched = (out == _OLD).all(axis=2)
    assert (values[untouched] == _OLD).all()
    assert relative_error(values, out) < _ROUNDING[dtype]
    assert lse_error(got_lse[: batch.num_rows].cpu().numpy(), lse) < _LSE_ERROR


@pytest.mark.interpret
@pytest.mark.parametrize(("heads", "fold"), [(8, 1), (16, 1), (32, 2)])
def test_cut_whole_and_empty_rows_interpreted(device: str, rng: np.random.Generator, heads: int, fold: int) -> None:
    """Rows of many pieces and of few, whole rows, an empty one between them, and padding."""
    batch = make_batch(rng, [900, 20, 0, 300, 280, 5], heads=heads, fold=fold, num_cus=30 * fold)
    pieces = np.diff(batch.arrays.reduce_indptr)
    assert pieces.max() > 8
    assert (pieces == 0).any()
    _check(batch, rng, device, "float32")


@pytest.mark.interpret
@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize(("heads", "fold"), [(6, 1), (18, 1), (32, 2)])
def test_the_cut_for_many_tiles(
    device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, heads: int, fold: int, programs: int
) -> None:
    """Blocks of several heads, the last one not full, few partials at once, and programs that share the blocks."""
    monkeypatch.setattr(module, "_ENOUGH_PROGRAMS", 1)
    monkeypatch.setattr(module, "_FEWEST_PER_TILE", programs)
    lengths = [0, 300, 20, 0, 0, 150, 5, 170, 0, 16, 400]
    batch = make_batch(rng, lengths, heads=heads, fold=fold, num_cus=20 * fold, padding=3)
    _check(batch, rng, device, "float32", one_cut=True)


def test_there_are_programs_enough_and_few_for_whole_rows() -> None:
    for tiles in (0, 1, 7, 16, 63, 64, 65, 512, 4096):
        for blocks in (1, 4, 32):
            programs = module.programs_per_tile(tiles, blocks)
            assert 1 <= programs <= blocks
            assert programs == blocks or tiles * programs >= 512, tiles
    assert [module.programs_per_tile(tiles, 32) for tiles in (8, 16, 32, 64, 512)] == [32, 32, 16, 8, 8]


@pytest.mark.interpret
def test_nothing_but_partials_that_count_for_nothing(device: str, rng: np.random.Generator) -> None:
    batch = make_batch(rng, [300], num_cus=20, padding=0)
    shape = (batch.num_partials, 16)
    partial_map, final_map = (torch.from_numpy(array).to(device) for array in batch.maps)
    out, lse = torch.full((1, 16, 512), _OLD, device=device), torch.full((1, 16), _OLD, device=device)
    merge(
        torch.full((*shape, 512), float("nan"), device=device),
        torch.full(shape, float("-inf"), device=device),
        PlanArrays(*(torch.from_numpy(array).to(device) for array in batch.arrays)),
        reduce_partial_map=partial_map,
        reduce_final_map=final_map,
        out=out,
        lse=lse,
        fold=1,
    )
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.interpret
def test_wild_arrays_stay_inside(device: str, rng: np.random.Generator) -> None:
    """Maps and pointers that lead out of the arrays: nothing is read or written there, and no loop is endless."""
    batch = make_batch(rng, [300, 200], num_cus=20, padding=0)
    arrays = [torch.from_numpy(array.copy()).to(device) for array in batch.arrays]
    extremes = torch.tensor([(1 << 31) - 1, -(1 << 31), -1, 10**6], dtype=torch.int32, device=device)
    most = (1 << 31) - 1
    wild = ([-5, 20, 1 << 30], [-(1 << 30), 20, 9], [most, 9, most], [most, -(1 << 31), most])
    for starts, one_cut in itertools.product(wild, (False, True)):
        arrays[3][:] = torch.tensor(starts, dtype=torch.int32, device=device)
        memory = torch.full((6, 16, 512), _OLD, device=device)
        merge(
            memory[:1],
            torch.zeros((1, 16), device=device),
            PlanArrays(*arrays),
            reduce_partial_map=extremes.repeat(8),
            reduce_final_map=extremes.reshape(2, 2).contiguous(),
            out=memory[2:4],
            lse=torch.zeros((2, 16), device=device),
            fold=1,
            one_cut=one_cut,
        )
        assert (memory == _OLD).all(), starts


@pytest.mark.interpret
def test_refusals(device: str, rng: np.random.Generator) -> None:
    batch = make_batch(rng, [40], padding=0)
    arrays = PlanArrays(*(torch.from_numpy(array).to(device) for array in batch.arrays))
    partial, lse, out = (torch.zeros(s, device=device) for s in ((3, 16, 512), (3, 16), (1, 16, 512)))
    maps = torch.zeros((1, 2), dtype=torch.int32, device=device)

    def call(**changed: Any) -> None:
        given = {"partial_lse": lse, "out": out, "lse": lse[:1], "fold": 1, **changed}
        merge(partial, arrays=arrays, reduce_partial_map=maps[0], reduce_final_map=maps, **given)

    for changed, message in (
        ({"fold": 2}, "partial_out has shape"),
        ({"partial_lse": lse[:2]}, "partial_out has shape"),
        ({"lse": lse}, "lse has shape"),
        ({"out": torch.zeros((2, 16, 512), device=device), "lse": lse[:2]}, "out has 2 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "fold"), [(8, 1), (16, 1), (24, 1), (64, 4), (128, 1), (128, 8)])
def test_random_partials(device: str, rng: np.random.Generator, dtype: str, heads: int, fold: int) -> None:
    for num_cus in (7, 132, 304):
        lengths = rng.integers(0, 2049, int(rng.choice([1, 12, 100]))).tolist()
        _check(make_batch(rng, lengths, heads=heads, fold=fold, num_cus=num_cus), rng, device, dtype)
