"""What a planner is made for."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlaplan import _core
from mlaplan.costs import CostTable
from mlaplan.layout import PlanParams, row_classes, work_capacity

_FULL_CHIP_CUS = {"gfx942": 304, "gfx950": 256}
_POLICIES = ("aiter", "balanced", "invariant")
_BACKENDS = ("auto", "reference", "portable", "aiter", "none")
_SCHEDULE_MAKERS = ("core", "device", "aiter")
_INT32_MAX = 2**31 - 1
_MOST_SLOT_COST = 1 << 30  # the device adds up what a slot costs in 32 bits
_MOST_SHARED_COST = 1 << 62  # the cost of all works times the slots is a number of 64 bits
# Far above any use, and low enough that a slip does not ask for gigabytes.
_MOST = {
    "max_rows": 1 << 24,
    "max_requests": 1 << 24,
    "topk": _INT32_MAX,
    "heads": 1024,
    "min_tokens_per_split": _INT32_MAX,
    "piece_tokens": _INT32_MAX,
    "staging_slots": 1024,
    "head_dim": 1 << 16,
    "v_head_dim": 1 << 16,
    "num_cus": 1 << 16,
    "fold": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """What a planner is made for: one frozen object feeds sizing, planning and decoding.

    Attributes:
        max_rows: Most rows of a step, padding included.
        max_requests: Most requests of a step, idle ones included.
        topk: KV slots per row at most, in tokens.
        heads: Query heads of this rank.
        arch: "gfx942" or "gfx950", whose head rules then decide the fold; None where aiter is not involved.
        num_cus: Compute units. None for the device's own count or, on the host, a full chip of `arch`. One arch
            comes with several counts, so ask the device where there is one. For the portable kernel None stands for as
            many slots as fill the GPU once, a program for each slot and block of heads.
        q_dtype: "bf16", "fp16" or "fp8".
        kv_dtype: "bf16", "fp16" or "fp8".
        page_size: Tokens of a page as the decode kernel sees it. Only 1.
        capture_sizes: Row counts that graphs are captured for.
        split_budget: aiter's `max_split_per_batch`, a budget of slots for the whole batch: at least 1, or -1 for no
            limit. None chooses it by the longest row: for the policy "aiter" see `mlaplan.max_split_per_batch`, for
            "balanced" the number of pieces that finishes that row first by the cost table. "invariant" takes none.
        min_tokens_per_split: Tokens per split that the choice of the policy "aiter" aims for.
        fold: Planner rows per token row. None takes it from `arch`'s head rules, or 1.
        policy: "aiter", the schedule of aiter's own planner; "balanced", whose longest slot is shorter; or "invariant",
            where a row's pieces, and so the bits of its output, do not depend on the other rows.
        cost_table: What works cost on the kernel at hand, for "balanced" and "invariant". None where the portable
            kernel decodes for the table that `mlaplan tune` stored for this device, else that of an H200; where
            another does for the one counted for aiter's kernel of these heads and dtypes, else `mlaplan.costs.DEFAULT`.
        piece_tokens: Tokens of a piece under "invariant". Partial outputs are kept for every piece of `max_rows` full
            rows, so memory grows as this shrinks.
        staging_slots: Host-made plans whose copies may be under way at once.
        aiter_version: aiter release whose head rules hold, "0.1.18" for instance. None for the newest known.
        backend: "reference", "portable", "aiter", "none" for an engine that decodes by itself, or "auto" for the
            device's own.
        schedule_maker: Who makes the plan of a batch that the host knows: "core" (Rust, one upload), "device" (the
            plan op, one launch) or "aiter" (rows as "core", then aiter's planner). The arrays are the same. Batches
            that the host does not know, and deferred plans, are always made by the device.
        head_dim: Values of a KV row that a query is compared with.
        v_head_dim: Leading values of a KV row that are summed up.
        always_rebuild: Make every plan anew though nothing changed; for hunting faults.
    """

    max_rows: int
    max_requests: int
    topk: int = 2048
    heads: int = 16
    arch: str | None = "gfx942"
    num_cus: int | None = None
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    page_size: int = 1
    capture_sizes: tuple[int, ...] = ()
    split_budget: int | None = None
    min_tokens_per_split: int = 128
    fold: int | None = None
    policy: str = "aiter"
    cost_table: CostTable | None = None
    piece_tokens: int = 256
    staging_slots: int = 16
    aiter_version: str | None = None
    backend: str = "auto"
    schedule_maker: str = "core"
    head_dim: int = 576
    v_head_dim: int = 512
    always_rebuild: bool = False

    def __post_init__(self) -> None:
        """Checks every setting.

        Raises:
            TypeError: A setting that must be a whole number is not one.
            ValueError: A setting is out of range; the message names it and its value.
        """
        self._check_numbers()
        self._check_names()
        self._check_policy()
        if self.arch is not None:
            self.support()
        elif self.num_cus is None and self.backend == "aiter":
            raise ValueError("arch is None, but the aiter backend needs one: 'gfx942' or 'gfx950'")
        elif self.aiter_version is not None:
            raise ValueError(f"aiter_version is {self.aiter_version!r}, but arch is None: its head rules go by arch")

    def _check_numbers(self) -> None:
        for name, most in _MOST.items():
            if getattr(self, name) is not None or name not in ("num_cus", "fold"):
                # NumPy's own integers would overflow in the products that sizes are.
                object.__setattr__(self, name, _count(name, getattr(self, name), most))
        if self.max_rows * self.topk > _INT32_MAX:
            raise _core.PlanError(
                f"max_rows x topk is {self.max_rows * self.topk}, must be at most {_INT32_MAX}, the kernels' index type"
            )
        if self.v_head_dim > self.head_dim:
            raise ValueError(f"v_head_dim is {self.v_head_dim}, must be at most head_dim, {self.head_dim}")
        if _integer("page_size", self.page_size) != 1:
            raise ValueError(f"page_size is {self.page_size}, must be 1: rows address single KV slots")
        if self.split_budget is not None and _integer("split_budget", self.split_budget) != -1:
            if self.split_budget < 1:
                raise ValueError(f"split_budget is {self.split_budget}, must be -1 (no limit) or at least 1")
            _count("split_budget", self.split_budget, _INT32_MAX)
        if not isinstance(self.capture_sizes, tuple):
            raise TypeError(f"capture_sizes must be a tuple of row counts, not {type(self.capture_sizes).__name__}")
        sizes = enumerate(self.capture_sizes)
        checked = tuple(_count(f"capture_sizes[{index}]", size, self.max_rows, " (max_rows)") for index, size in sizes)
        object.__setattr__(self, "capture_sizes", checked)

    def _check_names(self) -> None:
        _one_of("policy", self.policy, _POLICIES)
        _one_of("backend", self.backend, _BACKENDS)
        _one_of("schedule_maker", self.schedule_maker, _SCHEDULE_MAKERS)
        if self.schedule_maker == "aiter" and self.backend != "aiter":
            raise ValueError(
                f"schedule_maker is 'aiter', but backend is {self.backend!r}: only the aiter backend has its planner"
            )
        for name in ("q_dtype", "kv_dtype"):
            _one_of(name, getattr(self, name), ("bf16", "fp16", "fp8"))
        if not isinstance(self.always_rebuild, bool):
            raise TypeError(f"always_rebuild must be True or False, not {type(self.always_rebuild).__name__}")

    def _check_policy(self) -> None:
        policy, table = self.policy, self.cost_table
        if table is not None and not isinstance(table, CostTable):
            raise TypeError(f"cost_table must be a mlaplan.CostTable or None, not {type(table).__name__}")
        if policy != "aiter" and self.schedule_maker == "aiter":
            raise ValueError(
                f"schedule_maker is 'aiter', but policy is {policy!r}: aiter's planner makes its own alone"
            )
        if policy == "invariant" and self.split_budget is not None:
            raise ValueError(
                f"split_budget is {self.split_budget}, but policy 'invariant' cuts every row by piece_tokens alone"
            )
        if policy == "balanced" and self.num_cus is not None and table is not None:
            longest = table.longest_slot_bound(
                rows=self.max_rows, topk=self.topk, num_cus=self.num_cus, fold=self.fold or 1
            )
            if longest >= _MOST_SLOT_COST:
                raise _core.PlanError(
                    f"cost_table lets a slot cost {longest}, must stay below {_MOST_SLOT_COST}, for the device adds "
                    "costs up in 32 bits: give the table a larger unit"
                )
        if policy == "invariant":
            self._check_pieces()

    def _check_pieces(self) -> None:
        tiles, pieces = self.max_rows * (self.fold or 1), -(-self.topk // self.piece_tokens)
        works = work_capacity(tiles, self.num_cus or 1, pieces)
        if 8 * works > _INT32_MAX:
            raise _core.PlanError(
                f"piece_tokens is {self.piece_tokens}, which cuts {tiles} planner rows into {works} works, must be at "
                f"most {_INT32_MAX // 8}: give it a larger number"
            )
        if self.cost_table is not None and self.num_cus is not None:
            piece = self.cost_table.most_expensive(min(self.piece_tokens, self.topk))
            if works * piece * self.num_cus > _MOST_SHARED_COST:
                raise _core.PlanError(
                    f"cost_table lets {works} works cost {works * piece}, must stay below "
                    f"{_MOST_SHARED_COST // self.num_cus}: give the table a larger unit"
                )

    def support(self, rows: int | None = None) -> _core.Support:
        """What aiter supports for these heads and dtypes.

        Args:
            rows: Rows of a call, where the answer depends on it.

        Returns:
            The support table's answer.

        Raises:
            ValueError: `arch` is None or unknown, or the release is.
        """
        if self.arch is None:
            raise ValueError("arch is None: the support table is aiter's, and needs 'gfx942' or 'gfx950'")
        return _core.support(
            self.arch, self.heads, self.q_dtype, self.kv_dtype, rows=rows, aiter_version=self.aiter_version
        )

    def resolved(self, device_cus: int | None) -> PlannerConfig:
        """Returns the same settings with `num_cus` and `fold` filled in.

        Args:
            device_cus: Compute units of the device at hand, None where it has none.

        Raises:
            ValueError: Neither the settings nor the device say how many compute units there are.
        """
        num_cus = self.num_cus or device_cus or _FULL_CHIP_CUS.get(self.arch or "")
        if num_cus is None:
            raise ValueError("num_cus is None, and neither the device nor arch says how many there are")
        fold = self.fold or (self.support().fold if self.arch is not None else 1)
        return replace(self, num_cus=num_cus, fold=fold)

    @property
    def params(self) -> PlanParams:
        """What a plan depends on beside the batch. Of resolved settings only."""
        if self.num_cus is None or self.fold is None:
            raise ValueError("num_cus and fold are open: call resolved() first")
        return PlanParams(
            topk=self.topk,
            num_cus=self.num_cus,
            fold=self.fold,
            split_budget=self.split_budget,
            min_tokens_per_split=self.min_tokens_per_split,
            policy=self.policy,
            cost_table=self.cost_table,
            piece_tokens=self.piece_tokens,
        )

    @property
    def out_dtype(self) -> str:
        """Dtype of the output: bf16 unless the queries are fp16."""
        return "fp16" if self.q_dtype == "fp16" else "bf16"

    @property
    def row_classes(self) -> tuple[int, ...]:
        """Row counts that have a layout of their own."""
        return row_classes(self.max_rows, self.capture_sizes)


def _integer(name: str, value: Any) -> int:
    number = None
    if not isinstance(value, bool):
        with suppress(Exception):  # what it raises is an object's own affair; it is no number then
            number = operator.index(value)
    if number is None:
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    if number.bit_length() > 63:
        # Thousands of digits have no text.
        raise ValueError(f"{name} must be a number of at most 64 bits, it has {number.bit_length()}")
    return number


def _count(name: str, value: Any, most: int, why: str = "") -> int:
    number = _integer(name, value)
    if number < 1:
        raise ValueError(f"{name} is {number}, must be at least 1")
    if number > most:
        raise ValueError(f"{name} is {number}, must be at most {most}{why}")
    return number


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    if value not in known:
        raise ValueError(f"{name} is {value!r}, known are {', '.join(map(repr, known))}")
