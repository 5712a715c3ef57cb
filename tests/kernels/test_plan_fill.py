"""The walk of the fill in each of its forms: batches that are hard for it, against the reference."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_cases import rows_case

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from plan_runs import check
from triton import language as tl

from mlaplan.costs import CostTable
from mlaplan.kernels import plan_balanced, plan_fill
from mlaplan.layout import PlanParams

_PORTABLE = CostTable(block_tokens=64, block=2606, piece=1650, whole=1503, slot=4848, merge=243)
_DEAR_ROWS = CostTable(block_tokens=16, block=3, piece=5, whole=900, merge=1)
_LENGTHS = np.ndarray[Any, np.dtype[np.int64]]


def _check(lens: Any, device: str, params: PlanParams, *, more_rows: int = 0) -> None:
    check(rows_case(lens, len(lens) + more_rows, params), device)


def _params(num_cus: int, table: CostTable, *, topk: int = 2048, **more: Any) -> PlanParams:
    return PlanParams(topk=topk, num_cus=num_cus, split_budget=-1, policy="balanced", cost_table=table, **more)


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [3, 4, 5, 8, 12, 13, 16, 17, 24, 31, 40])
@pytest.mark.parametrize("kind", ["equal and large", "large", "short", "any"])
def test_every_form_at_the_ends_of_chunks_and_groups_interpreted(
    device: str, rng: np.random.Generator, rows: int, kind: str
) -> None:
    lens, cus = {
        "equal and large": (np.full(rows, 2048), 5 * rows + 1),
        "large": (rng.integers(1500, 2049, rows), 5 * rows + 1),
        "short": (rng.integers(1, 2049, rows), max(1, rows // 3)),
        "any": (rng.integers(1, 2049, rows), rows),
    }[kind]
    _check(lens, device, _params(cus, _PORTABLE), more_rows=2)


@pytest.mark.interpret
@pytest.mark.parametrize("table", [_PORTABLE, _DEAR_ROWS])
def test_empty_rows_and_rows_of_one_block_between_others_interpreted(
    device: str, rng: np.random.Generator, table: CostTable
) -> None:
    """A row of one block that would be cut where a piece's fixed cost is less than its own, and of none anywhere."""
    for cus in (3, 40):
        lens = rng.integers(1, 2049, 41)
        lens[rng.random(lens.size) < 0.3] = 0
        lens[rng.random(lens.size) < 0.4] = rng.integers(1, table.block_tokens + 1)
        _check(lens, device, _params(cus, table), more_rows=3)
        _check(lens[:14], device, _params(cus, table, fold=3))


