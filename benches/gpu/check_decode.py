"""The portable decode against float64 on this GPU: heads, dtypes, topk, rows, ragged and padded, any scale and budget.

For each head count and dtype the kernels are compiled once and run over random top-k indices. The relative error
`||out - ref|| / ||ref||` is over all rows of a case; that of LSE is the largest difference. The same rows under another
split budget must agree to rounding.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from dataclasses import asdict, dataclass

import numpy as np
import torch
from common import parser, publish, table

import mlaplan

HEADS = (8, 16, 24, 32, 64, 128)
FOLDS = {32: (1, 2), 64: (1, 4), 128: (1, 8)}
TYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8"))
CASES = tuple(itertools.product((512, 1024, 2048), (1, 3, 16, 64, 257, 512)))
SLOTS, BLOCK = 1 << 17, 64
KV_SCALE = 0.25  # what an fp8 entry is multiplied with
# Softmax scales by case; one that is not positive is somebody's mistake, and still says what the result is.
SOFTMAX_SCALES = tuple(factor * 576**-0.5 for factor in (1, 1, 4, 1, -1, 0))


@dataclass
class Found:
    """The worst of one head count, fold and dtype."""

    heads: int
    fold: int
    q_dtype: str
    kv_dtype: str
    cases: int = 0
    error: float = 0.0
    lse: float = 0.0
    splits: float = 0.0
    wrong_padding: int = 0


def reference(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense softmax attention of each row in float64."""
    outs, lses = [], []
    for first in range(0, len(q), 32):
        part = slice(first, first + 32)
        keys = kv[indices[part].long()].double()
        scores = q[part].double() @ keys.transpose(1, 2) * softmax_scale
        outside = torch.arange(indices.shape[1], device="cuda") >= lengths[part, None]
        scores.masked_fill_(outside[:, None], -torch.inf)
        lses.append(torch.logsumexp(scores, -1))
        outs.append(torch.softmax(scores, -1) @ keys[..., :512])
    return torch.cat(outs), torch.cat(lses)


def check(found: Found, topk: int, rows: int, softmax_scale: float, seed: int) -> None:
    """One case: ragged rows, some padding, under several budgets."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q_type = torch.float16 if found.q_dtype == "fp16" else torch.bfloat16
    padded = rows + seed % 5
    lengths = torch.randint(1, topk + 1, (rows,), generator=generator, device="cuda")
    lengths[torch.rand(rows, generator=generator, device="cuda") < 0.5] = topk
    seq_lens = torch.where(lengths == topk, lengths + 700, lengths).int()
    q = torch.randn(padded, found.heads, 576, generator=generator, device="cuda").to(q_type)
    kv = torch.randn(SLOTS, 576, generator=generator, device="cuda")
    scale = KV_SCALE if found.kv_dtype == "fp8" else 1.0
    kv = (kv / scale).to(torch.float8_e4m3fn if found.kv_dtype == "fp8" else q_type)
    # A request per row over one table: the token's position is its slot.
    positions = torch.randint(0, SLOTS, (padded, topk + 3), generator=generator, device="cuda", dtype=torch.int32)
    blocks = torch.arange(SLOTS // BLOCK, dtype=torch.int32, device="cuda").expand(rows, -1).contiguous()
    wanted, wanted_lse = reference(q[:rows], kv.float() * scale, positions[:rows, :topk], lengths, softmax_scale)
    outs = []
    for budget in (None, -1, 1, 3):
        config = mlaplan.PlannerConfig(
            max_rows=padded, max_requests=padded, arch=None, num_cus=264, topk=topk, heads=found.heads, fold=found.fold,
            q_dtype=found.q_dtype, kv_dtype=found.kv_dtype, split_budget=budget,
        )  # fmt: skip
        planner = mlaplan.Planner(config, "cuda")
        boundaries = np.arange(rows + 1, dtype=np.int32)
        plan = planner.plan(mlaplan.Batch(boundaries, mlaplan.Exact(seq_lens.cpu().numpy()), padded))
        out = torch.full((padded, found.heads, 512), 7.0, dtype=q_type, device="cuda")
        lse = torch.full((padded, found.heads), 7.0, device="cuda")
        scales = (None, KV_SCALE) if found.kv_dtype == "fp8" else (None, None)
        planner.decode(
            plan, q, kv, positions, blocks, block_size=BLOCK, scale=softmax_scale, out=out, lse=lse, fp8_scales=scales
        )
        found.error = max(found.error, float((out[:rows].double() - wanted).norm() / wanted.norm()))
        found.lse = max(found.lse, float((lse[:rows].double() - wanted_lse).abs().max()))
        found.wrong_padding += int((out[rows:] != 0).sum()) + int((~torch.isneginf(lse[rows:])).sum())
        outs.append(out[:rows].double())
        found.cases += 1
    found.splits = max(found.splits, *(float((out - outs[0]).norm() / outs[0].norm()) for out in outs[1:]))


def of_heads(heads: int) -> list[dict]:
    """All folds and dtypes of one head count; a process of its own, since most of the time is compiling."""
    results = []
    for fold, (q_dtype, kv_dtype) in itertools.product(FOLDS.get(heads, (1,)), TYPES):
        found = Found(heads, fold, q_dtype, kv_dtype)
        for number, (topk, rows) in enumerate(CASES):
            scale = SOFTMAX_SCALES[(number + number // 6) % len(SOFTMAX_SCALES)]
            check(found, topk, rows, scale, 100 * heads + number)
        results.append(asdict(found))
    return results


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--heads", type=int, nargs="+", default=list(HEADS))
    arguments = options.parse_args()
    with multiprocessing.get_context("spawn").Pool(len(arguments.heads)) as pool:
        results = [Found(**found) for part in pool.map(of_heads, arguments.heads) for found in part]
    limits = {"bf16": 4e-3, "fp16": 1e-3}
    failed = any(r.error > limits[r.q_dtype] or r.lse > 1e-3 or r.wrong_padding or not r.cases for r in results)
    header = ["heads", "fold", "q", "KV", "cases", "relative error", "LSE", "between budgets", "wrong padding"]
    lines = [
        [
            r.heads,
            r.fold,
            r.q_dtype,
            r.kv_dtype,
            r.cases,
            f"{r.error:.1e}",
            f"{r.lse:.1e}",
            f"{r.splits:.1e}",
            r.wrong_padding,
        ]
        for r in results
    ]
    publish("Portable decode against float64", table(header, lines), arguments.out)
    print(json.dumps({"failed": failed}))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
