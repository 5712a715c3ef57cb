"""What the tests of `mlaplan tune` share: times of loads and of schedules by the formulas that are fitted to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlaplan.costs import CostTable
from mlaplan.tuning import Load, decode_loads, merge_loads

LOADS = decode_loads(32) + merge_loads(132, 64)


def timer(
    table: CostTable, *, launch: float = 4000.0, noise: float = 0.0, rng: np.random.Generator | None = None
) -> Callable[[Load], float]:
    """Times by the formula of a launch whose slots are all the same."""

    def time(load: Load) -> float:
        fixed = table.piece if load.cut else table.whole
        exact = launch + load.merged * table.merge
        if load.works:
            exact += table.slot + load.works * (fixed + load.blocks * table.block)
        return exact if rng is None else exact * (1 + noise * rng.standard_normal())

    return time


def clock(
    table: CostTable, *, launch: float = 4000.0, error: Callable[[], float] = lambda: 0.0
) -> Callable[[Any], float]:
    """Times of schedules by the formula: the longest slot, and `cut` where something is merged."""

    def time(made: Any) -> float:
        longest = table.finish_time(made.work_indptr, made.work_info.reshape(-1))
        return launch + longest + (table.cut if made.num_partials else 0) + error()

    return time