@pytest.mark.interpret
@pytest.mark.parametrize("whole", [0, 4, 9])
def test_slots_that_fill_to_the_last_and_lack_one_interpreted(device: str, whole: int) -> None:
    """Runs of whole rows that end at the capacity itself, one before it and one behind it."""
    table = CostTable(block_tokens=1, block=1, piece=min(4, whole + 1), whole=whole)
    for off in (-1, 0, 1):
        # Two, three and five rows to a slot; the last of each run is off by some.
        runs = [[30, 30 + off], [20 - whole // 2] * 2 + [20 + off], [12 - whole] * 4 + [12 + 3 * whole + off]]
        lens = np.concatenate([np.array(run).clip(1) for run in runs * 3])
        for cus in (8, 9):
            _check(lens, device, _params(cus, table, topk=64))


@pytest.mark.interpret
def test_candidates_that_differ_by_one_interpreted(device: str, rng: np.random.Generator) -> None:
    """Small tables, whose 64 capacities follow each other one by one, under few slots."""
    for _ in range(15):
        block, whole = int(rng.integers(1, 12)), int(rng.integers(0, 30))
        piece = int(rng.integers(0, min(31, whole + block + 1)))
        table = CostTable(block_tokens=int(rng.integers(1, 4)), block=block, piece=piece, whole=whole)
        rows, longest = int(rng.integers(1, 30)), int(rng.choice([2, 6, 40, 300]))
        lens = rng.integers(0 if rng.random() < 0.3 else 1, longest + 1, rows)
        params = _params(int(rng.integers(1, 9)), table, topk=300, fold=int(rng.integers(1, 3)))
        _check(lens, device, params, more_rows=int(rng.integers(0, 3)))


@pytest.mark.interpret
def test_more_groups_than_are_walked_at_once_interpreted(device: str, rng: np.random.Generator) -> None:
    """1,040 tiles in blocks of 512, some of them empty."""
    lens = rng.integers(1, 2049, 130)
    lens[rng.integers(0, 130)] = 0
    _check(lens, device, _params(350, _PORTABLE, fold=8), more_rows=1)


@pytest.mark.interpret
def test_the_first_slot_decides_at_its_boundary_interpreted(device: str) -> None:
    """Where the first slot of aiter's walk costs what the fill's do, one less or one more, and what is left decides.

    Equal rows make that slot aiter's longest, or all but; `cut` moves the number that it is compared with.
    """
    for lens in ([160] * 9, [160, 160, 159] * 3, [40] * 20, [1600] * 5):
        for cus in (4, 13):
            table = CostTable(block_tokens=16, block=10, piece=30, whole=25)
            params = _params(cus, table)
            for cut in (0, 1, 400):
                _check(lens, device, replace(params, cost_table=replace(table, cut=cut)))
    # The walk's longest slot costs 125, the fill's 115.
    for cut in (10, 11):
        _check([160, 160, 144] * 3, device, _params(13, replace(table, cut=cut)))


@triton.jit
def _is_longer_kernel(numbers_ptr, out_ptr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """Whether a slot within a tile shows it, for blocks of 16 tokens that cost 1."""
    longest, share, capacity = tl.load(numbers_ptr), tl.load(numbers_ptr + 1), tl.load(numbers_ptr + 2)
    nothing, one, cut = tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4), tl.load(numbers_ptr + 5)
    costs = plan_fill.cost_words(one, nothing, nothing)
    per_block = plan_fill.divisor(16 * one)
    shows = plan_balanced._walk_is_longer(nothing, nothing, longest, share, capacity, per_block, costs, cut)
    tl.store(out_ptr, shows.to(tl.int32))


@pytest.mark.interpret
def test_a_share_of_which_twice_passes_32_bits_is_in_no_tile_interpreted() -> None:
    for share, blocks, least, cut, wanted in (
        (1 << 30, 1 << 16, 5, 0, 0),
        ((1 << 31) - 17, 1 << 26, 1, 0, 0),
        (9, 20, 9, 0, 1),
        (9, 20, 10, 0, 0),
        (9, 20, 19, 10, 1),
        (9, 20, 20, 10, 0),
        (9, 18, 9, 0, 0),
    ):
        numbers = torch.tensor([16 * blocks, share, least, 0, 1, cut], dtype=torch.int32)
        out = torch.empty(1, dtype=torch.int32)
        _is_longer_kernel[(1,)](numbers, out)
        assert int(out[0]) == wanted, (share, blocks, least, cut)


_BEHIND_A_WALL = """
import ctypes, mmap, sys
import torch
from mlaplan.costs import CostTable
from mlaplan.kernels.plan import plan
from mlaplan.layout import PlanArrays, PlanParams

memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first), mmap.PAGESIZE, 0) == 0
info = torch.frombuffer(memory, dtype=torch.int32, offset=mmap.PAGESIZE, count=7 * 8).reshape(7, 8)
if sys.argv[1] == "read":
    ctypes.c_int32.from_address(info.data_ptr() - 4).value
table = CostTable(block_tokens=64, block=2606, piece=1650, whole=1503)
params = PlanParams(topk=2048, num_cus=4, split_budget=-1, policy="balanced", cost_table=table)
arrays = PlanArrays(*(torch.zeros(count, dtype=torch.int32) for count in (4, 5, 5, 5)), info)
lens = torch.tensor([int(length) for length in sys.argv[2:]], dtype=torch.int32)
plan(torch.arange(len(lens) + 1, dtype=torch.int32), lens, arrays, params)
print("made", arrays.work_indptr.tolist())
"""


@pytest.mark.interpret
@pytest.mark.parametrize("lens", [(0, 0, 0, 0), (0,), (5, 0, 9, 2048)])
def test_nothing_before_the_works_is_read_interpreted(lens: tuple[int, ...]) -> None:
    """Memory in front of `work_info` that ends the process of whoever touches it."""

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _BEHIND_A_WALL, what, *map(str, lens)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("plan")
    assert done.returncode == 0, done.stderr
    assert "made" in done.stdout
    assert run("read").returncode < 0, "the wall keeps nobody out"
