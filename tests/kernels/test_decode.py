"""Decode equals the reference on every work, and with merge it equals attention of whole rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decode_cases import DEPTH, SCALE, V_DIM, Batch, lse_error, make_batch, relative_error

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlaplan.kernels.decode import decode
from mlaplan.kernels.merge import merge
from mlaplan.layout import PlanArrays
from mlaplan.reference import decode as reference
from mlaplan.reference.attention import attention

# Weights are rounded to the type of q before the second product, and the output to its own.
_OUT_ERROR = {"float16": 4e-4, "bfloat16": 3e-3}
_LSE_ERROR = 2e-5
_OLD = 7.0
_GUARD = 2


class Tensors:
    """Inputs and outputs of one decode; outputs hold old values and have guard rows behind them."""

    def __init__(self, batch: Batch, rng: np.random.Generator, device: str, dtype: str, kv_dtype: str) -> None:
        self.batch, self.device = batch, device
        self.kv_scale = 0.5 if kv_dtype.startswith("float8") else 1.0
        q = rng.standard_normal((batch.num_rows, batch.heads, DEPTH)).astype(np.float32)
        pool = rng.standard_normal((batch.pool, DEPTH)).astype(np.float32)
        self.q = torch.from_numpy(q).to(device).to(getattr(torch, dtype))
        self.pool = torch.from_numpy(pool / self.kv_scale).to(device).to(getattr(torch, kv_dtype))
        self.kv_indices = torch.from_numpy(batch.kv_indices).to(device)
        self.arrays = PlanArrays(*(torch.from_numpy(array).to(device) for array in batch.arrays))
        partials, group = batch.num_partials, batch.group
        shapes = ((batch.num_rows, batch.heads, V_DIM), (batch.num_rows, batch.heads))
        self.out, self.lse = self._old(shapes[0], getattr(torch, dtype)), self._old(shapes[1], torch.float32)
        self.partial_out = self._old((partials, group, V_DIM), torch.float32)
        self.partial_lse = self._old((partials, group), torch.float32)

    def _old(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.full((shape[0] + _GUARD, *shape[1:]), _OLD, dtype=dtype, device=self.device)

    def outputs(self) -> dict[str, Any]:
        names = ("out", "lse", "partial_out", "partial_lse")
        return {name: getattr(self, name)[:-_GUARD] for name in names}

    def decode(self, **changed: Any) -> None:
        given = {
            "fold": self.batch.params.fold,
            "scale": SCALE,
            "k_scale": self.kv_scale,
            **self.outputs(),
            **changed,
        }
        decode(self.q, self.pool, self.kv_indices, given.pop("arrays", self.arrays), **given)

    def merge(self) -> None:
        maps = (torch.from_numpy(array).to(self.device) for array in self.batch.maps)
        outputs = self.outputs()
        merge(
            outputs["partial_out"],
            outputs["partial_lse"],
            self.arrays,
            reduce_partial_map=next(maps),
            reduce_final_map=next(maps),
            out=outputs["out"],
            lse=outputs["lse"],
            fold=self.batch.params.fold,
        )

    def values(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Q and the pool as the kernel sees them, in float64."""
        return self.q.double().cpu().numpy(), self.pool.to(torch.float32).double().cpu().numpy() * self.kv_scale

    def check_guards(self) -> None:
        for name in self.outputs():
            assert (getattr(self, name)[-_GUARD:] == _OLD).all(), name


def _check_works(tensors: Tensors, dtype: str) -> None:
    """Every output of decode alone, and that what no work writes keeps its old value."""
    q, pool = tensors.values()
    expected: dict[str, Any] = {name: np.full(tuple(array.shape), _OLD) for name, array in tensors.outputs().items()}
    tensors.decode()
    batch = tensors.batch
    reference.decode(q, pool, batch.kv_indices, batch.arrays, fold=batch.params.fold, scale=SCALE, **expected)
    for name, array in tensors.outputs().items():
        got = array.double().cpu().numpy()
        if name.endswith("lse"):
            assert lse_error(got, expected[name]) < _LSE_ERROR, name
        else:
            assert relative_error(got, expected[name]) < _OUT_ERROR[dtype], name
        assert (got[expected[name] == _OLD] == _OLD).all(), name
    tensors.check_guards()


def _check_rows(tensors: Tensors, dtype: str) -> None:
    """Decode and merge together, against attention of whole rows."""
    q, pool = tensors.values()
    batch = tensors.batch
    tensors.decode()
    tensors.merge()
    out, lse = attention(q, pool, batch.kv_indices, batch.arrays.kv_indptr, SCALE, V_DIM)
    assert relative_error(tensors.outputs()["out"].double().cpu().numpy(), out) < _OUT_ERROR[dtype]
    assert lse_error(tensors.outputs()["lse"].cpu().numpy(), lse) < _LSE_ERROR
    tensors.check_guards()


