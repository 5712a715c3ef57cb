"""The backend class that the registry hands out in the place of the stock one."""

from __future__ import annotations

from vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse import ROCMAiterMLASparseBackend


class PlannedBackend(ROCMAiterMLASparseBackend):
    """The stock backend under a name that shows in vLLM's log.

    Builder and impl come from the stock class, where `mlaplan.vllm.activation` put ours; had it reason not to, this
    class is the stock backend and nothing else.
    """
