"""A decode loop of an engine that plans with mlaplan: a graph per batch size, and nothing to plan on the host.

    python examples/embed.py          on a GPU if torch and Triton are there and see one, otherwise on the host

The engine here has three requests that each get one token a step. What it keeps are the inputs of its graphs:
arrays of fixed address that it fills before each step. The first node of a graph makes the plan from them.
"""

from __future__ import annotations

import numpy as np

import mlaplan
from mlaplan.graphs import DecodeGraphs, DecodeInputs
from mlaplan.reference.attention import attention

ROWS, REQUESTS, TOPK, BLOCK_SIZE, HEADS = 4, 4, 64, 16, 16


def main() -> None:
    """Runs 40 steps and compares the last one with dense attention."""
    rng = np.random.default_rng(0)
    config = mlaplan.PlannerConfig(
        max_rows=ROWS, max_requests=REQUESTS, topk=TOPK, heads=HEADS, arch=None, num_cus=32, capture_sizes=(ROWS,)
    )
    planner = mlaplan.Planner(config, device="auto")
    device = planner.device

    def filled(shape: tuple[int, ...], dtype: str, values: object = 0) -> object:
        array = device.empty(shape, dtype)
        device.store(
            array, np.broadcast_to(np.asarray(values, np.float32 if dtype != "int32" else np.int32), shape).copy()
        )
        return array

    kv_cache = rng.standard_normal((64 * BLOCK_SIZE, config.head_dim)).astype(np.float32)
    block_table = (1 + np.arange(REQUESTS * 15, dtype=np.int32)).reshape(
        REQUESTS, 15
    )  # block 0 is kept for invalid slots
    inputs = DecodeInputs(
        query_start_loc=filled((REQUESTS + 1,), "int32"),
        seq_lens=filled((REQUESTS,), "int32"),
        q=filled((ROWS, HEADS, config.head_dim), "bf16"),
        kv_cache=filled(kv_cache.shape, "bf16", kv_cache),
        topk_indices=filled((ROWS, TOPK), "int32"),
        block_table=filled(block_table.shape, "int32", block_table),
        out=filled((ROWS, HEADS, config.v_head_dim), "bf16"),
        lse=filled((ROWS, HEADS), "float32"),
    )
    graphs = DecodeGraphs(planner, inputs, block_size=BLOCK_SIZE)
    graphs.capture(ROWS, REQUESTS)

    seq_lens = np.array([30, 62, 150, 0], np.int32)  # the fourth request is idle: padding of the graph
    query_start_loc = np.array([0, 1, 2, 3, 3], np.int32)
    for _step in range(40):
        seq_lens[:3] += 1  # two requests grow across topk on the way
        # A real indexer picks the best tokens; any positions below the row's length do here.
        positions = rng.integers(0, np.maximum(seq_lens, 1)[:, None], (ROWS, TOPK)).astype(np.int32)
        q = rng.standard_normal((ROWS, HEADS, config.head_dim)).astype(np.float32)
        device.store(inputs.query_start_loc, query_start_loc)
        device.store(inputs.seq_lens, seq_lens)
        device.store(inputs.topk_indices, positions)
        device.store(inputs.q, q)
        plan = planner.plan(graphs.batch(ROWS, REQUESTS), deferred=True)
        graphs.replay(plan, REQUESTS)

    out = device.to_host(inputs.out)
    lengths = np.minimum(seq_lens, TOPK)
    slots = block_table[np.arange(ROWS)[:, None], positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    used = slots[np.arange(TOPK) < lengths[:, None]].astype(np.int32)
    wanted, _lse = attention(q, kv_cache, used, np.concatenate([[0], np.cumsum(lengths)]), config.head_dim**-0.5, 512)
    error = float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
    stats = planner.stats
    print(
        f"{device.name}: 40 steps, relative error {error:.1e}, copies {stats.copies}, read-backs {stats.read_backs - 1}"
    )
    if not error < 1e-2 or out[3].any():
        raise SystemExit("the output differs from dense attention")


if __name__ == "__main__":
    main()
