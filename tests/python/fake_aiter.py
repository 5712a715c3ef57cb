"""aiter without a GPU: its three MLA functions as each release declares them, on CPU tensors.

They check everything that they are given, and then do what the real ones do: write a plan, and attend by it.
Signatures, head rules and kernel lists were read from ROCm/aiter at each tag; the work split is written from its
description, apart from the product and from its reference.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fake_aiter_kernels import FakeContractError, attend_by_schedule, attend_by_splits, expect, plan_walk

EMPTY = inspect.Parameter.empty
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}

__all__ = ["FP8", "RELEASES", "FakeAbortError", "FakeAiter", "FakeContractError", "Release", "head_rules"]

Parameters = tuple[tuple[str, Any], ...]


class FakeAbortError(BaseException):
    """Where the real library ends the process. Not an `Exception`: nothing can catch that."""


@dataclass(frozen=True)
class Release:
    """One release's interface and rules.

    Attributes:
        version: Version of the distribution.
        rules: (patch, post) of the release 0.1.patch.postN whose rules hold.
        only_four_dtypes: The main branch of one day in July 2026.
        has_gate: Whether `mla_decode_fwd` may turn away from its metadata.
    """

    version: str
    rules: tuple[int, int]
    only_four_dtypes: bool = False
    has_gate: bool = False

    @property
    def aborts(self) -> bool:
        """Whether a failed check ends the process instead of raising."""
        return self.rules >= (20, 0)

    def sizing(self) -> Parameters:
        """Parameters of `get_mla_metadata_info_v1`."""
        names: list[tuple[str, Any]] = [
            (name, EMPTY) for name in ("batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse")
        ]
        names.append(("fast_mode", True))
        if self.rules >= (7, 5):
            names += [("num_kv_splits", 32), ("intra_batch_mode", False)]
        if self.rules >= (16, 0):
            names.append(("max_split_per_batch", -1))
        return tuple(names)

    def planner(self) -> Parameters:
        """Parameters of `get_mla_metadata_v1`."""
        paged = self.rules >= (10, 2)
        # Until v0.1.8 the stub gave the second and third buffer each other's name; the positions meant the same.
        second, third = ("work_info_set", "work_indptr") if self.rules >= (8, 0) else ("work_indptr", "work_info")
        names: list[tuple[str, Any]] = [("seqlens_qo_indptr", EMPTY), ("seqlens_kv_indptr", EMPTY)]
        names += [("kv_last_page_lens", EMPTY)] if paged else []
        names += [(name, EMPTY) for name in ("num_heads_per_head_k", "num_heads_k", "is_causal")]
        names += [(name, EMPTY) for name in ("work_metadata_ptrs", second, third, "reduce_indptr")]
        names += [("reduce_final_map", EMPTY), ("reduce_partial_map", EMPTY)]
        names += [("page_size", 1)] if paged else []
        names += [("kv_granularity", 16), ("max_seqlen_qo", -1), ("uni_seqlen_qo", -1), ("fast_mode", True)]
        names += [("topk", -1), ("max_split_per_batch", -1)]
        names += [("intra_batch_mode", False)] if self.rules >= (7, 5) else []
        pair: list[tuple[str, Any]] = [("dtype_q", None), ("dtype_kv", None)]
        if self.rules >= (18, 0):
            names += [("is_cp_round_robin", False), ("mla_version", 32)]
            names += [(f"dtype_{part}", None) for part in ("q_nope", "q_rope", "kv_nope", "kv_rope")]
            names += [] if self.only_four_dtypes else pair
        elif self.rules >= (7, 3):
            names += pair
            names += [("is_cp_round_robin", False)] if self.rules >= (17, 0) else []
        return tuple(names)

    def decode(self) -> Parameters:
        """Parameters of `mla_decode_fwd`."""
        names: list[tuple[str, Any]] = [
            (name, EMPTY)
            for name in ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens")
        ]
        names.append(("max_seqlen_q", EMPTY))
        names += [("page_size", 1), ("nhead_kv", 1)] if self.rules >= (10, 2) else []
        names += [("sm_scale", None), ("logit_cap", 0.0)]
        names += [(name, None) for name in ("num_kv_splits", "num_kv_splits_indptr", "work_meta_data")]
        names += [(name, None) for name in ("work_indptr", "work_info_set", "reduce_indptr")]
        names += [(name, None) for name in ("reduce_final_map", "reduce_partial_map", "q_scale", "kv_scale")]
        names += [("intra_batch_mode", False)] if self.rules >= (7, 5) else []
        names += [("return_logits", False), ("return_lse", False)] if self.rules >= (9, 0) else []
        if self.rules >= (17, 0):
            names += [("g_kv_indptr", None), ("cp_world_size", 1), ("cp_rank", 0)]
        names += [("causal", True)] if self.rules >= (20, 0) else []
        return tuple(names)


RELEASES = {
    release.version: release
    for release in (
        Release("0.1.7.post2.dev18", (7, 2)),
        Release("0.1.7.post3", (7, 3)),
        Release("0.1.7.post5", (7, 5)),
        Release("0.1.8", (8, 0)),
        Release("0.1.9", (9, 0)),
        Release("0.1.10.post2", (10, 2)),
        Release("0.1.12", (12, 0)),
        Release("0.1.13", (13, 0)),
        Release("0.1.14", (14, 0)),
        Release("0.1.15", (15, 0)),
        Release("0.1.16", (16, 0)),
        Release("0.1.17", (17, 0)),
        # Numbered after the last tag on its branch, though newer than v0.1.17.
        Release("0.1.17.dev280+gfede90f46", (18, 0), only_four_dtypes=True),
        Release("0.1.18", (18, 0), has_gate=True),
        Release("0.1.20", (20, 0), has_gate=True),
        Release("0.1.21.dev46+ge4048607a", (21, 0), has_gate=True),
    )
}


@dataclass(frozen=True)
class HeadRules:
    """What one release does with a head count, one query per row.

    Attributes:
        planned: Planner rows per row, and queries of each, of `get_mla_metadata_v1`; None where it fails.
        decoded: The same of `mla_decode_fwd` with metadata.
    """

    planned: tuple[int, int] | None
    decoded: tuple[int, int] | None


def head_rules(rules: tuple[int, int], arch: str, heads: int, *, q_fp8: bool, kv_fp8: bool) -> HeadRules:
    """Reads of the C++ planner and of the Python decode, release by release."""
    both, neither = q_fp8 and kv_fp8, not q_fp8 and not kv_fp8
    gfx950 = arch == "gfx950"
    native = heads == 16
    if both and heads == 128:
        native = not gfx950 or not (12, 0) <= rules < (14, 0)
    elif both and heads == 64:
        native = rules >= ((13, 0) if gfx950 else (18, 0))
    elif both and heads == 32:
        native = gfx950 and ((15, 0) <= rules < (16, 0) or rules >= (17, 0))
    elif neither and gfx950 and heads != 16:
        native = rules >= (14, 0) or (rules >= (13, 0) and heads == 128)
    folds = heads % 16 == 0 and 32 <= heads <= 128
    planned = decoded = (1, 1) if native else (heads // 16, 1) if folds else None
    if (12, 0) <= rules < (13, 0) and gfx950 and both and heads == 64:
        planned = decoded = (1, 4)
    if rules < (7, 5) and kv_fp8 and heads == 128:
        decoded = (1, 1)  # looked at the KV's dtype alone, the planner at both
    return HeadRules(planned, decoded)


def has_kernel(rules: tuple[int, int], arch: str, heads: int, *, q_fp8: bool, kv_fp8: bool, lse: bool) -> bool:
    """Whether a binary for `heads` heads with metadata is listed; `heads` as left by the fold."""
    both, neither = q_fp8 and kv_fp8, not q_fp8 and not kv_fp8
    if arch == "gfx942":
        listed = heads == 16 or (both and (heads == 128 or (heads == 64 and rules >= (18, 0))))
        return listed and (not lse or (both and heads == 64))
    if neither:
        listed = heads == 16 or (heads >= 24 and rules >= (14, 0)) or (heads == 128 and rules >= (13, 0))
        return listed and (not lse or rules >= (20, 0))
    if both:
        listed = heads in (16, 64, 128) or (heads == 32 and rules >= (15, 0))
        return listed and (not lse or rules >= (20, 0) or (heads == 16 and rules >= (12, 0)))
    return heads == 16 and q_fp8 <= kv_fp8 and not lse


def has_fallback_kernel(rules: tuple[int, int], arch: str, heads: int, *, q_fp8: bool, kv_fp8: bool) -> bool:
    """Whether a binary without metadata is listed."""
    if q_fp8 != kv_fp8:
        return False
    if heads in (16, 128):
        return True
    if q_fp8:
        return heads == 8 and rules >= (16, 0)
    return (heads == 32 and rules >= (10, 0)) or (heads == 64 and rules >= (10, 0) and arch == "gfx950")


@dataclass
class FakeAiter:
    """One release on one GPU.

    Attributes:
        release: What is installed.
        arch: What the GPU is.
        num_cus: Its compute units.
        q_dtype: What every call must say of the queries.
        kv_dtype: The same of the KV.
        calls: Calls so far: name, and arguments by name.
        sized: Rows and heads of the last sizing call.
        merged_rows: Planner rows that were cut and merged so far.
    """

    release: Release
    arch: str
    num_cus: int
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sized: tuple[int, int] | None = None
    merged_rows: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch, *, version: str | None = None) -> None:
        """Puts the modules in place, and the version where Python looks for it."""
        for name, module in self.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        installed, real = version or self.release.version, importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: installed if name == "amd-aiter" else real(name)
        )

    def modules(self) -> dict[str, ModuleType]:
        """The modules that are imported, by name."""
        names = ("aiter", "aiter.mla", "aiter.jit", "aiter.jit.utils", "aiter.jit.utils.chip_info")
        modules = {name: ModuleType(name) for name in names}
        package: Any = modules["aiter"]
        mla: Any = modules["aiter.mla"]
        chip: Any = modules["aiter.jit.utils.chip_info"]
        package.get_mla_metadata_info_v1 = self._signed("sizing", self.release.sizing(), self._size)
        package.get_mla_metadata_v1 = self._signed("planner", self.release.planner(), self._plan)
        mla.mla_decode_fwd = self._signed("decode", self.release.decode(), self._decode)
        package.mla = mla
        package.dtypes = SimpleNamespace(fp8=FP8[self.arch], bf16=torch.bfloat16, fp16=torch.float16)
        chip.get_gfx = lambda: self.arch
        if self.release.has_gate:
            mla._use_persistent_mla_decode = lambda *_: None
        return modules

    def made(self, name: str) -> list[dict[str, Any]]:
        """Arguments of the calls of one function."""
        return [arguments for called, arguments in self.calls if called == name]

    def _signed(self, name: str, parameters: Parameters, run: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature(
            [inspect.Parameter(parameter, kind, default=default) for parameter, default in parameters]
        )

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls.append((name, dict(bound.arguments)))
            return run(dict(bound.arguments))

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    def _fail(self, message: str) -> None:
        if self.release.aborts:
            raise FakeAbortError(message)
        raise RuntimeError(message)

    def _size(self, given: dict[str, Any]) -> tuple[Any, ...]:
        expect(given["max_seqlen_qo"] == 1, "one query per row")
        expect(given["fast_mode"] is True and given["is_sparse"] in (True, 1), "fast mode, sparse")
        expect(given.get("max_split_per_batch", -1) == -1, "the split budget is not for the sizing function")
        expect(not given.get("intra_batch_mode", False), "intra-batch mode is another mode")
        expect((given["q_dtype"], given["kv_dtype"]) == (self.q_dtype, self.kv_dtype), "dtypes of the config")
        rows, heads = given["batch_size"], given["num_head_qo"]
        if heads % (8 if self.release.rules >= (12, 0) else 16):
            self._fail(f"{heads} heads cannot be sized")
        self.sized = (rows, heads)
        planned = self._rules(heads).planned
        tiles_per_row = 1 if planned is None or planned[1] > 1 else planned[0]
        slots = int(os.environ.get("CU_NUM", "0")) or self.num_cus
        doubled = self.arch == "gfx950" and heads == 64 and self.q_dtype == self.kv_dtype == FP8["gfx950"]
        if doubled and self.release.rules >= (14, 0) and os.environ.get("AITER_ENABLE_EXPERIMENTAL", "0") != "0":
            slots *= 2
        tiles, works = rows * tiles_per_row, (rows + slots - 1) * tiles_per_row
        partials = tiles_per_row * min(rows + slots - 1, 2 * (slots - 1))
        return (
            (2, torch.uint64),
            (slots + 1, torch.int32),
            ((works, 8), torch.int32),
            (tiles + 1, torch.int32),
            ((tiles, 2), torch.int32),
            (partials, torch.int32),
        )

    def _rules(self, heads: int, q_fp8: bool | None = None, kv_fp8: bool | None = None) -> HeadRules:
        fp8 = FP8[self.arch]
        return head_rules(
            self.release.rules,
            self.arch,
            heads,
            q_fp8=self.q_dtype == fp8 if q_fp8 is None else q_fp8,
            kv_fp8=self.kv_dtype == fp8 if kv_fp8 is None else kv_fp8,
        )

    def _planned_dtypes(self, given: dict[str, Any]) -> None:
        forms: list[list[str]] = [
            [name for name in ("dtype_q", "dtype_kv") if name in given],
            [name for name in given if name.endswith(("_nope", "_rope"))],
        ]
        said = {name: given[name] for form in forms for name in form if given[name] is not None}
        complete = any(form and set(form) <= set(said) for form in forms)
        expect(complete, f"the planner takes dtypes and was told only {sorted(said)}: an omitted one means bf16")
        for name, dtype in said.items():
            wanted = self.q_dtype if name.startswith("dtype_q") else self.kv_dtype
            expect(dtype == wanted, f"{name} is {dtype}, sizing and decode use {wanted}")

    def _plan(self, given: dict[str, Any]) -> None:
        values = list(given.values())
        first = 6 if "kv_last_page_lens" in given else 5
        pointers, info, indptr, reduce_indptr, final_map, partial_map = values[first : first + 6]
        starts, lengths = given["seqlens_qo_indptr"], given["seqlens_kv_indptr"]
        rows = starts.shape[0] - 1
        self._planned_dtypes(given)
        expect(rows >= 1, "no call for an empty batch")
        fixed = {
            "num_heads_k": 1,
            "is_causal": True,
            "page_size": 1,
            "kv_granularity": 16,
            "max_seqlen_qo": 1,
        }
        fixed |= {"uni_seqlen_qo": 1, "fast_mode": True, "topk": -1, "intra_batch_mode": False}
        fixed |= {"is_cp_round_robin": False, "mla_version": 32}
        for name, value in fixed.items():
            expect(given.get(name, value) == value, f"{name} is {given.get(name)}, expected {value}")
        budget = given["max_split_per_batch"]
        expect(isinstance(budget, int) and 1 <= budget <= self.num_cus, f"split budget is {budget}")
        for name in ("seqlens_qo_indptr", "seqlens_kv_indptr"):
            _check_int32(name, given[name], (rows + 1,))
        if "kv_last_page_lens" in given:
            _check_int32("kv_last_page_lens", given["kv_last_page_lens"], (rows,))
            expect(bool((given["kv_last_page_lens"] == 1).all()), "pages of one token")
        expect(starts.tolist() == list(range(rows + 1)), "one query per row")
        expect(self.sized is not None, "sized before planned")
        heads = given["num_heads_per_head_k"]
        expect(self.sized is not None and heads == self.sized[1], "as many heads as sized for")
        planned = self._rules(heads).planned
        if planned is None:
            self._fail(f"{heads} heads cannot be planned")
            return
        bounds = lengths.tolist()
        row_lengths = [end - start for start, end in pairwise(bounds)]
        expect(bounds[0] == 0 and min(row_lengths) >= 1, f"live rows only, and each with a token: {row_lengths}")
        plan = plan_walk(row_lengths, fold=planned[0], queries=planned[1], num_cus=self.num_cus, budget=budget)
        expect(pointers.dtype == torch.uint64 and pointers.shape == (2,), "work_metadata_ptrs is two uint64")
        for name, array, width in (("work_info_set", info, 8), ("reduce_final_map", final_map, 2)):
            expect(array.dtype == torch.int32 and array.dim() == 2 and array.shape[1] == width, f"{name} wrong")
            expect(array.is_contiguous(), f"{name} must be contiguous")
        expect(indptr.shape == (self.num_cus + 1,), f"work_indptr has shape {tuple(indptr.shape)}")
        plan.write(pointers, info, indptr, reduce_indptr, final_map, partial_map)

    def _decode(self, given: dict[str, Any]) -> tuple[Any, Any]:
        q, kv = given["q"], given["kv_buffer"]
        rows = given["qo_indptr"].shape[0] - 1
        self._check_decode(given, rows)
        fp8 = FP8[self.arch]
        said = {"q_fp8": q.dtype == fp8, "kv_fp8": kv.dtype == fp8}
        heads = q.shape[1]
        lse = bool(given.get("return_lse", False))
        if given["work_meta_data"] is None:
            # A view of head groups as rows has more queries than rows, which only metadata can say.
            expect(q.shape[0] == rows, "one query per row without metadata")
            if not has_fallback_kernel(self.release.rules, self.arch, heads, **said):
                self._fail(f"cannot get heuristic kernel: {heads} heads, {said}, no metadata")
            return attend_by_splits(given)
        gated = (self.arch, heads, *said.values()) == ("gfx950", 16, False, False) and self.release.has_gate
        expect(not (gated and rows >= _gate() > 0), "metadata that mla_decode_fwd would leave aside")
        decoded = self._rules(heads, **said).decoded
        if decoded is None:
            raise AssertionError(f"nhead={heads} not supported")
        expect(decoded[1] == 1, "a layout of several queries per row")
        shown = heads // decoded[0]
        if not has_kernel(self.release.rules, self.arch, shown, lse=lse, **said):
            self._fail(f"cannot get heuristic kernel: {shown} heads, {said}, lse {lse}")
        expect(
            not lse or self.release.rules >= (12, 0),
            "an LSE of uncut rows, which this release does not write",
        )
        partials = given["reduce_partial_map"].shape[0]
        if self.release.rules < (9, 0) and decoded[0] > 1 and partials * 16 % heads:
            raise RuntimeError(f"shape '[-1, 1, {heads}, 512]' is invalid for {partials} partials of 16 heads")
        merged, made_lse = attend_by_schedule(given, fold=decoded[0], num_cus=self.num_cus, lse=lse)
        self.merged_rows += merged
        return torch.empty(0), made_lse

    def _check_decode(self, given: dict[str, Any], rows: int) -> None:
        q, kv, o = given["q"], given["kv_buffer"], given["o"]
        expect(rows >= 1, "no call for an empty batch")
        expect((q.dtype, kv.dtype) == (self.q_dtype, self.kv_dtype), f"dtypes {q.dtype}, {kv.dtype}")
        expect(q.is_contiguous() and q.dim() == 3 and q.shape[2] == 576, f"q is {tuple(q.shape)}")
        expect(kv.is_contiguous() and kv.dim() == 4 and tuple(kv.shape[1:]) == (1, 1, 576), f"{kv.shape}")
        expect(o.is_contiguous() and tuple(o.shape) == (*q.shape[:2], 512), f"o is {tuple(o.shape)}")
        expect(o.dtype in (torch.bfloat16, torch.float16), f"the merge does not write {o.dtype}")
        expect(self.arch != "gfx942" or kv.numel() * kv.element_size() < 2**32, "32-bit offsets into the pool")
        for name, shape in (("qo_indptr", rows + 1), ("kv_indptr", rows + 1), ("kv_last_page_lens", rows)):
            _check_int32(name, given[name], (shape,))
        expect(given["qo_indptr"].tolist() == list(range(rows + 1)), "one query per row")
        expect(bool((given["kv_last_page_lens"] == 1).all()), "pages of one token")
        expect(given["kv_indices"].dtype == torch.int32 and given["kv_indices"].dim() == 1, "kv_indices")
        expect(given["max_seqlen_q"] == 1 and given.get("page_size", 1) == 1, "one query per row, pages of 1")
        expect(given.get("nhead_kv", 1) == 1 and given["logit_cap"] == 0.0, "one KV head, no cap")
        expect(isinstance(given["sm_scale"], float), f"sm_scale is {given['sm_scale']!r}")
        for name, dtype in (("q_scale", q.dtype), ("kv_scale", kv.dtype)):
            factor = given[name]
            expect(dtype != FP8[self.arch] or factor is not None, f"{name} is missing")
            expect(factor is None or (factor.dtype == torch.float32 and factor.numel() == 1), f"{name} wrong")


def _gate() -> int:
    """Rows from which the metadata of one shape is left aside; what is no number counts as the default."""
    try:
        return int(os.environ.get("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "32"))
    except ValueError:
        return 32


def _check_int32(name: str, array: torch.Tensor, shape: tuple[int, ...]) -> None:
    expect(array.dtype == torch.int32, f"{name} is {array.dtype}")
    expect(tuple(array.shape) == shape and array.is_contiguous(), f"{name} has shape {tuple(array.shape)}")
