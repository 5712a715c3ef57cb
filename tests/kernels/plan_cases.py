"""Batches for the plan kernel, the reference vectors, and arrays with guard bands around them."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaplan.costs import CostTable
from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference import plan as reference

Int32Array = npt.NDArray[np.int32]

GUARD = -0x5EED
_MARGIN = 64
_EXTREMES = np.array([-(1 << 31), -1, 0, 1, 7, (1 << 31) - 1])


@dataclass(frozen=True, slots=True)
class Case:
    """One batch for a class of `num_rows` rows."""

    name: str
    query_start_loc: Int32Array
    seq_lens: Int32Array
    num_rows: int
    params: PlanParams


def rows_case(lens: npt.ArrayLike, num_rows: int, params: PlanParams, *, name: str = "rows") -> Case:
    """A batch of one query token per request, with rows of these lengths."""
    seq_lens = np.asarray(lens, np.int32)
    return Case(name, np.arange(seq_lens.size + 1, dtype=np.int32), seq_lens, num_rows, params)


class Arena:
    """The arrays of one plan in one buffer, with guard words before, between and behind them."""

    def __init__(self, num_rows: int, params: PlanParams) -> None:
        """Fills everything with the guard value."""
        self._layout = Layout.of(num_rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
        self.words = np.full(self._layout.words + 2 * _MARGIN, GUARD, np.int32)

    def views(self, words: Any) -> PlanArrays:
        """The plan's arrays within `words`, an array or a torch tensor like `self.words`."""
        views = []
        for offset, shape in zip(self._layout.offsets, self._layout.shapes, strict=True):
            first = _MARGIN + offset
            views.append(words[first : first + int(np.prod(shape))].reshape(shape))
        return PlanArrays(*views)

    def expected(self, case: Case) -> Int32Array:
        """All words as the reference leaves them, guards and unused works included."""
        words = self.words.copy()
        reference.plan(case.query_start_loc, case.seq_lens, self.views(words), case.params)
        return words

    def difference(self, case: Case, words: Int32Array) -> str:
        """Says where `words` is not what the reference writes; empty if nowhere."""
        expected = self.expected(case)
        if np.array_equal(expected, words):
            return ""
        for name, want, got in zip(PlanArrays._fields, self.views(expected), self.views(words), strict=True):
            if not np.array_equal(want, got):
                at = np.argwhere(want != got)[0].tolist()
                return f"{case.name}: {name}{at} is {got[tuple(at)]}, expected {want[tuple(at)]}; {case.params}"
        at = int(np.flatnonzero(expected != words)[0])
        return f"{case.name}: guard word {at} holds {words[at]}; {case.params}"


def random_params(rng: np.random.Generator, *, topk: int | None = None) -> PlanParams:
    """Parameters from the whole range that a plan may have."""
    budgets = (None, None, -1, 1, 2, 4, 16, 1000)
    empty_rows, variant = (
        ("skip", "parallel"),
        ("skip", "parallel"),
        ("aiter", "serial"),
        ("aiter", "parallel"),
    )[rng.integers(4)]
    return PlanParams(
        topk=topk or int(rng.choice([1, 16, 100, 2048])),
        num_cus=int(rng.choice([1, 20, 38, 80, 256, 304, int(rng.integers(1, 305))])),
        fold=int(rng.integers(1, 9)) if rng.random() < 0.5 else 1,
        split_budget=budgets[rng.integers(len(budgets))],
        min_tokens_per_split=int(rng.choice([1, 16, 100, 128])),
        variant=variant,
        empty_rows=empty_rows,
    )


def random_table(rng: np.random.Generator) -> CostTable:
    """A cost table of any proportions: fixed costs far below and far above that of a block, pieces dear and cheap."""
    block, whole = int(rng.choice([1, 7, 100])), int(rng.choice([0, 3, 500, 3000]))
    return CostTable(
        block_tokens=int(rng.choice([1, 16, 32, 64, 100])),
        block=block,
        piece=min(whole + block, int(rng.choice([0, 5, 400, 4000]))),
        whole=whole,
        slot=int(rng.integers(0, 50)),
        merge=int(rng.choice([0, 1, 50, 800])),
        cut=int(rng.choice([0, 0, 1, 40, 1000, 1 << 24])),
    )


def with_policy(rng: np.random.Generator, case: Case, policy: str) -> Case:
    """The same batch under a policy, with a cost table that the kernel can add up."""
    params = replace(
        case.params,
        policy=policy,
        cost_table=random_table(rng),
        piece_tokens=int(rng.choice([64, 100, 256, 5000])),
        empty_rows="skip",
        variant="parallel",
    )
    size = {"rows": case.num_rows, "topk": params.topk, "num_cus": params.num_cus, "fold": params.fold}
    while params.cost_table is None or params.cost_table.longest_slot_bound(**size) > 1 << 30:
        params = replace(params, cost_table=random_table(rng))
    return replace(case, name=f"{case.name}, {policy}", params=params)


