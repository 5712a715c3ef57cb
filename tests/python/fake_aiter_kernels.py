"""What aiter's planner and decode kernels compute, on CPU tensors: written from their description, for `fake_aiter`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Float = npt.NDArray[np.float64]


class FakeContractError(AssertionError):
    """The library was called in a way that it does not check and does not forgive."""


def expect(condition: bool, message: str) -> None:
    """Raises unless the caller kept the contract."""
    if not condition:
        raise FakeContractError(message)


@dataclass
class WalkedPlan:
    """A plan as lists: first work of each slot, works, pieces of each planner row, queries of each."""

    slots: list[int]
    works: list[list[int]]
    pieces: list[int]
    queries: int

    def write(self, pointers: Any, info: Any, indptr: Any, reduce_indptr: Any, final: Any, partial: Any) -> None:
        """Fills the buffers as the planner does; what lies behind the used part is left, except where it is not."""
        running = np.concatenate([[0], np.cumsum([count if count > 1 else 0 for count in self.pieces])])
        total, tiles = int(running[-1]), len(self.pieces)
        for name, array, used in (
            ("work_info_set", info, len(self.works)),
            ("reduce_indptr", reduce_indptr, tiles + 1),
            ("reduce_final_map", final, tiles),
            ("reduce_partial_map", partial, total),
        ):
            expect(array.dtype == torch.int32 and array.is_contiguous(), f"{name} must be contiguous int32")
            expect(array.shape[0] >= used, f"{name} has {array.shape[0]} entries, the plan writes {used}")
        pointers.copy_(torch.tensor([indptr.data_ptr(), info.data_ptr()], dtype=torch.uint64))
        indptr.copy_(torch.tensor(self.slots, dtype=torch.int32))
        info[: len(self.works)] = torch.tensor(self.works, dtype=torch.int32)
        reduce_indptr[: tiles + 1] = torch.from_numpy(running.astype(np.int32))
        reduce_indptr[tiles + 1 :] = total
        for tile, count in enumerate(self.pieces):
            if count > 1:
                first = tile * self.queries
                final[tile] = torch.tensor([first, first + self.queries], dtype=torch.int32)
        partial[:total] = torch.arange(0, total * self.queries, self.queries, dtype=torch.int32)


def plan_walk(row_lengths: list[int], *, fold: int, queries: int, num_cus: int, budget: int) -> WalkedPlan:
    """The v1.2 work split of rows that all have a token.

    Blocks of 16 tokens; a row weighs 16 blocks more. A slot holds C + 16 blocks, where C is the total weight over the
    number of slots. Rows in order: one that fits goes in whole. Any other gives the open slot what it has room for
    beside its overhead, and then opens a slot for each further C blocks.
    """
    rows = [(tile // fold, length) for tile, length in enumerate(np.repeat(row_lengths, fold).tolist())]
    ends = np.cumsum(row_lengths).tolist()
    overhead = 16
    usable = min(num_cus, budget * len(rows))
    weights = [math.ceil(length / 16) + overhead for _, length in rows]
    capacity = math.ceil(sum(weights) / usable)
    slots: list[list[list[int]]] = [[]]
    room = capacity + overhead
    next_location, pieces = 0, []
    for tile, (row, length) in enumerate(rows):
        blocks = math.ceil(length / 16)
        cuts: list[tuple[bool, int, int]] = []  # whether in a new slot, first and last block
        if blocks + overhead <= room:
            cuts.append((False, 0, blocks))
            room -= blocks + overhead
        else:
            done = max(0, room - overhead)
            if done:
                cuts.append((False, 0, done))
            while done < blocks:
                cuts.append((True, done, min(done + capacity, blocks)))
                done = cuts[-1][2]
            room = capacity - (cuts[-1][2] - cuts[-1][1])
        start = ends[row] - length
        for in_new_slot, low, high in cuts:
            if in_new_slot:
                slots.append([])
            stop = min(start + 16 * high, ends[row])
            location = -1 if len(cuts) == 1 else next_location
            next_location += location >= 0
            query = tile * queries
            slots[-1].append([tile, location, query, query + queries, start + 16 * low, stop, ends[row] - stop, 0])
        pieces.append(len(cuts))
    expect(len(slots) <= num_cus, "the walk ended inside its slots")
    counts = [len(works) for works in slots] + [0] * (num_cus - len(slots))
    return WalkedPlan([0, *np.cumsum(counts).tolist()], [work for works in slots for work in works], pieces, queries)


def _doubles(tensor: torch.Tensor, factor: torch.Tensor | None = None) -> Float:
    values = tensor.to(torch.float64)
    result: Float = (values if factor is None else values * float(factor)).numpy()
    return result


def _attend(q: Float, kv: Float, scale: float) -> tuple[Float, Float]:
    scores = scale * q @ kv.T
    lse: Float = np.logaddexp.reduce(scores, axis=1)
    out: Float = np.exp(scores - lse[:, None]) @ kv[:, :512]
    return out, lse


def _inputs(given: dict[str, Any]) -> tuple[Float, Float, npt.NDArray[np.int32], list[int]]:
    kv = given["kv_buffer"]
    is_bf16_q = given["q"].dtype == torch.bfloat16
    return (
        _doubles(given["q"], None if is_bf16_q else given["q_scale"]),
        _doubles(kv.view(kv.shape[0], 576), None if kv.dtype == torch.bfloat16 else given["kv_scale"]),
        given["kv_indices"].numpy(),
        given["kv_indptr"].tolist(),
    )


def attend_by_splits(given: dict[str, Any]) -> tuple[Any, Any]:
    """Decode without metadata: every row in as many pieces, merged; a row without tokens divides 0 by 0."""
    rows, splits, starts = (
        given["qo_indptr"].shape[0] - 1,
        given["num_kv_splits"],
        given["num_kv_splits_indptr"],
    )
    expect(
        splits is not None and starts is not None,
        "splits left to a cache that captured graphs do not keep alive",
    )
    expect(starts.dtype == torch.int32 and starts.tolist() == [splits * row for row in range(rows + 1)], "splits")
    expect(1 <= splits <= 16, f"{splits} splits")
    expect(not given.get("return_lse", False), "no LSE without metadata")
    q, kv, indices, indptr = _inputs(given)
    for row in range(rows):
        tokens = indices[indptr[row] : indptr[row + 1]]
        if tokens.size == 0:
            given["o"][row] = float("nan")
        else:
            out, _ = _attend(q[row], kv[tokens], given["sm_scale"])
            given["o"][row] = torch.from_numpy(out).to(given["o"].dtype)
    return given["o"], None


def attend_by_schedule(given: dict[str, Any], *, fold: int, num_cus: int, lse: bool) -> tuple[int, Any]:
    """Decode with metadata, as the binaries were seen to run: slot by slot, work by work, then the merge.

    Returns the number of planner rows that were merged, and the LSE.
    """
    indptr, info, pointers = given["work_indptr"], given["work_info_set"], given["work_meta_data"]
    expect(given["num_kv_splits_indptr"] is None, "that is how metadata is recognised")
    expect(indptr.shape == (num_cus + 1,), f"the grid is {indptr.shape[0] - 1} groups, the device has {num_cus}")
    expect(pointers.tolist() == [indptr.data_ptr(), info.data_ptr()], "work_metadata_ptrs point elsewhere")
    q, kv, indices, row_starts = _inputs(given)
    rows = given["qo_indptr"].shape[0] - 1
    tiles = q.shape[0] * fold
    shown_fold = tiles // rows  # of the view that the caller made and of aiter's own
    heads = q.shape[1] // fold
    q = q.reshape(tiles, heads, 576)
    target = given["o"].view(tiles, heads, 512)
    final_lse = torch.full((tiles, heads), float("nan"))
    capacity = given["reduce_partial_map"].shape[0]
    partials: dict[int, tuple[int, Float, Float]] = {}
    done = np.zeros((shown_fold, max(row_starts[-1], 1)), np.int64)
    bounds, works = indptr.tolist(), info.tolist()
    expect(bounds[0] == 0 and bounds[-1] <= len(works), "work_indptr")
    for first, last in pairwise(bounds):
        for number in range(first, last):
            tile, location, query, query_end, start, stop, behind, _ = works[number]
            expect(start < stop, f"work {number} is empty and ends its slot: {works[number]}")
            expect(
                0 <= tile < tiles and (query, query_end) == (tile, tile + 1),
                f"work {number}: {works[number]}",
            )
            row = tile // shown_fold
            inside = row_starts[row] <= start and stop <= row_starts[row + 1] and behind >= 0
            expect(inside, f"work {number} leaves its row: {works[number]}")
            done[tile % shown_fold, start:stop] += 1
            out, piece_lse = _attend(q[tile], kv[indices[start:stop]], given["sm_scale"])
            if location < 0:
                target[tile] = torch.from_numpy(out).to(target.dtype)
                final_lse[tile] = torch.from_numpy(piece_lse)
            else:
                expect(location < capacity, f"partial {location} of {capacity} is outside the scratch")
                expect(location not in partials, f"partial {location} written twice")
                partials[location] = (tile, out, piece_lse)
    expect(bool((done[:, : row_starts[-1]] == 1).all()), "every position of every row exactly once")
    merged = _merge(given, target, final_lse, partials)
    return merged, final_lse.view(q.shape[0] // fold, -1) if lse else None


def _merge(given: dict[str, Any], target: Any, final_lse: Any, partials: dict[int, tuple[int, Float, Float]]) -> int:
    bounds, locations = given["reduce_indptr"].tolist(), given["reduce_partial_map"].tolist()
    final = given["reduce_final_map"].tolist()
    expect(bounds[0] == 0 and len(bounds) - 1 >= target.shape[0], "reduce_indptr covers every planner row")
    merged = 0
    for tile, (first, last) in enumerate(pairwise(bounds)):
        expect(first <= last <= len(locations), f"reduce_indptr[{tile + 1}] is {last} of {len(locations)}")
        if last - first < 2:
            expect(last == first, f"planner row {tile} has one partial")
            continue
        pieces = [partials[location] for location in locations[first:last]]
        expect(final[tile] == [tile, tile + 1], f"reduce_final_map[{tile}] is {final[tile]}")
        expect(all(owner == tile for owner, _, _ in pieces), f"planner row {tile} merges another's partials")
        merged += len(pieces)
        lses = np.stack([piece_lse for _, _, piece_lse in pieces])
        lse = np.logaddexp.reduce(lses, axis=0)
        out = sum(np.exp(piece_lse - lse)[:, None] * out for _, out, piece_lse in pieces)
        target[tile] = torch.from_numpy(np.asarray(out)).to(target.dtype)
        final_lse[tile] = torch.from_numpy(lse)
    expect(merged == len(partials), "every partial is merged")
    return len({owner for owner, _, _ in partials.values()})
