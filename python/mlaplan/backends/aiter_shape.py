"""What one configuration means to one aiter: heads, folds, limits, and what must be refused before a call.

What aiter answers with an abort of the process, or with wrong values, is an error here, with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from mlaplan import _core
from mlaplan.backends.aiter_release import AiterRelease
from mlaplan.backends.base import UnsupportedError, partial_capacity
from mlaplan.config import PlannerConfig

HEAD_DIM, V_HEAD_DIM = 576, 512  # of every MLA binary that aiter ships
MAX_FALLBACK_SPLITS = 16

_ADDRESS_LIMIT = 2**32  # bytes that a 32-bit offset reaches
_ANY_ROWS = 2**20  # more rows than any limit on them
_FALLBACK_OVERHEAD = 84.1  # tokens that aiter's own choice counts for a split
# Tokens per block of the fp8 kernels without metadata, by heads, as aiter's choice of a split count has them.
_FALLBACK_FP8_BLOCK = {8: 64, 16: 128, 24: 128, 32: 128, 48: 64, 64: 64, 128: 32}


def kv_pool_refusal(arch: str | None, num_bytes: int) -> str | None:
    """Says why a KV pool cannot be decoded from, or None where it can.

    aiter's gfx942 kernels use 32-bit byte offsets into the pool (seen by executing them).

    Args:
        arch: GPU family.
        num_bytes: Bytes of one layer's pool.
    """
    if arch != "gfx942" or num_bytes < _ADDRESS_LIMIT:
        return None
    return (
        f"the KV pool has {num_bytes} bytes per layer, but aiter's gfx942 kernels use 32-bit offsets and "
        "read wrong data beyond: give a layer a smaller pool"
    )


@cache
def fallback_splits(rows: int, tokens_per_row: int, num_cus: int, heads: int, *, q_is_fp8: bool) -> int:
    """Returns the splits per row that aiter's own rule chooses where no metadata is given.

    Chosen here and passed on, so that it depends on the size of a batch alone. aiter would derive it from the
    lengths at capture, and keep the device array behind it in a cache that may drop what a captured graph still
    reads (ROCm/aiter#5193).

    Args:
        rows: Rows of the call.
        tokens_per_row: Longest row, in tokens.
        num_cus: Compute units.
        heads: Query heads of the call.
        q_is_fp8: Whether queries are fp8.
    """
    best, best_score = 1, 0.0
    for splits in range(1, MAX_FALLBACK_SPLITS + 1):
        groups = rows * splits
        occupancy = groups / (num_cus * -(-groups // num_cus))
        score = occupancy * tokens_per_row / (tokens_per_row + _FALLBACK_OVERHEAD * splits)
        if score > best_score:
            best, best_score = splits, score
    if q_is_fp8:
        block = _FALLBACK_FP8_BLOCK[heads]
        best = min(best, -(-tokens_per_row // block))
        if best > 1:
            best = min(best, (tokens_per_row - 1) // block + 1)
    return min(best, -(-tokens_per_row // 16))  # a split of less than a block would be empty


@dataclass(frozen=True, slots=True)
class AiterShape:
    """One configuration as aiter sees it.

    Attributes:
        config: Resolved settings.
        release: What is installed.
        num_cus: Slots of a schedule.
        q_dtype: torch dtype of queries.
        kv_dtype: torch dtype of KV.
        native: The support table's answer for the head count of the model.
        support: The same for the head count that aiter is shown.
        padded_heads: Heads of a row after padding.
        view_fold: Head groups of a row that aiter is shown as rows of their own.
        gated: Whether `mla_decode_fwd` leaves this shape's metadata aside from some number of rows on.
    """

    config: PlannerConfig
    release: AiterRelease
    num_cus: int
    q_dtype: Any
    kv_dtype: Any
    native: _core.Support
    support: _core.Support
    padded_heads: int
    view_fold: int
    gated: bool

    @property
    def fold(self) -> int:
        """Planner rows per token row."""
        return self.view_fold * self.support.fold

    @property
    def aiter_heads(self) -> int:
        """Heads that aiter is told."""
        return self.padded_heads // self.view_fold

    @property
    def name(self) -> str:
        """The shape in words, for messages."""
        config = self.config
        return (
            f"{config.heads} heads, q {config.q_dtype}, kv {config.kv_dtype} on {config.arch}, "
            f"aiter {self.release.version}"
        )

    def ignores_metadata(self, rows: int) -> bool:
        """Whether `mla_decode_fwd` would leave the metadata of so many rows aside."""
        limit = self.release.persistent_rows
        return self.gated and limit is not None and rows >= limit

    def fallback_refusal(self) -> str | None:
        """Says why the shape cannot run without metadata, or None where it can."""
        # Those of 32 and 64 heads came with v0.1.10.
        is_older = self.padded_heads in (32, 64) and "page_size" not in self.release.decode_parameters
        if self.native.non_persistent and not is_older:
            return None
        return f"{self.name}: there is no kernel without metadata for one query per row"

    def budget(self, budget: int | None = None) -> int:
        """The split budget to pass: never -1, whose meaning changed, and never 0, which aiter divides by.

        Args:
            budget: The batch's; None for the largest that the settings allow.
        """
        config = self.config
        if budget is None:
            budget = config.split_budget
        if budget is None:
            budget = _core.max_split_per_batch(
                config.topk,
                topk=config.topk,
                num_cus=self.num_cus,
                min_tokens_per_split=config.min_tokens_per_split,
            )
        return self.num_cus if budget < 1 else min(budget, self.num_cus)

    def partials(self, rows: int) -> int:
        """Partial locations that a schedule of so many rows may use, whatever its lengths."""
        tiles = rows * self.fold
        # Releases before v0.1.9, which have no return_logits, view the partials as rows of all heads afterwards.
        multiple = 1 if "return_logits" in self.release.decode_parameters else self.support.fold
        # Under "balanced" the cost table chooses the budget, so it may be any.
        slots = self.num_cus if self.config.policy != "aiter" else min(self.num_cus, self.budget() * tiles)
        return partial_capacity(tiles, slots, multiple=multiple, pieces=self.config.params.pieces)

    def splits(self, rows: int) -> int:
        """Splits per row of a call without metadata."""
        config = self.config
        is_fp8 = config.q_dtype == "fp8"
        return fallback_splits(rows, config.topk, self.num_cus, self.padded_heads, q_is_fp8=is_fp8)

    def scratch_bytes(self, rows: int, *, scheduled: bool) -> int:
        """Bytes of partial outputs and LSE that aiter allocates in a call of so many rows."""
        if scheduled:
            heads = self.partials(rows) * (self.padded_heads // self.fold)
        else:
            heads = rows * self.splits(rows) * self.padded_heads
        return heads * (V_HEAD_DIM + 1) * 4


def resolve_shape(config: PlannerConfig, release: AiterRelease, *, persistent: bool) -> AiterShape:
    """Returns the shape that `config` means to the installed aiter.

    Args:
        config: Resolved settings.
        release: What is installed.
        persistent: Whether schedules are wanted at all.

    Raises:
        UnsupportedError: The settings or aiter's own idea of the GPU rule it out.
    """
    import torch

    if config.arch is None or config.num_cus is None:
        raise UnsupportedError("arch or num_cus is None: the aiter backend needs resolved settings")
    if (config.head_dim, config.v_head_dim) != (HEAD_DIM, V_HEAD_DIM):
        raise UnsupportedError(
            f"head_dim and v_head_dim are {config.head_dim} and {config.v_head_dim}, "
            f"but aiter's MLA kernels are made for {HEAD_DIM} and {V_HEAD_DIM}"
        )
    if release.arch is not None and release.arch != config.arch:
        raise UnsupportedError(
            f"arch is {config.arch!r}, but aiter takes the GPU for {release.arch!r} (rocminfo, or GPU_ARCHS)"
        )
    fp8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}.get(config.arch)
    if "fp8" in (config.q_dtype, config.kv_dtype) and release.fp8 != fp8:
        raise UnsupportedError(f"fp8 is {fp8} on {config.arch}, but aiter uses {release.fp8}")
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": fp8}
    native = _table(config, release, config.heads)
    view_fold = 4 if persistent and _faults_natively(config, native) else 1
    shown = native if view_fold == 1 else _table(config, release, native.padded_heads // view_fold)
    gated = release.persistent_rows is not None and not _table(config, release, config.heads, _ANY_ROWS).plan_used
    return AiterShape(
        config=config,
        release=release,
        num_cus=config.num_cus,
        q_dtype=dtypes[config.q_dtype],
        kv_dtype=dtypes[config.kv_dtype],
        native=native,
        support=shown,
        padded_heads=native.padded_heads,
        view_fold=view_fold,
        gated=gated,
    )


def _table(config: PlannerConfig, release: AiterRelease, heads: int, rows: int = 1) -> _core.Support:
    if config.arch is None:
        raise UnsupportedError("arch is None: the support table is aiter's")
    return _core.support(config.arch, heads, config.q_dtype, config.kv_dtype, rows=rows, aiter_version=release.release)


def _faults_natively(config: PlannerConfig, native: _core.Support) -> bool:
    """Whether aiter would run its gfx942 kernel of 64 fp8 heads.

    Native from v0.1.18 on, it faults on hardware at a page size of 1 (ROCm/aiter#4363). The 16-head kernel, onto
    which earlier releases fold the shape, does not; so aiter is shown four rows of 16 heads.
    """
    shape = (config.arch, native.padded_heads, config.q_dtype, config.kv_dtype)
    return shape == ("gfx942", 64, "fp8", "fp8") and native.persistent and native.fold == 1


def check_shape(shape: AiterShape, *, persistent: bool, aiter_plans: bool) -> None:
    """Refuses a shape on which aiter would abort, or which it would answer wrongly.

    Args:
        shape: The shape.
        persistent: Whether schedules are wanted.
        aiter_plans: Whether aiter's planner makes them.

    Raises:
        UnsupportedError: With the reason.
    """
    config = shape.config
    if persistent and not (shape.support.persistent and shape.support.plan_used):
        raise UnsupportedError(f"{shape.name}: {shape.support.reason}")
    # Before v0.1.7.post5 the decode looked at the KV's dtype alone, the planner at both.
    mixed = shape.padded_heads == 128 and (config.q_dtype, config.kv_dtype) == ("bf16", "fp8")
    if persistent and mixed and "intra_batch_mode" not in shape.release.decode_parameters:
        raise UnsupportedError(
            f"{shape.name}: this release plans 8 rows of 16 heads and decodes as if 128 heads were native"
        )
    if not persistent or shape.ignores_metadata(config.max_rows):
        refusal = shape.fallback_refusal()
        if refusal is not None:
            raise UnsupportedError(refusal)
    if shape.view_fold > 1 and aiter_plans:
        raise UnsupportedError(
            f"{shape.name}: aiter plans for its native 64-head kernel, which faults at a page size of 1 "
            "(ROCm/aiter#4363); use schedule_maker 'core' or 'device'"
        )
    if persistent:
        _check_pieces(shape)
    reach = _ADDRESS_LIMIT // (2 * V_HEAD_DIM * shape.padded_heads)
    if config.arch == "gfx942" and config.max_rows >= reach:
        raise UnsupportedError(
            f"{shape.name}: max_rows is {config.max_rows}, but 32-bit offsets reach {reach - 1} rows of output"
        )


def _check_pieces(shape: AiterShape) -> None:
    """Refuses pieces that aiter's merge or its addresses do not hold, which only the policy "invariant" can make."""
    config, pieces = shape.config, shape.config.params.pieces
    if pieces is None:
        return
    if pieces > shape.num_cus:
        raise UnsupportedError(
            f"{shape.name}: piece_tokens is {config.piece_tokens}, so a row has up to {pieces} pieces, but aiter's "
            f"merge holds {shape.num_cus} of a row"
        )
    # Stage 1 addresses float32 partial outputs by 32-bit offsets on gfx942.
    partials, reach = (
        shape.partials(config.max_rows),
        _ADDRESS_LIMIT // (4 * V_HEAD_DIM * shape.padded_heads // shape.fold),
    )
    if config.arch == "gfx942" and partials >= reach:
        raise UnsupportedError(
            f"{shape.name}: policy 'invariant' with max_rows {config.max_rows} and piece_tokens {config.piece_tokens} "
            f"needs {partials} partial outputs, but 32-bit offsets reach {reach - 1}"
        )


def check_sizes(shape: AiterShape) -> None:
    """Asks aiter for its sizes, and checks that it means as many slots as the plan.

    The split budget is left away on purpose: it inflates aiter's partial map (ROCm/aiter#3855), and without it
    the sizes are always enough. Only the slots are compared: some releases size for fewer planner rows than they
    plan, and the plan's own arrays do not depend on it.

    Raises:
        UnsupportedError: It means another number of slots.
    """
    rows = shape.config.max_rows * shape.view_fold
    sizes = shape.release.sizing(
        rows, 1, shape.aiter_heads, shape.q_dtype, shape.kv_dtype, is_sparse=True, fast_mode=True
    )
    entries = sizes[1][0]
    slots = (entries if isinstance(entries, int) else entries[0]) - 1
    if slots != shape.num_cus:
        raise UnsupportedError(
            f"num_cus is {shape.num_cus}, but aiter plans for {slots} slots; CU_NUM and "
            "AITER_ENABLE_EXPERIMENTAL change its count"
        )
