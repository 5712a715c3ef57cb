"""A stock engine and ours beside each other: vLLM's own attention groups, metadata plumbing and impls on one batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rocm_stand_ins import AITER, FP8
from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as stock
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.utils import AttentionGroup

from mlaplan.layout import PlanArrays
from mlaplan.reference.plan import plan as reference_plan
from mlaplan.vllm.builder import PlannedBuilder
from mlaplan.vllm.impl import PlannedImpl

BLOCK = 64
HEAD_DIM = 576
NUM_BLOCKS = 97
CPU = torch.device("cpu")

STOCK = (stock.ROCMAiterMLASparseMetadataBuilder, stock.ROCMAiterMLASparseImpl)
OURS = (PlannedBuilder, PlannedImpl)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What an engine is configured with."""

    max_rows: int = 96
    max_reqs: int = 24
    topk: int = 128
    heads: int = 16
    drafts: int = 0
    cache_dtype: str = "auto"
    max_len: int = 1024
    dense_prefill: bool = False
    capture_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 48)
    sinks: bool = False
    rope_dim: int = 64
    layers: int = 1
    micro_batches: int = 1


@dataclass(kw_only=True)
class Step:
    """One batch, as a runner hands it out.

    Attributes:
        query_lens: Query tokens of each request, as the host has them.
        seq_lens: True KV lengths.
        device_query_lens: Query tokens on the device, where they differ.
        prefilling: Which requests are prefills.
        padded_reqs: Requests with padding, of a graph.
        padded_rows: Rows with padding.
        bound_excess: How far the host's lengths are too large on decode requests.
        max_seq_len: What the host says is the longest; None for the truth.
        capture: Whether it is built for a capture.
    """

    query_lens: list[int]
    seq_lens: list[int]
    device_query_lens: list[int] | None = None
    prefilling: list[bool] | None = None
    padded_reqs: int | None = None
    padded_rows: int | None = None
    bound_excess: int = 0
    max_seq_len: int | None = None
    capture: bool = False
    kind: str = ""

    @property
    def rows(self) -> int:
        return sum(self.query_lens)

    @property
    def visible_rows(self) -> int:
        return self.rows if self.padded_rows is None else self.padded_rows


