"""The `plan` op in one launch: rows and schedule from the device's `query_start_loc` and `seq_lens` alone.

One workgroup does all of it, so that nothing has to wait for another one. `reference/plan.py` defines the result.
`plan_rows.py` finds rows and their lengths, `plan_walk.py` the room that each tile meets, `plan_works.py` writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import triton
import triton.language as tl

from mlaplan.kernels.launch import Launch, next_power_of_two
from mlaplan.kernels.plan_balanced import balanced_kernel
from mlaplan.kernels.plan_invariant import invariant_kernel
from mlaplan.kernels.plan_rows import (
    FALLING,
    PARALLEL,
    SERIAL,
    SKIP,
    TAIL,
    add_pair,
    fill,
    mark_owners,
    row_lengths,
    share_of_slot,
    survey,
    totals,
    weights,
    write_rows,
)
from mlaplan.kernels.plan_walk import find_rooms, first_state
from mlaplan.kernels.plan_works import PARTIALS_SHIFT, aiter_cuts, aiter_size, slots_and_works, write_works
from mlaplan.layout import PlanArrays, PlanParams, work_capacity

if TYPE_CHECKING:
    from mlaplan.costs import CostTable

_MAX_CUS = (1 << 16) - 1
_MAX_TILES = 1 << 22
_MAX_BLOCK = 1024
_MAX_TOPK = 1 << 30
_MOST_SLOT_COST = 1 << 30
_MOST_SHARED_COST = 1 << 62
_MOST_BLOCKS = 1 << 20


@triton.jit(
    do_not_specialize=["num_requests", "num_rows", "most", "topk", "num_cus", "split_budget", "min_tokens_per_split"],
    do_not_specialize_on_alignment=[
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "request_ids_ptr",
        "kv_indptr_ptr",
        "work_indptr_ptr",
        "reduce_indptr_ptr",
    ],
)
def _plan_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    request_ids_ptr,
    kv_indptr_ptr,
    work_indptr_ptr,
    reduce_indptr_ptr,
    work_info_ptr,
    num_requests,
    num_rows,
    most,
    topk,
    num_cus,
    split_budget,
    min_tokens_per_split,
    BLOCK: tl.constexpr,
    FRESH: tl.constexpr,
    FOLD: tl.constexpr,
    EMPTY: tl.constexpr,
    ONE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Makes one plan; one program.

    query_start_loc_ptr: (num_requests + 1,) int32, any values. seq_lens_ptr: (num_requests,) int32, any
    values. The others: the arrays of `PlanArrays` for `num_rows` rows, int32. `reduce_indptr`, and `request_ids`
    where boundaries fall, also serve as scratch before they get their values. `most` is the largest power of two
    up to `num_requests`, `split_budget` is 0 for the work-per-split rule. FRESH works of a tile are written at a time.
    ONE: the class has no more than BLOCK tiles. EVEN: their number is a multiple of 4.
    """
    live, order = survey(query_start_loc_ptr, num_requests, num_rows, BLOCK)
    if order == FALLING:
        mark_owners(query_start_loc_ptr, request_ids_ptr, num_requests, num_rows, live, BLOCK)
    nothing = tl.zeros([1], tl.int32)
    tl.store(kv_indptr_ptr + tl.arange(0, 1), nothing)
    tl.store(work_indptr_ptr + tl.arange(0, 1), nothing)
    tiles = live * FOLD
    sums = tl.zeros([], tl.int64)
    if ONE:
        tile = tl.arange(0, BLOCK)
        row = tile // FOLD
        is_first = tile % FOLD == 0
        owner, length = row_lengths(
            query_start_loc_ptr, seq_lens_ptr, request_ids_ptr, row, live, order, num_requests, num_rows, most, topk
        )
        need = weights(length, row < live, EMPTY)
        end, weight = tl.associative_scan((tl.where(is_first, length, 0), need), 0, add_pair)
        total_weight, filled, longest = totals(need, (need > 0).to(tl.int32), length)
        share = share_of_slot(total_weight, filled, longest, num_cus, split_budget, min_tokens_per_split)
        if order == FALLING:
            tl.debug_barrier()  # the owners were read by other threads than those that write here
        tl.store(request_ids_ptr + row, owner, mask=is_first & (row < num_rows))
        tl.store(kv_indptr_ptr + row + 1, end, mask=is_first & (row < num_rows))
        room, _ = find_rooms(
            reduce_indptr_ptr,
            tile,
            0,
            tiles,
            num_rows * FOLD,
            weight,
            need,
            share,
            first_state(share, EMPTY),
            BLOCK,
            EMPTY,
            EVEN,
        )
        start = end - length
        head, uses_open, fresh = aiter_cuts(tile, start, length, room, tile < tiles, share, FOLD, EMPTY)
        sums = write_works(
            work_indptr_ptr,
            reduce_indptr_ptr,
            work_info_ptr,
            tile,
            start,
            length,
            head,
            uses_open,
            fresh,
            aiter_size(share),
            tile < num_rows * FOLD,
            sums,
            FRESH,
        )
    else:
        total_weight, filled, longest = write_rows(
            query_start_loc_ptr,
            seq_lens_ptr,
            request_ids_ptr,
            kv_indptr_ptr,
            num_requests,
            num_rows,
            most,
            topk,
            live,
            order,
            BLOCK,
            EMPTY,
        )
        share = share_of_slot(total_weight * FOLD, filled * FOLD, longest, num_cus, split_budget, min_tokens_per_split)
        tl.debug_barrier()
        state = first_state(share, EMPTY)
        before = 0
        for base in range(0, tiles, BLOCK):
            tile = base + tl.arange(0, BLOCK)
            inside = tile < tiles
            row = tile // FOLD
            start = tl.load(kv_indptr_ptr + row, mask=inside, other=0)
            length = tl.load(kv_indptr_ptr + row + 1, mask=inside, other=0) - start
            need = weights(length, inside, EMPTY)
            weight = before + tl.cumsum(need, 0)
            before += tl.sum(need, 0)
            room, state = find_rooms(
                reduce_indptr_ptr,
                tile,
                base,
                tiles,
                num_rows * FOLD,
                weight,
                need,
                share,
                state,
                BLOCK,
                EMPTY,
                EVEN,
            )
            head, uses_open, fresh = aiter_cuts(tile, start, length, room, inside, share, FOLD, EMPTY)
            sums = write_works(
                work_indptr_ptr,
                reduce_indptr_ptr,
                work_info_ptr,
                tile,
                start,
                length,
                head,
                uses_open,
                fresh,
                aiter_size(share),
                inside,
                sums,
                FRESH,
            )
        partials = (sums >> PARTIALS_SHIFT).to(tl.int32)
        fill(reduce_indptr_ptr, tiles, num_rows * FOLD, partials, BLOCK)
    slots, works = slots_and_works(sums)
    fill(work_indptr_ptr, slots + 1, num_cus + 1, works, TAIL)
    tl.store(reduce_indptr_ptr + num_rows * FOLD + tl.arange(0, 1), nothing + (sums >> PARTIALS_SHIFT).to(tl.int32))


