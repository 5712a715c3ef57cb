"""The mode `classic`: what vLLM's builder does, with the fingerprint compared in Rust and rows made there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from mlaplan.batch import Batch, Exact
from mlaplan.plan import Plan
from mlaplan.vllm.serving import Serving


def plan(builder: Any, serving: Serving, batch: Batch) -> Plan:
    """Reads the lengths back, and where the fingerprint changed uploads rows, lets aiter plan and waits.

    Args:
        builder: The builder, for what its own call to aiter takes.
        serving: How it plans.
        batch: The batch with its device arrays, lengths unknown.

    Returns:
        A plan that is made.
    """
    planner = serving.planner
    with gpu_sync_allowed():
        seq_lens = batch.device_seq_lens.cpu().numpy()
    queries = np.diff(batch.query_start_loc)
    if np.any((seq_lens < queries) | ((queries > 0) & (seq_lens < 1))):
        # A dummy request without KV. Its rows are empty, and of those aiter's planner makes works that end their slot.
        made = planner.plan(batch)
        torch.cuda.current_stream(builder.device).synchronize()
        return made
    made = planner.plan(replace(batch, lengths=Exact(seq_lens), boundaries_exact=True))
    if made.decision.action != "nothing":
        try:
            _let_aiter_plan(builder, serving, made, int(seq_lens.max()))
        except BaseException:
            # The planner believes that the plan is there, and aiter may have written half of another.
            planner.invalidate()
            raise
        torch.cuda.current_stream(builder.device).synchronize()
    return made


def _let_aiter_plan(builder: Any, serving: Serving, made: Plan, max_seq_len: int) -> None:
    """Calls aiter's planner as the stock builder does, for the live rows and with the dtypes of the decode call."""
    rows, arrays, constants, release = made.decision.rows, made.arrays, made.constants, serving.release
    indptrs = [constants.qo_indptr[: rows + 1], arrays.kv_indptr[: rows + 1]]
    options: dict[str, Any] = {}
    if release.takes_last_page_lens:
        indptrs.append(constants.kv_last_page_lens[:rows])
        options["page_size"] = 1
    if serving.planner.config.kv_dtype == "fp8":
        dtypes = (release.fp8, release.fp8)
    else:
        dtypes = (builder.model_dtype, builder.model_dtype)
    release.planner(
        *indptrs,
        builder._num_attention_heads,  # noqa: SLF001  (no public name says it)
        1,
        True,  # noqa: FBT003  (is_causal; by position in every release)
        constants.work_metadata_ptrs,
        arrays.work_info,
        arrays.work_indptr,
        arrays.reduce_indptr,
        constants.reduce_final_map,
        constants.reduce_partial_map,
        **options,
        kv_granularity=16,
        max_seqlen_qo=1,
        uni_seqlen_qo=1,
        fast_mode=True,
        max_split_per_batch=builder._sparse_decode_max_split(max_seq_len),  # noqa: SLF001
        **release.dtype_arguments(*dtypes),
    )