def random_case(rng: np.random.Generator, *, max_rows: int, name: str = "random") -> Case:
    """A batch as an engine makes it: padding rows, dummy requests, lengths around the limits."""
    params = random_params(rng)
    num_requests = int(rng.integers(1, max(2, max_rows // 2)))
    queries = rng.integers(0, int(rng.choice([2, 3, 5])), num_requests)
    if rng.random() < 0.2:
        queries[rng.integers(num_requests)] = max_rows // 2
    kept = np.minimum(np.cumsum(queries), max_rows)
    query_start_loc = np.concatenate(([0], kept)).astype(np.int32)
    queries = np.diff(query_start_loc)
    seq_lens = queries + rng.integers(0, int(rng.choice([2, 40, 3 * params.topk])) + 1, num_requests)
    if rng.random() < 0.3:
        seq_lens[rng.random(num_requests) < 0.5] = 0
    live = int(query_start_loc[-1])
    num_rows = int(rng.choice([max(1, live), live + int(rng.integers(1, max_rows + 2)), max_rows]))
    return Case(name, query_start_loc, seq_lens.astype(np.int32), max(num_rows, 1), params)


def wild_case(rng: np.random.Generator, *, max_rows: int, name: str = "wild") -> Case:
    """A batch of which nothing holds: boundaries that fall, leave the class, or are any number at all."""
    num_requests, num_rows = int(rng.integers(1, 40)), int(rng.integers(1, max_rows + 1))
    query_start_loc = rng.integers(-3, num_rows + 4, num_requests + 1)
    if rng.random() < 0.5:
        query_start_loc = np.sort(query_start_loc)
    seq_lens = rng.integers(-100, 5000, num_requests)
    for values in (query_start_loc, seq_lens):
        where = rng.random(values.size) < rng.choice([0.0, 0.2, 1.0])
        values[where] = rng.choice(_EXTREMES, int(where.sum()))
    params = random_params(rng, topk=2048)
    return Case(name, query_start_loc.astype(np.int32), seq_lens.astype(np.int32), num_rows, params)


def stale_starts(num_rows: int = 1024) -> tuple[Case, ...]:
    """What a captured graph was reported to see: boundaries of the step before (ROCm/hip#3902)."""
    params = PlanParams(topk=2048, num_cus=304)
    seq_lens = np.array([5000, 900, 40], np.int32)
    return tuple(
        Case(f"starts {starts}", np.array(starts, np.int32), seq_lens, num_rows, params)
        for starts in ([0, 996, 996, 996], [0, 1, 2, 3], [0, 996, 2, 3])
    )


def golden_vectors(shared: Path) -> list[dict[str, Any]]:
    """The reference vectors, in the order of the file."""
    path = shared / "golden" / "aiter_mla_metadata_v1_2.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def golden_cases(vector: dict[str, Any]) -> list[tuple[Case, dict[str, Any]]]:
    """A vector as batches and the arrays they must give; two where the variants of aiter's planner differ.

    Vectors without a list of requests, or with rows behind it, become one request per row.
    """
    kv_indptr = np.array(vector["kv_indptr"])
    rows = kv_indptr.size - 1
    requests = np.array(vector["requests"] or [], np.int64).reshape(-1, 2)
    if int(requests[:, 1].sum()) != rows:
        lengths = np.diff(kv_indptr)
        requests = np.stack((lengths - np.minimum(lengths, 1), np.minimum(lengths, 1)), axis=1)
        requests[:, 0] -= requests[:, 1] == 0  # a context of -1 and one token: the row of a dummy request
        requests[:, 1] = 1
    query_start_loc = np.concatenate(([0], np.cumsum(requests[:, 1]))).astype(np.int32)
    seq_lens = requests.sum(axis=1).astype(np.int32)
    made = [(vector["planner"], vector)]
    if "serial" in vector:
        made.append(("serial", vector["serial"]))
    cases = []
    for variant, arrays in made:
        params = PlanParams(
            topk=int(vector["topk"]),
            num_cus=int(vector["num_cu"]),
            fold=int(vector["qk_batch_ratio"]),
            split_budget=int(vector["max_split_per_batch"]),
            variant=variant,
            empty_rows="aiter",
        )
        name = f"golden {vector['id']} {variant}"
        num_rows = max(rows, int(vector["max_batch"]))
        cases.append((Case(name, query_start_loc, seq_lens, num_rows, params), arrays))
    return cases


def golden_difference(vector: dict[str, Any], arrays: PlanArrays, wanted: dict[str, Any]) -> str:
    """Says which array of a plan is not the vector's; empty if none."""
    work_info = np.array(wanted["work_info"], np.int32).reshape(-1, 8)
    reduce_indptr = np.array(wanted["reduce_indptr"])
    kv_indptr = np.array(vector["kv_indptr"])
    pairs = {
        "kv_indptr": (kv_indptr, arrays.kv_indptr[: kv_indptr.size]),
        "work_indptr": (np.array(wanted["work_indptr"]), arrays.work_indptr),
        "work_info": (work_info, arrays.work_info[: len(work_info)]),
        "reduce_indptr": (reduce_indptr, arrays.reduce_indptr[: reduce_indptr.size]),
    }
    return ", ".join(name for name, (want, got) in pairs.items() if not np.array_equal(want, got))
