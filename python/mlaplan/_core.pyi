"""The Rust core. Arrays cross without a copy: inputs are borrowed, results are read-only views of Rust memory.

Every array is a contiguous int32 NumPy array; another dtype is a TypeError, since casting would be a copy.
"""

from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

_Int32: TypeAlias = npt.NDArray[np.int32]
# A table, or its seven numbers in the order of its field `fields`.
_Costs: TypeAlias = CostTable | tuple[int, int, int, int, int, int, int]

__all__ = [
    "CostTable",
    "Decision",
    "PlanError",
    "Schedule",
    "StepPlanner",
    "Support",
    "__version__",
    "buffer_shapes",
    "build_profile",
    "cost_table",
    "kv_indptr",
    "max_split_per_batch",
    "request_ids",
    "row_lengths",
    "schedule",
    "segment_lengths",
    "split_budget",
    "support",
]

__version__: Final[str]
build_profile: Final[str]
"""Either "debug" or "release": a benchmark refuses the first."""

class PlanError(ValueError):
    """The input is well formed, but this planner cannot plan it: it exceeds a capacity, or something is missing."""

def segment_lengths(query_start_loc: _Int32) -> _Int32:
    """Query tokens of each request.

    Args:
        query_start_loc: Where each request's query tokens start, and the number of rows. Shape (R + 1,), int32,
            non-decreasing, starts at 0.

    Returns:
        Shape (R,), int32.

    Raises:
        ValueError: The boundaries do not start at 0, or fall; the message names the position.
    """

def request_ids(query_start_loc: _Int32, padded_rows: int | None = None) -> _Int32:
    """Request of each row; padding rows get 0.

    Args:
        query_start_loc: As for `segment_lengths`.
        padded_rows: Rows to return, at least the live ones; None for the live ones.

    Returns:
        Shape (padded_rows,), int32.

    Raises:
        ValueError: The boundaries are wrong, or `padded_rows` is too small.
        PlanError: More than 2^24 rows.
    """

def row_lengths(query_start_loc: _Int32, seq_lens: _Int32, topk: int, padded_rows: int | None = None) -> _Int32:
    """KV tokens that each row attends to: `min(context + i + 1, topk)` for the i-th query token, 0 for padding.

    Args:
        query_start_loc: As for `segment_lengths`.
        seq_lens: KV tokens of each request, this step's included. Shape (R,), int32, at least its query tokens.
        topk: Longest row, in tokens, at least 1.
        padded_rows: Rows to return, at least the live ones; None for the live ones.

    Returns:
        Shape (padded_rows,), int32.

    Raises:
        ValueError: An argument breaks a rule; the message names it, the position and the value.
        PlanError: Rows x topk passes 2^31 - 1, the kernels' index type.
    """

def kv_indptr(row_lengths: _Int32) -> _Int32:
    """Running sum of row lengths.

    Args:
        row_lengths: Shape (T,), int32, in tokens, not negative.

    Returns:
        Shape (T + 1,), int32, first 0.

    Raises:
        ValueError: A length is negative.
        PlanError: The sum passes 2^31 - 1.
    """

def max_split_per_batch(max_seq_len: int, *, topk: int, num_cus: int, min_tokens_per_split: int = 128) -> int:
    """Split budget by the work-per-split rule.

    `min(next_power_of_two(max(1, min(max_seq_len, topk) // min_tokens_per_split)), num_cus)`, a budget of slots per
    row for the whole batch and not a limit of any one row.

    Args:
        max_seq_len: Longest KV length of the batch, in tokens, not negative.
        topk: Longest row, in tokens.
        num_cus: Compute units.
        min_tokens_per_split: Tokens per split that the rule aims for.

    Returns:
        At least 1, at most `num_cus`.

    Raises:
        ValueError: A number is out of range.
    """

