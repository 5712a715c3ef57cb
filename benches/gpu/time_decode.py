"""Device time of slots, decode and merge over planned batches, beside a peer and the memory floor.

A peer is a plug-in (`--peer FILE`): a module with `decode(q, kv, indices, scale, lengths)`, where q is (rows, heads,
576), kv (slots, 576), indices (rows, topk) and lengths (rows,). Everything is checked against float64 on sampled rows
first. What is compared is timed by turns, and the L2 cache is written over before each call. The floor counts every
byte once: bytes / 4.3 TB/s or operations / 790 TFLOP/s, whichever is larger; it knows nothing of the 50 MB that the
cache has to write back first, which both the peer and we pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import parser, plugin, publish, refuse_debug, side_by_side_us, table

import mlaplan
from mlaplan.kernels.target import gpu_kind, tile_for

ROWS = (1, 4, 16, 64, 128, 256, 512)
FEW_ROWS = (1, 16, 64, 256)
BANDWIDTH = 4.3e12  # bytes per second, a large copy on this GPU
ARITHMETIC = 790e12  # bf16 operations per second, a large matrix product on this GPU
POOL = 1 << 20  # KV slots, 1.2 GB
BLOCK = 64  # tokens per block of the table
CONTEXT = 5000  # tokens of a request whose row is full


def floor_us(tokens: int, rows: int, heads: int) -> float:
    """Time below which no kernel can be: bytes over bandwidth or operations over rate."""
    moved = tokens * 576 * 2 + rows * heads * (576 + 512) * 2
    operations = 2 * heads * tokens * (576 + 512)
    return 1e6 * max(moved / BANDWIDTH, operations / ARITHMETIC)


def slots_of(heads: int) -> int:
    """Slots that fill the GPU once: a program per multiprocessor, one per slot and block of heads."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return processors // -(-heads // tile_for(gpu_kind(), heads, 2).heads)


