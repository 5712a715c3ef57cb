"""The loads of `tuning.py` on a GPU: schedules made by hand, run by the portable kernels and timed in graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import triton

from mlaplan import _core
from mlaplan.backends.portable import slots_that_fill, tile_of
from mlaplan.batch import Batch, Exact
from mlaplan.calibration import Calibration, Shape
from mlaplan.config import PlannerConfig
from mlaplan.device.torch import TorchDevice
from mlaplan.planner import Planner
from mlaplan.tuning import Fit, Load, decode_loads, fit, measure, merge_loads, pairs, with_cut

_MOST_WORKS = 4  # works of a slot, and whole rows per slot
_TOKENS = 2048  # of the longest work
_FLUSH_BYTES = 128 << 20  # more than the last-level cache of any GPU this runs on, so that KV comes from memory
_MOST_POOL_SLOTS = 1 << 20  # KV slots; a larger pool is no colder
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shape_of(device: TorchDevice, config: PlannerConfig) -> Shape:
    """What a calibration of resolved settings on a GPU holds for."""
    return Shape(
        device=torch.cuda.get_device_name(device.device),
        capability=_capability(device),
        heads=config.heads // (config.fold or 1),
        q_dtype=config.q_dtype,
        kv_dtype=config.kv_dtype,
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
    )


class Bench:
    """Times loads of the decode on one GPU."""

    def __init__(self, config: PlannerConfig, device: TorchDevice, *, repeats: int = 20, nodes: int = 8) -> None:
        """Allocates inputs and compiles the kernels.

        Args:
            config: Resolved settings whose `max_rows` is at least the works of a load, and `topk` its tokens.
            device: The GPU.
            repeats: Replays of which the median is taken.
            nodes: How often a graph holds the decode.
        """
        self.planner = Planner(config, device)
        self._device, self._repeats, self._nodes = device, repeats, nodes
        self.num_slots = self.planner.params.num_cus
        self.tile = tile_of(config)
        rows = config.max_rows
        self._plan = self.planner.plan(
            Batch(np.arange(rows + 1, dtype=np.int32), Exact(np.full(rows, config.topk, np.int32)))
        )
        generator = torch.Generator(device.device).manual_seed(0)
        pool = self._pool(config, generator)
        options: Any = {"device": device.device, "generator": generator}
        q = torch.randn(rows, config.heads, config.head_dim, **options).to(_DTYPES[config.q_dtype])
        indices = torch.randint(0, len(pool), (rows * config.topk,), dtype=torch.int32, **options)
        out = device.empty((rows, config.heads, config.v_head_dim), config.out_dtype)
        lse = device.empty((rows, config.heads), "float32")
        scales = (None, 1.0 if config.kv_dtype == "fp8" else None)
        self._scratch = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device.device)
        self._decode: Callable[[], object] = lambda: self.planner.backend.decode(
            self._plan, q, pool, indices, scale=config.head_dim**-0.5, out=out, lse=lse, fp8_scales=scales
        )
        # Partials that nobody wrote might hold NaN, which the merge does not read.
        self._set(Load(1, 1, cut=True))
        self._decode()
        self._flush_only = self._graph_ns(_nothing)

    def time(self, load: Load) -> float:
        """Device time of decode and merge of a load in nanoseconds, KV in memory."""
        self._set(load)
        return self._graph_ns(self._decode) - self._flush_only

    def time_schedule(self, made: _core.Schedule) -> float:
        """Device time of decode and merge of a schedule of full rows in nanoseconds, KV in memory."""
        self._set_schedule(made)
        return self._graph_ns(self._decode) - self._flush_only

    def _set_schedule(self, made: _core.Schedule) -> None:
        """Writes a schedule of no more rows than the bench has, in as many slots."""
        arrays = self._plan.arrays
        works = np.zeros((arrays.work_info.shape[0], 8), np.int32)
        works[: len(made.work_info)] = made.work_info
        ends = np.full(arrays.reduce_indptr.shape[0], made.num_partials, np.int32)
        ends[: len(made.reduce_indptr)] = made.reduce_indptr
        self._device.store(arrays.work_info, works)
        self._device.store(arrays.work_indptr, made.work_indptr.copy())  # torch warns of arrays that are read-only
        self._device.store(arrays.reduce_indptr, ends)

    def _pool(self, config: PlannerConfig, generator: torch.Generator) -> torch.Tensor:
        size = 1 if config.kv_dtype == "fp8" else 2
        free, _total = torch.cuda.mem_get_info(self._device.device)
        slots = max(1, min(_MOST_POOL_SLOTS, free // (8 * config.head_dim * size)))
        pool = torch.randn(slots, config.head_dim, device=self._device.device, dtype=torch.float16, generator=generator)
        if config.kv_dtype != "fp8":
            return pool.to(_DTYPES[config.kv_dtype])
        is_fnuz = torch.version.hip is not None and _capability(self._device) == "gfx942"
        return pool.to(torch.float8_e4m3fnuz if is_fnuz else torch.float8_e4m3fn)

    def _set(self, load: Load) -> None:
        """Writes a schedule in which every slot does the load."""
        arrays, slots, topk = self._plan.arrays, self.num_slots, self.planner.params.topk
        count = slots * load.works
        work = np.arange(count)
        info = np.zeros((arrays.work_info.shape[0], 8), np.int32)
        # Neighbours in a slot are rows far apart, as in a plan they need not be: nothing is shared but the cache.
        info[:count, 0] = info[:count, 2] = work
        info[:count, 1] = work % self.planner.backend.describe()["partial_rows"] if load.cut else -1
        info[:count, 3] = work + 1
        info[:count, 4] = work * topk
        info[:count, 5] = work * topk + load.blocks * self.tile.tokens
        info[:count, 6] = topk - load.blocks * self.tile.tokens
        self._device.store(arrays.work_info, info)
        self._device.store(arrays.work_indptr, np.arange(slots + 1, dtype=np.int32) * load.works)
        tiles = arrays.reduce_indptr.shape[0] - 1
        merged = slots // load.merged if load.merged else 0
        self._device.store(
            arrays.reduce_indptr, np.minimum(np.arange(tiles + 1, dtype=np.int32), merged) * np.int32(load.merged)
        )

    def _graph_ns(self, call: Callable[[], object]) -> float:
        """Median time of a call in nanoseconds, the cache written over before it, as a node of a replayed graph."""
        with torch.cuda.stream(torch.cuda.Stream(self._device.device)):  # type: ignore[no-untyped-call]
            call()
        torch.cuda.synchronize(self._device.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self._nodes):
                self._scratch.zero_()
                call()
        times: list[float] = []
        event: Any = torch.cuda.Event
        for _ in range(self._repeats + 3):
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize(self._device.device)
            times.append(1e6 * begin.elapsed_time(end) / self._nodes)
        return statistics.median(times[3:])


def tune(
    config: PlannerConfig, device: TorchDevice, *, watch: Callable[[list[Load]], Iterable[Load]] = iter
) -> tuple[Calibration, Fit]:
    """Measures the cost table of the portable decode kernel.

    Args:
        config: Heads, dtypes, dimensions and compute units to measure for; its sizes are not used.
        device: The GPU.
        watch: Is handed the loads and gives them back one by one, for a progress bar.

    Returns:
        The calibration, and how well its table fits.

    Raises:
        TuningError: The times make no table.
    """
    settings = config.resolved(device.num_cus)
    tile = tile_of(settings)
    slots = config.num_cus or slots_that_fill(settings, device.num_cus or 1)
    bench_config = PlannerConfig(
        max_rows=slots * _MOST_WORKS,
        max_requests=slots * _MOST_WORKS,
        topk=_TOKENS,
        heads=settings.heads // (settings.fold or 1),
        arch=None,
        num_cus=slots,
        q_dtype=settings.q_dtype,
        kv_dtype=settings.kv_dtype,
        backend="portable",
        head_dim=settings.head_dim,
        v_head_dim=settings.v_head_dim,
    )
    bench = Bench(bench_config, device)
    loads = decode_loads(_TOKENS // tile.tokens, most_works=_MOST_WORKS) + merge_loads(slots, 64)
    fitted = fit(measure(bench.time, watch(loads)), block_tokens=tile.tokens)
    # What is timed here depends on the table, so no progress bar can count it; it takes a few seconds.
    fitted = with_cut(fitted, pairs(slots, _TOKENS, fitted.table), bench.time_schedule)
    calibration = Calibration(
        shape=shape_of(device, settings),
        table=fitted.table,
        residual=fitted.residual,
        num_cus=slots,
        heads_per_tile=tile.heads,
        mlaplan=_core.__version__,
        triton=triton.__version__,
    )
    return calibration, fitted


def _nothing() -> None:
    """The call that a flush is timed with."""


def _capability(device: TorchDevice) -> str:
    properties = torch.cuda.get_device_properties(device.device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":", maxsplit=1)[0]
    return f"{properties.major}.{properties.minor}"
