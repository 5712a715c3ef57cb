"""The planner: turns each step's batch into nothing, one copy, one launch or a node of a captured graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan import _core
from mlaplan.arguments import check_decode, check_outputs, check_scales, finite
from mlaplan.backends import make_backend, partial_capacity
from mlaplan.batch import Batch, Exact, UpperBound
from mlaplan.config import PlannerConfig
from mlaplan.device import Device, make_device
from mlaplan.layout import Layout, PlanArrays
from mlaplan.plan import Constants, Plan, Quality

if TYPE_CHECKING:
    import numpy.typing as npt

    from mlaplan._types import Int32Array


@dataclass(frozen=True, slots=True)
class Stats:
    """What a planner has done since it was made.

    Attributes:
        steps: Plans asked for.
        actions: How often each action was decided.
        reasons: How often each reason counted.
        launches: Ops run on the device, refreshes and decodes included.
        copies: Uploads from the host.
        bytes_copied: Bytes of those uploads.
        allocations: Device arrays made.
        waits: Times the host waited for the device.
        read_backs: Times device memory was read by the host.
    """

    steps: int
    actions: dict[str, int]
    reasons: dict[str, int]
    launches: int
    copies: int
    bytes_copied: int
    allocations: int
    waits: int
    read_backs: int


class Planner:
    """Plans the steps of one model part on one device.

    All device memory is allocated here and never moves. A planner serves one stream of steps; micro-batches and draft
    models that are under way at the same time get a planner each.

    Example:
        >>> import numpy as np, mlaplan
        >>> planner = mlaplan.Planner(mlaplan.PlannerConfig(max_rows=64, max_requests=64), device="cpu")
        >>> qsl = np.array([0, 1, 3], np.int32)
        >>> plan = planner.plan(mlaplan.Batch(qsl, mlaplan.Exact(np.array([5, 9000], np.int32))))
        >>> plan.decision.action, plan.kv_indptr.tolist()
        ('copy', [0, 5, 2053, 4101])
    """

    def __init__(self, config: PlannerConfig, device: Any = "auto") -> None:
        """Allocates the device buffers.

        Args:
            config: What the planner is made for.
            device: "cpu", "cuda", "auto" or a device object; see `mlaplan.device.make_device`.

        Raises:
            ImportError: A GPU was asked for without torch and Triton.
            ValueError: A setting does not fit the device, or rows x topk passes 2^31 - 1.
        """
        if not isinstance(config, PlannerConfig):
            raise TypeError(f"config must be a PlannerConfig, not {type(config).__name__}")
        self.device: Device = make_device(device)
        self.backend, self.config = make_backend(config.resolved(self.device.num_cus), self.device)
        if config.fold not in (None, self.config.fold):
            raise ValueError(
                f"fold is {config.fold}, but backend {self.backend.name!r} takes {self.config.fold} planner rows a row"
            )
        self.params = self.config.params
        sizes = {"num_cus": self.params.num_cus, "fold": self.params.fold}
        self._layouts = [Layout.of(rows, **sizes) for rows in self.config.row_classes]
        self._step = _core.StepPlanner(
            max_requests=self.config.max_requests,
            topk=self.params.topk,
            num_cus=self.params.num_cus,
            fold=self.params.fold,
            split_budget=self.params.split_budget,
            min_tokens_per_split=self.params.min_tokens_per_split,
            classes=[(layout.rows, layout.offsets, layout.words) for layout in self._layouts],
        )
        self._arena = self.device.allocate(self._layouts[-1].words)
        self._ring = self.device.staging(self.config.staging_slots, self._layouts[-1].words)
        self._arrays = [self._views(layout) for layout in self._layouts]
        self._constants = self._make_constants()
        self._constants_lost = False
        self._kv_indices: Any = None
        # Number of the last plan that was or may have been written; a plan is held if it bears it.
        self._generation = 0
        self._decisions: Counter[int] = Counter()
        self._examples: dict[int, _core.Decision] = {}

    def plan(self, batch: Batch, *, deferred: bool = False) -> Plan:
        """Makes the device hold the plan of `batch`, with as little work as that takes.

        Never reads device memory and never waits for the device, except for a staging area when every one is still
        being copied from and the batch has no device arrays.

        Args:
            batch: The step's batch.
            deferred: Leave the plan to its first consumer, which calls `refresh`: eagerly, or while a graph is captured
                whose replays then make the plan by themselves.

        Returns:
            The plan; `Plan.decision` says what was done and why.

        Raises:
            TypeError: An array has the wrong kind or dtype.
            ValueError: An argument breaks a rule; the message names it, the position and the value.
            mlaplan.PlanError: The batch exceeds the capacity, device arrays are needed, or a copy would be captured
                into a graph. A `ValueError`.
        """
        if not isinstance(batch, Batch):
            raise TypeError(f"batch must be a Batch, not {type(batch).__name__}")
        seq_lens, max_rejects = _host_lengths(batch)
        if deferred:
            self._check_device_arrays(batch)
            decision = self._step.defer(
                batch.query_start_loc, seq_lens, max_rejects, batch.padded_rows, batch.boundaries_exact
            )
            self._generation += 1
            return self._finish(batch, decision)
        on_device = batch.on_device
        if on_device or batch.device_query_start_loc is not None or batch.device_seq_lens is not None:
            self._check_device_arrays(batch)
        decision = self._step.decide(
            batch.query_start_loc,
            seq_lens,
            max_rejects,
            batch.padded_rows,
            batch.boundaries_exact,
            on_device,
            self.config.always_rebuild,
        )
        action = decision.action
        if action == "nothing":
            return self._finish(batch, decision, self._generation)
        if action == "copy" and self.device.capture() is not None:
            # A replay would bring back what the staging area holds by then, and the host would believe in a plan
            # that never ran.
            raise _core.PlanError(
                "a copy cannot be captured into a graph: plan with deferred=True and refresh under capture"
            )
        self._generation += 1
        if action == "launch":
            plan = self._finish(batch, decision)
            self._launch(plan)
            return plan
        by_device = on_device and self.config.schedule_maker == "device"
        slot = None if by_device else self._ring.acquire()
        if slot is None and on_device:
            plan = self._finish(batch, self._step.launch_instead(decision, not by_device))
            self._launch(plan)
            self._step.commit()
            return plan
        return self._copy(batch, decision, self._ring.wait() if slot is None else slot)

    def refresh(self, plan: Plan) -> None:
        """Makes rows and schedule in place from the device's own arrays, unless the buffers hold the plan already.

        One launch per plan: every layer may call it. While a graph is captured the launch becomes a node of the
        graph, once per plan and capture, and each replay makes the plan of what the device arrays hold then.

        Args:
            plan: A plan of this planner, deferred or not.

        Raises:
            ValueError: The plan is another planner's, or has no device arrays to be made from.
        """
        self._check_plan(plan)
        graph = self.device.capture()
        if graph is None:
            if plan.generation == self._generation:
                return
        elif plan.captured is graph:
            return
        if not plan.batch.on_device:
            raise _core.PlanError(
                "device_query_start_loc and device_seq_lens are needed to make this plan on the device"
            )
        if self._constants_lost:
            self._restore_constants()
        self._step.made_on_device()
        self._generation += 1
        self._launch(plan)

    def remake(self, plan: Plan) -> None:
        """Makes a plan again from what the device's arrays hold now, whatever the buffers hold.

        For lengths that the device changed itself, as between two draft steps: one launch, or one more node of the
        graph being captured.

        Args:
            plan: A plan of this planner with device arrays.

        Raises:
            ValueError: As `refresh`.
        """
        plan.generation, plan.captured = -1, None
        self.refresh(plan)

    def decode(  # noqa: PLR0913 - the arrays of a decode, each with a name of its own
        self,
        plan: Plan,
        q: Any,
        kv_cache: Any,
        topk_indices: Any,
        block_table: Any,
        *,
        block_size: int,
        scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        fp8_scales: tuple[Any, Any] = (None, None),
    ) -> tuple[Any, Any]:
        """Attends each row to its KV slots, after making the plan if nobody has.

        Args:
            plan: This step's plan.
            q: Queries. Shape (padded_rows, heads, head_dim).
            kv_cache: KV slots. Shape (num_slots, head_dim); slot 0 must hold finite values.
            topk_indices: Token positions that each row attends to, the first `row length` of each row. Shape
                (padded_rows, at least topk), int32. A position that is negative or beyond the table reads slot 0.
            block_table: KV blocks of each request. Shape (R, width), int32.
            block_size: KV slots of a block.
            scale: Factor of q k; None for head_dim ** -0.5.
            out: Where to write the output; None for a new array. Shape (padded_rows, heads, v_head_dim).
            lse: Where to write the natural log of the sum of exponentials; None for a new array. Shape (padded_rows,
                heads), float32.
            fp8_scales: Factors of queries and of KV where they are fp8. Each shape (1,), float32.

        Returns:
            Output and LSE. Rows of length 0, padding included, give zeros and -inf.

        Raises:
            TypeError: An argument has the wrong kind or dtype; the message names it.
            ValueError: A shape or number does not fit the plan; the message names the argument.
        """
        self._check_plan(plan)
        check_decode(plan, self.config, type(self._arena), q, kv_cache, topk_indices, block_table, block_size)
        check_outputs(plan, self.config, type(self._arena), out, lse)
        check_scales(fp8_scales)
        scale = self.config.head_dim**-0.5 if scale is None else finite("scale", scale)
        self.refresh(plan)
        if self._kv_indices is None:
            # Not before: who decodes elsewhere has an array of its own for this, and it is the largest of all.
            self._kv_indices = self.device.empty((self.config.max_rows * self.params.topk,), "int32")
        kv_indices = self._kv_indices
        self.device.run(
            self.device.ops.slots,
            topk_indices,
            block_table,
            plan.arrays.request_ids,
            plan.arrays.kv_indptr,
            kv_indices,
            block_size=block_size,
            num_rows=plan.padded_rows,
        )
        return self.backend.decode(plan, q, kv_cache, kv_indices, scale=scale, out=out, lse=lse, fp8_scales=fp8_scales)

    def invalidate(self) -> None:
        """Forgets what the device holds: call it when the buffers were discarded or written by somebody else.

        The next plan, made or refreshed, writes the arrays that never change anew. Not this call, for the memory may
        not be back yet.
        """
        self._step.invalidate()
        self._generation += 1
        self._constants_lost = True

    def quality(self, plan: Plan) -> Quality:
        """Finish time and lower bound of a plan; see `Plan.quality`."""
        self.refresh(plan)
        arrays = [self.device.to_host(array) for array in plan.arrays]
        lengths = np.diff(arrays[1])
        works = arrays[4][: arrays[2][-1]]
        return schedule_quality(lengths, arrays[2], works, self.params.fold)

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        actions: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for key, times in self._decisions.items():
            example = self._examples[key]
            actions[example.action] += times
            for reason in example.reasons:
                reasons[reason] += times
        counters = self.device.counters
        return Stats(
            steps=sum(actions.values()),
            actions=dict(actions),
            reasons=dict(reasons),
            launches=counters.launches,
            copies=counters.copies,
            bytes_copied=counters.bytes_copied,
            allocations=counters.allocations,
            waits=counters.waits,
            read_backs=counters.read_backs,
        )

    def _copy(self, batch: Batch, decision: _core.Decision, slot: int) -> Plan:
        written = self._step.write(self._ring.areas[slot])
        self.device.upload(self._ring, slot, self._arena, written.words)
        plan = self._finish(batch, decision, self._generation)
        plan.num_works = written.num_works
        plan.split_budget = written.split_budget
        if self.backend.makes_schedule:
            self.backend.make_schedule(plan)
        # Last of all: had anything above failed, the next step must not believe in this plan.
        self._step.commit()
        return plan

    def _launch(self, plan: Plan) -> None:
        batch = plan.batch
        self.device.plan(batch.device_query_start_loc, batch.device_seq_lens, plan.arrays, self.params)
        # Under capture nothing ran: the buffers hold what they held, until a replay that the host does not see. Set
        # when the launch is through, so that a failed one is tried again.
        plan.captured = self.device.capture()
        plan.generation = self._generation if plan.captured is None else -1

    def _finish(self, batch: Batch, decision: _core.Decision, generation: int = -1) -> Plan:
        if self._constants_lost:
            self._restore_constants()
        key = decision.key
        self._decisions[key] += 1
        if key not in self._examples:
            self._examples[key] = decision
        row_class = decision.row_class
        return Plan(
            batch=batch,
            decision=decision,
            arrays=self._arrays[row_class],
            constants=self._constants[row_class],
            planner=self,
            generation=generation,
        )

    def _views(self, layout: Layout) -> PlanArrays:
        views = zip(layout.offsets, layout.shapes, strict=True)
        return PlanArrays(*(self.device.view(self._arena, offset, shape) for offset, shape in views))

    def _constant_values(self) -> list[npt.NDArray[Any]]:
        """Host values of the constants that all classes share, then the pointers of each class."""
        tiles = self.config.max_rows * self.params.fold
        # aiter before v0.1.9 views the partials as rows of all heads again.
        partials = partial_capacity(tiles, self.params.num_cus, multiple=self.params.fold)
        steps = np.arange(tiles + 1, dtype=np.int32)
        shared = (steps, np.ones(tiles, np.int32), np.stack([steps[:-1], steps[1:]], axis=1))
        address = self.device.address
        pointers = (np.array([address(a.work_indptr), address(a.work_info)], np.uint64) for a in self._arrays)
        return [*shared, np.arange(partials, dtype=np.int32), *pointers]

    def _make_constants(self) -> list[Constants]:
        made = (self.device.array(values) for values in self._constant_values())
        queries, page_lens, final_map, partial_map, *pointers = made
        return [Constants(queries, page_lens, final_map, partial_map, own) for own in pointers]

    def _restore_constants(self) -> None:
        """Writes the constants again, once the memory that was lost is there to be written."""
        if self.device.capture() is not None:
            return
        arrays = [*self._constants[0][:-1], *(constants.work_metadata_ptrs for constants in self._constants)]
        for array, values in zip(arrays, self._constant_values(), strict=True):
            self.device.store(array, values)
        self._constants_lost = False

    def _check_device_arrays(self, batch: Batch) -> None:
        for name in ("device_query_start_loc", "device_seq_lens"):
            if getattr(batch, name) is None:
                raise _core.PlanError(
                    f"{name} is needed: a plan is made on the device from both of the device's arrays"
                )
        boundaries: Any = batch.query_start_loc
        if not isinstance(boundaries, np.ndarray) or boundaries.ndim != 1 or not boundaries.size:
            _core.segment_lengths(boundaries)  # says what is wrong with them
        num_requests = boundaries.size - 1
        try:
            self.device.check("device_query_start_loc", batch.device_query_start_loc, num_requests + 1)
            self.device.check("device_seq_lens", batch.device_seq_lens, num_requests)
        except (TypeError, ValueError):
            # Where the host's boundaries are at fault the device's only seem to be.
            _core.segment_lengths(boundaries)
            raise

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a Plan, not {type(plan).__name__}")
        if plan.planner is not self:
            raise ValueError("plan belongs to another planner, whose buffers it describes")


def schedule_quality(row_lengths: Int32Array, work_indptr: Int32Array, work_info: Int32Array, fold: int) -> Quality:
    """Finish time and lower bound of a schedule, in aiter's units.

    Args:
        row_lengths: Length of each row before folding, in tokens. Shape (rows,), int32.
        work_indptr: First work of each slot. Shape (C + 1,), int32.
        work_info: Works. Shape (works, 8), int32.
        fold: Planner rows per token row.

    Returns:
        Both numbers, the bound for as many slots as the schedule uses.
    """
    table = _core.CostTable.named("aiter")
    used = int(np.count_nonzero(np.diff(work_indptr)))
    finish = table.finish_time(work_indptr, np.ascontiguousarray(work_info).reshape(-1))
    return Quality(finish, table.lower_bound(row_lengths, max(used, 1), fold=fold))


def _host_lengths(batch: Batch) -> tuple[Int32Array | None, int | None]:
    lengths = batch.lengths
    if lengths is None:
        return None, None
    # None inside would be taken for lengths that are not known, or a bound for an exact length.
    if isinstance(lengths, Exact):
        if lengths.seq_lens is None:
            raise TypeError("seq_lens must be a one-dimensional int32 NumPy array, not NoneType")
        return lengths.seq_lens, None
    if isinstance(lengths, UpperBound):
        if lengths.bound is None:
            raise TypeError("seq_lens_bound must be a one-dimensional int32 NumPy array, not NoneType")
        if lengths.max_rejects is None:
            raise TypeError("max_rejects must be a whole number, not NoneType")
        return lengths.bound, lengths.max_rejects
    raise TypeError(f"lengths must be Exact, UpperBound or None, not {type(lengths).__name__}")