@dataclass
class Inputs:
    """The device arrays of a runner, which never move, and what the layers get."""

    sizes: Sizes
    rng: np.random.Generator
    query_start_loc: Any = field(init=False)
    seq_lens: Any = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.query_start_loc = torch.zeros(sizes.max_reqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(sizes.max_reqs, dtype=torch.int32)
        self.block_table = torch.zeros(sizes.max_reqs, sizes.max_len // BLOCK, dtype=torch.int32)
        self.topk_indices = torch.zeros(sizes.max_rows, sizes.topk, dtype=torch.int32)
        dtype = FP8 if sizes.cache_dtype.startswith("fp8") else torch.bfloat16
        self.q = torch.zeros(sizes.max_rows, sizes.heads, HEAD_DIM, dtype=dtype)
        self.kv_cache = torch.zeros(NUM_BLOCKS, BLOCK, HEAD_DIM, dtype=dtype)

    def write(self, step: Step) -> dict[str, Any]:
        """Writes the device arrays of a step, and returns what `build_attn_metadata` takes."""
        sizes, n = self.sizes, len(step.query_lens)
        reqs = step.padded_reqs or n
        starts = np.zeros(sizes.max_reqs + 1, np.int32)
        starts[1 : n + 1] = np.cumsum(step.query_lens)
        starts[n + 1 :] = starts[n]
        device = np.zeros_like(starts)
        device[1 : n + 1] = np.cumsum(step.device_query_lens or step.query_lens)
        device[n + 1 :] = device[n]
        self.query_start_loc.copy_(torch.from_numpy(device))
        self.seq_lens.zero_()
        self.seq_lens[:n] = torch.tensor(step.seq_lens, dtype=torch.int32)
        self.block_table.copy_(torch.from_numpy(self.rng.integers(1, NUM_BLOCKS, self.block_table.shape, np.int32)))
        longest = max(step.seq_lens, default=1)
        indices = self.rng.integers(-1, max(longest, 1), self.topk_indices.shape, np.int32)
        self.topk_indices.copy_(torch.from_numpy(indices))
        prefilling = step.prefilling or [False] * n
        bound = torch.zeros(reqs, dtype=torch.int32)
        bound[:n] = torch.tensor(
            [s if p else s + step.bound_excess for s, p in zip(step.seq_lens, prefilling, strict=True)],
            dtype=torch.int32,
        )
        longest = max(step.seq_lens, default=0)
        return {
            "num_reqs": reqs,
            "num_tokens": step.visible_rows,
            "query_start_loc_gpu": self.query_start_loc[: reqs + 1],
            "query_start_loc_cpu": torch.from_numpy(starts[: reqs + 1].copy()),
            "max_query_len": max(step.query_lens + (step.device_query_lens or []), default=0),
            "seq_lens": self.seq_lens,
            "max_seq_len": longest if step.max_seq_len is None else step.max_seq_len,
            "block_tables": [self.block_table[:reqs]],
            "slot_mappings": torch.zeros(1, step.visible_rows, dtype=torch.int64),
            "seq_lens_cpu_upper_bound": bound,
            "positions": torch.zeros(step.visible_rows, dtype=torch.int64),
            "is_prefilling": torch.tensor(prefilling),
            "for_cudagraph_capture": step.capture,
        }


class PrefillBackend:
    """A dense prefill backend that does nothing, to have its rows taken out of the sparse ones."""

    def clone(self) -> PrefillBackend:
        return self

    def prepare_metadata(self, prefill: Any) -> None:
        """Nothing to prepare."""

    def supports_quant_output(self, _key: Any) -> bool:
        return False


def config(sizes: Sizes, layers: dict[str, Any]) -> Any:
    """What the builder reads of a `VllmConfig`."""
    dims = SimpleNamespace(
        index_topk=sizes.topk,
        kv_lora_rank=512 if sizes.rope_dim else HEAD_DIM,
        qk_nope_head_dim=128,
        qk_rope_head_dim=sizes.rope_dim,
        v_head_dim=128,
        q_lora_rank=1536,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            hf_text_config=dims,
            max_model_len=sizes.max_len,
            get_num_attention_heads=lambda _parallel: sizes.heads,
            model_arch_config=SimpleNamespace(total_num_attention_heads=sizes.heads),
        ),
        cache_config=SimpleNamespace(cache_dtype=sizes.cache_dtype, block_size=BLOCK),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=sizes.max_rows, max_num_seqs=sizes.max_reqs),
        attention_config=SimpleNamespace(hisparse_config=None, sparse_mla_force_mqa=False),
        speculative_config=(
            SimpleNamespace(num_speculative_tokens=sizes.drafts, parallel_drafting=False) if sizes.drafts else None
        ),
        use_v2_model_runner=True,
        compilation_config=SimpleNamespace(
            static_forward_context=layers, cudagraph_capture_sizes=list(sizes.capture_sizes)
        ),
    )


class Engine:
    """One attention group with its layers."""

    def __init__(self, classes: tuple[type, type], sizes: Sizes, inputs: Inputs, *, impl: type | None = None) -> None:
        builder_cls, impl_cls = classes
        impl_cls = impl or impl_cls
        self.sizes, self.inputs = sizes, inputs
        names = [f"layer.{index}" for index in range(sizes.layers)]
        self.layers = {name: _layer(name, impl_cls, sizes, inputs) for name in names}
        backend = type(
            "Backend", (stock.ROCMAiterMLASparseBackend,), {"get_builder_cls": staticmethod(lambda: builder_cls)}
        )
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD_DIM, dtype=torch.bfloat16)
        self.config = config(sizes, self.layers)
        self.group = AttentionGroup(backend, names, spec, 0)
        self.group.create_metadata_builders(
            self.config, CPU, kernel_block_size=BLOCK, num_metadata_builders=sizes.micro_batches
        )
        self.kv_cache_config = KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
        )

    @property
    def builder(self) -> Any:
        return self.group.get_metadata_builder()

    @property
    def planner(self) -> Any:
        return self.builder._serving.planner

    def build(self, given: dict[str, Any], micro_batch: int = 0) -> Any:
        """Builds through vLLM's `build_attn_metadata`."""
        metadata = attn_utils.build_attn_metadata(
            attn_groups=[[self.group]], kv_cache_config=self.kv_cache_config, ubatch_idx=micro_batch, **given
        )
        return metadata["layer.0"]

    def forward(self, metadata: Any, rows: int) -> list[dict[str, Any]]:
        """Runs every layer's sparse part, and returns what the decode calls were given."""
        before = len(AITER.decodes)
        for layer in self.layers.values():
            layer.impl.forward_mqa(self.inputs.q[:rows], self.inputs.kv_cache, metadata, layer)
        return AITER.decodes[before:]


