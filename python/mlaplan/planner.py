"""The planner: turns each step's batch into nothing, one copy, one launch or a node of a captured graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan import _core
from mlaplan.arguments import check_decode, check_outputs, check_scales, finite
from mlaplan.backends import make_backend, partial_capacity
from mlaplan.batch import Batch, host_lengths, sized_batch
from mlaplan.config import PlannerConfig
from mlaplan.device import Device, make_device
from mlaplan.layout import Layout, PlanArrays
from mlaplan.plan import Constants, Plan
from mlaplan.quality import Quality, schedule_quality
from mlaplan.stats import Stats, Tally

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from mlaplan.checks import Difference
    from mlaplan.observer import Observer
    from mlaplan.recorder import Recorder
    from mlaplan.selfcheck import SelfCheck


# Batches without host arrays whose decisions are kept; steady decodes come in a few hundred sizes.
_MOST_DEFERRALS = 8192


class Planner:
    """Plans the steps of one model part on one device.

    All device memory is allocated here and never moves. A planner serves one stream of steps in one thread; threads,
    micro-batches and draft models that are under way at the same time get a planner each.

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
        self.backend, self.config = make_backend(config, self.device)
        if config.fold not in (None, self.config.fold):
            raise ValueError(
                f"fold is {config.fold}, but backend {self.backend.name!r} takes {self.config.fold} planner rows a row"
            )
        self.params = self.config.params
        params = self.params
        self.device.check_sizes(self.config.row_classes[-1], params)
        self._layouts = [
            Layout.of(rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
            for rows in self.config.row_classes
        ]
        self._step = _core.StepPlanner(
            max_requests=self.config.max_requests,
            topk=self.params.topk,
            num_cus=self.params.num_cus,
            fold=self.params.fold,
            split_budget=self.params.split_budget,
            min_tokens_per_split=self.params.min_tokens_per_split,
            classes=[(layout.rows, layout.offsets, layout.words) for layout in self._layouts],
            policy=self.params.policy,
            cost_table=None if self.params.cost_table is None else self.params.cost_table.fields,
            piece_tokens=self.params.piece_tokens,
            device_makes=self.config.schedule_maker == "device",
        )
        self._arena = self.device.allocate(self._layouts[-1].words)
        self._ring = self.device.staging(self.config.staging_slots, self._layouts[-1].words)
        self._arrays = [self._views(layout) for layout in self._layouts]
        self._constants = self._make_constants()
        self._constants_lost = False
        self._kv_indices: Any = None
        # Number of the last plan that was or may have been written; a plan is held if it bears it.
        self._generation = 0
        self._arrived = 0  # ticket of the last plan whose copy or launch was queued whole
        self._tally = Tally()
        self._deferrals: dict[tuple[int, int, int], _core.Decision] = {}
        # Who records or checks; None costs one comparison a step.
        self.observer: Observer | None = None
        self.self_checks = (0, 0)  # comparisons made, those of ended self-checks too, and how many differed

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
        if self.observer is not None and not self.observer.planning:
            return self.observer.plan(batch, deferred=deferred)
        if not isinstance(batch, Batch):
            raise TypeError(f"batch must be a Batch, not {type(batch).__name__}")
        seq_lens, max_rejects = host_lengths(batch)
        on_device = batch.device_query_start_loc is not None and batch.device_seq_lens is not None
        if deferred:
            self._check_device_arrays(batch)
            decision = self._step.defer(
                batch.query_start_loc, seq_lens, max_rejects, batch.padded_rows, batch.boundaries_exact
            )
            self._generation += 1
            return self._finish(batch, decision)
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
            self._arrived,
            self._ring.ready,
        )
        action = decision.action
        if action == "nothing":
            return self._finish(batch, decision, self._generation)
        graph = self.device.capture()
        if graph is not None and (action == "copy" or decision.ticket):
            # A replay would bring back what the staging area holds by then, and the host would believe in a plan
            # that never ran.
            self._step.withdraw()
            raise _core.PlanError(
                "a copy cannot be captured into a graph: plan with deferred=True and refresh under capture"
            )
        self._generation += 1
        if action == "copy" and not decision.words:
            decision = self._written(decision, on_device=on_device)
        if decision.action == "copy":
            return self._copy(batch, decision)
        plan = self._finish(batch, decision)
        self._launch(plan, graph)
        self._arrived = decision.ticket
        return plan

    def defer(
        self, num_requests: int, rows: int, padded_rows: int, device_query_start_loc: Any, device_seq_lens: Any
    ) -> Plan:
        """Leaves a batch of which the host only has the sizes to its first consumer.

        As `plan` with `deferred=True` and `boundaries_exact=False`, in half the time: there is nothing to read on the
        host, and what a size leads to is remembered.

        Args:
            num_requests: Requests, R.
            rows: Rows that belong to a request.
            padded_rows: Rows that the consumer sees, at least `rows`.
            device_query_start_loc: The device's `query_start_loc`. Shape (R + 1,), int32, contiguous.
            device_seq_lens: The device's `seq_lens`. Shape (R,), int32, contiguous.

        Returns:
            The plan, deferred.

        Raises:
            TypeError: An array has the wrong kind or dtype.
            ValueError: An argument breaks a rule; the message names it, the position and the value.
            mlaplan.PlanError: The batch exceeds the capacity. A `ValueError`.
        """
        try:
            decision = self._deferrals.get((num_requests, rows, padded_rows))
        except TypeError:  # no number, which the batch says better
            decision = None
        if decision is None or self.observer is not None:
            batch = sized_batch(num_requests, rows, padded_rows, device_query_start_loc, device_seq_lens)
            plan = self.plan(batch, deferred=True)
            if len(self._deferrals) >= _MOST_DEFERRALS:
                self._deferrals.clear()
            self._deferrals[num_requests, rows, padded_rows] = plan.decision
            return plan
        self.device.check("device_query_start_loc", device_query_start_loc, num_requests + 1)
        self.device.check("device_seq_lens", device_seq_lens, num_requests)
        self._step.made_on_device()
        self._generation += 1
        if self._constants_lost:
            self._restore_constants()
        self._tally.add(decision)
        return Plan(self, decision, None, device_query_start_loc, device_seq_lens)

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
        self._check_plan(plan, has_arrays=True)
        if self._constants_lost:
            self._restore_constants()
        self._step.made_on_device()
        self._generation += 1
        self._launch(plan, graph)
        if self.observer is not None:
            self.observer.refreshed(plan)

    def remake(self, plan: Plan) -> None:
        """Makes a plan again from what the device's arrays hold now, whatever the buffers hold.

        For lengths that the device changed itself, as between two draft steps: one launch, or one more node of the
        graph being captured.

        Args:
            plan: A plan of this planner with device arrays.

        Raises:
            ValueError: As `refresh`.
        """
        self._check_plan(plan, has_arrays=True)
        if self.observer is not None:
            self.observer.remade(plan)
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
        if self.observer is not None:
            self.observer.invalidated()

    def record(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 64 << 20,
        keep: str = "first",
        read_lengths: bool = False,
        overwrite: bool = False,
    ) -> Recorder:
        """Writes a trace of every step from here on; see `mlaplan.recorder.Recorder`, a context manager too."""
        from mlaplan.recorder import Recorder

        return Recorder(self, path, max_bytes=max_bytes, keep=keep, read_lengths=read_lengths, overwrite=overwrite)

    def check(self, plan: Plan, *, dump: str | os.PathLike[str] | None = None) -> Difference | None:
        """Reads the buffers back and compares them with a plan from nothing; see `mlaplan.selfcheck.check`."""
        from mlaplan.selfcheck import check

        return check(self, plan, dump=dump)

    def self_check(self, every: int, *, dump: str | os.PathLike[str] | None = None) -> SelfCheck:
        """Makes the same comparison every so many steps from here on; see `mlaplan.selfcheck.SelfCheck`."""
        from mlaplan.selfcheck import SelfCheck

        return SelfCheck(self, every, dump=dump)

    def quality(self, plan: Plan) -> Quality:
        """Finish time and lower bound of a plan; see `Plan.quality`."""
        self.refresh(plan)
        arrays = [self.device.to_host(array) for array in plan.arrays]
        lengths = np.diff(arrays[1])
        works = arrays[4][: arrays[2][-1]]
        return schedule_quality(lengths, arrays[2], works, self.params)

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        return self._tally.stats(self.device.counters)

    def arrays_of(self, row_class: int) -> PlanArrays:
        """The arrays of a row class on the device."""
        return self._arrays[row_class]

    def constants_of(self, row_class: int) -> Constants:
        """The arrays of a row class that never change."""
        return self._constants[row_class]

    def _written(self, decision: _core.Decision, *, on_device: bool) -> _core.Decision:
        """Writes the plan once an area is free; a batch that can be planned on the device does not wait for that."""
        area = self._ring.reserve()
        if area is None:
            if on_device:
                return self._step.launch_instead(decision)
            area = self._ring.wait()
        return self._step.write(decision, area)

    def _copy(self, batch: Batch, decision: _core.Decision) -> Plan:
        self.device.upload(self._ring, self._ring.take(), self._arena, decision.words)
        plan = self._finish(batch, decision, self._generation)
        plan.num_works = decision.num_works
        plan.split_budget = decision.split_budget
        if self.backend.makes_schedule:
            self.backend.make_schedule(plan)
        # Last of all: had anything above failed, the next step must not believe in this plan.
        self._arrived = decision.ticket
        self._ring.reserve()  # now, so that the call that decides on the next plan can write it too
        return plan

    def _launch(self, plan: Plan, graph: object | None) -> None:
        arrays = self._arrays[plan.decision.row_class]
        self.device.plan(plan.device_query_start_loc, plan.device_seq_lens, arrays, self.params)
        plan.num_works = plan.split_budget = None
        plan.by_device = True
        # Under capture nothing ran: the buffers hold what they held, until a replay that the host does not see. Set
        # when the launch is through, so that a failed one is tried again.
        plan.captured = graph
        plan.generation = self._generation if graph is None else -1

    def _finish(self, batch: Batch, decision: _core.Decision, generation: int = -1) -> Plan:
        if self._constants_lost:
            self._restore_constants()
        self._tally.add(decision)
        return Plan(self, decision, batch, batch.device_query_start_loc, batch.device_seq_lens, generation)

    def _views(self, layout: Layout) -> PlanArrays:
        views = zip(layout.offsets, layout.shapes, strict=True)
        return PlanArrays(*(self.device.view(self._arena, offset, shape) for offset, shape in views))

    def _constant_values(self) -> list[npt.NDArray[Any]]:
        """Host values of the constants that all classes share, then the pointers of each class."""
        tiles = self.config.max_rows * self.params.fold
        # aiter before v0.1.9 views the partials as rows of all heads again.
        params = self.params
        partials = partial_capacity(tiles, params.num_cus, multiple=params.fold, pieces=params.pieces)
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

    def _check_plan(self, plan: Plan, *, has_arrays: bool = False) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a Plan, not {type(plan).__name__}")
        if plan.planner is not self:
            raise ValueError("plan belongs to another planner, whose buffers it describes")
        if has_arrays and (plan.device_query_start_loc is None or plan.device_seq_lens is None):
            raise _core.PlanError(
                "device_query_start_loc and device_seq_lens are needed to make this plan on the device"
            )
