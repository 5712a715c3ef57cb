"""A decode step captured per batch size, as an engine does: plan, slots, decode and merge are nodes of one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan.batch import Batch

if TYPE_CHECKING:
    from mlaplan.device import Graph
    from mlaplan.plan import Plan
    from mlaplan.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """What a captured decode step reads and writes: device arrays that never move, filled anew for each step.

    For at most R requests and P rows.

    Attributes:
        query_start_loc: Shape (R + 1,), int32. Idle requests come last and are empty.
        seq_lens: Shape (R,), int32. 0 for idle requests.
        q: Shape (P, heads, head_dim).
        kv_cache: Shape (num_slots, head_dim).
        topk_indices: Shape (P, at least topk), int32.
        block_table: Shape (R, width), int32.
        out: Shape (P, heads, v_head_dim).
        lse: Shape (P, heads), float32.
    """

    query_start_loc: Any
    seq_lens: Any
    q: Any
    kv_cache: Any
    topk_indices: Any
    block_table: Any
    out: Any
    lse: Any


class DecodeGraphs:
    """Captured decode steps of one planner, one graph for each number of rows and requests.

    A step then is: fill the inputs, `planner.plan(batch, deferred=True)`, `replay`. The host does not know the
    lengths, and need not: the graph's first node makes the plan of what the inputs hold.

    Attributes:
        inputs: The arrays that the graphs hold the addresses of.
    """

    def __init__(self, planner: Planner, inputs: DecodeInputs, *, block_size: int, scale: float | None = None) -> None:
        """Captures nothing yet.

        Args:
            planner: Whose plans the graphs make; its buffers' addresses are captured.
            inputs: The arrays to read and write.
            block_size: KV slots of a block.
            scale: Factor of q k; None for head_dim ** -0.5.
        """
        self.inputs = inputs
        self._planner = planner
        self._block_size = block_size
        self._scale = scale
        self._graphs: dict[tuple[int, int], Graph] = {}

    def batch(self, rows: int, num_requests: int) -> Batch:
        """A batch that says nothing but its size: the inputs hold the rest.

        Args:
            rows: Rows of the graph, padding included.
            num_requests: Requests of the graph, idle ones included.
        """
        return Batch(
            np.zeros(num_requests + 1, np.int32),
            padded_rows=rows,
            device_query_start_loc=self.inputs.query_start_loc[: num_requests + 1],
            device_seq_lens=self.inputs.seq_lens[:num_requests],
        )

    def capture(self, rows: int, num_requests: int) -> None:
        """Captures a decode step, unless it is there. The step runs once before, so that every kernel is compiled.

        Args:
            rows: Rows of the graph, padding included.
            num_requests: Requests of the graph, idle ones included.

        Raises:
            ValueError: The planner has no room for so many rows or requests.
        """
        if (rows, num_requests) in self._graphs:
            return
        batch = self.batch(rows, num_requests)
        self._decode(self._planner.plan(batch, deferred=True))
        plan = self._planner.plan(batch, deferred=True)
        with self._planner.device.record() as graph:
            self._decode(plan)
        self._graphs[rows, num_requests] = graph

    def replay(self, plan: Plan, num_requests: int) -> None:
        """Queues the captured step for a deferred plan.

        Args:
            plan: A plan of this planner, deferred, with as many padded rows as were captured.
            num_requests: Requests that the graph was captured for.

        Raises:
            KeyError: No graph was captured for this size.
            ValueError: The plan is not deferred: the planner would take what the graph makes for the last plan's.
        """
        if plan.decision.action != "deferred":
            raise ValueError(
                f"plan has action {plan.decision.action!r}, must be deferred: the graph makes a plan of its own"
            )
        self._graphs[plan.padded_rows, num_requests].replay()

    def _decode(self, plan: Plan) -> None:
        inputs, rows = self.inputs, plan.padded_rows
        self._planner.decode(
            plan,
            inputs.q[:rows],
            inputs.kv_cache,
            inputs.topk_indices[:rows],
            inputs.block_table,
            out=inputs.out[:rows],
            lse=inputs.lse[:rows],
            block_size=self._block_size,
            scale=self._scale,
        )