@final
class Schedule:
    """Which compute unit handles which piece of which row, and how pieces are merged.

    For C compute units, T tiles (rows x fold), W works and M partials. All arrays are int32 and read-only.

    Attributes:
        work_indptr: First work of each slot. Shape (C + 1,).
        work_info: Shape (W, 8): tile, partial location or -1 for the final output, first query, end of the queries,
            first KV position, end of the KV positions, positions of the row behind that, 0.
        reduce_indptr: First partial of each tile; a tile that is not cut has none. Shape (T + 1,).
        reduce_final_map: First query and end of the queries of each cut tile, -1 for the others. Shape (T, 2).
        reduce_partial_map: Partial location of each partial. Shape (M,).
        num_works: W.
        num_partials: M.
        num_slots: Slots that the budget allows.
        blocks_per_slot: Blocks of 16 tokens that aiter's walk gives a slot, a row's overhead of 16 included.
        first_unsafe_work: Slot and work of the first empty work that others of its slot come after; None if there is
            none.
        finish_time: Cost of the longest slot by the cost table given, else by aiter's own, in blocks.
        lower_bound: Cost below which no schedule on `num_slots` slots can finish, in the same unit.
    """

    work_indptr: Final[_Int32]
    work_info: Final[_Int32]
    reduce_indptr: Final[_Int32]
    reduce_final_map: Final[_Int32]
    reduce_partial_map: Final[_Int32]
    num_works: Final[int]
    num_partials: Final[int]
    num_slots: Final[int]
    blocks_per_slot: Final[int]
    first_unsafe_work: Final[tuple[int, int] | None]
    finish_time: Final[int]
    lower_bound: Final[int]
    @property
    def is_safe(self) -> bool:
        """Whether a decode kernel may run it: an empty work ends its slot in aiter's kernels."""

def schedule(
    kv_indptr: _Int32,
    *,
    num_cus: int,
    max_split_per_batch: int = -1,
    fold: int = 1,
    variant: str = "parallel",
    policy: str = "aiter",
    skip_empty: bool = False,
    cost_table: _Costs | None = None,
    piece_tokens: int | None = None,
) -> Schedule:
    """The schedule of the rows, one query per row; with policy "aiter" that of aiter's v1.2 planner, bit for bit.

    Args:
        kv_indptr: Running sum of row lengths, in tokens. Shape (T + 1,), int32, non-decreasing.
        num_cus: Compute units, the number of slots.
        max_split_per_batch: Split budget: at most this times the tiles slots are used; -1 for no limit. "invariant"
            uses all slots.
        fold: Tiles per row.
        variant: "parallel" or "serial", aiter's two kernels. They differ only where a row is empty.
        policy: "aiter"; "balanced" for a longest slot that by the cost table is never longer than aiter's, `cut` added
            to each that cuts a row; "invariant" for pieces that depend on their row alone. `docs/design.md` has the
            definitions.
        skip_empty: Give empty rows no work and no weight, as every plan of a `Planner` and every policy but "aiter"
            does. Otherwise the result is aiter's, which may be unsafe to run: see `Schedule.is_safe`.
        cost_table: What works cost. Needed by "balanced" and "invariant"; else what the quality is told by.
        piece_tokens: Tokens of a piece, needed by "invariant".

    Returns:
        The schedule.

    Raises:
        ValueError: An argument breaks a rule; the message names it, the position and the value.
        PlanError: More works than the 32-bit index type holds.
    """

@final
class CostTable:
    """What works cost on one kernel: a slot costs `slot`, a work a fixed part and `block` for each begun block.

    A policy takes costs of at most 2^24, a block of at least 1, and `piece <= whole + block`.

    Attributes:
        block_tokens: KV tokens of a block.
        block: Cost of a block.
        piece: Fixed cost of a piece of a cut row.
        whole: Fixed cost of a whole row.
        slot: Cost of a slot that has works.
        merge: Cost of merging one piece, which weighs in the split budget only. For aiter's kernels it is assumed: the
            4 KiB that a piece and head write and read back, at the price of a block's bytes.
        cut: Cost of having anything to merge, however much it is. For aiter's kernels 0, an assumption too: their merge
            is launched either way.
        fields: The seven numbers, in this order.
    """

    def __new__(
        cls, *, block_tokens: int, block: int, piece: int, whole: int, slot: int, merge: int = 0, cut: int = 0
    ) -> CostTable: ...
    @staticmethod
    def named(name: str) -> CostTable:
        """The table of a known kernel.

        Args:
            name: "aiter", the units of aiter's planner, or a kernel whose instructions were counted: "bf16 16",
                "bf16/fp8 16", "gfx942 fp8 16", "gfx942 fp8 64", "gfx942 fp8 128", "gfx950 bf16 64", in tenths of an
                instruction.

        Raises:
            ValueError: The name is not known.
        """

    block_tokens: Final[int]
    block: Final[int]
    piece: Final[int]
    whole: Final[int]
    slot: Final[int]
    merge: Final[int]
    cut: Final[int]
    fields: Final[tuple[int, int, int, int, int, int, int]]
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def finish_time(self, work_indptr: _Int32, work_info: _Int32) -> int:
        """Cost of the longest slot.

        Args:
            work_indptr: Shape (C + 1,), int32.
            work_info: Works, flat. Shape (works * 8,), int32.
        """

    def lower_bound(self, row_lengths: _Int32, num_slots: int, *, fold: int = 1) -> int:
        """Cost below which no schedule of these rows on so many slots can finish.

        Args:
            row_lengths: Shape (rows,), int32, in tokens.
            num_slots: Slots, at least 1.
            fold: Tiles per row.

        Raises:
            ValueError: A number is out of range.
        """

