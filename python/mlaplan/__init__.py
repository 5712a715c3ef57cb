"""mlaplan: plans sparse MLA decode on the host, on the device and inside captured graphs. Needs NumPy alone."""

from __future__ import annotations

from mlaplan._core import (
    Decision,
    PlanError,
    Schedule,
    Support,
    __version__,
    buffer_shapes,
    kv_indptr,
    max_split_per_batch,
    request_ids,
    row_lengths,
    schedule,
    segment_lengths,
    support,
)
from mlaplan.batch import Batch, Exact, UpperBound
from mlaplan.config import PlannerConfig
from mlaplan.costs import CostTable
from mlaplan.layout import PlanArrays, PlanParams
from mlaplan.plan import Constants, Plan
from mlaplan.planner import Planner
from mlaplan.quality import Quality
from mlaplan.stats import Stats

__all__ = [
    "Batch",
    "Constants",
    "CostTable",
    "Decision",
    "Exact",
    "Plan",
    "PlanArrays",
    "PlanError",
    "PlanParams",
    "Planner",
    "PlannerConfig",
    "Quality",
    "Schedule",
    "Stats",
    "Support",
    "UpperBound",
    "__version__",
    "buffer_shapes",
    "kv_indptr",
    "max_split_per_batch",
    "request_ids",
    "row_lengths",
    "schedule",
    "segment_lengths",
    "support",
]
