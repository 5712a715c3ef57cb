"""What `test_processes.py` lets other processes do: they import it by its name."""

from __future__ import annotations

from typing import Any

import mlaplan


def planned(settings: mlaplan.PlannerConfig, handed: mlaplan.Batch) -> tuple[dict[str, int], tuple[Any, ...]]:
    """Plans what was sent; returns the actions and the plan's arrays."""
    made = mlaplan.Planner(settings, device="cpu")
    plan = made.plan(handed)
    works = plan.arrays.work_indptr[-1]
    return made.stats.actions, (*plan.arrays[:4], plan.arrays.work_info[:works])