def sparse_rows(metadata: Any, visible: int) -> int:
    """Rows that the MLA layer hands to `forward_mqa`: those that no dense prefill takes."""
    prefill = metadata.prefill
    return metadata.num_decode_tokens if prefill is not None and prefill.use_dense_mha else visible


def _layer(name: str, impl_cls: type, sizes: Sizes, inputs: Inputs) -> Any:
    impl = object.__new__(impl_cls)
    impl.__dict__.update(
        num_heads=sizes.heads,
        kv_lora_rank=512,
        qk_rope_head_dim=sizes.rope_dim,
        scale=0.1,
        kv_cache_dtype=sizes.cache_dtype,
        sinks=torch.zeros(sizes.heads) if sizes.sinks else None,
        use_aiter_sparse_mla=False,
        _indexer=None,
        owns_indexer=True,
        index_epoch=0,
    )
    impl.topk_indices_buffer = inputs.topk_indices
    one = torch.ones(1)
    return SimpleNamespace(
        layer_name=name,
        impl=impl,
        prefill_backend=PrefillBackend() if sizes.dense_prefill else None,
        _q_scale=one,
        _k_scale=one,
    )


# What the planner fills; every other field must be the same value or the same tensor.
PLANNED = {
    "req_id_per_token",
    "qo_indptr",
    "paged_kv_last_page_len",
    "paged_kv_indices",
    "paged_kv_indptr",
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
}
ROWS = ("req_id_per_token", "qo_indptr", "paged_kv_last_page_len", "paged_kv_indptr")


def assert_same_fields(theirs: Any, ours: Any) -> None:
    """Every field that is not planned is equal, and the planned ones have equal shape, dtype and presence."""
    assert isinstance(ours, type(theirs))
    for entry in dataclasses.fields(theirs):
        a, b = getattr(theirs, entry.name), getattr(ours, entry.name)
        if entry.name in PLANNED:
            assert (a is None) == (b is None), entry.name
            if a is not None:
                assert a.dtype == b.dtype, entry.name
            if entry.name in (*ROWS, "paged_kv_indices"):
                assert a.shape == b.shape, (entry.name, a.shape, b.shape)
        else:
            _assert_same(entry.name, a, b)


def _assert_same(name: str, a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), name
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
    elif dataclasses.is_dataclass(a):
        assert type(a) is type(b), name
        for entry in dataclasses.fields(a):
            if "backend" not in entry.name and "workspace" not in entry.name:  # each engine's own, and scratch
                _assert_same(f"{name}.{entry.name}", getattr(a, entry.name), getattr(b, entry.name))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), name
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            _assert_same(f"{name}[{index}]", x, y)
    else:
        assert a == b, (name, a, b)


def assert_same_rows(theirs: Any, ours: Any, stock_builder: Any, visible: int) -> None:
    """The row arrays are equal, padding of the buffers behind them included: a captured kernel reads as far as that."""
    for name in ROWS:
        assert getattr(theirs, name).tolist() == getattr(ours, name).tolist(), name
    plan = getattr(ours, "plan", None)
    if plan is not None:
        arrays = plan.arrays
        assert arrays.request_ids[:visible].tolist() == stock_builder.req_id_per_token_buffer[:visible].tolist()
        assert arrays.kv_indptr[: visible + 1].tolist() == stock_builder.paged_kv_indptr[: visible + 1].tolist()
        spare = arrays.request_ids[visible:]
        assert not spare.any(), "padding of a class names no request"


