"""The plan kernel of `invariant`: slots of works of any cost, and few works on many slots, by the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plan_cases import rows_case

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from plan_runs import check
from triton import language as tl

from mlaplan.costs import CostTable
from mlaplan.kernels import plan_invariant
from mlaplan.layout import PlanParams

_SIZE = 1 << 12


@triton.jit  # type: ignore[untyped-decorator]
def _slots_kernel(cost_ptr, total, out_ptr, num_cus, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    index = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int64) + total
    inverse = 1.0 / total.to(tl.float32)
    tl.store(out_ptr + index, plan_invariant._slots(tl.load(cost_ptr + index), num_cus, total, inverse))


def _slots(cost: np.ndarray[Any, np.dtype[np.int64]], total: int, num_cus: int) -> list[int]:
    out = torch.empty(_SIZE, dtype=torch.int32)
    _slots_kernel[(1,)](torch.from_numpy(cost), total, out, num_cus, BLOCK=_SIZE)
    return [int(slot) for slot in out.tolist()]


@pytest.mark.interpret
def test_slots_are_exact_interpreted(rng: np.random.Generator) -> None:
    """Costs where a slot begins, one before and one behind it, up to products that take 62 bits."""
    for turn in range(60):
        num_cus = (1, 2, 304, 65_535, int(rng.integers(1, 65_536)))[turn % 5]
        most = (1 << 62) // num_cus
        total = most if turn == 0 else int(rng.integers(1, int(rng.integers(2, most + 1))))
        slots = rng.integers(0, num_cus + 1, _SIZE)
        # As Python numbers, for a slot times the total has more than 64 bits where a cost has not.
        begins = [-(-slot * total // num_cus) for slot in slots.tolist()]
        cost = np.array([min(begin, total) for begin in begins], np.int64)
        cost = np.clip(cost + rng.integers(-1, 2, _SIZE), 0, total)
        wanted = [value * num_cus // total for value in cost.tolist()]
        assert _slots(cost, total, num_cus) == wanted, (num_cus, total)


@pytest.mark.interpret
@pytest.mark.parametrize("num_cus", [1, 7, 304, 5000])
@pytest.mark.parametrize("lens", [[1], [2048], [0, 900, 0], [2048, 1, 0, 300, 257], [256] * 40 + [1]])
def test_few_works_on_many_slots_interpreted(device: str, lens: list[int], num_cus: int) -> None:
    """A work that costs more than a slot's share leaves slots without any behind it."""
    table = CostTable(block_tokens=64, block=2606, piece=1650, whole=1503)
    for fold in (1, 3):
        params = PlanParams(topk=2048, num_cus=num_cus, policy="invariant", cost_table=table, fold=fold)
        check(rows_case(lens, len(lens) + 2, params), device)
