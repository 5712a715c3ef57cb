"""The metadata builder: the stock builder's fields, with rows and schedule planned by mlaplan. No planning here."""

from __future__ import annotations

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
# Views kept: one set for each (class, rows) pair that was met, a few dozen bytes of host memory each.
_MOST_VIEWS = 8192


class _Views(NamedTuple):
    """The slices that a batch of so many rows sees."""

    req_id_per_token: torch.Tensor
    qo_indptr: torch.Tensor
    paged_kv_last_page_len: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_indptr: torch.Tensor
    reduce_partial_map: torch.Tensor


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
        self._views: dict[tuple[int, int], _Views] = {}
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
        if _HAS_COMMON_BASE:
            # The stock builder's own base, past the stock builder.
            metadata = super(ROCMAiterMLASparseMetadataBuilder, self).build(
                common_prefix_len, common_attn_metadata, fast_build=fast_build
            )
        else:
            metadata = plain.metadata(self, common_attn_metadata, self._unfilled())
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
        return self._unfilled()

    def _unfilled(self) -> torch.Tensor:
        buffer: torch.Tensor = self.req_id_per_token_buffer
        return buffer

    def _fill(self, serving: Serving, metadata: Any, common: Any) -> None:
        """Sets every field that the stock builder sets after its base class."""
        dense = metadata.prefill is not None and metadata.prefill.use_dense_mha
        num_reqs = metadata.num_decodes if dense else metadata.num_reqs
        boundaries = _host_array(common.query_start_loc_cpu)[: num_reqs + 1]
        rows = int(boundaries[num_reqs])
        visible = rows if dense else metadata.num_actual_tokens
        metadata.attn_out_dtype = self.model_dtype

        plan = None
        if rows > 0:
            batch = Batch(
                boundaries,
                padded_rows=visible,
                boundaries_exact=False,
                device_query_start_loc=_leading(common.query_start_loc, num_reqs + 1),
                device_seq_lens=_leading(common.seq_lens, num_reqs),
            )
            plan = self._plan(serving, batch)
            metadata.plan = plan
            metadata.made_by_consumer = serving.deferred
        views = self._views_of(plan, rows if _HAS_COMMON_BASE else visible)
        metadata.req_id_per_token = views.req_id_per_token
        metadata.qo_indptr = views.qo_indptr
        metadata.paged_kv_last_page_len = views.paged_kv_last_page_len
        metadata.paged_kv_indices = views.paged_kv_indices
        metadata.paged_kv_indptr = views.paged_kv_indptr
        if plan is not None and not self._runs_without_schedule(metadata):
            arrays, constants = plan.arrays, plan.constants
            metadata.work_meta_data = constants.work_metadata_ptrs
            metadata.work_indptr = arrays.work_indptr
            metadata.work_info_set = arrays.work_info
            metadata.reduce_indptr = arrays.reduce_indptr
            metadata.reduce_final_map = constants.reduce_final_map
            metadata.reduce_partial_map = views.reduce_partial_map

    def _plan(self, serving: Serving, batch: Batch) -> Plan:
        planner = serving.planner
        if serving.mode is Mode.CLASSIC:
            return classic.plan(self, serving, batch)
        plan = planner.plan(batch, deferred=True)
        if not serving.deferred:
            planner.refresh(plan)
            # A replay right behind may read the arrays before this launch has written them.
            torch.cuda.current_stream(self.device).synchronize()
        return plan

    def _runs_without_schedule(self, metadata: Any) -> bool:
        return (
            metadata.num_prefills > 0
            and _is_long_bf16_prefill is not None
            and bool(_is_long_bf16_prefill(self._mla_kv_dtype, metadata))
        )

    def _views_of(self, plan: Plan | None, rows: int) -> _Views:
        """Slices for `rows` rows. A torch slice costs microseconds, and the same few come back all the time."""
        key = (-1 if plan is None else plan.decision.row_class, rows)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            views = self._views[key] = self._make_views(plan, rows)
        return views

    def _make_views(self, plan: Plan | None, rows: int) -> _Views:
        if plan is None:
            ids, indptr, partials = self.req_id_per_token_buffer, self.paged_kv_indptr, self.qo_indptr
            queries, last_page_len = self.qo_indptr, self.paged_kv_last_page_len
        else:
            ids, indptr = plan.arrays.request_ids, plan.arrays.kv_indptr
            # The planner's, because it writes them again after memory was lost.
            queries, last_page_len = plan.constants.qo_indptr, plan.constants.kv_last_page_lens
            partials = plan.constants.reduce_partial_map
        return _Views(
            req_id_per_token=ids[:rows],
            qo_indptr=queries[: rows + 1],
            paged_kv_last_page_len=last_page_len[:rows],
            paged_kv_indices=self.paged_kv_indices[: rows * self.topk_tokens],
            paged_kv_indptr=indptr[: rows + 1],
            # aiter allocates its partial outputs by this array's length in every call, and there are never more
            # partials than this.
            reduce_partial_map=partials[: self._mla_reduce_partial_map.shape[0]],
        )

    def _varlen_bound(self, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Longest query of the variable-length decode batches that a captured graph may replay.

        Rows and schedule are made inside the graph from the device's boundaries, whatever they are; the host gives
        nothing but the number of rows. So the bound is what vLLM takes for a decode at most.
        """
        del vllm_config, kv_cache_spec
        bound: int | None = self.reorder_batch_threshold
        return bound


def _host_array(tensor: torch.Tensor) -> Any:
    array = tensor.numpy()
    return array if array.dtype == np.int32 else array.astype(np.int32)


def _leading(tensor: torch.Tensor, entries: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == entries else tensor[:entries]
