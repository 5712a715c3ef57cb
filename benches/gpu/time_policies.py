"""Device time of decode and merge under each policy: what `balanced` gains over the rule, what `invariant` costs.

Planned on the host, decoded by the portable kernels by turns, the L2 cache written over before each. Every decode is
checked against float64 on sampled rows before it is timed. The cost tables are those that `mlaplan tune` stored:

    mlaplan tune --heads 16 && mlaplan tune --heads 128 && python benches/gpu/time_policies.py --out docs/results
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from common import parser, publish, refuse_debug, side_by_side_us, table

import mlaplan

ROWS = (1, 4, 16, 64, 128, 256, 512)
POOL = 1 << 20
SETTINGS: dict[str, dict[str, Any]] = {
    "rule": {},
    "no limit (-1)": {"split_budget": -1},
    "one piece per row": {"split_budget": 1},
    "balanced": {"policy": "balanced"},
    "invariant": {"policy": "invariant"},
    "invariant 1024": {"policy": "invariant", "piece_tokens": 1024},
}


def row_lengths(kind: str, rows: int, topk: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of a batch: all full, or a third full and the others anywhere below."""
    if kind == "full":
        return np.full(rows, topk, np.int32)
    lengths = rng.integers(1, topk + 1, rows)
    lengths[rng.random(rows) < 1 / 3] = topk
    return lengths.astype(np.int32)


class Inputs:
    """Queries, KV and KV slots that all policies decode."""

    def __init__(self, heads: int, lengths: np.ndarray, pool: torch.Tensor, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        rows, tokens = len(lengths), int(lengths.sum())
        self.lengths, self.pool, self.heads = lengths, pool, heads
        self.q = torch.randn(rows, heads, 576, generator=generator, device="cuda").to(torch.bfloat16)
        self.kv_indices = torch.randint(0, POOL, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        self.out = torch.empty(rows, heads, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(rows, heads, device="cuda")

    def error(self) -> float:
        """Relative error of some rows against float64."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        errors = []
        for row in range(0, len(self.lengths), max(1, len(self.lengths) // 4)):
            kv = self.pool[self.kv_indices[starts[row] : starts[row + 1]].long()].double()
            weights = torch.softmax(self.q[row].double() @ kv.T * 576**-0.5, -1)
            wanted = weights @ kv[:, :512]
            errors.append(float((self.out[row].double() - wanted).norm() / wanted.norm()))
        return max(errors)


class Side:
    """A batch planned under one policy.

    Attributes:
        run: Its decode.
        longest: The longest slot by the cost table.
    """

    def __init__(self, inputs: Inputs, topk: int, slots: int | None, settings: dict[str, Any]) -> None:
        rows = len(inputs.lengths)
        config = mlaplan.PlannerConfig(max_rows=rows, max_requests=rows, arch=None, heads=inputs.heads, topk=topk,
                                       num_cus=slots, **settings)  # fmt: skip
        planner = mlaplan.Planner(config, "cuda")
        boundaries = np.arange(rows + 1, dtype=np.int32)
        plan = planner.plan(mlaplan.Batch(boundaries, mlaplan.Exact(inputs.lengths)))
        works = planner.device.to_host(plan.arrays.work_info[: plan.num_works])
        indptr = planner.device.to_host(plan.arrays.work_indptr)
        table = planner.params.cost_table
        assert table is not None
        self.longest = table.finish_time(indptr, np.ascontiguousarray(works).reshape(-1))

        def run() -> None:
            planner.backend.decode(
                plan, inputs.q, inputs.pool, inputs.kv_indices, scale=576**-0.5, out=inputs.out, lse=inputs.lse
            )

        self.run = run
        inputs.out.fill_(float("nan"))
        run()
        assert inputs.error() < 4e-3, "the decode is wrong: not timed"


def measure(arguments: Any, heads: int, kind: str, pool: torch.Tensor) -> list[list[object]]:
    """Times all row counts of one shape under all policies, by turns."""
    lines = []
    for rows in arguments.rows:
        rng = np.random.default_rng([arguments.seed, rows])
        inputs = Inputs(heads, row_lengths(kind, rows, arguments.topk, rng), pool, arguments.seed)
        # With the table of `balanced`, so that all longest slots are told by the same numbers.
        sides = {
            name: Side(inputs, arguments.topk, arguments.slots, {**settings, "cost_table": arguments.tables[heads]})
            for name, settings in SETTINGS.items()
        }
        calls = {name: side.run for name, side in sides.items()}
        times = side_by_side_us(calls, nodes=8, repeats=15, flush=True)
        best_of_aiter = min(times[name] for name in ("rule", "no limit (-1)", "one piece per row"))
        balanced, invariant = times["balanced"], times["invariant"]
        lines.append([
            heads, kind, rows, *(f"{value:.1f}" for value in times.values()),
            f"{times['rule'] / balanced:.2f}x", f"{sides['rule'].longest / sides['balanced'].longest:.2f}x",
            f"{best_of_aiter / balanced:.2f}x", f"{invariant / balanced:.2f}x",
        ])  # fmt: skip
        print(*lines[-1], flush=True)
    return lines


def stored_table(heads: int, slots: int | None) -> mlaplan.CostTable:
    """The cost table that a planner finds for so many heads."""
    config = mlaplan.PlannerConfig(max_rows=1, max_requests=1, arch=None, heads=heads, num_cus=slots, policy="balanced")
    found = mlaplan.Planner(config, "cuda").params.cost_table
    assert found is not None
    return found


def summary(header: list[str], lines: list[list[object]]) -> str:
    """Medians and extremes of the columns that hold ratios."""
    texts = []
    for column, name in enumerate(header):
        if " / " not in name:
            continue
        ratios = [float(str(line[column]).removesuffix("x")) for line in lines]
        texts.append(
            f"* {name}: median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f} over "
            f"{len(ratios)} batches"
        )
    return "\n".join(texts)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--slots", type=int, help="compute units (default: the GPU's)")
    options.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    options.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options.add_argument("--topk", type=int, default=2048)
    arguments = options.parse_args()
    refuse_debug()
    arguments.tables = {heads: stored_table(heads, arguments.slots) for heads in arguments.heads}
    generator = torch.Generator("cuda").manual_seed(arguments.seed)
    pool = torch.randn(POOL, 576, generator=generator, device="cuda").to(torch.bfloat16)
    lines = [
        line
        for heads in arguments.heads
        for kind in ("full", "mixed")
        for line in measure(arguments, heads, kind, pool)
    ]
    header = ["heads", "lengths", "rows", *SETTINGS, "rule / balanced", "the same by the table",
              "best of aiter's / balanced", "invariant / balanced"]  # fmt: skip
    names = ["block_tokens", "block", "piece", "whole", "slot", "merge", "cut"]
    costs = [[heads, *costs.fields] for heads, costs in arguments.tables.items()]
    about = (
        f"Device time in us of decode and merge, bf16, topk {arguments.topk}, by turns, L2 written over before each. "
        "`rule`, `no limit` and `one piece per row` are split budgets of the policy `aiter`; `invariant` has pieces of "
        "256 tokens, or of 1,024 where it says so. `full`: every row has topk tokens; `mixed`: a third has, the others "
        "have 1 to topk, evenly. A ratio above 1 means that the second is faster. `by the table` compares longest "
        "slots as the cost table has them, merges and cuts not included."
    )
    stored = "Cost tables, in ns, as `mlaplan tune` stored them in the same run:"
    text = "\n\n".join([about, table(header, lines), summary(header, lines), stored, table(["heads", *names], costs)])
    publish("Policies", text, arguments.out)


if __name__ == "__main__":
    main()