# Measured on an H200: fewer warps write too slowly, more wait too long for each other.
_WARPS = {8: 1, 16: 1, 32: 1, 64: 2, 128: 4, 256: 8, 512: 8, 1024: 8}
# Under "balanced" as few as do not share a scheduler, and blocks no larger than those hold without spills.
_MAX_BALANCED_BLOCK = 512
_BALANCED_WARPS = {8: 2, 16: 2, 32: 2, 64: 2, 128: 4, 256: 4, 512: 4}


def plan_launch(query_start_loc: Any, seq_lens: Any, arrays: PlanArrays, params: PlanParams) -> Launch:
    """Returns the launch that `plan` runs.

    Everything in it is a constant of the arrays' shapes and of `params`, so a captured graph may replay it.

    Args:
        query_start_loc: Shape (R + 1,), int32, on the device.
        seq_lens: Shape (R,), int32, in tokens, on the device.
        arrays: The arrays of a class of P rows.
        params: What the plan depends on beside the batch.

    Raises:
        ValueError: The shapes do not belong together, or `params` holds what the kernel cannot plan.
    """
    num_rows = arrays.request_ids.shape[0]
    num_requests = seq_lens.shape[0]
    _check(query_start_loc, num_requests, arrays, params)
    tiles = num_rows * params.fold
    largest = _MAX_BALANCED_BLOCK if params.policy == "balanced" else _MAX_BLOCK
    block = min(largest, next_power_of_two(max(tiles, 8)))
    constants: dict[str, Any] = {"BLOCK": block, "FOLD": params.fold}
    before = (
        query_start_loc,
        seq_lens,
        *arrays,
        num_requests,
        num_rows,
        _half(num_requests),
        params.topk,
        params.num_cus,
    )
    rest: tuple[int, ...]
    if params.policy == "invariant":
        rest = (params.piece_tokens, *_costs(params)[:4])
        constants["FRESH"] = min(64, max(1, 512 // block))
        return Launch(invariant_kernel, (1,), (*before, *rest), constants, {"num_warps": _WARPS[block]})
    constants |= {"FRESH": min(8, max(1, 256 // block)), "EVEN": tiles % 4 == 0}
    budget = 0 if params.split_budget is None else params.split_budget
    if params.policy == "balanced":
        tokens, cost, piece, whole, merge, cut = _costs(params)
        span = max(whole, 2 * piece) + cost + max(0, piece - whole)
        rest = (budget, tokens, cost, piece, whole, merge, cut, span)
        return Launch(balanced_kernel, (1,), (*before, *rest), constants, {"num_warps": _BALANCED_WARPS[block]})
    empty = SKIP if params.empty_rows == "skip" else SERIAL if params.variant == "serial" else PARALLEL
    constants |= {"EMPTY": empty.value, "ONE": tiles <= block}
    rest = (budget, params.min_tokens_per_split)
    return Launch(_plan_kernel, (1,), (*before, *rest), constants, {"num_warps": _WARPS[block]})


def _half(num_requests: int) -> int:
    """The largest power of two up to a number, where a search for one of so many begins."""
    return 1 << max(num_requests, 1).bit_length() - 1


def _costs(params: PlanParams) -> tuple[int, int, int, int, int, int]:
    """The cost table's tokens of a block; what a block, a piece, a whole row, a merged piece and any merge cost."""
    tokens, block, piece, whole, _, merge, cut = cast("CostTable", params.cost_table).fields
    return tokens, block, piece, whole, merge, cut


def plan(query_start_loc: Any, seq_lens: Any, arrays: PlanArrays, params: PlanParams) -> None:
    """Writes rows and schedule of one batch into `arrays` with one launch; `reference.plan.plan` in Triton.

    Nothing on the host is read but shapes, so the launch may be captured and replayed for other contents of
    the two inputs. Whatever they hold, reads and writes stay inside the arrays given.

    Args:
        query_start_loc: Shape (R + 1,), int32, contiguous, any values.
        seq_lens: Shape (R,), int32, contiguous, any values.
        arrays: The arrays of a class of P rows, contiguous, `reduce_indptr` and `work_info` at multiples of 16 bytes;
            written in place.
        params: What the plan depends on beside the batch. The caller keeps `P * topk < 2**31`.

    Raises:
        ValueError: The shapes do not belong together, or `params` holds what the kernel cannot plan.
    """
    plan_launch(query_start_loc, seq_lens, arrays, params).run()


def _address(array: Any) -> int:
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)


def check_sizes(num_rows: int, params: PlanParams) -> None:
    """Checks that the kernel can make plans of so many rows.

    Raises:
        ValueError: Some number would not fit the kernel's words; the message names what is too large.
    """
    _check_params(params)
    num_tiles = num_rows * params.fold
    if params.policy != "aiter":
        _check_costs(num_rows, params)
    if num_rows * params.topk >= 1 << 31:
        raise ValueError(f"topk is {params.topk}, expected rows * topk below 2**31 for {num_rows} rows")
    if num_tiles > _MAX_TILES:
        raise ValueError(f"{num_rows} rows times fold {params.fold} are {num_tiles} tiles, at most {_MAX_TILES} fit")
    # aiter's walk, which "balanced" prices too, adds up the blocks of all tiles in 32 bits, 16 more for each.
    weight = num_tiles * (-(-params.topk // 16) + 16) + params.num_cus
    if params.policy != "invariant" and weight >= 1 << 31:
        raise ValueError(
            f"topk is {params.topk}, expected less: {num_tiles} tiles weigh {weight} blocks, at most 2**31 - 1"
        )


def _check(query_start_loc: Any, num_requests: int, arrays: PlanArrays, params: PlanParams) -> None:
    num_rows, num_tiles = arrays.request_ids.shape[0], arrays.request_ids.shape[0] * params.fold
    check_sizes(num_rows, params)
    for name in ("reduce_indptr", "work_info"):
        address = _address(getattr(arrays, name))
        if address % 16:
            raise ValueError(f"{name} is at address {address:#x}, expected a multiple of 16")
    expected = (
        ("query_start_loc", query_start_loc, (num_requests + 1,)),
        ("kv_indptr", arrays.kv_indptr, (num_rows + 1,)),
        ("work_indptr", arrays.work_indptr, (params.num_cus + 1,)),
        ("reduce_indptr", arrays.reduce_indptr, (num_tiles + 1,)),
        ("work_info", arrays.work_info, (work_capacity(num_tiles, params.num_cus, params.pieces), 8)),
    )
    for name, array, wanted in expected:
        if tuple(array.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {wanted}")


def _check_params(params: PlanParams) -> None:
    if params.policy not in ("aiter", "balanced", "invariant"):
        raise ValueError(f"policy is {params.policy!r}, known are 'aiter', 'balanced', 'invariant'")
    if params.policy != "aiter" and params.empty_rows != "skip":
        raise ValueError(f"empty_rows is {params.empty_rows!r}, but policy {params.policy!r} gives empty rows no work")
    if params.variant not in ("parallel", "serial"):
        raise ValueError(f"variant is {params.variant!r}, known are 'parallel', 'serial'")
    if params.empty_rows not in ("skip", "aiter"):
        raise ValueError(f"empty_rows is {params.empty_rows!r}, known are 'skip', 'aiter'")
    if params.split_budget is not None and params.split_budget != -1 and params.split_budget < 1:
        raise ValueError(f"split_budget is {params.split_budget}, expected -1, at least 1, or None")
    if not 1 <= params.num_cus <= _MAX_CUS:
        raise ValueError(f"num_cus is {params.num_cus}, expected 1 to {_MAX_CUS}")
    if not 1 <= params.topk <= _MAX_TOPK:
        raise ValueError(f"topk is {params.topk}, expected 1 to {_MAX_TOPK}")


def _check_costs(num_rows: int, params: PlanParams) -> None:
    """What the kernels of `balanced` and `invariant` add up has to fit their words."""
    table = params.cost_table
    if table is None:
        raise ValueError(f"cost_table is None, but policy {params.policy!r} places works by their cost")
    if params.policy == "balanced":
        longest = table.longest_slot_bound(rows=num_rows, topk=params.topk, num_cus=params.num_cus, fold=params.fold)
        if longest > _MOST_SLOT_COST:
            raise ValueError(f"cost_table gives a slot up to {longest}, expected at most 2**30")
        if table.blocks(params.topk) > _MOST_BLOCKS:
            raise ValueError(f"topk is {params.topk}, {table.blocks(params.topk)} blocks, expected at most 2**20")
        return
    if params.piece_tokens < 1:
        raise ValueError(f"piece_tokens is {params.piece_tokens}, must be at least 1")
    works = work_capacity(num_rows * params.fold, params.num_cus, params.pieces)
    piece = table.most_expensive(min(params.piece_tokens, params.topk))
    if works * piece * params.num_cus > _MOST_SHARED_COST:
        raise ValueError(f"cost_table lets {works} works cost {works * piece}, times num_cus that is above 2**62")
