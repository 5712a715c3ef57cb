"""vLLM 0.30 and 0.31, where no base class fills the fields that are not planned."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from mlaplan.vllm.metadata import PlannedMetadata


def build(builder: Any, _common_prefix_len: int, common: Any, *, fast_build: bool) -> Any:
    """Returns metadata with every field that does not depend on the plan.

    Args:
        builder: The builder.
        common: vLLM's `CommonAttentionMetadata`.
        fast_build: Not used, as in the stock builder.
    """
    del fast_build
    unfilled = builder.req_id_per_token_buffer  # until the planned fields are set
    decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(
        common, decode_threshold=builder.reorder_batch_threshold or 1
    )
    return PlannedMetadata(
        num_reqs=common.num_reqs,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        num_actual_tokens=common.num_actual_tokens,
        query_start_loc=common.query_start_loc,
        slot_mapping=common.slot_mapping,
        block_table=common.block_table_tensor,
        block_size=builder.kv_cache_spec.block_size,
        topk_tokens=builder.topk_tokens,
        num_decodes=decodes,
        num_prefills=prefills,
        num_decode_tokens=decode_tokens,
        attn_out_dtype=builder.model_dtype,
        req_id_per_token=unfilled,
        qo_indptr=unfilled,
        paged_kv_last_page_len=unfilled,
        paged_kv_indices=unfilled,
        paged_kv_indptr=unfilled,
    )
