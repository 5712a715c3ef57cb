"""Device time of decode and merge over a planned batch, beside a peer and the memory floor.

A peer is a plug-in (`--peer FILE`): a module with `decode(q, kv, indices, scale, lengths)`, where q is (rows, heads,
576), kv (slots, 576), indices (rows, topk) and lengths (rows,). Everything is checked against float64 on sampled rows
first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import graph_us, parser, plugin, publish, refuse_debug, table

import mlaplan

ROWS = (1, 4, 16, 64, 128, 256, 512)
BANDWIDTH = 4.3e12  # bytes per second, a large copy on this GPU
ARITHMETIC = 790e12  # bf16 operations per second, a large matrix product on this GPU
SLOTS = 1 << 20


def floor_us(rows: int, heads: int, topk: int) -> float:
    """Time below which no kernel can be: bytes over bandwidth or operations over rate."""
    moved = rows * (topk * 576 * 2 + heads * (576 + 512) * 2)
    operations = 2 * rows * heads * topk * (576 + 512)
    return 1e6 * max(moved / BANDWIDTH, operations / ARITHMETIC)


class Problem:
    """One planned batch of full rows with random KV slots."""

    def __init__(self, rows: int, heads: int, topk: int, budget: int | None, num_cus: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        config = mlaplan.PlannerConfig(max_rows=rows, max_requests=rows, arch=None, heads=heads, topk=topk,
                                       split_budget=budget, num_cus=num_cus)  # fmt: skip
        self.planner = mlaplan.Planner(config, "cuda")
        boundaries = np.arange(rows + 1, dtype=np.int32)
        self.plan = self.planner.plan(mlaplan.Batch(boundaries, mlaplan.Exact(np.full(rows, 5000, np.int32))))
        self.q = torch.randn(rows, heads, 576, generator=generator, device="cuda").to(torch.bfloat16)
        self.kv = torch.randn(SLOTS, 576, generator=generator, device="cuda").to(torch.bfloat16)
        self.indices = torch.randint(0, SLOTS, (rows, topk), generator=generator, device="cuda", dtype=torch.int32)
        self.lengths = torch.full((rows,), topk, dtype=torch.int32, device="cuda")
        self.kv_indices = self.indices.reshape(-1)
        self.out = torch.empty(rows, heads, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(rows, heads, device="cuda")
        self.scale = 576**-0.5

    def run(self) -> None:
        """Decode and merge, as a layer runs them after the step's plan."""
        self.planner.backend.decode(
            self.plan, self.q, self.kv, self.kv_indices, scale=self.scale, out=self.out, lse=self.lse
        )

    def error(self, out: torch.Tensor) -> float:
        """Relative error of some rows against float64."""
        sample = range(0, len(self.q), max(1, len(self.q) // 4))
        errors = []
        for row in sample:
            kv = self.kv[self.indices[row].long()].double()
            weights = torch.softmax(self.q[row].double() @ kv.T * self.scale, -1)
            wanted = weights @ kv[:, :512]
            errors.append(float((out[row].double() - wanted).norm() / wanted.norm()))
        return max(errors)


def measure(arguments: Any, heads: int, topk: int, peer: Any) -> list[list[object]]:
    """Times all row counts of one shape."""
    lines = []
    for rows in ROWS:
        line: list[object] = [heads, topk, rows]
        best = {}
        for num_cus in arguments.slots:
            problem = Problem(rows, heads, topk, None, num_cus, arguments.seed)
            problem.run()
            assert problem.error(problem.out) < 4e-3, "the decode is wrong: not timed"
            best[num_cus] = graph_us(problem.run, nodes=8, repeats=15, flush=True)
        line += [f"{value:.1f}" for value in best.values()]
        mine = min(best.values())
        if peer is not None:
            out = peer.decode(problem.q, problem.kv, problem.indices, problem.scale, problem.lengths)
            assert problem.error(out) < 1e-2, "the peer is wrong: not timed"
            theirs = graph_us(
                lambda p=problem: peer.decode(p.q, p.kv, p.indices, p.scale, p.lengths), nodes=8, repeats=15, flush=True
            )
            line += [f"{theirs:.1f}", f"{theirs / mine:.2f}x"]
        floor = floor_us(rows, heads, topk)
        lines.append([*line, f"{floor:.1f}", f"{mine / floor:.2f}"])
    return lines


def budgets(arguments: Any) -> list[list[object]]:
    """What the split budget does: one piece per row, the rule, and no limit."""
    lines = []
    for rows in (1, 8, 64, 256):
        times = []
        for budget in (1, None, -1):
            problem = Problem(rows, 16, 2048, budget, arguments.slots[0], arguments.seed)
            problem.run()
            times.append(graph_us(problem.run, nodes=8, repeats=15, flush=True))
        lines.append([rows, *(f"{value:.1f}" for value in times)])
    return lines


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peer", help="file of a peer's decode")
    options.add_argument("--slots", type=int, nargs="+", default=[132, 264])
    options.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    options.add_argument("--topk", type=int, nargs="+", default=[2048])
    arguments = options.parse_args()
    refuse_debug()
    peer = plugin(arguments.peer)
    header = ["heads", "topk", "rows", *(f"{slots} slots" for slots in arguments.slots)]
    header += ["peer", "peer / best"] if peer is not None else []
    lines = [
        line for heads in arguments.heads for topk in arguments.topk for line in measure(arguments, heads, topk, peer)
    ]
    text = "\n\n".join(
        [
            "Device time in us of decode and merge, bf16, L2 flushed before each:",
            table([*header, "floor", "best / floor"], lines),
            f"The same by split budget, 16 heads, {arguments.slots[0]} slots:",
            table(["rows", "one piece per row", "work-per-split rule", "no limit (-1)"], budgets(arguments)),
        ]
    )
    publish("Cost of decoding", text, arguments.out)


if __name__ == "__main__":
    main()
