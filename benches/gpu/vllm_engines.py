"""A stock engine and ours on one device: inputs that never move, captured forwards, and a comparison on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engines
import numpy as np
import torch
from engines import Engine, Sizes, Step
from vllm_slice import AITER, CPU, DEVICE

from mlaplan.layout import PlanArrays

_AREAS = 16
_NEVER = 1 << 40


class DeviceInputs(engines.Inputs):
    """A runner's arrays on the device. A step is written with one copy from a ring of pinned areas, without a wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._second = -(-(self.sizes.max_reqs + 1) // 64) * 64
        words = self._second + self.sizes.max_reqs
        self._packed = torch.zeros(words, dtype=torch.int32, device=DEVICE)
        self.query_start_loc = self._packed[: self.sizes.max_reqs + 1]
        self.seq_lens = self._packed[self._second :]
        for name in ("block_table", "topk_indices", "q", "kv_cache"):
            setattr(self, name, getattr(self, name).to(DEVICE))
        self.q.normal_()
        self.kv_cache.normal_()
        self._slots = torch.zeros(self.sizes.max_rows, dtype=torch.int64, device=DEVICE)
        self._areas = [torch.zeros(words, dtype=torch.int32, pin_memory=not CPU) for _ in range(_AREAS)]
        self._events = [None if CPU else torch.cuda.Event() for _ in range(_AREAS)]
        self._written = 0
        self.shuffle()

    def shuffle(self) -> None:
        """Gives every request other blocks and, now and then, every row other positions."""
        self.block_table.random_(1, engines.NUM_BLOCKS)
        if self._written % 16 == 0:
            self.topk_indices.random_(-1, self.sizes.max_len)

    def write(self, step: Step) -> dict[str, Any]:
        """Queues the copy of a step's arrays, and returns what `build_attn_metadata` takes."""
        n = len(step.query_lens)
        reqs = step.padded_reqs or n
        at = self._written % _AREAS
        event = self._events[at]
        if event is not None:
            event.synchronize()
        self._written += 1
        host = self._areas[at].numpy()
        starts = host[: self.sizes.max_reqs + 1]
        starts[0] = 0
        np.cumsum(step.query_lens, out=starts[1 : n + 1])
        starts[n + 1 :] = starts[n]
        host[self._second :] = 0
        host[self._second : self._second + n] = step.seq_lens
        self._packed.copy_(self._areas[at], non_blocking=True)
        if event is not None:
            event.record()
        prefilling = np.array(step.prefilling or [False] * n)
        bound = np.zeros(reqs, np.int32)
        bound[:n] = np.array(step.seq_lens) + np.where(prefilling, 0, step.bound_excess)
        return {
            "num_reqs": reqs,
            "num_tokens": step.visible_rows,
            "query_start_loc_gpu": self.query_start_loc[: reqs + 1],
            "query_start_loc_cpu": torch.from_numpy(starts[: reqs + 1].copy()),
            "max_query_len": max(step.query_lens),
            "seq_lens": self.seq_lens,
            "max_seq_len": max(step.seq_lens),
            "block_tables": [self.block_table[:reqs]],
            "slot_mappings": self._slots[None, : step.visible_rows],
            "seq_lens_cpu_upper_bound": torch.from_numpy(bound),
            "positions": self._slots[: step.visible_rows],
            "is_prefilling": torch.from_numpy(prefilling),
            "for_cudagraph_capture": step.capture,
        }


def forward(engine: Engine, metadata: Any, rows: int) -> Any:
    """Runs every layer's sparse part, and returns the last layer's output."""
    out = None
    for layer in engine.layers.values():
        out, _ = layer.impl.forward_mqa(engine.inputs.q[:rows], engine.inputs.kv_cache, metadata, layer)
    return out


class Captured:
    """Work that ran once and is replayed: a CUDA graph. Without a GPU it is run again."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.result: Any = None
        if CPU:
            return
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = work()

    def replay(self) -> Any:
        """Runs it, and returns what it writes its result to."""
        if CPU:
            self.result = self._work()
        else:
            self._graph.replay()
        return self.result


def dummy(engine: Engine, reqs: int, rows: int) -> Step:
    """The batch that vLLM captures with."""
    queries = [rows // reqs + (index < rows % reqs) for index in range(reqs)]
    return Step(query_lens=queries, seq_lens=queries, max_seq_len=engine.sizes.max_len, capture=True)


def capture_forward(engine: Engine, reqs: int, rows: int) -> Captured:
    """Captures the layers for a size as vLLM's V2 runner does: a dummy batch, warmed up, built afresh, recorded."""
    step = dummy(engine, reqs, rows)
    forward(engine, engine.build(engine.inputs.write(step)), rows)
    metadata = engine.build(engine.inputs.write(step))
    before = engine.planner.stats.launches
    captured = Captured(lambda: forward(engine, metadata, rows))
    if not CPU:
        nodes = engine.planner.stats.launches - before
        assert nodes == 1, f"{nodes} plan nodes in a graph of {len(engine.layers)} layers"
    return captured


