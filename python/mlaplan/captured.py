"""Pure decode steps of a run through captured graphs, as an engine runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan.graphs import DecodeGraphs, DecodeInputs

if TYPE_CHECKING:
    from mlaplan.batch import Batch
    from mlaplan.checks import DecodeValues
    from mlaplan.plan import Plan
    from mlaplan.planner import Planner
    from mlaplan.workload import SchedulerConfig, Step


class CapturedSteps:
    """Graphs of a planner for each capture size, and the buffers that their steps are fed through."""

    def __init__(self, planner: Planner, scheduler: SchedulerConfig, kv_cache: Any) -> None:
        """Allocates the buffers; a graph is captured when its size first comes.

        Args:
            planner: Who plans.
            scheduler: Whose capture sizes and query tokens per decode hold.
            kv_cache: KV slots on the device. Shape (num_slots, head_dim).
        """
        device, config = planner.device, planner.config
        self._planner = planner
        self._sizes = frozenset(scheduler.graph_sizes)
        self._decode_tokens = scheduler.decode_tokens
        rows = max(self._sizes, default=1)
        self._requests = -(-rows // scheduler.decode_tokens)
        self._width = scheduler.table_width
        q_dtype = "bf16" if config.q_dtype == "fp8" else config.q_dtype
        self.inputs = DecodeInputs(
            query_start_loc=device.allocate(self._requests + 1),
            seq_lens=device.allocate(self._requests),
            q=device.empty((rows, config.heads, config.head_dim), q_dtype),
            kv_cache=kv_cache,
            topk_indices=device.view(device.allocate(rows * config.topk), 0, (rows, config.topk)),
            block_table=device.view(device.allocate(self._requests * self._width), 0, (self._requests, self._width)),
            out=device.empty((rows, config.heads, config.v_head_dim), config.out_dtype),
            lse=device.empty((rows, config.heads), "float32"),
        )
        device.store(self.inputs.q, np.ones(self.inputs.q.shape, np.float32))
        self._graphs = DecodeGraphs(planner, self.inputs, block_size=scheduler.block_size)

    def takes(self, step: Step) -> bool:
        """Whether a step is one that an engine would replay a graph for."""
        return step.is_pure_decode and step.padded_rows in self._sizes

    def load(self, step: Step, values: DecodeValues | None) -> Batch:
        """Feeds a step, and returns its batch, of which the host knows nothing but the size.

        Args:
            step: The step.
            values: What it decodes; None leaves queries, positions and tables as they are.
        """
        rows, requests = step.padded_rows, self._requests_of(step)
        self._graphs.capture(rows, requests)
        device, inputs = self._planner.device, self.inputs
        boundaries = np.full(requests + 1, step.query_start_loc[-1], np.int32)
        boundaries[: step.num_requests + 1] = step.query_start_loc
        seq_lens = np.zeros(requests, np.int32)
        seq_lens[: step.num_requests] = step.seq_lens
        device.store(inputs.query_start_loc[: requests + 1], boundaries)
        device.store(inputs.seq_lens[:requests], seq_lens)
        if values is not None:
            device.store(inputs.q[:rows], values.q)
            device.store(inputs.topk_indices[:rows], values.topk_indices)
            device.store(inputs.block_table[: step.num_requests, : values.block_table.shape[1]], values.block_table)
        return self._graphs.batch(rows, requests)

    def replay(self, plan: Plan, step: Step) -> tuple[Any, Any]:
        """Runs the captured step; returns its output and LSE."""
        self._graphs.replay(plan, self._requests_of(step))
        return self.inputs.out[: step.padded_rows], self.inputs.lse[: step.padded_rows]

    def _requests_of(self, step: Step) -> int:
        return step.padded_rows // self._decode_tokens
