"""What the tests of the policies share: random cost tables and rows, prices, and the optimum by trying everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from mlaplan.costs import CostTable
from mlaplan.layout import PlanParams
from mlaplan.reference.plan import ReferenceSchedule

# Counted for aiter's kernels in tenths of an instruction, and one like a measured table of the portable kernel.
BF16_16 = CostTable(block_tokens=16, block=3115, piece=11330, whole=15460, slot=310, merge=2000)
FP8_16 = CostTable(block_tokens=64, block=3435, piece=8920, whole=10040, slot=310, merge=2000)
PORTABLE = CostTable(block_tokens=32, block=410, piece=1900, whole=1500, slot=900, merge=160)
TABLES = (BF16_16, FP8_16, PORTABLE)


def table_of(numbers: tuple[int, int, int, int, int, int, int]) -> CostTable:
    """A table whose piece costs no more than it may."""
    tokens, block, piece, whole, slot, merge, cut = numbers
    return CostTable(
        block_tokens=tokens, block=block, piece=min(piece, whole + block), whole=whole, slot=slot, merge=merge, cut=cut
    )


def tables(most: int = 12) -> Any:
    """Cost tables of small numbers, where every rounding shows, of many blocks to a step, and three real ones.

    A cut costs nothing, about a block, about a row, or more than any row, in each of them.
    """
    few = st.integers(0, most)
    cut = st.one_of(st.just(0), few, st.integers(0, 3000), st.just(1 << 24))
    numbers = st.tuples(st.sampled_from([1, 7, 16, 24, 32, 64, 100]), st.integers(1, most), few, few, few, few, cut)
    large = st.integers(0, 3000)
    fine = st.tuples(st.sampled_from([1, 16, 64]), st.integers(1, 3), large, large, few, few, cut)
    real = st.builds(lambda table, cut: replace(table, cut=cut), st.sampled_from(TABLES), st.integers(0, 100_000) | cut)
    return st.one_of(numbers.map(table_of), fine.map(table_of), real, st.sampled_from(TABLES))


def lengths(*, longest: int = 2048, rows: int = 40) -> Any:
    """Rows of every kind: full, short, one token, a block less or more; or all of nearly one length.

    The latter aiter's walk often leaves whole.
    """
    one = st.one_of(
        st.integers(0, longest),
        st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, longest - 1, longest]),
        st.integers(1, 64),
    )
    alike = st.integers(1, longest).flatmap(
        lambda most: st.lists(st.integers(max(1, most - 20), most), min_size=1, max_size=rows)
    )
    return st.one_of(st.lists(one, max_size=rows), alike)


def price(made: ReferenceSchedule | Any, table: CostTable) -> list[int]:
    """Cost of each slot's works by the table, `slot` not included."""
    info = np.asarray(made.work_info)
    pieces = np.bincount(info[:, 0], minlength=1) if len(info) else np.zeros(1, np.int64)
    costs = []
    for first, last in zip(made.work_indptr[:-1], made.work_indptr[1:], strict=True):
        cost = 0
        for work in info[first:last].tolist():
            cost += table.whole if pieces[work[0]] == 1 else table.piece
            cost += table.blocks(work[5] - work[4]) * table.block
        costs.append(cost)
    return costs


def best_longest_slot(blocks: list[int], num_slots: int, table: CostTable) -> int:
    """Least longest slot of all schedules in order that cut at blocks, with one work of a tile in a slot."""
    capacity = 0
    while not _can_finish(blocks, num_slots, capacity, table):
        capacity += 1
    return capacity


def _can_finish(blocks: list[int], num_slots: int, capacity: int, table: CostTable) -> bool:
    starts = {(0, 0)}  # tile and blocks done where a slot may begin
    for _slot in range(num_slots):
        ends: set[tuple[int, int]] = set()
        for start in starts:
            todo = [(*start, capacity, -1)]
            while todo:
                tile, done, room, last = todo.pop()
                if tile == len(blocks):
                    return True
                ends.add((tile, done))
                if tile == last:
                    continue
                count = blocks[tile]
                if done == 0 and (left := room - table.whole - count * table.block) >= 0:
                    todo.append((tile + 1, 0, left, tile))
                for taken in range(1, count - done + (done > 0)):
                    left = room - table.piece - taken * table.block
                    if left < 0:
                        break
                    at = (tile, done + taken) if done + taken < count else (tile + 1, 0)
                    todo.append((*at, left, tile))
        starts = ends
    return False


def parameters(policy: str, table: CostTable, **more: Any) -> PlanParams:
    """Parameters of a plan under a policy."""
    return PlanParams(**{"topk": 2048, "num_cus": 20, "policy": policy, "cost_table": table, **more})