def cost_table(arch: str, heads: int, q_dtype: str, kv_dtype: str) -> CostTable | None:
    """What works cost on aiter's kernel for a shape, by the instructions counted in an emulator, in tenths of one.

    Args:
        arch: "gfx942" or "gfx950".
        heads: Query heads of a tile, that is padded and after folding.
        q_dtype: "bf16", "fp16" or "fp8".
        kv_dtype: "bf16", "fp16" or "fp8".

    Returns:
        The table, None for a kernel that was not counted.

    Raises:
        ValueError: A name is not known, or a number out of range.
    """

def split_budget(longest_row: int, *, cost_table: _Costs, num_cus: int) -> int:
    """Split budget by the cost table: the pieces that make the longest row's longest piece and its merge cheapest.

    Args:
        longest_row: Length of the longest row, in tokens, not negative.
        cost_table: What works cost.
        num_cus: Compute units.

    Returns:
        At least 1, at most `num_cus` and the row's blocks.

    Raises:
        ValueError: A number is out of range, or no policy can follow the table.
    """

@final
class Support:
    """What aiter supports for one shape, one query per row, page size 1.

    Attributes:
        fold: Planner rows per token row; 1 where nothing can be planned.
        native: Whether the kernel takes the padded heads as they are.
        padded_heads: Heads padded up to a multiple of 16.
        persistent: Whether the decode that follows a schedule exists.
        non_persistent: Whether the decode without a schedule exists, as a fallback.
        lse: Whether the persistent decode can also return the LSE of rows that are not cut.
        plan_used: Whether `mla_decode_fwd` follows the schedule when it gets one.
        variant: "parallel" or "serial", the planner kernel that aiter takes; None if that depends on rows not given.
        reason: One sentence: why there is no persistent decode, or how the shape is planned.
    """

    fold: Final[int]
    native: Final[bool]
    padded_heads: Final[int]
    persistent: Final[bool]
    non_persistent: Final[bool]
    lse: Final[bool]
    plan_used: Final[bool]
    variant: Final[str | None]
    reason: Final[str]

def support(
    arch: str, heads: int, q_dtype: str, kv_dtype: str, *, rows: int | None = None, aiter_version: str | None = None
) -> Support:
    """What an aiter release supports for a shape.

    Args:
        arch: "gfx942" or "gfx950"; target features behind a colon are ignored.
        heads: Query heads of this rank.
        q_dtype: "bf16", "fp16" or "fp8".
        kv_dtype: "bf16", "fp16" or "fp8".
        rows: Token rows of the plan, padding included, where the answer depends on it.
        aiter_version: Release, such as "0.1.18" or "main"; None for the newest known.

    Returns:
        The answer; an unsupported shape is an answer with `persistent` False, not an error.

    Raises:
        ValueError: A name is not known, or a number out of range.
    """

def buffer_shapes(
    max_rows: int, heads: int, *, arch: str, num_cus: int, q_dtype: str, kv_dtype: str
) -> dict[str, tuple[int, ...]]:
    """Shapes of aiter's metadata buffers, as its sizing function gives them without a split limit.

    Args:
        max_rows: Token rows.
        heads: Query heads; padded up to a multiple of 16 first.
        arch: "gfx942" or "gfx950".
        num_cus: Compute units.
        q_dtype: "bf16", "fp16" or "fp8".
        kv_dtype: "bf16", "fp16" or "fp8".

    Returns:
        Shape by name: `work_metadata_ptrs` (uint64), `work_indptr`, `work_info_set`, `reduce_indptr`,
        `reduce_final_map`, `reduce_partial_map` (int32).

    Raises:
        ValueError: A name is not known, or a number out of range.
        PlanError: More than 2^31 works.
    """

