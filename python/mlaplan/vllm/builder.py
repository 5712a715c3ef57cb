"""The metadata builder: the stock builder's fields, with rows and schedule planned by mlaplan. No planning here."""

from __future__ import annotations

from ctypes import c_int32
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as stock
from vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse import (
    ROCMAiterMLASparseMetadata,
    ROCMAiterMLASparseMetadataBuilder,
)

from mlaplan.batch import Batch
from mlaplan.plan import Plan
from mlaplan.vllm import classic, plain
from mlaplan.vllm.metadata import PlannedMetadata
from mlaplan.vllm.release import Stock
from mlaplan.vllm.serving import Serving, serve
from mlaplan.vllm.settings import Mode

_HAS_COMMON_BASE = Stock.of(stock).has_common_base
# How the stock builder decides that a pure prefill runs without a schedule; 0.30 and 0.31 have no such rule.
_is_long_bf16_prefill = getattr(stock, "_is_long_bf16_prefill", None)
# What the stock builder builds upon: it fills the fields that are not planned.
_build_unplanned = ROCMAiterMLASparseMetadataBuilder.__mro__[1].build if _HAS_COMMON_BASE else plain.build
# Fields kept: one set for each (class, rows) pair that was met, a few kilobytes of host memory each.
_MOST_FIELDS = 8192


def _entry_of(array: torch.Tensor, index: int) -> int:
    """An entry of a one-dimensional host array. NumPy's view of it costs more than all that is asked of it here."""
    is_plain = array.dtype is torch.int32 and array.is_cpu and array.is_contiguous()
    if is_plain and 0 <= index < array.numel() and (address := array.data_ptr()):
        return c_int32.from_address(address + 4 * index).value
    return int(array.numpy()[index])


class _Fields(NamedTuple):
    """The planned fields of a batch of so many rows."""

    with_schedule: dict[str, Any]
    without: dict[str, Any]


