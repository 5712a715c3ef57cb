"""What several test files need: batches in short, the plan a planner holds, and a plan from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.device import HostDevice
from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference.plan import plan as plan_from_nothing


def ints(*values: int) -> Int32Array:
    """An int32 array of the values."""
    return np.array(values, np.int32)


def starts(query_lens: list[int]) -> Int32Array:
    """`query_start_loc` of requests with so many query tokens."""
    return np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)


def batch(query_lens: list[int], seq_lens: list[int], padded_rows: int | None = None, **more: Any) -> mlaplan.Batch:
    """A batch whose lengths the host knows; `on_device=True` gives it device arrays, `lengths` other knowledge."""
    query_start_loc, lengths = starts(query_lens), np.array(seq_lens, np.int32)
    if more.pop("on_device", False):
        more = {"device_query_start_loc": query_start_loc.copy(), "device_seq_lens": lengths.copy(), **more}
    return mlaplan.Batch(query_start_loc, more.pop("lengths", mlaplan.Exact(lengths)), padded_rows, **more)


def planner(device: HostDevice | None = None, **settings: Any) -> mlaplan.Planner:
    """A small planner on the host."""
    settings = {"max_rows": 64, "max_requests": 16, "topk": 16, "num_cus": 20, "arch": None, "heads": 2,
                "head_dim": 8, "v_head_dim": 4, **settings}  # fmt: skip
    return mlaplan.Planner(mlaplan.PlannerConfig(**settings), device or "cpu")


def definition(query_lens: list[int], seq_lens: list[int], topk: int) -> tuple[list[int], list[int]]:
    """Request and length of each row, token by token."""
    ids, lengths = [], []
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for i in range(query_len):
            ids.append(request)
            lengths.append(min(seq_len - query_len + i + 1, topk))
    return ids, lengths


def from_nothing(query_start_loc: Int32Array, seq_lens: Int32Array, rows: int, params: PlanParams) -> PlanArrays:
    """The plan of the `plan` op in arrays of their own."""
    layout = Layout.of(rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
    arrays = PlanArrays(*(np.full(shape, -77, np.int32) for shape in layout.shapes))
    plan_from_nothing(query_start_loc, seq_lens, arrays, params)
    return arrays


def held(plan: mlaplan.Plan) -> PlanArrays:
    """A copy of what the plan's arrays hold, works that nobody reads left out."""
    copies = [np.array(array) for array in plan.arrays]
    copies[4] = copies[4][: copies[2][-1]]
    return PlanArrays(*copies)


def assert_holds(
    plan: mlaplan.Plan, query_lens: list[int], seq_lens: list[int], arrays: PlanArrays | None = None
) -> None:
    """Compares what is held, or `arrays`, with a plan from nothing, and its rows with the definition."""
    actual = held(plan) if arrays is None else arrays
    params = plan.planner.params
    wanted = from_nothing(starts(query_lens), np.array(seq_lens, np.int32), len(actual.request_ids), params)
    for name, got, want in zip(PlanArrays._fields, actual, wanted, strict=True):
        assert np.array_equal(got, want[: len(got)]), name
    assert len(actual.work_info) == wanted.work_indptr[-1]
    ids, lengths = definition(query_lens, seq_lens, params.topk)
    assert actual.request_ids.tolist() == ids + [0] * (len(actual.request_ids) - len(ids))
    assert np.diff(actual.kv_indptr).tolist() == lengths + [0] * (len(actual.request_ids) - len(ids))