class Problem:
    """One planned batch with random KV slots, full rows or rows of the lengths given."""

    pool: torch.Tensor | None = None

    def __init__(
        self, rows: int, heads: int, topk: int = 2048, *, lengths: np.ndarray | None = None, **options: Any
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(rows)
        if Problem.pool is None:
            Problem.pool = torch.randn(POOL, 576, generator=generator, device="cuda").to(torch.bfloat16)
        self.kv = Problem.pool
        config = mlaplan.PlannerConfig(
            max_rows=rows, max_requests=rows, arch=None, heads=heads, topk=topk,
            **{"num_cus": slots_of(heads), **options},
        )  # fmt: skip
        self.planner = mlaplan.Planner(config, "cuda")
        lengths = np.full(rows, topk, np.int32) if lengths is None else lengths
        seq_lens = np.where(lengths == topk, CONTEXT, lengths).astype(np.int32)
        boundaries = np.arange(rows + 1, dtype=np.int32)
        self.plan = self.planner.plan(mlaplan.Batch(boundaries, mlaplan.Exact(seq_lens)))
        self.tokens = int(lengths.sum())
        self.lengths = torch.from_numpy(lengths.astype(np.int32)).cuda()
        self.q = torch.randn(rows, heads, 576, generator=generator, device="cuda").to(torch.bfloat16)
        self.indices = torch.randint(0, POOL, (rows, topk), generator=generator, device="cuda", dtype=torch.int32)
        self.table = torch.arange(POOL // BLOCK, dtype=torch.int32, device="cuda").expand(rows, -1).contiguous()
        inside = torch.arange(topk, device="cuda") < self.lengths[:, None]
        self.kv_indices = self.indices[inside].contiguous()
        self.written = torch.zeros(rows * topk, dtype=torch.int32, device="cuda")
        self.out = torch.empty(rows, heads, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(rows, heads, device="cuda")
        self.scale = 576**-0.5

    def run(self) -> None:
        """Decode and merge, as a layer runs them after the step's plan."""
        self.planner.backend.decode(
            self.plan, self.q, self.kv, self.kv_indices, scale=self.scale, out=self.out, lse=self.lse
        )

    def ops(self) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
        """The three ops on their own: slots, decode and merge."""
        device, arrays, constants = self.planner.device, self.plan.arrays, self.plan.constants
        partials = self.planner.backend._partial_out, self.planner.backend._partial_lse  # noqa: SLF001
        shared = {"out": self.out, "lse": self.lse, "fold": 1}
        maps = {name: getattr(constants, name) for name in ("reduce_partial_map", "reduce_final_map")}
        return (
            lambda: device.ops.slots(
                self.indices, self.table, arrays.request_ids, arrays.kv_indptr, self.written,
                block_size=BLOCK, num_rows=len(self.q),
            ),
            lambda: device.ops.decode(
                self.q, self.kv, self.kv_indices, arrays, scale=self.scale, v_dim=512,
                partial_out=partials[0], partial_lse=partials[1], **shared,
            ),
            lambda: device.ops.merge(*partials, arrays, **maps, **shared),
        )  # fmt: skip

    def error(self, out: torch.Tensor) -> float:
        """Relative error of some rows against float64."""
        errors = []
        for row in range(0, len(self.q), max(1, len(self.q) // 4)):
            kv = self.kv[self.indices[row, : int(self.lengths[row])].long()].double()
            weights = torch.softmax(self.q[row].double() @ kv.T * self.scale, -1)
            wanted = weights @ kv[:, :512]
            errors.append(float((out[row].double() - wanted).norm() / wanted.norm()))
        return max(errors)


def timed(**calls: Callable[[], object]) -> dict[str, float]:
    return side_by_side_us(calls, nodes=8, repeats=15, flush=True)


def beside(problem: Problem, peer: Any) -> list[object]:
    """Our time, the peer's where there is one, and the floor."""
    problem.run()
    assert problem.error(problem.out) < 4e-3, "the decode is wrong: not timed"
    calls: dict[str, Callable[[], object]] = {"mine": problem.run}
    if peer is not None:
        given = problem.q, problem.kv, problem.indices, problem.scale, problem.lengths
        assert problem.error(peer.decode(*given)) < 1e-2, "the peer is wrong: not timed"
        calls["theirs"] = lambda: peer.decode(*given)
    times = timed(**calls)
    mine = times["mine"]
    line: list[object] = [f"{mine:.1f}"]
    if peer is not None:
        line += [f"{times['theirs']:.1f}", f"{times['theirs'] / mine:.2f}x"]
    floor = floor_us(problem.tokens, *problem.q.shape[:2])
    return [*line, f"{floor:.1f}", f"{mine / floor:.2f}"]


def lengths_of(kind: str, rows: int, topk: int, seed: int) -> np.ndarray:
    """Row lengths: full, half of them full, or uniform."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, topk + 1, rows)
    if kind != "uniform":
        lengths[rng.random(rows) < (1.0 if kind == "full" else 0.5)] = topk
    return lengths


def parts(heads: int) -> list[list[object]]:
    """What each op costs on its own, and decode and merge as they are run."""
    lines = []
    for rows in ROWS:
        problem = Problem(rows, heads)
        slots, decode, merge = problem.ops()
        problem.run()
        slots()
        assert torch.equal(problem.written[: problem.tokens], problem.kv_indices), "the slots are wrong: not timed"
        pieces = int(problem.plan.arrays.reduce_indptr[-1])
        times = timed(slots=slots, decode=decode, merge=merge, run=problem.run)
        lines.append([heads, rows, pieces, *(f"{value:.1f}" for value in times.values())])
    return lines


def budgets(heads: int) -> list[list[object]]:
    """What the split budget does: one piece per row, the rule, and no limit."""
    lines = []
    for rows in (1, 8, 64, 256):
        problems = {str(budget): Problem(rows, heads, split_budget=budget) for budget in (1, None, 32, -1)}
        times = timed(**{budget: problem.run for budget, problem in problems.items()})
        lines.append([heads, rows, *(f"{value:.1f}" for value in times.values())])
    return lines


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peer", help="file of a peer's decode")
    options.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    arguments = options.parse_args()
    refuse_debug()
    peer = plugin(arguments.peer)
    header = ["ours", *(["peer", "peer / ours"] if peer is not None else []), "floor", "ours / floor"]
    full = [[h, slots_of(h), rows, *beside(Problem(rows, h), peer)] for h in arguments.heads for rows in ROWS]
    others = []
    for heads in arguments.heads:
        for kind, topk in (("full", 512), ("full", 1024), ("half full", 2048), ("uniform", 2048)):
            for rows in FEW_ROWS:
                lengths = lengths_of(kind, rows, topk, arguments.seed)
                others.append([heads, topk, kind, rows, *beside(Problem(rows, heads, topk, lengths=lengths), peer)])
    text = "\n\n".join(
        [
            "Device time in us of decode and merge, bf16, rows of 2,048 tokens, L2 flushed before each:",
            table(["heads", "slots", "rows", *header], full),
            "Other row lengths (half full: the other half is uniform in 1..topk):",
            table(["heads", "topk", "lengths", "rows", *header], others),
            "The ops on their own, and decode and merge as they are run, the merge set up while the decode runs:",
            table(
                ["heads", "rows", "pieces", "slots", "decode", "merge", "decode and merge"],
                [line for heads in arguments.heads for line in parts(heads)],
            ),
            "Decode and merge by split budget:",
            table(
                ["heads", "rows", "one piece per row", "work-per-split rule", "32", "no limit (-1)"],
                [line for heads in arguments.heads for line in budgets(heads)],
            ),
        ]
    )
    publish("Cost of decoding", text, arguments.out)


if __name__ == "__main__":
    main()