def schedule_of(metadata: Any, tiles: int) -> dict[str, list[Any]]:
    """The part of a schedule that is read."""
    work_indptr, reduce_indptr = metadata.work_indptr.numpy(), metadata.reduce_indptr.numpy()
    works, partials = int(work_indptr[-1]), int(reduce_indptr[tiles])
    cut = np.flatnonzero(np.diff(reduce_indptr[: tiles + 1]))
    assert (reduce_indptr[tiles:] == partials).all(), "tiles behind the last one are empty"
    assert metadata.reduce_partial_map.shape[0] >= partials
    return {
        "work_indptr": work_indptr.tolist(),
        "work_info": metadata.work_info_set[:works].tolist(),
        "reduce_indptr": reduce_indptr[: tiles + 1].tolist(),
        "reduce_final_map": metadata.reduce_final_map.numpy()[cut].tolist(),
        "reduce_partial_map": metadata.reduce_partial_map[:partials].tolist(),
    }


def assert_same_schedule(theirs: Any, ours: Any, tiles: int) -> None:
    if theirs.work_indptr is None:
        return
    assert theirs.work_indptr.shape == ours.work_indptr.shape, "its length is the grid of the decode kernel"
    wanted, found = schedule_of(theirs, tiles), schedule_of(ours, tiles)
    for name, values in wanted.items():
        assert values == found[name], name
    assert_points_at_its_arrays(ours)


def assert_points_at_its_arrays(metadata: Any) -> None:
    addresses = metadata.work_meta_data.view(torch.int64).tolist()
    assert addresses == [metadata.work_indptr.data_ptr(), metadata.work_info_set.data_ptr()]


def assert_made(ours: Any, engine: Engine, *, reqs: int, visible: int) -> None:
    """The arrays hold the plan of what the device's arrays hold, made from nothing by the reference."""
    arrays = PlanArrays(*(array.numpy() for array in ours.plan.arrays))
    wanted = PlanArrays(*(np.full_like(array, -7) for array in arrays))
    inputs = engine.inputs
    reference_plan(
        inputs.query_start_loc[: reqs + 1].numpy(), inputs.seq_lens[:reqs].numpy(), wanted, engine.planner.params
    )
    works = int(wanted.work_indptr[-1])
    for name in ("request_ids", "kv_indptr", "work_indptr", "reduce_indptr"):
        assert getattr(wanted, name).tolist() == getattr(arrays, name).tolist(), name
    assert wanted.work_info[:works].tolist() == arrays.work_info[:works].tolist()
    assert arrays.request_ids.shape[0] >= visible


DECODE_OPTIONS = {"max_seqlen_q", "page_size", "nhead_kv", "sm_scale", "logit_cap", "return_lse", "causal"}


def assert_same_decodes(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], tiles: int) -> None:
    """The decode calls got the same arguments, as far as a kernel reads them."""
    assert len(theirs) == len(ours)
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys()
        tokens = int(a["kv_indptr"][-1])
        assert a["kv_indices"].shape == b["kv_indices"].shape
        assert torch.equal(a["kv_indices"][:tokens], b["kv_indices"][:tokens])
        for name in {"qo_indptr", "kv_indptr", "kv_last_page_lens"} & a.keys():
            assert a[name].tolist() == b[name].tolist(), name
        assert a["q"].shape == b["q"].shape
        for name in {
            "max_seqlen_q",
            "page_size",
            "nhead_kv",
            "sm_scale",
            "logit_cap",
            "return_lse",
            "causal",
        } & a.keys():
            assert a[name] == b[name], name
        assert (a["work_indptr"] is None) == (b["work_indptr"] is None)
        if a["work_indptr"] is not None:
            assert b["work_meta_data"].view(torch.int64).tolist() == b["addresses"]
            wanted = schedule_of(_renamed(a), tiles)
            assert wanted == schedule_of(_renamed(b), tiles)


def _renamed(call: dict[str, Any]) -> Any:
    return SimpleNamespace(**{name: call[name] for name in call})


def padding_is_planned(builder: Any) -> bool:
    """Whether the stock builder hands padding rows to aiter's planner, as 0.30 and 0.31 do and we never."""
    return not hasattr(builder, "metadata_cls")


def varlen_bound(engine: Engine) -> int | None:
    """What the builder answers vLLM from 0.31 on; 0.30 does not ask."""
    ask = getattr(engine.builder, "get_varlen_cudagraph_max_query_len", None)
    return None if ask is None else ask(engine.config, None)
