"""Measures what works cost on a kernel: loads of one kind in every slot, timed, and a cost table fitted to them.

Every slot of a load has the same content, so the time of the launch is the time of a slot. What is fitted:

    decode = launch + slot + wholes * whole + pieces * piece + blocks * block       slot: where there are works
    merge  = launch + pieces of a row * merge

Both by least squares of the relative difference. What it costs to have a merge at all shows in none of these: it is
what a few batches, shared out evenly by their blocks, take longer than under aiter's walk, which leaves their rows
whole, less what the table says of their longest slots. `tuning_gpu.py` has what runs; nothing here needs a GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlaplan import _core
from mlaplan.costs import CostTable

FloatArray = npt.NDArray[np.float64]

# Above this the model does not describe the kernel, or the GPU is busy with something else.
MOST_RESIDUAL = 0.25
# Full rows per slot: so near a whole number that aiter's walk leaves all rows whole, so far that cutting may gain.
_ROWS_PER_SLOT = (1.9, 1.94, 2.9, 3.9)
# Times that both schedules of a pair are timed by turns, for a GPU's clock falls while it works.
_TURNS = 5


class TuningError(RuntimeError):
    """Times that no cost table can be fitted to; the message says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every slot does: so many works of so many blocks; or, without works, so many rows merged of such pieces.

    Attributes:
        works: Works of a slot.
        blocks: Blocks of each work.
        cut: Whether the works are pieces of cut rows, or whole rows.
        merged: Pieces of each row that the merge puts together; 0 for none.
    """

    works: int
    blocks: int
    cut: bool = False
    merged: int = 0


class Sample(NamedTuple):
    """A load, and the time that it took in nanoseconds."""

    load: Load
    time: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two schedules of one batch on as many slots.

    Attributes:
        whole: aiter's, which cuts no row.
        cut: The balanced one by a table in which a work costs its blocks alone; it cuts some.
        longer: What the table says the longest slot of `cut` costs more than that of `whole`; may be less than 0.
    """

    whole: _core.Schedule
    cut: _core.Schedule
    longer: int


class Fit(NamedTuple):
    """A cost table in nanoseconds and how well it tells the times it was fitted to.

    Attributes:
        table: The costs, rounded, none below 0.
        launch: What a launch of the decode without works takes.
        residual: Root of the mean squared relative difference between times told and measured.
        worst: The largest relative difference.
        notes: What had to be bent to make a table, in words.
    """

    table: CostTable
    launch: float
    residual: float
    worst: float
    notes: tuple[str, ...]


def decode_loads(most_blocks: int, *, most_works: int = 4) -> list[Load]:
    """Loads of the decode: short and long works, one and several in a slot, whole rows and pieces.

    Args:
        most_blocks: Blocks of the longest row.
        most_works: Works of a slot at most.

    Returns:
        An empty load and a few of every kind.
    """
    counts = sorted({count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if count <= most_blocks} | {most_blocks})
    loads = [Load(0, 0)]
    for cut in (False, True):
        loads += [Load(1, count, cut) for count in counts]
        for works in range(2, most_works + 1):
            loads += [Load(works, count, cut) for count in counts if works * count <= max(most_blocks, works)]
    return loads


def merge_loads(num_slots: int, most_pieces: int) -> list[Load]:
    """Loads of the merge: as many pieces as slots, in rows of a few or of many."""
    most = min(num_slots, most_pieces)
    counts = sorted({count for count in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if count <= most})
    return [Load(0, 0, merged=count) for count in counts]


def measure(time: Callable[[Load], float], loads: Iterable[Load]) -> list[Sample]:
    """Times every load.

    Args:
        time: Returns the time of a load in nanoseconds.
        loads: What to time.
    """
    return [Sample(load, float(time(load))) for load in loads]


def fit(samples: Iterable[Sample], *, block_tokens: int) -> Fit:
    """Fits a cost table to timed loads.

    Args:
        samples: Timed loads of decode and of merge.
        block_tokens: KV tokens of a block.

    Returns:
        The table and how well it fits.

    Raises:
        TuningError: The times are no times, too few kinds of loads were timed, time does not grow with the blocks, or
            the model is off by more than a quarter.
    """
    samples = list(samples)
    for sample in samples:
        if not (math.isfinite(sample.time) and sample.time > 0):
            raise TuningError(f"{sample.load} took {sample.time} ns, which is no time")
    decodes = [sample for sample in samples if not sample.load.merged]
    merges = [sample for sample in samples if sample.load.merged]
    decode = _least_squares([_decode_terms(sample.load) for sample in decodes], decodes, "decode")
    launch, slot, whole, piece, block = decode.tolist()
    merge = float(_least_squares([[1.0, sample.load.merged] for sample in merges], merges, "merge")[1])
    if round(block) < 1:
        raise TuningError(f"a block costs {block:.2f} ns by these times: they do not grow with the work")
    table, notes = _table(block_tokens, block, piece, whole, slot, merge)
    told = np.array([_decode_terms(sample.load) for sample in decodes]) @ np.array(
        [launch, table.slot, table.whole, table.piece, table.block]
    )
    differences = told / np.array([sample.time for sample in decodes]) - 1
    residual = float(np.sqrt(np.mean(differences**2)))
    if residual > MOST_RESIDUAL:
        raise TuningError(
            f"the times differ from the best table's by {100 * residual:.0f}% in the mean, more than "
            f"{100 * MOST_RESIDUAL:.0f}%: is the GPU busy with something else?"
        )
    return Fit(table, launch, residual, float(np.max(np.abs(differences))), notes)


