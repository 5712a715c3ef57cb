"""What planning costs: the plan node in a graph, and `plan()` in each mode beside a straightforward builder.

The straightforward builder is a plug-in (`--peer FILE`): a module with `Seed(max_tokens, topk, device, launch)`, whose
`build(batch)` makes the same rows with NumPy and torch, and `batch(requests, tokens, context, device)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import graph_us, host_side_by_side_us, parser, plugin, publish, refuse_debug, table

import mlaplan
from mlaplan.layout import PlanArrays
from mlaplan.reference import plan as reference

ROWS = (1, 8, 64, 256, 512, 1024, 4096)
BATCHES = ((1, 1, 5000), (64, 1, 5000), (128, 4, 5000), (256, 1, 5000), (256, 1, 700), (512, 4, 9000))


def decode_batch(requests: int, tokens: int, lengths: np.ndarray, **more: Any) -> mlaplan.Batch:
    """A batch of `requests` decodes of `tokens` query tokens, host and device."""
    boundaries = (np.arange(requests + 1) * tokens).astype(np.int32)
    return mlaplan.Batch(
        boundaries,
        mlaplan.Exact(lengths.astype(np.int32)),
        device_query_start_loc=torch.from_numpy(boundaries).cuda(),
        device_seq_lens=torch.from_numpy(lengths.astype(np.int32)).cuda(),
        **more,
    )


def _check_by_reference(planner: mlaplan.Planner, plan: mlaplan.Plan, batch: mlaplan.Batch) -> None:
    """Compares the arrays of a plan with those of the reference."""
    wanted = PlanArrays(*(np.zeros(array.shape, np.int32) for array in plan.arrays))
    reference.plan(batch.query_start_loc, batch.lengths.seq_lens, wanted, planner.params)
    works = int(wanted.work_indptr[-1])
    for name, want, got in zip(PlanArrays._fields, wanted, plan.arrays, strict=True):
        count = works if name == "work_info" else None
        assert np.array_equal(want[:count], got[:count].cpu().numpy()), f"{name} is wrong: not timed"


def check(planner: mlaplan.Planner, plan: mlaplan.Plan, batch: mlaplan.Batch) -> None:
    """Compares a plan with the core's before anything is timed."""
    lengths = mlaplan.row_lengths(batch.query_start_loc, batch.lengths.seq_lens, planner.params.topk)
    if planner.params.policy != "aiter":
        _check_by_reference(planner, plan, batch)
        return
    wanted = mlaplan.schedule(
        mlaplan.kv_indptr(lengths),
        num_cus=planner.params.num_cus,
        max_split_per_batch=mlaplan.max_split_per_batch(
            int(lengths.max()), topk=planner.params.topk, num_cus=planner.params.num_cus
        ),
        fold=planner.params.fold,
        skip_empty=True,
    )
    works = plan.arrays.work_info[: wanted.num_works].cpu().numpy()
    assert np.array_equal(works, wanted.work_info), "the plan is wrong: not timed"


def node_us(rows: int, cus: int, lengths: np.ndarray, policy: str) -> float:
    """Device time of one plan node, what a replay of few nodes costs left out."""
    config = mlaplan.PlannerConfig(max_rows=rows, max_requests=rows, arch=None, num_cus=cus, policy=policy)
    planner = mlaplan.Planner(config, "cuda")
    batch = decode_batch(rows, 1, lengths)
    plan = planner.plan(batch, deferred=True)
    planner.refresh(plan)
    check(planner, plan, batch)

    def node() -> None:
        planner.device.plan(batch.device_query_start_loc, batch.device_seq_lens, plan.arrays, planner.params)

    few, many = 2, 42
    return (many * graph_us(node, nodes=many) - few * graph_us(node, nodes=few)) / (many - few)


def plan_node(cus: int, seed: int) -> list[list[object]]:
    """Device time of the plan node under every policy, for full rows and for rows of many lengths."""
    rng = np.random.default_rng(seed)
    lines = []
    for rows in ROWS:
        full, mixed = np.full(rows, 5000), rng.integers(1, 4096, rows)
        times = [node_us(rows, cus, lengths, policy) for policy in ("aiter", "balanced") for lengths in (full, mixed)]
        times.append(node_us(rows, cus, mixed, "invariant"))
        lines.append([rows, cus, *(f"{value:.2f}" for value in times)])
    return lines


def _miss(builder: Any, batch: Any) -> None:
    """A build of the straightforward builder whose plan is not the one before."""
    builder.key = None
    builder.build(batch)


