"""Measures what works cost on a kernel: loads of one kind in every slot, timed, and a cost table fitted to them.

Every slot of a load has the same content, so the time of the launch is the time of a slot. What is fitted:

    decode = launch + slot + wholes * whole + pieces * piece + blocks * block       slot: where there are works
    merge  = launch + pieces of a row * merge

Both by least squares of the relative difference. `tuning_gpu.py` has the loads that run; nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlaplan.costs import CostTable

FloatArray = npt.NDArray[np.float64]

# Above this the model does not describe the kernel, or the GPU is busy with something else.
MOST_RESIDUAL = 0.25


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