@pytest.mark.interpret
@pytest.mark.parametrize(("heads", "fold"), [(8, 1), (16, 1), (24, 1), (32, 2), (128, 1)])
def test_ragged_rows_interpreted(device: str, rng: np.random.Generator, heads: int, fold: int) -> None:
    """Float16 only: the interpreter multiplies bfloat16 as integers."""
    batch = make_batch(rng, [1, 300, 17, 0, 64, 129], heads=heads, fold=fold, num_cus=20)
    assert batch.num_partials > 2
    _check_works(Tensors(batch, rng, device, "float16", "float16"), "float16")
    _check_rows(Tensors(batch, rng, device, "float16", "float16"), "float16")


@pytest.mark.interpret
def test_any_split_gives_the_same_row(device: str, rng: np.random.Generator) -> None:
    for num_cus in (1, 3, 30):
        batch = make_batch(rng, [200, 90], num_cus=num_cus)
        _check_rows(Tensors(batch, rng, device, "float16", "float16"), "float16")


def _check_empty_works(rng: np.random.Generator, device: str, dtype: str, heads: int, *, ends: bool) -> None:
    """Slot 0: a work, an empty one, and one more that aiter's kernels would skip; in other slots what there is."""
    batch = make_batch(rng, [16, 16, 16], heads=heads, num_cus=1)
    info = batch.arrays.work_info
    info[1, 5] = info[1, 4]
    tensors = Tensors(batch, rng, device, dtype, dtype)
    q, pool = tensors.values()
    expected: dict[str, Any] = {name: np.full(tuple(array.shape), _OLD) for name, array in tensors.outputs().items()}
    given: dict[str, Any] = {"fold": 1, "scale": SCALE, "empty_work_ends_slot": ends}
    reference.decode(q, pool, batch.kv_indices, batch.arrays, **given, **expected)
    tensors.decode(empty_work_ends_slot=ends)
    lse = tensors.outputs()["lse"].cpu().numpy()
    assert lse_error(lse, expected["lse"]) < _LSE_ERROR
    assert (lse[2] == _OLD).all() == ends
    assert relative_error(tensors.outputs()["out"].double().cpu().numpy(), expected["out"]) < _OUT_ERROR[dtype]


def _check_wild_works(rng: np.random.Generator, device: str, dtype: str, heads: int, *, ends: bool = True) -> None:
    """A schedule and indices of random words: nothing outside is read or written, and every program ends."""
    batch = make_batch(rng, [100, 60], heads=heads, num_cus=4)
    arrays = [array.copy() for array in batch.arrays]
    info = arrays[4]
    info[:] = rng.choice([-(1 << 31), -1, 0, 1, 2, 90, 1000, (1 << 31) - 1], info.shape)
    info[:, 5] = rng.choice([*rng.integers(-50, 400, 9), -(1 << 31), (1 << 31) - 1], len(info))
    info[:, 4] = rng.choice([*rng.integers(-50, 160, 9), -(1 << 31), (1 << 31) - 1], len(info))
    arrays[2][:] = rng.choice([-1, 0, 1, 3, 1 << 20, -(1 << 31), (1 << 31) - 1], arrays[2].size)
    wild = replace(batch, kv_indices=rng.choice([-5, 0, 3, 10**6, (1 << 31) - 1], 160).astype(np.int32))
    tensors = Tensors(wild, rng, device, dtype, dtype)
    given = PlanArrays(*(torch.from_numpy(array).to(device) for array in arrays))
    tensors.decode(arrays=given, empty_work_ends_slot=ends)
    tensors.check_guards()


