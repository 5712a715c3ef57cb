"""What of vLLM the adapter relies on, and how a vLLM that differs is recognised.

The builder copies no logic out of vLLM: it takes the fields that the stock builder makes for a batch, and replaces
those that are planned. So it must know every field, and where each comes from. Releases 0.30 to 0.33 were read.
"""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType
from typing import Any, NamedTuple

BACKEND_MODULE = "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse"

OLDEST, NEWEST = (0, 30), (0, 33)

_PLANNED = frozenset(
    {
        "qo_indptr",
        "paged_kv_last_page_len",
        "paged_kv_indices",
        "paged_kv_indptr",
        "attn_out_dtype",
        "work_meta_data",
        "work_indptr",
        "work_info_set",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
    }
)
# Until 0.31 the metadata has no base class with fields and the builder none that fills them.
_PLAIN = frozenset(
    {
        "num_reqs",
        "max_query_len",
        "max_seq_len",
        "num_actual_tokens",
        "query_start_loc",
        "slot_mapping",
        "block_table",
        "req_id_per_token",
        "block_size",
        "topk_tokens",
        "num_decodes",
        "num_prefills",
        "num_decode_tokens",
        "prefill_max_seq_len",
        "prefill",
    }
)
# From 0.33 on the impl notes there which layer's indices it has converted.
_NOTES = frozenset({"remapped_buf", "remapped_epoch"})

_SIGNATURES = (
    ("builder", "__init__", ["self", "kv_cache_spec", "layer_names", "vllm_config", "device"]),
    ("builder", "build", ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]),
    ("impl", "forward_mqa", ["self", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"]),
)


class Stock(NamedTuple):
    """The classes of the stock backend."""

    backend: Any
    builder: Any
    impl: Any
    metadata: Any

    @classmethod
    def of(cls, module: ModuleType) -> Stock:
        """Takes the classes from the backend's module.

        Raises:
            AttributeError: One is missing.
        """
        prefix = "ROCMAiterMLASparse"
        names = ("Backend", "MetadataBuilder", "Impl", "Metadata")
        return cls(*(getattr(module, prefix + name) for name in names))

    @property
    def has_common_base(self) -> bool:
        """Whether the builder's base class fills the fields that are not planned (0.32 on)."""
        return hasattr(self.builder, "metadata_cls")


def unknown_release(module: ModuleType, version: tuple[int, int] | None) -> str | None:
    """Why this vLLM is not one that the adapter knows, or None.

    Args:
        module: The backend's module.
        version: Major and minor number, None where vLLM does not say.
    """
    span = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
    if version is None:
        return f"vLLM has no version number; {span[0]} to {span[1]} are known"
    if not OLDEST <= version <= NEWEST:
        return f"vLLM {version[0]}.{version[1]} is not known, {span[0]} to {span[1]} are"
    try:
        stock = Stock.of(module)
    except AttributeError as error:
        return f"the backend of this vLLM has another form: {error}"
    for owner, method, expected in _SIGNATURES:
        actual = list(inspect.signature(getattr(getattr(stock, owner), method)).parameters)
        if actual != expected:
            return f"{method} of this vLLM's {owner} takes {actual}, known is {expected}"
    return _unknown_fields(stock)


def _unknown_fields(stock: Stock) -> str | None:
    fields = {field.name for field in dataclasses.fields(stock.metadata)}
    if not stock.has_common_base:
        difference = fields ^ (_PLANNED | _PLAIN)
    else:
        if not hasattr(stock.builder, "_build_req_id_per_token"):
            return "the builder of this vLLM fills request ids in another way"
        inherited = {field.name for field in dataclasses.fields(stock.metadata.__mro__[1])}
        if "req_id_per_token" not in inherited:
            return "the metadata of this vLLM has no common base"
        difference = (fields - inherited) ^ _PLANNED
        difference -= _NOTES
    if difference:
        return f"the metadata of this vLLM has other fields than known: {', '.join(sorted(difference))}"
    return None
