"""What works cost on a kernel: the table that the policies `balanced` and `invariant` place works by.

`docs/design.md` section 6 says how the policies use it.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from mlaplan import _core

if TYPE_CHECKING:
    from mlaplan._types import Int32Array

_MOST_COST = 1 << 24  # sums over any batch then fit 63 bits; as nanoseconds 17 ms
_MOST_BLOCK_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """What works cost on one kernel, in one unit, whatever it is.

    A slot with works costs `slot`; a work costs `whole` or `piece` and `block` for each block it begins, counted from
    the work's first token; a row that is cut costs `merge` per piece in the merge,
    and a batch with any row that is cut costs `cut` once.

    Attributes:
        block_tokens: KV tokens of a block: what the kernel reads at a time. 1 to 2**31 - 1.
        block: Cost of a block, at least 1.
        piece: Fixed cost of a piece of a row that is cut; at most `whole + block`, so that cutting one block off a
            row never makes the rest dearer.
        whole: Fixed cost of a row that is not cut.
        slot: Cost of a slot that has works.
        merge: Cost of merging one piece.
        cut: Cost of having anything to merge, however much it is. No cost is above 2**24.

    Raises:
        TypeError: A field is not a whole number.
        ValueError: A field is out of range; the message names it and its value.
    """

    block_tokens: int
    block: int
    piece: int
    whole: int
    slot: int = 0
    merge: int = 0
    cut: int = 0

    def __post_init__(self) -> None:
        """Checks every field."""
        for field in fields(self):
            least = 1 if field.name in ("block_tokens", "block") else 0
            most = _MOST_BLOCK_TOKENS if field.name == "block_tokens" else _MOST_COST
            object.__setattr__(self, field.name, _whole(field.name, getattr(self, field.name), least, most))
        if self.piece > self.whole + self.block:
            raise ValueError(
                f"piece is {self.piece}, must be at most whole + block, {self.whole + self.block}: the fill relies on "
                "it that the rest of a cut row is never dearer than the row"
            )

    @staticmethod
    def named(name: str) -> CostTable:
        """The table of a known kernel.

        Args:
            name: "aiter", the units of aiter's planner, or a kernel of aiter whose instructions were counted: see
                `mlaplan._core.CostTable.named`.

        Raises:
            ValueError: The name is not known.
        """
        return CostTable.of(_core.CostTable.named(name))

    @staticmethod
    def of(table: _core.CostTable) -> CostTable:
        """The same table as the core has it."""
        tokens, block, piece, whole, slot, merge, cut = table.fields
        return CostTable(block_tokens=tokens, block=block, piece=piece, whole=whole, slot=slot, merge=merge, cut=cut)

    @property
    def core(self) -> _core.CostTable:
        """The same table for the core."""
        tokens, block, piece, whole, slot, merge, cut = self.fields
        return _core.CostTable(
            block_tokens=tokens, block=block, piece=piece, whole=whole, slot=slot, merge=merge, cut=cut
        )

    def finish_time(self, work_indptr: Int32Array, work_info: Int32Array) -> int:
        """Cost of the longest slot of a schedule; see `mlaplan._core.CostTable.finish_time`."""
        return self.core.finish_time(work_indptr, work_info)

    def lower_bound(self, row_lengths: Int32Array, num_slots: int, *, fold: int = 1) -> int:
        """Cost below which no schedule can finish; see `mlaplan._core.CostTable.lower_bound`."""
        return self.core.lower_bound(row_lengths, num_slots, fold=fold)

    @property
    def fields(self) -> tuple[int, int, int, int, int, int, int]:
        """The seven numbers, in the order of the attributes."""
        return self.block_tokens, self.block, self.piece, self.whole, self.slot, self.merge, self.cut

    def blocks(self, tokens: int) -> int:
        """Blocks that a work of `tokens` tokens begins."""
        return -(-tokens // self.block_tokens)

    def most_expensive(self, tokens: int) -> int:
        """Cost that no work of at most `tokens` tokens passes."""
        return max(self.piece, self.whole) + self.blocks(tokens) * self.block

    def longest_slot_bound(self, *, rows: int, topk: int, num_cus: int, fold: int = 1) -> int:
        """Cost that no slot of a plan passes under any policy, whatever the batch and the split budget.

        Args:
            rows: Most rows.
            topk: Longest row, in tokens.
            num_cus: Compute units.
            fold: Planner rows per token row.
        """
        tiles, fixed = rows * fold, max(self.piece, self.whole)
        # What aiter's walk puts into one slot, in its own blocks of 16 tokens, 16 for each work included. The budget
        # leaves min(CUs, k x tiles) slots, so either all slots share all tiles or a slot has less than one full tile.
        weight = -(-topk // 16) + 16
        payload = max(-(-tiles * weight // num_cus), weight) + 16
        works = payload // 17 + 2
        walk = works * (fixed + self.block) + self.blocks(16 * payload) * self.block
        # The fill: an even share, no less than a piece of one block, the span of the search, and `cut` for whole rows.
        row = self.blocks(topk) * self.block + self.whole
        span = max(self.whole, 2 * self.piece) + self.block + max(0, self.piece - self.whole)
        fill = max(-(-tiles * row // num_cus), row, self.piece + self.block) + span + 64 + self.cut
        return max(walk, fill) + self.slot


def _whole(name: str, value: object, least: int, most: int) -> int:
    number = None
    if not isinstance(value, bool):
        with suppress(Exception):  # what it raises is an object's own affair; it is no number then
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None:
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    if number.bit_length() > 63:
        # Thousands of digits have no text.
        text = number if number.bit_length() < 1000 else f"of {number.bit_length()} bits"
        raise ValueError(f"{name} is {text}, must be a number of at most 64 bits")
    if number < least:
        raise ValueError(f"{name} is {number}, must be at least {least}")
    if number > most:
        raise ValueError(f"{name} is {number}, must be at most {most}")
    return number


DEFAULT = CostTable.named("bf16 16")
"""What is taken where nothing is known of a kernel: the counts of aiter's bfloat16 kernel of 16 heads."""

# `mlaplan tune` on one H200, 2026-11-30, one of several runs: 16 heads on 132 slots, 128 heads on 66, in nanoseconds.
# docs/results (time-policies) has another run's.
_PORTABLE_FEW = CostTable(block_tokens=64, block=2621, piece=1977, whole=1600, slot=4861, merge=294, cut=12_205)
_PORTABLE_MANY = CostTable(block_tokens=64, block=2004, piece=5723, whole=3719, slot=6449, merge=1289, cut=12_515)


def portable_default(heads: int, block_tokens: int) -> CostTable:
    """The table of the portable kernel on a GPU that it was not measured on: that of an H200, in blocks of this kernel.

    Args:
        heads: Query heads per planner row.
        block_tokens: KV tokens that the kernel reads at a time.
    """
    table = _PORTABLE_FEW if heads <= 32 else _PORTABLE_MANY
    block = max(1, table.block * block_tokens // table.block_tokens)
    # A smaller block makes the rest of a cut row dearer than the row; the policies rely on it that it is not.
    return replace(table, block_tokens=block_tokens, block=block, piece=min(table.piece, table.whole + block))