def host_modes(peer: Any) -> list[list[object]]:
    """Host time of `plan()` by what there is to do."""
    lines = []
    for requests, tokens, context in BATCHES:
        rows = requests * tokens
        config = mlaplan.PlannerConfig(max_rows=8192, max_requests=1024, arch=None, num_cus=304)
        planner = mlaplan.Planner(config, "cuda")
        same = decode_batch(requests, tokens, np.full(requests, context))
        changed = [decode_batch(requests, tokens, np.full(requests, 100 + step)) for step in range(2)]
        unknown = mlaplan.Batch(same.query_start_loc, None, device_query_start_loc=same.device_query_start_loc,
                                device_seq_lens=same.device_seq_lens)  # fmt: skip
        check(planner, planner.plan(changed[0]), changed[0])
        check(planner, planner.plan(unknown), same)
        step = iter(range(1_000_000))
        calls: dict[str, Callable[[], object]] = {
            "nothing": lambda planner=planner, same=same: planner.plan(same),
            "copy": lambda planner=planner, changed=changed, step=step: planner.plan(changed[next(step) % 2]),
            "launch": lambda planner=planner, unknown=unknown: planner.plan(unknown),
            "deferred": lambda planner=planner, unknown=unknown: planner.plan(unknown, deferred=True),
        }
        if peer is not None:
            builder, peer_batch = peer.Seed(8192, 2048, "cuda", None), peer.batch(requests, tokens, context, "cuda")
            calls |= {"peer hit": partial(builder.build, peer_batch), "peer miss": partial(_miss, builder, peer_batch)}
        times = host_side_by_side_us(calls)
        assert planner.stats.read_backs == 0
        line: list[object] = [
            f"{requests} x {tokens}, {context}",
            *(f"{times[name]:.1f}" for name in ("nothing", "copy", "launch", "deferred")),
        ]
        if peer is not None:
            hit, missed = times["peer hit"], times["peer miss"]
            line += [
                f"{hit:.0f}",
                f"{missed:.0f}",
                f"{hit / times['nothing']:.0f}x",
                f"{missed / times['copy']:.1f}x",
                f"{missed / times['launch']:.1f}x",
            ]
        lines.append([*line, rows])
    return lines


def behind_busy() -> list[list[object]]:
    """Host time of `plan()` behind five queued matrix products, against an idle device."""
    import time

    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    config = mlaplan.PlannerConfig(max_rows=8192, max_requests=1024, arch=None, num_cus=304)
    planner = mlaplan.Planner(config, "cuda")
    changed = [decode_batch(256, 1, np.full(256, 100 + step)) for step in range(2)]
    unknown = mlaplan.Batch(changed[0].query_start_loc, None, device_query_start_loc=changed[0].device_query_start_loc,
                            device_seq_lens=changed[0].device_seq_lens)  # fmt: skip
    calls = {
        "copy": lambda step: planner.plan(changed[step % 2]),
        "launch": lambda _step: planner.plan(unknown),
        "deferred": lambda _step: planner.plan(unknown, deferred=True),
    }
    lines = []
    for name, call in calls.items():
        # The same work on the host before each, so that only the device's being busy differs.
        line: list[object] = [name]
        for waits in (True, False):
            times = []
            for step in range(40):
                for _ in range(5):
                    square @ square
                if waits:
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                call(step)
                times.append(1e6 * (time.perf_counter() - begin))
                torch.cuda.synchronize()
            line.append(f"{sorted(times)[20]:.1f}")
        lines.append(line)
    return lines


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peer", help="file of the straightforward builder")
    arguments = options.parse_args()
    refuse_debug()
    peer = plugin(arguments.peer)
    node = [line for cus in (304, 256) for line in plan_node(cus, arguments.seed)]
    modes = host_modes(peer)
    header = ["requests x tokens, context", "nothing", "copy", "launch", "deferred"]
    if peer is not None:
        header += ["peer hit", "peer miss", "hit / nothing", "miss / copy", "miss / launch"]
    text = "\n\n".join(
        [
            "Device time of the plan node in us, the difference of replays with 42 and with 2 of them:",
            table(
                ["rows", "CUs", "full rows", "mixed rows", "full, balanced", "mixed, balanced", "mixed, invariant"],
                node,
            ),
            "Host time of `plan()` in us, median, idle device:",
            table([*header, "rows"], modes),
            "Host time of `plan()` in us behind five queued 8192^3 products, 256 requests:",
            table(["action", "idle", "busy"], behind_busy()),
        ]
    )
    publish("Cost of planning", text, arguments.out)


if __name__ == "__main__":
    main()
