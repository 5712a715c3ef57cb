"""aiter's own decode binaries, driven by our schedules for batches of the real logs."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import checks
import emulator
import numpy as np
from plan_cases import Case

import mlaplan
from mlaplan.layout import PlanParams

_LOGS = ("mooncake_conversation.csv", "azure_conv_2023.csv")
# Emulated attention to a full row of 2,048 tokens takes half a minute, so the logs' lengths are capped lower.
_TOPK = 160


class Binary(NamedTuple):
    """One of aiter's persistent decode kernels.

    Attributes:
        heads: Query heads of the kernel; more heads than these are planned with a fold.
        formats: Types of q and KV rows, as the harness names them.
        partial_error: Largest error of a piece, relative to the largest value, and of a whole row below.
    """

    arch: str
    name: str
    heads: int
    formats: str
    partial_error: float
    row_error: float


# The limits are those of the harness's own self test: weights are rounded to bfloat16 or to 8 bits.
BINARIES = (
    Binary("gfx942", "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps", 16, "bf16", 3e-3, 6e-3),
    Binary("gfx942", "mla_a8w8_qh16_qseqlen1_gqaratio16_ps", 16, "fp8", 4e-2, 4e-2),
    Binary("gfx950", "mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_ps", 16, "bf16", 3e-3, 6e-3),
    Binary("gfx950", "mla_a8w8_qh16_qseqlen1_gqaratio16_ps", 16, "fp8", 4e-2, 4e-2),
)
_LSE_ERROR = 1e-5


def find(binary: Binary) -> Path | None:
    """The file of a binary below the folders of AITER_HSA."""
    for folder in filter(None, os.environ.get("AITER_HSA", "").split(os.pathsep)):
        for path in sorted(Path(folder).rglob(f"{binary.name}.co")):
            if binary.arch in path.parts:
                return path
    return None


def missing() -> str:
    """Why no binary can be run here; empty if all can."""
    absent = [f"{binary.arch}/{binary.name}" for binary in BINARIES if find(binary) is None]
    return f"AITER_HSA holds no {', '.join(absent)}: aiter's decode was not run" if absent else ""


def _log_batch(number: int) -> Case:
    """One decode step of some neighbours in a log, each somewhere in its output, with up to two tokens per request."""
    rng = np.random.default_rng(number)
    shared = emulator.shared_folder()
    assert shared is not None
    with (shared / "data" / _LOGS[number % 2]).open(encoding="utf-8") as lines:
        requests = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(lines)]
    first, count = int(rng.integers(0, len(requests) - 4)), int(rng.integers(1, 4))
    chosen = requests[first : first + count]
    queries = rng.integers(1, 3, count)
    seq_lens = [tokens + int(rng.integers(0, made + 1)) + 2 for tokens, made in chosen]
    if number % 4 == 3:
        # What the logs hardly hold at this cap: rows that are short and grow.
        seq_lens = [int(rng.integers(2, _TOPK)) for _ in chosen]
    params = PlanParams(
        topk=_TOPK,
        num_cus=int(rng.integers(2, 9)),
        fold=(1, 1, 2)[number % 3],
        split_budget=(None, -1, 4)[number % 3],
        min_tokens_per_split=32,
    )
    query_start_loc = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    return Case(f"log batch {number}", query_start_loc, np.array(seq_lens, np.int32), int(query_start_loc[-1]), params)


def check_aiter(arch: str, numbers: Iterable[int]) -> checks.Result:
    """Plans batches with the emulated `plan` and in Rust, which must agree, and runs aiter's binary on the schedule."""
    import aiter_case  # type: ignore[import-not-found]

    result = checks.Result("aiter's decode, log batches", arch)
    binaries = [binary for binary in BINARIES if binary.arch == arch]
    for number in numbers:
        case, binary = _log_batch(number), binaries[number // 2 % len(binaries)]
        path = find(binary)
        assert path is not None, binary
        arrays = checks.check_plan(case, arch, number, result)
        params, num_works = case.params, int(arrays.work_indptr[-1])
        budget = params.split_budget
        if budget is None:
            longest = int(np.diff(arrays.kv_indptr).max())
            budget = mlaplan.max_split_per_batch(
                longest,
                topk=params.topk,
                num_cus=params.num_cus,
                min_tokens_per_split=params.min_tokens_per_split,
            )
        made = mlaplan.schedule(
            arrays.kv_indptr,
            num_cus=params.num_cus,
            max_split_per_batch=budget,
            fold=params.fold,
            skip_empty=True,
        )
        assert np.array_equal(made.work_indptr, arrays.work_indptr), case.name
        assert np.array_equal(made.work_info, arrays.work_info[:num_works]), case.name
        lengths = np.diff(arrays.kv_indptr).tolist()
        decode = aiter_case.Case(
            path,
            lengths,
            binary.heads,
            binary.formats,
            queries=len(lengths) * params.fold,
            seed=number,
            partials=max(1, made.num_partials),
        )
        stats = decode.run((arrays.work_indptr.copy(), arrays.work_info[:num_works].copy()))
        errors = decode.check()
        assert not stats.faults, stats.faults[0]
        limits = {"out": binary.row_error, "merged": binary.row_error, "partial": binary.partial_error}
        limits |= {"lse": _LSE_ERROR, "stray": 0.0}
        assert all(errors[name] <= limit for name, limit in limits.items()), (case.name, binary, errors)
        result.instructions += int(stats.instructions)
        errors.pop("stray")
        result.note(lse=errors.pop("lse"))
        result.note(**{f"{name} {binary.formats}": error for name, error in errors.items()})
    return result
