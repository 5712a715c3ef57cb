"""Where a plan's arrays lie: row classes, and the layout of each class over one arena.

A captured graph holds addresses, so they may not depend on anything but the class. `docs/design.md` section 2 has the
reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mlaplan.costs import CostTable

_ALIGN_WORDS = 64  # 256 bytes, the granularity of GPU allocations and of vector loads


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParams:
    """What a plan depends on beside the device's `query_start_loc` and `seq_lens`.

    Attributes:
        topk: Longest row, in tokens.
        num_cus: Compute units, the number of slots.
        fold: Planner rows per token row.
        split_budget: aiter's `max_split_per_batch`: -1 for no limit, at least 1 for a number, None for the
            work-per-split rule on the longest row.
        min_tokens_per_split: Tokens per split that the rule aims for.
        variant: "parallel" or "serial"; the two differ only where `empty_rows` is "aiter" and a row is empty.
        empty_rows: "skip" gives rows of length 0 no work and no weight; "aiter" treats them as aiter's planner does,
            and goes with the policy "aiter" alone.
        policy: "aiter", "balanced" or "invariant", see `docs/design.md` section 6.
        cost_table: What works cost; "balanced" and "invariant" need it.
        piece_tokens: Tokens of a piece under "invariant", at least 1.
    """

    topk: int
    num_cus: int
    fold: int = 1
    split_budget: int | None = None
    min_tokens_per_split: int = 128
    variant: str = "parallel"
    empty_rows: str = "skip"
    policy: str = "aiter"
    cost_table: CostTable | None = None
    piece_tokens: int = 256

    @property
    def pieces(self) -> int | None:
        """Most pieces of a tile where the policy gives every row its own; None where cuts are shared by the batch."""
        return -(-self.topk // self.piece_tokens) if self.policy == "invariant" else None


class PlanArrays(NamedTuple):
    """The arrays of one plan, all int32, on one device, for a class of P rows, C compute units and fold f.

    Attributes:
        request_ids: Shape (P,). Request of each row; 0 behind the live rows.
        kv_indptr: Shape (P + 1,). Running sum of row lengths, in tokens; the total behind the live rows.
        work_indptr: Shape (C + 1,). First work of each slot.
        reduce_indptr: Shape (P * f + 1,). First partial of each tile; the total behind the live tiles.
        work_info: Shape (`work_capacity`, 8). The works; rows behind the last work are not written.
    """

    request_ids: Any
    kv_indptr: Any
    work_indptr: Any
    reduce_indptr: Any
    work_info: Any


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of a class's arrays from the arena's base, in int32 words.

    Attributes:
        rows: Rows of the class, P.
        offsets: First word of each array, in the order of `PlanArrays`.
        shapes: Shape of each array, in the same order.
        words: Words from the base to the end of the last array.
    """

    rows: int
    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    words: int

    @classmethod
    def of(cls, rows: int, *, num_cus: int, fold: int, pieces: int | None = None) -> Layout:
        """Returns the layout of the class of `rows` rows; `pieces` as in `work_capacity`."""
        tiles = rows * fold
        shapes: tuple[tuple[int, ...], ...] = (
            (rows,),
            (rows + 1,),
            (num_cus + 1,),
            (tiles + 1,),
            (work_capacity(tiles, num_cus, pieces), 8),
        )
        offsets = []
        end = 0
        for shape in shapes:
            start = -(-end // _ALIGN_WORDS) * _ALIGN_WORDS
            offsets.append(start)
            end = start
            size = 1
            for extent in shape:
                size *= extent
            end += size
        return cls(rows, tuple(offsets), shapes, end)

    def words_used(self, num_works: int) -> int:
        """Words that a copy of a plan with `num_works` works has to carry."""
        return self.offsets[4] + 8 * num_works


def work_capacity(tiles: int, num_cus: int, pieces: int | None = None) -> int:
    """Works that a schedule may have.

    Args:
        tiles: Planner rows, the fold included.
        num_cus: Compute units. Each slot after the first adds at most one cut.
        pieces: Most pieces of a tile where each row is cut by itself, see `PlanParams.pieces`.
    """
    return tiles * pieces if pieces is not None else tiles + num_cus - 1


def row_classes(max_rows: int, capture_sizes: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Row counts that have a layout of their own: capture sizes, powers of two and `max_rows`, ascending."""
    classes = {max_rows, *(size for size in capture_sizes if size <= max_rows)}
    size = 1
    while size < max_rows:
        classes.add(size)
        size *= 2
    return tuple(sorted(classes))