def pairs(num_slots: int, row_tokens: int, table: CostTable) -> list[Pair]:
    """Batches of full rows that one schedule leaves whole and another cuts.

    Args:
        num_slots: Slots to fill.
        row_tokens: Tokens of a row.
        table: A fitted table; its `cut` is not used.

    Returns:
        Up to four, of at most 4 rows per slot. Those that are cut are as they would be if a work cost its blocks alone:
        a table by which cutting gains nothing tells less than one by which it does, but needs `cut` no less.
    """
    found = []
    free = replace(table, cut=0).core
    blocks_alone = replace(table, piece=0, whole=0, cut=0).core
    for rows_per_slot in _ROWS_PER_SLOT:
        indptr = np.arange(int(rows_per_slot * num_slots) + 1, dtype=np.int32) * np.int32(row_tokens)
        whole = _core.schedule(indptr, num_cus=num_slots)
        cut = _core.schedule(indptr, num_cus=num_slots, policy="balanced", cost_table=blocks_alone)
        if whole.num_partials == 0 and cut.num_partials > 0:
            longest = [free.finish_time(made.work_indptr, made.work_info.reshape(-1)) for made in (cut, whole)]
            found.append(Pair(whole, cut, longest[0] - longest[1]))
    return found


def with_cut(fitted: Fit, pairs: Iterable[Pair], time: Callable[[_core.Schedule], float]) -> Fit:
    """Adds what it costs to have anything to merge to a fitted table.

    Args:
        fitted: The rest of the table.
        pairs: Schedules to time, of that table.
        time: Returns the time of decode and merge of a schedule in nanoseconds.

    Returns:
        The fit with `cut` in its table: the median over the pairs of what cutting takes longer than the table says, by
        turns, and at least 0. Without pairs, as for a single slot, it is 0, and a note says so.

    Raises:
        TuningError: The times are no times, or `cut` comes out larger than a table may hold.
    """
    extra = []
    for pair in pairs:
        turns = [(_checked(time, pair.cut), _checked(time, pair.whole)) for _ in range(_TURNS)]
        extra.append(statistics.median(cut - whole for cut, whole in turns) - pair.longer)
    if not extra:
        note = "cut was taken as 0: there is no batch to measure it by"
        return fitted._replace(notes=(*fitted.notes, note))
    cut = statistics.median(extra)
    notes = fitted.notes
    if cut < -0.5:
        notes = (*notes, f"cut came out as {cut:.1f} ns and was taken as 0")
    try:
        table = replace(fitted.table, cut=max(0, round(cut)))
    except ValueError as error:
        raise TuningError(f"these times make no table: {error}") from error
    return fitted._replace(table=table, notes=notes)


def _checked(time: Callable[[_core.Schedule], float], made: _core.Schedule) -> float:
    """The time of a schedule, if it is one."""
    taken = float(time(made))
    if not (math.isfinite(taken) and taken > 0):
        raise TuningError(f"a schedule of {len(made.work_indptr) - 1} slots took {taken} ns, which is no time")
    return taken


def _decode_terms(load: Load) -> list[float]:
    whole, piece = (0, load.works) if load.cut else (load.works, 0)
    return [1.0, float(load.works > 0), whole, piece, load.works * load.blocks]


def _least_squares(terms: list[list[float]], samples: list[Sample], name: str) -> FloatArray:
    """Coefficients of the terms; every sample weighs by the inverse of its time."""
    if not samples:
        raise TuningError(f"no {name} was timed")
    times = np.array([sample.time for sample in samples])
    matrix = np.array(terms)
    # Columns of one size: blocks are many and launches one, and the rank is judged by the smallest part.
    scale = np.abs(matrix).max(axis=0)
    if not scale.all():
        raise TuningError(f"too few kinds of loads of the {name} were timed: one cost is in none of them")
    weighted = matrix / scale / times[:, None]
    solution, _residuals, rank, _singular = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=1e-9)
    if rank < matrix.shape[1]:
        raise TuningError(f"too few kinds of loads of the {name} were timed: {len(times)} do not tell the costs apart")
    coefficients: FloatArray = solution / scale
    return coefficients


def _table(
    block_tokens: int, block: float, piece: float, whole: float, slot: float, merge: float
) -> tuple[CostTable, tuple[str, ...]]:
    """A table of whole numbers that the policies can use, and what was bent for it."""
    notes = []
    numbers = {"block": block, "piece": piece, "whole": whole, "slot": slot, "merge": merge}
    for name, value in numbers.items():
        if value < -0.5:
            notes.append(f"{name} came out as {value:.1f} ns and was taken as 0")
    rounded = {name: max(0, round(value)) for name, value in numbers.items()}
    most = rounded["whole"] + rounded["block"]
    if rounded["piece"] > most:
        notes.append(f"piece came out as {piece:.1f} ns, more than whole + block, and was taken as {most}")
        rounded["piece"] = most
    try:
        return CostTable(block_tokens=block_tokens, **rounded), tuple(notes)
    except ValueError as error:
        raise TuningError(f"these times make no table: {error}") from error
