"""The stock impl, which makes the plan before it reads it."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse import ROCMAiterMLASparseImpl

from mlaplan.backends.aiter_shape import kv_pool_refusal
from mlaplan.vllm.settings import LOG


class PlannedImpl(ROCMAiterMLASparseImpl):
    """Makes a deferred plan when the first layer of a step comes by; everything else is the stock impl's.

    Run eagerly that is one launch. Under capture it is a node of the graph, in front of everything that reads the plan,
    and each replay makes the plan of the lengths that the device holds then.
    """

    _pool_checked = False

    def forward_mqa(
        self,
        q: Any,
        kv_c_and_k_pe_cache: Any,
        attn_metadata: Any,
        layer: Any,
    ) -> Any:
        """See the stock impl. Every layer asks for the plan; it is made once per step and once per capture."""
        plan = getattr(attn_metadata, "plan", None)
        if plan is not None:
            if attn_metadata.made_by_consumer:
                plan.planner.refresh(plan)
            if not self._pool_checked:
                self._pool_checked = True
                _report_large_pool(plan.planner.config.arch, kv_c_and_k_pe_cache)
        return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)


_REPORTED: set[str] = set()


def _report_large_pool(arch: str | None, kv_cache: Any) -> None:
    """Says once that aiter's kernels do not reach all of a layer's pool. They do so without us as well."""
    extent = kv_cache.shape[0] * kv_cache.stride(0) * kv_cache.element_size()
    reason = kv_pool_refusal(arch, extent)
    if reason is not None and reason not in _REPORTED:
        _REPORTED.add(reason)
        LOG.warning("with or without mlaplan: %s", reason)
