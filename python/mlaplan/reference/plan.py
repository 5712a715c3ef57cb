"""The `plan` op: a batch's boundaries and lengths in, rows and schedule out.

`docs/design.md` section 1 defines the result, section 2 the arrays. The schedule of the policy "aiter" is aiter's v1.2
work split for one query per row: rows are counted in blocks of 16 tokens, each row weighs 16 blocks more, and slots
are filled in order. `policies.py` has the other policies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlaplan.layout import PlanArrays, PlanParams, work_capacity
from mlaplan.reference import policies

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

BLOCK_TOKENS = 16  # tokens per block, the unit of the schedule
ROW_OVERHEAD_BLOCKS = 16  # what a row weighs beside its blocks, at a page size of 1


class ReferenceSchedule(NamedTuple):
    """A schedule for T rows, fold f, C compute units and W works; all arrays int32.

    Attributes:
        work_indptr: Shape (C + 1,). First work of each slot; W behind the last slot used.
        work_info: Shape (W, 8). Tile, partial location or -1, query start, query end, kv start, kv end,
            tokens of the row behind kv end, 0. Positions count from the first row's first token.
        reduce_indptr: Shape (T * f + 1,). First partial of each tile; a row that was not cut has none.
        reduce_final_map: Shape (T * f, 2). Query start and end of each tile.
        reduce_partial_map: Shape (reduce_indptr[-1],). Partial location of each entry.
        num_slots: Slots that the policy may use.
        blocks_per_slot: Blocks, overhead included, that aiter's walk gives a slot; 0 when there are no rows, and
            under other policies.
        limit: Cost that "balanced" fills a slot up to; 0 under other policies.
    """

    work_indptr: Int32Array
    work_info: Int32Array
    reduce_indptr: Int32Array
    reduce_final_map: Int32Array
    reduce_partial_map: Int32Array
    num_slots: int
    blocks_per_slot: int
    limit: int = 0


class _Cuts(NamedTuple):
    """How the walk cut each tile; one entry per tile."""

    slot: list[int]  # slot that was open when the tile came
    head: list[int]  # blocks that went into that slot
    uses_open: list[bool]  # whether a work of the tile lies in that slot
    fresh: list[int]  # works in slots opened for the tile


def plan(query_start_loc: Int32Array, seq_lens: Int32Array, arrays: PlanArrays, params: PlanParams) -> None:
    """Writes rows and schedule of one batch into `arrays`, in place.

    `query_start_loc` and `seq_lens` may hold anything. The rule for every value, with P rows in the class:

    * boundary 0 is 0, whatever `query_start_loc[0]` says; boundary r is the largest of boundary r - 1 and
      `query_start_loc[r]` clamped to [0, P]; live rows = the last boundary;
    * row t belongs to the request r with boundary r <= t < boundary r + 1. The same without a scan: r is the
      smallest with `query_start_loc[r + 1] > t`, and the live rows are the largest of 0 and
      `query_start_loc[1:]`, at most P;
    * row t of request r has length `clamp(seq_lens[r] - (boundary[r + 1] - 1 - t), 0, topk)` without
      wrap-around; in 32 bits, replace a negative `seq_lens[r]` by 0 first, which changes no result.

    For a valid batch this is the definition. Reads and writes stay inside the arrays given. Behind the live
    rows `request_ids` is 0 and `kv_indptr` and `reduce_indptr` hold their totals; `work_info` behind the last
    work is not written.

    Args:
        query_start_loc: Shape (R + 1,), int32.
        seq_lens: Shape (R,), int32, in tokens.
        arrays: The arrays of a class of P rows, written in place.
        params: What the plan depends on beside the batch. The caller keeps `P * topk < 2**31`.

    Raises:
        ValueError: The shapes do not belong together, or `params` names an unknown policy, variant or handling of
            empty rows. Nothing was written.
    """
    num_rows = arrays.request_ids.shape[0]
    _check_shapes(query_start_loc, seq_lens, arrays, params)
    boundaries = _boundaries(query_start_loc, num_rows)
    live = int(boundaries[-1])
    request_ids, lengths = _live_rows(boundaries, seq_lens, params.topk)
    made = schedule(lengths, params)
    live_tiles, num_works = live * params.fold, made.work_info.shape[0]

    arrays.request_ids[:live] = request_ids
    arrays.request_ids[live:] = 0
    arrays.kv_indptr[0] = 0
    np.cumsum(lengths, out=arrays.kv_indptr[1 : live + 1])
    arrays.kv_indptr[live + 1 :] = arrays.kv_indptr[live]
    arrays.work_indptr[:] = made.work_indptr
    arrays.reduce_indptr[: live_tiles + 1] = made.reduce_indptr
    arrays.reduce_indptr[live_tiles + 1 :] = made.reduce_indptr[-1]
    arrays.work_info[:num_works] = made.work_info


def rows(query_start_loc: Int32Array, seq_lens: Int32Array, topk: int, num_rows: int) -> tuple[Int32Array, Int32Array]:
    """Returns the request and the length of each of `num_rows` rows; 0 and 0 behind the live rows.

    Args:
        query_start_loc: Shape (R + 1,), int32; any values, see `plan`.
        seq_lens: Shape (R,), int32, in tokens; any values.
        topk: Longest row, in tokens.
        num_rows: Rows to return, P.

    Returns:
        `request_ids` and `row_lengths`, both shape (P,), int32.
    """
    request_ids = np.zeros(num_rows, np.int32)
    row_lengths = np.zeros(num_rows, np.int32)
    boundaries = _boundaries(query_start_loc, num_rows)
    live = int(boundaries[-1])
    request_ids[:live], row_lengths[:live] = _live_rows(boundaries, seq_lens, topk)
    return request_ids, row_lengths


def split_budget(longest_row: int, params: PlanParams) -> int:
    """Gives the split budget where the longest row has `longest_row` tokens; -1: no limit.

    The policy "balanced" weighs the pieces of the longest row against their merge, by the cost table; "invariant"
    has none; "aiter" takes the work-per-split rule, and the budget is aiter's `max_split_per_batch`.
    """
    if params.policy == "invariant":
        return -1
    if params.split_budget is not None:
        return params.split_budget
    if params.policy == "balanced":
        return policies.best_split(longest_row, params)
    splits = max(1, longest_row // params.min_tokens_per_split)
    return min(1 << (splits - 1).bit_length(), params.num_cus)


def schedule(row_lengths: npt.NDArray[np.signedinteger[Any]], params: PlanParams) -> ReferenceSchedule:
    """Cuts rows into works for the compute units, as the policy has it.

    With `empty_rows="skip"` the result is the schedule of the batch without its empty rows, row numbers
    mapped back. With `"aiter"` empty rows count, and the two variants of aiter's planner treat them
    differently: where an empty row does not fit into the open slot, "serial" gives it an empty work in a new
    slot, "parallel" gives it none and takes the slot as full. Both give an empty work where it fits. The
    variant is applied as named, whatever the fold; aiter itself runs "serial" where the fold is above 1.

    Args:
        row_lengths: Shape (T,), tokens of each row, none negative.
        params: `topk` is not used here.

    Returns:
        The schedule of `T * fold` tiles; tile `t * fold + k` is part k of row t.

    Raises:
        ValueError: An unknown policy, variant or handling of empty rows, or no cost table where one is needed.
    """
    _check_names(params)
    lengths = np.asarray(row_lengths).astype(np.int64)
    ends = np.cumsum(lengths)
    budget = split_budget(int(lengths.max(initial=0)), params)
    tile_lengths = np.repeat(lengths, params.fold)
    tile_starts = np.repeat(ends - lengths, params.fold)
    num_tiles = tile_lengths.size
    if params.empty_rows == "skip":
        tiles = np.flatnonzero(tile_lengths)
        tile_lengths, tile_starts = tile_lengths[tiles], tile_starts[tiles]
    else:
        tiles = np.arange(num_tiles)

    num_slots = params.num_cus if budget < 0 else min(params.num_cus, budget * tiles.size)
    blocks_per_slot = limit = 0
    if params.policy == "invariant":
        works = policies.invariant(tile_lengths.tolist(), params)
    else:
        works, blocks_per_slot = _aiter_works(tile_lengths, num_slots, params.variant)
        if params.policy == "balanced":
            works, limit = policies.balanced(tile_lengths.tolist(), num_slots, works, params)
            blocks_per_slot = 0
    slots, pieces, work_info = _work_info(works, tiles, tile_starts, tile_lengths)

    partials = np.zeros(num_tiles + 1, np.int64)
    partials[1 + tiles] = np.where(pieces >= 2, pieces, 0)
    reduce_indptr = np.cumsum(partials).astype(np.int32)
    query = np.arange(num_tiles, dtype=np.int32)
    return ReferenceSchedule(
        work_indptr=np.searchsorted(slots, np.arange(params.num_cus + 1), "left").astype(np.int32),
        work_info=work_info,
        reduce_indptr=reduce_indptr,
        reduce_final_map=np.stack((query, query + 1), axis=1),
        reduce_partial_map=np.arange(reduce_indptr[-1], dtype=np.int32),
        num_slots=num_slots,
        blocks_per_slot=blocks_per_slot,
        limit=limit,
    )


def _boundaries(query_start_loc: Int32Array, num_rows: int) -> Int64Array:
    """First row of each request, made sane: starts at 0, never falls, at most `num_rows`. Shape (R + 1,)."""
    boundaries = np.clip(query_start_loc, 0, num_rows).astype(np.int64)
    boundaries[0] = 0
    return np.maximum.accumulate(boundaries)


def _live_rows(boundaries: Int64Array, seq_lens: Int32Array, topk: int) -> tuple[Int64Array, Int64Array]:
    """Request and length of each live row."""
    request_ids = np.repeat(np.arange(seq_lens.shape[0]), np.diff(boundaries))
    tokens_behind = boundaries[1:][request_ids] - 1 - np.arange(request_ids.size)
    return request_ids, np.clip(seq_lens.astype(np.int64)[request_ids] - tokens_behind, 0, topk)


def _walk(blocks: list[int], blocks_per_slot: int, variant: str) -> _Cuts:
    """Walks the tiles in order and fills slots in order.

    The state is the open slot and the blocks it has left. A slot holds `blocks_per_slot` and the overhead of
    one row more. A tile that fits, overhead included, goes into the open slot whole. Any other is cut: what
    is left of the open slot less the overhead, if anything, then fresh slots of `blocks_per_slot` each, the
    last with the rest.
    """
    overhead = ROW_OVERHEAD_BLOCKS
    payload = blocks_per_slot + overhead
    slot, room = 0, payload
    cuts = _Cuts([], [], [], [])
    for need in blocks:
        cuts.slot.append(slot)
        if need + overhead <= room:
            head, uses_open, fresh = need, True, 0
            room -= need + overhead
        elif need == 0:
            head, uses_open = 0, False
            fresh = 1 if variant == "serial" else 0
            room = payload - overhead if fresh else 0
        else:
            uses_open = room > overhead
            head = room - overhead if uses_open else 0
            left = need - head
            fresh = -(-left // blocks_per_slot)
            rest = left - (fresh - 1) * blocks_per_slot
            room = payload - (rest + overhead)
        slot += fresh
        cuts.head.append(head)
        cuts.uses_open.append(uses_open)
        cuts.fresh.append(fresh)
    return cuts


def _aiter_works(lengths: Int64Array, num_slots: int, variant: str) -> tuple[policies.Works, int]:
    """Returns the works of aiter's walk over tiles of `lengths` tokens, and the blocks of a slot."""
    blocks = -(-lengths // BLOCK_TOKENS)
    weight = int(blocks.sum()) + ROW_OVERHEAD_BLOCKS * lengths.size
    blocks_per_slot = -(-weight // num_slots) if lengths.size else 0
    cuts = _walk(blocks.tolist(), blocks_per_slot, variant)
    open_slot, head = np.array(cuts.slot, np.int64), np.array(cuts.head, np.int64)
    uses_open, fresh = np.array(cuts.uses_open, np.int64), np.array(cuts.fresh, np.int64)
    pieces = uses_open + fresh
    first = np.cumsum(pieces) - pieces
    owner = np.repeat(np.arange(lengths.size), pieces)
    # Slots behind the open one: 0 is the head piece, 1 and up are the fresh slots.
    step = np.arange(owner.size) - first[owner] + (1 - uses_open)[owner]
    begin = np.where(step == 0, 0, head[owner] + (step - 1) * blocks_per_slot) * BLOCK_TOKENS
    end = np.minimum((head[owner] + step * blocks_per_slot) * BLOCK_TOKENS, lengths[owner])
    slot = open_slot[owner] + step
    works = [policies.Work(*work) for work in zip(*(a.tolist() for a in (owner, slot, begin, end)), strict=True)]
    return works, blocks_per_slot


def _work_info(
    works: policies.Works, tiles: Int64Array, starts: Int64Array, lengths: Int64Array
) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Returns the slot of each work, the number of works of each tile, and `work_info`."""
    owner, slots, begin, end = np.array(works, np.int64).reshape(-1, 4).T
    pieces = np.bincount(owner, minlength=tiles.size)
    is_cut = pieces[owner] >= 2
    work_info = np.zeros((owner.size, 8), np.int32)
    work_info[:, 0] = tiles[owner]
    work_info[:, 1] = np.where(is_cut, np.cumsum(is_cut) - 1, -1)
    work_info[:, 2] = tiles[owner]
    work_info[:, 3] = tiles[owner] + 1
    work_info[:, 4] = starts[owner] + begin
    work_info[:, 5] = starts[owner] + end
    work_info[:, 6] = lengths[owner] - end
    return slots, pieces, work_info


def _check_names(params: PlanParams) -> None:
    if params.variant not in ("parallel", "serial"):
        raise ValueError(f"variant is {params.variant!r}, known are 'parallel', 'serial'")
    if params.empty_rows not in ("skip", "aiter"):
        raise ValueError(f"empty_rows is {params.empty_rows!r}, known are 'skip', 'aiter'")
    if params.policy not in ("aiter", "balanced", "invariant"):
        raise ValueError(f"policy is {params.policy!r}, known are 'aiter', 'balanced', 'invariant'")
    if params.policy != "aiter" and params.empty_rows != "skip":
        raise ValueError(f"empty_rows is {params.empty_rows!r}, but policy {params.policy!r} gives empty rows no work")
    if params.policy != "aiter" and params.cost_table is None:
        raise ValueError(f"cost_table is None, but policy {params.policy!r} places works by their cost")
    if params.piece_tokens < 1:
        raise ValueError(f"piece_tokens is {params.piece_tokens}, must be at least 1")


def _check_shapes(query_start_loc: Int32Array, seq_lens: Int32Array, arrays: PlanArrays, params: PlanParams) -> None:
    _check_names(params)
    num_rows, num_tiles = arrays.request_ids.shape[0], arrays.request_ids.shape[0] * params.fold
    expected = (
        ("query_start_loc", query_start_loc.shape, (seq_lens.shape[0] + 1,)),
        ("kv_indptr", arrays.kv_indptr.shape, (num_rows + 1,)),
        ("work_indptr", arrays.work_indptr.shape, (params.num_cus + 1,)),
        ("reduce_indptr", arrays.reduce_indptr.shape, (num_tiles + 1,)),
        ("work_info", arrays.work_info.shape, (work_capacity(num_tiles, params.num_cus, params.pieces), 8)),
    )
    for name, actual, wanted in expected:
        if tuple(actual) != wanted:
            raise ValueError(f"{name} has shape {tuple(actual)}, expected {wanted}")
