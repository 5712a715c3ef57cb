"""The chart of `mlaplan compare`: host time of every step, and what the steps asked of the device. Needs matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlaplan.compare import OPERATIONS, Comparison, Side, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
# Okabe and Ito's colours, as in the pictures of `explain`.
_COLOURS = ("#D55E00", "#0072B2", "#009E73")
_WIDTH, _HEIGHT, _DPI = 9.0, 4.2, 150
_BINS = 100  # points of a line: more, and what else a machine does is all that is seen
_LABELS = {"launches": "launches", "copies": "copies", "read_backs": "read-backs", "waits": "waits"}


def check_suffix(path: Path) -> None:
    """Checks that a file's ending is known, and that matplotlib is there.

    Raises:
        ValueError: It is not.
        ImportError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"output is {str(path)!r}, must end in {' or '.join(SUFFIXES)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError("a chart needs matplotlib: pip install 'mlaplan[plot]'") from error


def save(comparison: Comparison, path: str | Path) -> None:
    """Draws a comparison into a file.

    Args:
        comparison: What to draw, of at least one step.
        path: File to write; its ending says how: .svg or .png.

    Raises:
        ValueError: The ending is not known, or there is no step.
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    target = Path(path)
    check_suffix(target)
    figure = draw(comparison)
    import matplotlib as mpl

    suffix = target.suffix.lower()
    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "mlaplan"}):
        figure.savefig(target, format=suffix[1:], dpi=_DPI, metadata=metadata)


def draw(comparison: Comparison) -> Figure:
    """Returns the chart as a matplotlib figure.

    Raises:
        ValueError: There is no step.
    """
    if not comparison.steps:
        raise ValueError("the comparison has no step: there is nothing to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    time_axes, count_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    _times(time_axes, comparison)
    _counts(count_axes, comparison)
    figure.suptitle(f"Planning {comparison.steps:,} steps on {where(comparison)}", fontsize="medium")
    return figure


def _times(axes: Axes, comparison: Comparison) -> None:
    for side, colour in zip(comparison.sides, _COLOURS, strict=True):
        steps, low, middle, high = _binned(side)
        median = float(np.median(np.frombuffer(side.host_us, np.float64)))
        axes.plot(steps, middle, color=colour, linewidth=1.2, label=f"{side.name}: median {median:.3g} us")
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0, zorder=0)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("host time of a step, us")
    axes.set_xlim(0, max(comparison.steps - 1, 1))
    axes.grid(axis="y", which="major", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the axes: no corner of them is free for certain.
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, frameon=False, fontsize="small")


def _binned(side: Side) -> tuple[Any, ...]:
    """Median of neighbouring steps, and where half of them lie; each step for itself where there are few."""
    values = np.frombuffer(side.host_us, np.float64)
    parts = np.array_split(values, min(_BINS, values.size))
    ends = np.cumsum([part.size for part in parts])
    centres = ends - (np.array([part.size for part in parts]) + 1) / 2
    return (
        centres,
        *(np.array([np.percentile(part, share) for part in parts]) for share in (25, 50, 75)),
    )


def _counts(axes: Axes, comparison: Comparison) -> None:
    height = 0.8 / len(comparison.sides)
    places = np.arange(len(OPERATIONS))
    most = 0.0
    for index, (side, colour) in enumerate(zip(comparison.sides, _COLOURS, strict=True)):
        shares = [side.total(name) / comparison.steps for name in OPERATIONS]
        most = max(most, *shares)
        bars = axes.barh(places + index * height, shares, height * 0.92, color=colour)
        axes.bar_label(bars, [f"{share:.2g}" for share in shares], padding=3, fontsize="small")
    axes.set_yticks(places + height * (len(comparison.sides) - 1) / 2, [_LABELS[name] for name in OPERATIONS])
    axes.invert_yaxis()
    axes.set_xlim(0, max(most, 0.1) * 1.18)
    axes.set_xlabel("per step")
    axes.spines[["top", "right"]].set_visible(False)
