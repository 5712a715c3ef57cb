"""How good a schedule is: its longest slot, and a bound below which no schedule of the rows can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mlaplan import _core

if TYPE_CHECKING:
    from mlaplan._types import Int32Array
    from mlaplan.costs import CostTable
    from mlaplan.layout import PlanParams


class Quality(NamedTuple):
    """How good a schedule is, by the policy's cost table; under "aiter" in aiter's units of 16-token blocks.

    Attributes:
        finish_time: Cost of the longest slot.
        lower_bound: No schedule of these rows on as many slots as the budget allows can finish earlier.
    """

    finish_time: float
    lower_bound: float

    @property
    def ratio(self) -> float:
        """Finish time over lower bound; 1 for an empty plan."""
        return self.finish_time / self.lower_bound if self.lower_bound else 1.0


def schedule_quality(
    row_lengths: Int32Array, work_indptr: Int32Array, work_info: Int32Array, params: PlanParams
) -> Quality:
    """Finish time and lower bound of a schedule, by the policy's cost table; in aiter's units under "aiter".

    Args:
        row_lengths: Length of each row before folding, in tokens. Shape (rows,), int32.
        work_indptr: First work of each slot. Shape (C + 1,), int32.
        work_info: Works. Shape (works, 8), int32.
        params: What the schedule was made with.

    Returns:
        Both numbers, the bound for as many slots as the budget allows, whether they are used or not.
    """
    table = _core.CostTable.named("aiter") if params.policy == "aiter" else _costs(params).core
    finish = table.finish_time(work_indptr, np.ascontiguousarray(work_info).reshape(-1))
    slots = max(1, _allowed_slots(row_lengths, params))
    return Quality(finish, table.lower_bound(row_lengths, slots, fold=params.fold))


def _allowed_slots(row_lengths: Int32Array, params: PlanParams) -> int:
    budget, longest, num_cus = params.split_budget, int(row_lengths.max(initial=0)), params.num_cus
    if params.policy == "invariant":
        return num_cus
    if budget is None and params.policy == "balanced":
        budget = _core.split_budget(longest, cost_table=_costs(params).core, num_cus=num_cus)
    elif budget is None:
        budget = _core.max_split_per_batch(
            longest, topk=params.topk, num_cus=num_cus, min_tokens_per_split=params.min_tokens_per_split
        )
    live = params.fold * int(np.count_nonzero(row_lengths))
    return num_cus if budget < 0 else min(num_cus, budget * live)


def _costs(params: PlanParams) -> CostTable:
    if params.cost_table is None:
        raise ValueError(f"cost_table is None, must be given with policy {params.policy!r}")
    return params.cost_table