@final
class Decision:
    """What a step asks for, and what was written into a staging area for it.

    Attributes:
        action: "nothing", "copy", "launch" or "deferred".
        reasons: Why, in words.
        key: Action and reasons in one number, to count by.
        rows: Rows that belong to a request, as the host counts them.
        padded_rows: Rows that the consumer sees.
        row_class: Position of the batch's row class among the planner's.
        words: int32 words from the start of the staging area that a copy has to carry; 0 where nothing was written.
        num_works: Works of the schedule that was written; None where none was.
        split_budget: Its budget, -1 for no limit; None where none was written.
        ticket: Number of the plan that is to be brought to the device, 0 if none is; see `StepPlanner.decide`.
    """

    action: Final[str]
    reasons: Final[tuple[str, ...]]
    key: Final[int]
    rows: Final[int]
    padded_rows: Final[int]
    row_class: Final[int]
    words: Final[int]
    num_works: Final[int | None]
    split_budget: Final[int | None]
    ticket: Final[int]

@final
class StepPlanner:
    """Remembers what a device holds and decides what the next batch needs; `mlaplan.Planner` is its user.

    Safe to share between threads: each call is one step under a lock.
    """

    def __new__(
        cls,
        *,
        max_requests: int,
        topk: int,
        num_cus: int,
        fold: int,
        split_budget: int | None,
        min_tokens_per_split: int,
        classes: list[tuple[int, tuple[int, ...], int]],
        policy: str = "aiter",
        cost_table: _Costs | None = None,
        piece_tokens: int | None = None,
        device_makes: bool = False,
    ) -> StepPlanner:
        """A planner whose device buffers hold nothing yet.

        With `device_makes` a plan is launched instead of copied where the batch has device arrays.

        Without a `split_budget` the longest row decides: by the cost table under "balanced", else by work per split.
        `work_info` of a class holds tiles + num_cus - 1 works, or tiles x ceil(topk / piece_tokens) under "invariant".

        Raises ValueError for a setting out of range, PlanError for more works than 32 bits number.
        """

    def decide(
        self,
        query_start_loc: _Int32,
        lengths: _Int32 | None,
        max_rejects: int | None,
        padded_rows: int | None,
        boundaries_exact: bool,
        on_device: bool,
        force: bool,
        arrived: int = 0,
        staging: _Int32 | None = None,
    ) -> Decision:
        """Decides what the device needs; a launch forgets what is held.

        A plan that was written or is to be launched is held from the next decision on, if that bears its ticket.

        Args:
            query_start_loc: See `mlaplan.Batch`, as for the next four.
            lengths: `seq_lens` or their bound.
            max_rejects: None for exact lengths.
            padded_rows: None for the rows themselves.
            boundaries_exact: Whether the host's boundaries are the device's.
            on_device: Whether the batch has device arrays.
            force: Make a plan though nothing changed.
            arrived: Ticket of the last plan whose copy or launch was queued.
            staging: Where to write a plan to copy at once; None to leave it to `write`.

        Raises:
            TypeError: An array is not one-dimensional int32.
            ValueError: The batch breaks a rule, or the area is too small. What is held stays held.
            PlanError: The batch exceeds the capacity, or needs device arrays. What is held stays held.
        """

    def defer(
        self,
        query_start_loc: _Int32,
        lengths: _Int32 | None,
        max_rejects: int | None,
        padded_rows: int | None,
        boundaries_exact: bool,
    ) -> Decision:
        """Leaves the plan to its first consumer and forgets what is held. Raises as `decide`."""

    def write(self, decision: Decision, staging: _Int32) -> Decision:
        """Writes the plan that was last decided on into a staging area, laid out as its row class.

        Raises:
            TypeError: The area is read-only or not one-dimensional int32.
            ValueError: The area is too small.
            PlanError: No copy was asked for.
        """

    def withdraw(self) -> None:
        """Gives up the plan that was last decided on, of which nothing went to the device: what was held still is."""

    def made_on_device(self) -> None:
        """Says that the device makes a plan of its own: nothing is held afterwards."""

    def launch_instead(self, decision: Decision) -> Decision:
        """Turns the last decision, to copy, into one to launch, because no staging area is free.

        Raises:
            PlanError: No copy was asked for.
        """

    def invalidate(self) -> None:
        """Forgets what the device holds."""