class PlannedBuilder(ROCMAiterMLASparseMetadataBuilder):
    """Builds the stock builder's metadata without touching the device where the first layer makes the plan.

    Where a case is not ours (`mlaplan.vllm.serving`), the stock builder builds. What a batch means is the device's
    `query_start_loc` and `seq_lens`; of the host's copies only the number of rows is used.

    A captured graph keeps the addresses of the metadata that it was captured with. They depend on the padded row count
    alone, and stay.
    """

    metadata_cls = PlannedMetadata
    # For a builder made without __init__: then it is the stock builder.
    _serving: Serving | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not _HAS_COMMON_BASE:
            self.layer_names = layer_names
        self._fields: dict[tuple[int, int], _Fields] = {}
        self._serving = serving = serve(self)
        if serving is None:
            self.metadata_cls = ROCMAiterMLASparseMetadata
            return
        # Vouched for where the plan is made on the device, from its own boundaries and lengths.
        self.supports_draft_decode_metadata_update = serving.mode is not Mode.CLASSIC
        if serving.deferred:
            self.get_varlen_cudagraph_max_query_len = self._varlen_bound

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """See the stock builder.

        Returns:
            Metadata equal to the stock builder's in every field. Where plans are deferred its arrays hold the plan from
            the first layer on, which makes it; otherwise they hold it now.
        """
        serving = self._serving
        if serving is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build=fast_build)
        if serving.reporter is not None:
            serving.reporter.tick()
        metadata = _build_unplanned(self, common_prefix_len, common_attn_metadata, fast_build=fast_build)
        self._fill(serving, metadata, common_attn_metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Makes the plan again from what the device's arrays hold now, in place.

        Recorded in a draft graph between two draft steps, or run eagerly there.
        """
        plan = metadata.plan
        if plan is None:
            return
        # Whatever the buffers hold, and even if this capture has made the plan before: the lengths are others now.
        plan.planner.remake(plan)
        if hasattr(metadata, "remapped_epoch"):
            # The row lengths changed, so the indices converted for the step before lie elsewhere.
            metadata.remapped_epoch = -1

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> torch.Tensor:
        """Leaves out the launch that fills request ids: the plan has them."""
        if self._serving is None:
            ids: torch.Tensor = super()._build_req_id_per_token(common_attn_metadata)
            return ids
        buffer: torch.Tensor = self.req_id_per_token_buffer
        return buffer

    def _fill(self, serving: Serving, metadata: Any, common: Any) -> None:
        """Sets every field that the stock builder sets after its base class."""
        dense = metadata.prefill is not None and metadata.prefill.use_dense_mha
        num_reqs = metadata.num_decodes if dense else metadata.num_reqs
        boundaries = common.query_start_loc_cpu
        rows = _entry_of(boundaries, num_reqs)
        visible = rows if dense else metadata.num_actual_tokens
        plan = None
        if rows > 0:
            plan = self._plan(serving, common, num_reqs, rows, visible)
            metadata.plan = plan
            metadata.made_by_consumer = serving.deferred
        fields = self._fields_of(plan, rows if _HAS_COMMON_BASE else visible)
        scheduled = plan is not None and not (metadata.num_prefills and self._runs_without_schedule(metadata))
        metadata.__dict__.update(fields.with_schedule if scheduled else fields.without)

    def _plan(self, serving: Serving, common: Any, num_reqs: int, rows: int, visible: int) -> Plan:
        planner = serving.planner
        device_boundaries, device_lengths = common.query_start_loc, common.seq_lens
        if device_lengths.numel() != num_reqs or device_boundaries.numel() != num_reqs + 1:
            device_boundaries, device_lengths = device_boundaries[: num_reqs + 1], device_lengths[:num_reqs]
        if serving.deferred and planner.observer is None:
            return planner.defer(num_reqs, rows, visible, device_boundaries, device_lengths)
        boundaries = np.ascontiguousarray(common.query_start_loc_cpu.numpy()[: num_reqs + 1], np.int32)
        batch = Batch(boundaries, None, visible, False, device_boundaries, device_lengths)  # noqa: FBT003
        if serving.mode is Mode.CLASSIC:
            return classic.plan(self, serving, batch)
        plan = planner.plan(batch, deferred=True)
        if not serving.deferred:
            planner.refresh(plan)
            # A replay right behind may read the arrays before this launch has written them.
            torch.cuda.current_stream(self.device).synchronize()
        return plan

    def _runs_without_schedule(self, metadata: Any) -> bool:
        return _is_long_bf16_prefill is not None and bool(_is_long_bf16_prefill(self._mla_kv_dtype, metadata))

    def _fields_of(self, plan: Plan | None, rows: int) -> _Fields:
        """Planned fields for `rows` rows. A torch slice costs microseconds, and the same few come back all the time."""
        key = (-1 if plan is None else plan.decision.row_class, rows)
        fields = self._fields.get(key)
        if fields is None:
            if len(self._fields) >= _MOST_FIELDS:
                self._fields.clear()
            fields = self._fields[key] = self._make_fields(plan, rows)
        return fields

    def _make_fields(self, plan: Plan | None, rows: int) -> _Fields:
        if plan is None:
            ids, indptr, last_page_len = self.req_id_per_token_buffer, self.paged_kv_indptr, self.paged_kv_last_page_len
            queries, schedule = self.qo_indptr, {}
        else:
            arrays, constants = plan.arrays, plan.constants
            ids, indptr = arrays.request_ids, arrays.kv_indptr
            # The planner's, because it writes them again after memory was lost.
            queries, last_page_len = constants.qo_indptr, constants.kv_last_page_lens
            schedule = {
                "work_meta_data": constants.work_metadata_ptrs,
                "work_indptr": arrays.work_indptr,
                "work_info_set": arrays.work_info,
                "reduce_indptr": arrays.reduce_indptr,
                "reduce_final_map": constants.reduce_final_map,
                # aiter allocates its partial outputs by this array's length in every call, and there are never more
                # partials than this.
                "reduce_partial_map": constants.reduce_partial_map[: self._mla_reduce_partial_map.shape[0]],
            }
        without = {
            "attn_out_dtype": self.model_dtype,
            "req_id_per_token": ids[:rows],
            "qo_indptr": queries[: rows + 1],
            "paged_kv_last_page_len": last_page_len[:rows],
            "paged_kv_indices": self.paged_kv_indices[: rows * self.topk_tokens],
            "paged_kv_indptr": indptr[: rows + 1],
        }
        return _Fields(without | schedule, without)

    def _varlen_bound(self, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Longest query of the variable-length decode batches that a captured graph may replay.

        Rows and schedule are made inside the graph from the device's boundaries, whatever they are; the host gives
        nothing but the number of rows. So the bound is what vLLM takes for a decode at most.
        """
        del vllm_config, kv_cache_spec
        bound: int | None = self.reorder_batch_threshold
        return bound
