"""aiter on ROCm: its decode kernels, and its planner where asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mlaplan.backends.aiter_release import read_release
from mlaplan.backends.aiter_shape import (
    HEAD_DIM,
    MAX_FALLBACK_SPLITS,
    V_HEAD_DIM,
    AiterShape,
    check_shape,
    check_sizes,
    kv_pool_refusal,
    resolve_shape,
)
from mlaplan.backends.base import UnsupportedError, known_rows
from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device
from mlaplan.plan import Plan

__all__ = ["SCHEDULE_MAKERS", "AiterBackend", "kv_pool_refusal"]

SCHEDULE_MAKERS = ("core", "device", "aiter")


class AiterBackend:
    """Decode by `aiter.mla.mla_decode_fwd`; the schedule by mlaplan or by aiter's planner.

    Args:
        schedule_maker: "core" (Rust on the host), "device" (a Triton kernel) or "aiter". One set of arrays,
            whoever makes it.
        persistent: False leaves the metadata away in every call, where the shape has a kernel for that.
        observe: Let aiter's planner plan one row of 16 tokens when the backend is prepared, and compare what it
            makes of it with the head rules. A wrong fold is silent garbage; this tells.
    """

    name = "aiter"
    shape: AiterShape

    def __init__(self, schedule_maker: str = "core", *, persistent: bool = True, observe: bool = True) -> None:
        if schedule_maker not in SCHEDULE_MAKERS:
            raise ValueError(f"schedule_maker is {schedule_maker!r}, known are 'core', 'device', 'aiter'")
        self.schedule_maker = schedule_maker
        self.makes_schedule = schedule_maker == "aiter"
        self._persistent = persistent
        self._observe = observe
        self._split_starts: dict[int, Any] = {}

    def prepare(self, config: PlannerConfig, device: Device) -> PlannerConfig:
        """See `Backend.prepare`. What is installed is read here, once."""
        release = read_release(config.aiter_version)
        shape = resolve_shape(config, release, persistent=self._persistent)
        check_shape(shape, persistent=self._persistent, aiter_plans=self.makes_schedule)
        check_sizes(shape)
        self.shape, self._device = shape, device
        if self._persistent and self._observe:
            self._check_fold()
        if not self.needs_schedule(config.max_rows):
            # One array for each number of splits: a captured graph may read any of them for ever.
            starts = np.arange(config.max_rows + 1, dtype=np.int32)
            self._split_starts = {k: device.array(starts * k) for k in range(1, MAX_FALLBACK_SPLITS + 1)}
        return replace(config, fold=shape.fold, aiter_version=release.release)

    def needs_schedule(self, padded_rows: int) -> bool:
        """See `Backend.needs_schedule`: false where `mla_decode_fwd` would leave the metadata aside."""
        return self._persistent and not self.shape.ignores_metadata(padded_rows)

    def make_schedule(self, plan: Plan) -> None:
        """See `Backend.make_schedule`: one call of aiter's planner, for the live rows only.

        Raises:
            UnsupportedError: The host does not know which rows have tokens. aiter would plan empty rows too: each
                takes a row's share of the balance, and an empty work ends its slot.
        """
        if not self.makes_schedule:
            raise UnsupportedError(f"schedule_maker is {self.schedule_maker!r}: the planner makes schedules")
        rows = known_rows(plan, self._device)
        if rows is None:
            raise UnsupportedError("schedule_maker 'aiter' needs rows and lengths on the host; use 'device'")
        if rows == 0 or not self.needs_schedule(plan.padded_rows):
            return
        constants, arrays = plan.constants, plan.arrays
        self._call_planner(
            constants.qo_indptr[: rows + 1],
            arrays.kv_indptr[: rows + 1],
            constants.kv_last_page_lens[:rows],
            (
                constants.work_metadata_ptrs,
                arrays.work_info,
                arrays.work_indptr,
                arrays.reduce_indptr,
                constants.reduce_final_map,
                constants.reduce_partial_map,
            ),
            self.shape.budget(plan.split_budget),
        )

    def decode(
        self,
        plan: Plan,
        q: Any,
        kv_cache: Any,
        kv_indices: Any,
        *,
        scale: float,
        out: Any = None,
        lse: Any = None,
        fp8_scales: tuple[Any, Any] = (None, None),
    ) -> tuple[Any, Any]:
        """See `Backend.decode`. The LSE is made only where `lse` is given: few binaries write it."""
        rows, shape, device = plan.padded_rows, self.shape, self._device
        if out is None:
            out = device.empty((rows, shape.config.heads, V_HEAD_DIM), shape.config.out_dtype)
        self._check_call(rows, q, kv_cache, out, lse)
        self._check_scales(fp8_scales)
        live = known_rows(plan, device)
        if rows == 0 or live == 0:
            device.run(_clear_from, 0, out, lse)
            return out, lse
        scheduled = self.needs_schedule(rows)
        options = self._schedule_arguments(plan, rows) if scheduled else self._fallback_arguments(rows)
        options |= {"sm_scale": scale, "q_scale": fp8_scales[0], "kv_scale": fp8_scales[1]}
        if lse is not None:
            options["return_lse"] = True
        device.run(self._launch, plan, q, kv_cache, kv_indices, out, lse, live, options)
        return out, lse

    def fallback_refusal(self) -> str | None:
        """Says why the shape cannot run without metadata, or None where it can."""
        return self.shape.fallback_refusal()

    def describe(self) -> dict[str, Any]:
        """See `Backend.describe`."""
        shape, config, release = self.shape, self.shape.config, self.shape.release
        return {
            "backend": self.name,
            "aiter": release.version,
            "head_rules_of": release.release,
            "arch": config.arch,
            "num_cus": shape.num_cus,
            "heads": config.heads,
            "padded_heads": shape.padded_heads,
            "aiter_heads": shape.aiter_heads,
            "fold": shape.fold,
            "q_dtype": config.q_dtype,
            "kv_dtype": config.kv_dtype,
            "page_size": config.page_size,
            "schedule_maker": self.schedule_maker if self._persistent else None,
            "metadata_ignored_from_rows": release.persistent_rows if shape.gated else None,
            "fallback": self.fallback_refusal() or "available",
            "lse": shape.support.lse,
            "planner_dtypes": release.dtype_names,
            "scratch_bytes": shape.scratch_bytes(config.max_rows, scheduled=self.needs_schedule(config.max_rows)),
            "environment": dict(release.environment),
        }

    def _launch(
        self,
        plan: Plan,
        q: Any,
        kv_cache: Any,
        kv_indices: Any,
        out: Any,
        lse: Any,
        live: int | None,
        options: dict[str, Any],
    ) -> None:
        """Everything that a decode queues, so that a captured graph holds all of it."""
        rows, shape = plan.padded_rows, self.shape
        padded_q, target = self._pad(q, out)
        scheduled = "work_meta_data" in options
        if scheduled and live is None and target is out:
            out.zero_()  # rows without a work keep what the buffer holds
        starts = plan.arrays.kv_indptr[: rows + 1]
        _, made_lse = shape.release.decode(
            padded_q.view(-1, shape.aiter_heads, HEAD_DIM),
            kv_cache.view(-1, 1, 1, HEAD_DIM),
            target.view(-1, shape.aiter_heads, V_HEAD_DIM),
            plan.constants.qo_indptr[: rows + 1],
            starts,
            kv_indices,
            plan.constants.kv_last_page_lens[:rows],
            1,
            **options,
        )
        if target is not out:
            out.copy_(self._unpad(target))
        if lse is not None:
            lse.copy_(self._unpad(made_lse.view(rows, shape.padded_heads)))
        if live is not None:
            _clear_from(live, out, lse)
        else:
            _clear_empty(starts, None if scheduled else out, lse)

    def _check_fold(self) -> None:
        """Lets aiter plan one row of one block, and compares what it makes of it with the head rules."""
        shape, device = self.shape, self._device
        fold, slots = shape.support.fold, shape.num_cus
        # Room for the most planner rows that any head count has, whatever aiter makes of this one.
        tiles = shape.padded_heads // 8
        sizes = ((2,), (tiles + slots, 8), (slots + 1,), (tiles + 1,), (tiles, 2), (tiles + 2 * slots,))
        buffers = tuple(
            device.array(np.zeros(size, np.int32 if index else np.uint64)) for index, size in enumerate(sizes)
        )
        starts, length = device.array(np.array([0, 1], np.int32)), device.array(np.array([0, 16], np.int32))
        self._call_planner(starts, length, device.array(np.ones(1, np.int32)), buffers, 1)
        num_works = int(device.to_host(buffers[2])[-1])
        works = device.to_host(buffers[1])[:num_works].tolist()
        if works != [[tile, -1, tile, tile + 1, 0, 16, 0, 0] for tile in range(fold)]:
            raise UnsupportedError(
                f"{shape.name}: aiter makes {num_works} works of one row, but the head rules of "
                f"{shape.release.release} say {fold}, one query each; name the release that holds by aiter_version"
            )

    def _call_planner(
        self, qo_indptr: Any, kv_indptr: Any, last_page_lens: Any, buffers: tuple[Any, ...], budget: int
    ) -> None:
        release, shape = self.shape.release, self.shape
        takes_pages = release.takes_last_page_lens
        self._device.run(
            release.planner,
            qo_indptr,
            kv_indptr,
            *((last_page_lens,) if takes_pages else ()),
            shape.aiter_heads,
            1,
            True,  # noqa: FBT003 - is_causal; the third of three that stand in front of the buffers by position
            *buffers,
            **({"page_size": 1} if takes_pages else {}),
            kv_granularity=16,
            max_seqlen_qo=1,
            uni_seqlen_qo=1,
            fast_mode=True,
            max_split_per_batch=budget,
            **release.dtype_arguments(shape.q_dtype, shape.kv_dtype),
        )

    def _schedule_arguments(self, plan: Plan, rows: int) -> dict[str, Any]:
        shape, constants, arrays = self.shape, plan.constants, plan.arrays
        tiles = rows * shape.fold
        # aiter allocates its partial buffers by this array's length, in every call: the shortest that is enough.
        partials = shape.partials(rows)
        if arrays.work_indptr.shape[0] != shape.num_cus + 1:
            raise UnsupportedError(
                f"work_indptr has {arrays.work_indptr.shape[0]} entries, must have {shape.num_cus + 1}: "
                "its length is the grid of aiter's kernel"
            )
        if constants.reduce_partial_map.shape[0] < partials or arrays.reduce_indptr.shape[0] <= tiles:
            raise UnsupportedError(f"the plan's arrays are too small for {rows} rows at a fold of {shape.fold}")
        return {
            "work_meta_data": constants.work_metadata_ptrs,
            "work_indptr": arrays.work_indptr,
            "work_info_set": arrays.work_info,
            "reduce_indptr": arrays.reduce_indptr[: tiles + 1],
            "reduce_final_map": constants.reduce_final_map[:tiles],
            "reduce_partial_map": constants.reduce_partial_map[:partials],
        }

    def _fallback_arguments(self, rows: int) -> dict[str, Any]:
        splits = self.shape.splits(rows)
        return {"num_kv_splits": splits, "num_kv_splits_indptr": self._split_starts[splits][: rows + 1]}

    def _check_call(self, rows: int, q: Any, kv_cache: Any, out: Any, lse: Any) -> None:
        import torch

        shape, heads = self.shape, self.shape.config.heads
        _check_array("q", q, (rows, heads, HEAD_DIM), (shape.q_dtype,))
        _check_array("out", out, (rows, heads, V_HEAD_DIM), (torch.bfloat16, torch.float16))
        if lse is not None:
            _check_array("lse", lse, (rows, heads), (torch.float32,))
            self._check_lse(rows)
        if kv_cache.dtype != shape.kv_dtype or kv_cache.shape[-1] != HEAD_DIM or not kv_cache.is_contiguous():
            raise UnsupportedError(
                f"kv_cache is {kv_cache.dtype} of shape {tuple(kv_cache.shape)}, must be {shape.kv_dtype}, "
                f"contiguous, {HEAD_DIM} values per slot"
            )
        refusal = kv_pool_refusal(shape.config.arch, kv_cache.numel() * kv_cache.element_size())
        if refusal is not None:
            raise UnsupportedError(refusal)

    def _check_lse(self, rows: int) -> None:
        shape = self.shape
        if not shape.support.lse or "return_lse" not in shape.release.decode_parameters:
            raise UnsupportedError(f"{shape.name}: no kernel writes the LSE of rows that are not cut")
        if not self.needs_schedule(rows):
            raise UnsupportedError(f"{shape.name}: no LSE for {rows} rows, which aiter decodes without metadata")

    def _check_scales(self, fp8_scales: tuple[Any, Any]) -> None:
        config = self.shape.config
        for name, dtype, factor in zip("qk", (config.q_dtype, config.kv_dtype), fp8_scales, strict=True):
            if dtype == "fp8" and factor is None:
                part = "queries" if name == "q" else "KV"
                raise UnsupportedError(f"fp8_scales has no factor of {part}, which are fp8")

    def _pad(self, q: Any, out: Any) -> tuple[Any, Any]:
        """Queries and output with as many heads as the kernel has, padded as vLLM does.

        A divisor repeats each head in place; any other count repeats the heads from the first on. Heads do not see
        each other, so what is added is dropped again. The scratch comes from torch's allocator, as aiter's does.
        """
        heads, padded = self.shape.config.heads, self.shape.padded_heads
        if heads == padded:
            return q, out
        if padded % heads == 0:
            padded_q = q.repeat_interleave(padded // heads, dim=1)
        else:
            padded_q = q.repeat(1, -(-padded // heads), 1)[:, :padded].contiguous()
        return padded_q, out.new_zeros((q.shape[0], padded, V_HEAD_DIM))

    def _unpad(self, padded: Any) -> Any:
        heads, padded_heads = self.shape.config.heads, self.shape.padded_heads
        step = padded_heads // heads if padded_heads % heads == 0 else 1
        return padded[:, ::step][:, :heads]


def _check_array(name: str, array: Any, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> None:
    if tuple(array.shape) != shape or not array.is_contiguous():
        raise UnsupportedError(f"{name} has shape {tuple(array.shape)}, must be {shape} and contiguous")
    if array.dtype not in dtypes:
        raise UnsupportedError(f"{name} is {array.dtype}, must be {' or '.join(map(str, dtypes))}")


def _clear_from(first: int, out: Any, lse: Any) -> None:
    """Writes the result of rows without tokens, which are those from `first` on."""
    if first < out.shape[0]:
        out[first:].zero_()
        if lse is not None:
            lse[first:].fill_(float("-inf"))


def _clear_empty(kv_indptr: Any, out: Any, lse: Any) -> None:
    """The same for rows of which only the device knows that they are empty."""
    if out is None and lse is None:
        return
    empty = kv_indptr[1:] == kv_indptr[:-1]
    if out is not None:
        out.masked_fill_(empty[:, None, None], 0.0)
    if lse is not None:
        lse.masked_fill_(empty[:, None], float("-inf"))