class Differences:
    """Counts, on the device, entries that a kernel may read and that differ between ours and a stock build.

    Attributes:
        NAMES: What is counted.
    """

    NAMES = ("rows", "schedule", "indices", "outputs")

    def __init__(self, ours: Engine, theirs: Engine, *, padding: bool = True) -> None:
        """Compares the buffers of two engines.

        Args:
            ours: The engine whose builder is ours.
            theirs: The stock one.
            padding: Whether request ids of padding rows are compared. A stock builder with dense prefills leaves ids of
                prefill tokens there, which nobody reads.
        """
        self._ours, self._theirs, self._padding = ours, theirs, padding
        self._counts = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        self._step = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self._never = torch.full((), _NEVER, dtype=torch.int64, device=DEVICE)
        self._first = self._never.clone()
        self._known: dict[tuple[int, bool], Captured] = {}

    def compare(self, plan: Any, *, scheduled: bool) -> None:
        """Compares the arrays of a plan, by a graph for each row class."""
        key = (plan.arrays.request_ids.shape[0], scheduled)
        if key not in self._known:
            arrays, constants, indices = plan.arrays, plan.constants, self._ours.builder.paged_kv_indices
            own = torch.tensor([arrays.work_indptr.data_ptr(), arrays.work_info.data_ptr()]).to(DEVICE)

            def work() -> None:
                found = self.found(arrays, constants, indices, scheduled=scheduled)
                found[1] += _differing(own, constants.work_metadata_ptrs.view(torch.int64))
                self.add(found)

            self.found(arrays, constants, indices, scheduled=scheduled)  # so that nothing is loaded during capture
            self._known[key] = Captured(work)
        self._known[key].replay()

    def found(self, arrays: PlanArrays, constants: Any, indices: Any, *, scheduled: bool) -> Any:
        """Compares arrays of a class with the stock builder's buffers as they are now; returns the four counts."""
        theirs, rows = self._theirs.builder, arrays.request_ids.shape[0]
        total = arrays.kv_indptr[-1]
        found = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        found[0] += _differing(arrays.kv_indptr, theirs.paged_kv_indptr)
        found[0] += _differing(constants.qo_indptr[: rows + 1], theirs.qo_indptr)
        found[0] += _differing(constants.kv_last_page_lens[:rows], theirs.paged_kv_last_page_len)
        if self._padding:
            found[0] += _differing(arrays.request_ids, theirs.req_id_per_token_buffer)
        if scheduled:
            found[1] += self._schedule(arrays, constants)
        live = torch.arange(rows * theirs.topk_tokens, device=DEVICE) < total
        found[2] += _differing(indices[: live.shape[0]], theirs.paged_kv_indices, live)
        return found

    def _schedule(self, arrays: PlanArrays, constants: Any) -> Any:
        theirs = self._theirs.builder
        bounds = arrays.reduce_indptr
        tiles, works = bounds.shape[0] - 1, arrays.work_info.shape[0]
        wrong = _differing(arrays.work_indptr, theirs._mla_work_indptr)  # noqa: SLF001  (the buffers have no other name)
        wrong += _differing(bounds, theirs._mla_reduce_indptr)  # noqa: SLF001
        live = torch.arange(works, device=DEVICE) < arrays.work_indptr[-1]
        wrong += _differing(arrays.work_info, theirs._mla_work_info_set, live[:, None])  # noqa: SLF001
        cut = bounds[1:] > bounds[:-1]
        wrong += _differing(constants.reduce_final_map[:tiles], theirs._mla_reduce_final_map, cut[:, None])  # noqa: SLF001
        # Never more partials than the stock builder has room for.
        partials = theirs._mla_reduce_partial_map  # noqa: SLF001
        used = torch.arange(partials.shape[0], device=DEVICE) < bounds[-1]
        wrong += _differing(partials, constants.reduce_partial_map, used)
        return wrong + (bounds[-1] > partials.shape[0]).long()

    def compare_ids(self, metadata: Any, wanted: Any) -> None:
        """Compares the request ids that the layers see."""
        found = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        found[0] = _differing(metadata.req_id_per_token, wanted.req_id_per_token)
        self.add(found)

    def compare_outputs(self, ours: Any, theirs: Any) -> None:
        """Compares outputs bit for bit; rows that the stock forward did not have must be zeros."""
        rows = theirs.shape[0]
        wanted = torch.zeros_like(ours)
        wanted[:rows] = theirs
        found = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        found[3] = (ours.view(torch.int16) != wanted.view(torch.int16)).sum()
        self.add(found)

    def add(self, found: Any) -> None:
        """Adds counts of the current step."""
        self._counts += found
        at = torch.where(found.sum() > 0, self._step, self._never)
        self._first.copy_(torch.minimum(self._first, at))

    def next_step(self) -> None:
        """Counts steps, so that the first that differed has a number."""
        self._step += 1

    def read(self) -> tuple[dict[str, int], int | None]:
        """Reads the counts back: entries that differ by what they are, and the first step that had one."""
        first = int(self._first)
        return dict(zip(self.NAMES, self._counts.tolist(), strict=True)), None if first == _NEVER else first


def _differing(a: Any, b: Any, where: Any = None) -> Any:
    """Entries of `a` that differ from the leading entries of `b`, where it matters."""
    differ = a != b[: a.shape[0]]
    return (differ if where is None else differ & where).sum()


def pair(backend: Any, sizes: Sizes, seed: int) -> tuple[Engine, Engine, DeviceInputs]:
    """Our engine, as the plugin set it up, and a stock one, on the same inputs."""
    inputs = DeviceInputs(sizes, np.random.default_rng(seed))
    classes = backend.ROCMAiterMLASparseBackend.get_builder_cls(), backend.ROCMAiterMLASparseBackend.get_impl_cls()
    ours, theirs = Engine(classes, sizes, inputs), Engine(engines.STOCK, sizes, inputs)
    serving = ours.builder._serving  # noqa: SLF001
    assert serving is not None, "our builder stepped aside; the log above says why"
    assert serving.deferred, "plans are not left to the first layer"
    assert ours.planner.params.num_cus == AITER.num_cus
    assert ours.planner.params.fold == sizes.heads // 16, "the stand-in's planner folds otherwise"
    return ours, theirs, inputs