def _check_lanes_behind_the_end(rng: np.random.Generator, device: str, dtype: str, heads: int) -> None:
    """Slot 0 holds NaN, and no row uses it: lanes that are switched off must not bring it in."""
    batch = make_batch(rng, [5, 70, 33], heads=heads, num_cus=3)
    batch = replace(batch, kv_indices=np.maximum(batch.kv_indices, 1))
    tensors = Tensors(batch, rng, device, dtype, dtype)
    tensors.pool[0] = float("nan")
    _check_rows(tensors, dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("ends", [True, False])
def test_an_empty_work_ends_its_slot_or_gives_zeros(device: str, rng: np.random.Generator, *, ends: bool) -> None:
    _check_empty_works(rng, device, "float16", 16, ends=ends)


@pytest.mark.interpret
def test_wild_works_and_indices_stay_inside(device: str, rng: np.random.Generator) -> None:
    for _ in range(4):
        _check_wild_works(rng, device, "float16", 16)


@pytest.mark.interpret
def test_lanes_behind_the_end_do_not_touch_the_result(device: str, rng: np.random.Generator) -> None:
    _check_lanes_behind_the_end(rng, device, "float16", 16)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_odd_works_compiled(device: str, rng: np.random.Generator, heads: int) -> None:
    """The same on the compiled kernels; a loop without end or a fault shows as such."""
    for ends in (True, False):
        _check_empty_works(rng, device, "bfloat16", heads, ends=ends)
        for _ in range(100):
            _check_wild_works(rng, device, "bfloat16", heads, ends=ends)
    torch.cuda.synchronize()
    _check_lanes_behind_the_end(rng, device, "bfloat16", heads)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("ends", [True, False])
def test_slots_of_many_works_in_any_order(device: str, rng: np.random.Generator, heads: int, *, ends: bool) -> None:
    """Slots of 0 to 20 works of 0 to 300 tokens: whole rows, pieces, empty works, and works that are not run."""
    for _ in range(10):
        batch = make_batch(rng, [300] * 60, heads=heads, num_cus=12, split_budget=1)
        arrays = PlanArrays(*(array.copy() for array in batch.arrays))
        count = arrays.work_info.shape[0]
        lengths = rng.choice([0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 300], count)
        tiles, locations = rng.permutation(count), rng.permutation(count)
        whole = rng.random(count) < 0.4
        info = arrays.work_info
        info[:, 0] = info[:, 2] = np.where(tiles < 62, tiles, 70)
        info[:, 1] = np.where(whole, -1, locations)
        info[:, 4] = rng.integers(0, 60, count) * 300
        info[:, 5] = info[:, 4] + lengths
        ends_at = np.sort(rng.integers(0, count + 1, arrays.work_indptr.shape[0] - 1))
        arrays.work_indptr[:] = [0, *ends_at]
        arrays.reduce_indptr[-1] = count  # a partial location for each
        made = replace(batch, arrays=arrays)
        tensors = Tensors(made, rng, device, "bfloat16", "bfloat16")
        q, pool = tensors.values()
        expected: dict[str, Any] = {
            name: np.full(tuple(array.shape), _OLD) for name, array in tensors.outputs().items()
        }
        given: dict[str, Any] = {"fold": 1, "scale": SCALE, "empty_work_ends_slot": ends}
        reference.decode(q, pool, made.kv_indices, made.arrays, **given, **expected)
        tensors.decode(empty_work_ends_slot=ends)
        for name, array in tensors.outputs().items():
            got = array.double().cpu().numpy()
            if name.endswith("lse"):
                assert lse_error(got, expected[name]) < _LSE_ERROR, name
            else:
                assert relative_error(got, expected[name]) < _OUT_ERROR["bfloat16"], name
            assert (got[expected[name] == _OLD] == _OLD).all(), name
        tensors.check_guards()


@pytest.mark.interpret
def test_refusals(device: str, rng: np.random.Generator) -> None:
    tensors = Tensors(make_batch(rng, [40]), rng, device, "float16", "float16")
    for changed, message in (
        ({"fold": 3}, "fold is 3"),
        ({"fold": 2}, "partial_out has shape"),
        ({"lse": tensors.lse}, "lse has shape"),
        ({"v_dim": 500}, "out has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            tensors.decode(**changed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "fold"), [(8, 1), (16, 1), (24, 1), (32, 1), (64, 1), (64, 4), (128, 1), (128, 8)])
def test_ragged_rows(device: str, rng: np.random.Generator, dtype: str, heads: int, fold: int) -> None:
    for num_cus, rows in ((132, 1), (132, 5), (304, 12)):
        lengths = rng.integers(0, 2049, rows).tolist()
        batch = make_batch(rng, lengths, heads=heads, fold=fold, num_cus=num_cus)
        _check_works(Tensors(batch, rng, device, dtype, dtype), dtype)
        _check_rows(Tensors(batch, rng, device, dtype, dtype), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_eight_bit_pool(device: str, rng: np.random.Generator, heads: int) -> None:
    # gfx942 has its own 8-bit float; everything newer, and NVIDIA, has the one of the open standard.
    arch = getattr(torch.cuda.get_device_properties(0), "gcnArchName", "")
    kv_dtype = "float8_e4m3fnuz" if arch.startswith("gfx942") else "float8_e4m3fn"
    batch = make_batch(rng, [2048, 100, 1, 700], heads=heads, num_cus=132)
    _check_rows(Tensors(batch, rng, device, "bfloat16", kv_dtype), "bfloat16")


@pytest.mark.gpu
def test_a_pool_beyond_four_gibibytes(device: str, rng: np.random.Generator) -> None:
    """Slots whose byte offset does not fit 32 bits."""
    pool_rows = (9 << 30) // (2 * DEPTH)
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("less than 12 GiB of device memory free: large offsets were not checked")
    batch = make_batch(rng, [300, 2048], num_cus=132)
    tensors = Tensors(batch, rng, device, "bfloat16", "bfloat16")
    q, pool = tensors.values()
    out, lse = attention(q, pool, batch.kv_indices, batch.arrays.kv_indptr, SCALE, V_DIM)
    large = torch.full((pool_rows, DEPTH), float("nan"), dtype=torch.bfloat16, device=device)
    large[pool_rows - batch.pool :] = tensors.pool
    tensors.pool, tensors.kv_indices = large, tensors.kv_indices + (pool_rows - batch.pool)
    tensors.decode()
    tensors.merge()
    assert relative_error(tensors.outputs()["out"].double().cpu().numpy(), out) < _OUT_ERROR["bfloat16"]
    assert lse_error(tensors.outputs()["lse"].cpu().numpy(), lse) < _LSE_ERROR
