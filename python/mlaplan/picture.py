"""Pictures of a schedule: what each compute unit does, when, and for which row. SVG and PNG, and a page to hover over.

Needs the extra `plot`. matplotlib draws the files; Bokeh makes the page, which holds its own script and loads nothing.
Bokeh, because its script is a third of Plotly's 4 MB, and its glyphs are columns of one table, which hovering shows.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mlaplan.explain import Explanation, Merge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".html")
# A file of some megabytes; more is no picture any more.
MOST_WORKS = 20_000

# Okabe and Ito's colours, which are told apart with every kind of colour vision.
_FEW = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_FIXED_SHARE = 0.55  # how far the fixed part of a work is blended with white
_ODD_SHARE = 0.3  # the same for every other row, where there are many and neighbours look alike
_BOUND, _FINISH, _EDGE = "#B00020", "#111111", "#111111"
_WIDTH, _DPI = 9.0, 150
_LANES = 3  # brackets of consecutive merges share a slot at most
_TEXT_INCHES = 0.1  # height of the smallest text

Line: TypeAlias = list[tuple[float, float]]


def save(explanation: Explanation, path: str | Path) -> None:
    """Draws a schedule into a file.

    Args:
        explanation: What to draw.
        path: File to write; its ending says how: .svg, .png or .html.

    Raises:
        ValueError: The ending is not known, or there are no works, or too many.
        ImportError: The library is not installed.
        OSError: The file cannot be written.
    """
    target = Path(path)
    suffix = check_suffix(target)
    if suffix == ".html":
        target.write_text(page(explanation), encoding="utf-8")
        return
    figure = draw(explanation)
    import matplotlib as mpl

    # Equal plans give equal files: no date, and element names that do not depend on the process.
    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "mlaplan"}):
        figure.savefig(target, format=suffix[1:], dpi=_DPI, metadata=metadata)


def check_suffix(path: Path) -> str:
    """Returns the ending of a file to draw into.

    Raises:
        ValueError: It is not known.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"output is {path.name!r}, its ending must be one of {', '.join(SUFFIXES)}")
    return suffix


def title_of(explanation: Explanation) -> tuple[str, str]:
    """Returns a headline and a line below it."""
    question = explanation.question
    rows = f"{explanation.rows:,} row{'' if explanation.rows == 1 else 's'}"
    fold = f", fold {question.fold}" if question.fold > 1 else ""
    padding = f" ({question.padding:,} padding rows not planned)" if question.padding else ""
    budget = "no split limit" if explanation.split_budget == -1 else f"split budget {explanation.split_budget}"
    head = f"{rows}{padding} on {explanation.slots_used} of {question.num_cus} compute units"
    below = f"{budget}{fold}; finish time {explanation.finish_time:,}, {explanation.ratio:.3f} x lower bound"
    return head, below


def colours_of(rows: int) -> list[str]:
    """Returns a colour for each row: distinct ones for few rows, else a ramp whose every other step is lighter."""
    if rows <= len(_FEW):
        return list(_FEW[:rows])
    mpl = _need("matplotlib")
    hexadecimal = importlib.import_module("matplotlib.colors").to_hex
    ramp = mpl.colormaps["viridis"].resampled(rows)
    return [_lighter(hexadecimal(ramp(row)), _ODD_SHARE if row % 2 else 0.0) for row in range(rows)]


def draw(explanation: Explanation) -> Figure:
    """Returns a schedule's picture.

    Raises:
        ValueError: There are no works, or too many.
        ImportError: matplotlib is not installed.
    """
    _check_size(explanation)
    _need("matplotlib")
    from matplotlib.figure import Figure

    shown = _slots_shown(explanation)
    plot_inches = min(max(0.13 * shown, 1.3), 1.9 + 0.018 * shown, 7.5)
    figure = Figure(figsize=(_WIDTH, plot_inches + 1.9), layout="constrained")
    works, merges = figure.subplots(1, 2, sharey=True, width_ratios=(7, 1))
    colours = colours_of(explanation.rows)
    _draw_works(works, explanation, colours, plot_inches / shown)
    _draw_merges(merges, explanation, colours, plot_inches / shown)
    works.set_ylim(shown - 0.5, -0.5)
    works.locator_params(axis="y", integer=True)
    head, below = title_of(explanation)
    figure.suptitle(f"{head}\n{below}", fontsize=10)
    idle = explanation.question.num_cus - shown
    works.set_ylabel(f"slot ({idle:,} idle not shown)" if idle else "slot")
    works.set_xlabel(f"cost, {explanation.unit}")
    _draw_legend(figure, works, explanation, colours)
    return figure


def _draw_works(axes: Axes, explanation: Explanation, colours: list[str], slot_inches: float) -> None:
    from matplotlib.collections import PolyCollection

    boxes, faces = [], []
    ends: list[Line] = []
    for work in explanation.works:
        top, bottom = work.slot - 0.5, work.slot + 0.5
        for left, right, share in (
            (work.start, work.start + work.fixed, _FIXED_SHARE),
            (work.start + work.fixed, work.end, 0.0),
        ):
            boxes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
            faces.append(_lighter(colours[work.row], share))
        if work.partial is not None:
            ends.append([(work.end, top), (work.end, bottom)])
    line = min(0.5, 8 * slot_inches)
    axes.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors="white", linewidths=line))
    _add_lines(axes, ends, _EDGE, 1.4)
    if slot_inches >= _TEXT_INCHES:
        for work in explanation.works:
            middle = (work.start + work.fixed + work.end) / 2
            ink = "white" if _is_dark(colours[work.row]) else "black"
            axes.text(middle, work.slot, str(work.row), fontsize=6, ha="center", va="center_baseline", color=ink)
    axes.axvline(explanation.lower_bound, color=_BOUND, linestyle="--", linewidth=1.3)
    axes.axvline(explanation.finish_time, color=_FINISH, linewidth=0.9, linestyle=":")
    axes.set_xlim(0, explanation.finish_time * 1.02)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_merges(axes: Axes, explanation: Explanation, colours: list[str], slot_inches: float) -> None:
    lines: list[Line] = []
    ends: list[Line] = []
    for index, merge in enumerate(explanation.merges):
        lane = index % _LANES
        lines.append([(lane, merge.first_slot - 0.35), (lane, merge.last_slot + 0.35)])
        ends += [[(lane - 0.15, y), (lane + 0.15, y)] for y in (lines[-1][0][1], lines[-1][1][1])]
        if (merge.last_slot - merge.first_slot + 1) * slot_inches >= _TEXT_INCHES:
            middle = (merge.first_slot + merge.last_slot) / 2
            axes.text(lane + 0.12, middle, str(merge.pieces), fontsize=6, ha="left", va="center_baseline")
    row_colours = [colours[merge.row] for merge in explanation.merges]
    _add_lines(axes, lines, row_colours, 2.0)
    _add_lines(axes, ends, [colour for colour in row_colours for _ in range(2)], 1.2)
    axes.set_xlim(-0.4, _LANES - 0.2)
    axes.set_title("pieces merged" if explanation.merges else "no merges", fontsize=8)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)


def _add_lines(axes: Axes, lines: list[Line], colours: str | list[str], width: float) -> None:
    from matplotlib.collections import LineCollection

    if lines:
        axes.add_collection(LineCollection(lines, colors=colours, linewidths=width, capstyle="butt", clip_on=False))


def _draw_legend(figure: Figure, works: Axes, explanation: Explanation, colours: list[str]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "#777777"
    marks: list[Any] = [
        Line2D([], [], color=_BOUND, linestyle="--", label=f"lower bound, {explanation.lower_bound:,}"),
        Line2D([], [], color=_FINISH, linestyle=":", label=f"finish time, {explanation.finish_time:,}"),
        Patch(color=_lighter(grey, _FIXED_SHARE), label="fixed cost of a work"),
    ]
    if explanation.merges:
        marks.append(Line2D([], [], color=_EDGE, linewidth=1.4, marker="|", linestyle="", label="piece, merged later"))
    lengths = explanation.question.row_lengths.tolist()
    if len(lengths) <= len(_FEW):
        marks += [
            Patch(color=colour, label=f"row {row}, {length:,} tokens")
            for row, (colour, length) in enumerate(zip(colours, lengths, strict=True))
        ]
    else:
        edges = [row - 0.5 for row in range(len(lengths) + 1)]
        mappable = ScalarMappable(BoundaryNorm(edges, len(lengths)), ListedColormap(colours))
        step = max(1, -(-len(lengths) // 8))
        bar = figure.colorbar(mappable, ax=works, location="right", aspect=40, pad=0.01, drawedges=False, fraction=0.03)
        bar.set_ticks(list(range(0, len(lengths), step)))
        bar.set_label("row", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        bar.minorticks_off()
        bar.ax.invert_yaxis()
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=7.5, frameon=False)


def page(explanation: Explanation) -> str:
    """Returns a schedule's picture as one HTML page that loads nothing, with zoom, and details under the pointer.

    Raises:
        ValueError: There are no works, or too many.
        ImportError: Bokeh is not installed.
    """
    _check_size(explanation)
    _need("bokeh")
    from bokeh.embed import file_html
    from bokeh.layouts import column, row
    from bokeh.models.widgets import Div
    from bokeh.resources import INLINE

    colours = colours_of(explanation.rows)
    works = _works_figure(explanation, colours)
    merges = _merges_figure(explanation, colours, works)
    text = Div(text=_introduction(explanation), disable_math=True)
    layout = column(text, row(works, merges, sizing_mode="stretch_width"), sizing_mode="stretch_width")
    html: str = file_html(layout, INLINE, title=f"mlaplan explain: {title_of(explanation)[0]}")
    return html


def _introduction(explanation: Explanation) -> str:
    head, below = title_of(explanation)
    idle = explanation.question.num_cus - _slots_shown(explanation)
    rest = f" {idle:,} idle compute units are not shown." if idle else ""
    return (
        f"<h3>{head}</h3>{below}.<br>Each line is a compute unit, time runs to the right in {explanation.unit}. The "
        f"light part is the fixed cost of a work; a black end is a piece that is merged later.{rest}"
    )


def _page_height(explanation: Explanation) -> int:
    return min(max(220, 130 + 18 * _slots_shown(explanation)), 760)


def _works_figure(explanation: Explanation, colours: list[str]) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, Range1d
    from bokeh.plotting import figure

    shown = _slots_shown(explanation)
    plot = figure(
        height=_page_height(explanation),
        sizing_mode="stretch_width",
        x_range=Range1d(start=0, end=explanation.finish_time * 1.02),
        y_range=Range1d(start=shown - 0.5, end=-0.5),
        tools="xwheel_zoom,ywheel_zoom,pan,box_zoom,reset,save",
        x_axis_label=f"cost, {explanation.unit}",
        y_axis_label="slot",
    )
    plot.xgrid.visible = plot.ygrid.visible = False
    plot.toolbar.logo = None
    source = ColumnDataSource(_columns(explanation, colours))
    middle: dict[str, Any] = {
        "top": "top",
        "bottom": "bottom",
        "source": source,
        "line_color": "white",
        "line_width": min(0.5, 40 / shown),  # thinner than the slots themselves
    }
    plot.quad(left="start", right="body", fill_color="light", **middle)
    plot.quad(left="body", right="end", fill_color="colour", **middle)
    plot.segment("end", "top", "end", "bottom", color=_EDGE, alpha="cut", line_width=2, source=source)
    # One box without paint over both parts, so that the pointer finds each work once.
    whole = plot.quad(left="start", right="end", fill_alpha=0, hover_line_color="black", **middle)
    tips = [
        ("row", "@row, request @request"),
        ("slot", "@slot"),
        ("tokens", "@tokens"),
        ("cost", "@cost, from @start to @end"),
        ("result", "@result"),
    ]
    if explanation.question.fold > 1:
        tips.insert(1, ("planner row", "@tile"))
    plot.add_tools(HoverTool(renderers=[whole], tooltips=tips))
    for place, colour, dash, name in (
        (explanation.lower_bound, _BOUND, "dashed", f"lower bound, {explanation.lower_bound:,}"),
        (explanation.finish_time, _FINISH, "dotted", f"finish time, {explanation.finish_time:,}"),
    ):
        ends = [-0.5, shown - 0.5]
        plot.line([place, place], ends, color=colour, line_dash=dash, line_width=2, legend_label=name)
    plot.add_layout(plot.legend[0], "above")
    plot.legend[0].orientation = "horizontal"
    return plot


def _merges_figure(explanation: Explanation, colours: list[str], works: Any) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, Range1d
    from bokeh.plotting import figure

    plot = figure(
        title="pieces merged" if explanation.merges else "no merges",
        height=_page_height(explanation),
        width=150,
        x_range=Range1d(start=-0.5, end=_LANES - 0.5),
        y_range=works.y_range,
        tools="",
        toolbar_location=None,
    )
    plot.axis.visible = plot.xgrid.visible = plot.ygrid.visible = False
    merges = explanation.merges
    source = ColumnDataSource(
        {
            "lane": [index % _LANES for index in range(len(merges))],
            "top": [merge.first_slot - 0.35 for merge in merges],
            "bottom": [merge.last_slot + 0.35 for merge in merges],
            "colour": [colours[merge.row] for merge in merges],
            "text": [_merge_text(merge) for merge in merges],
        }
    )
    lines = plot.segment("lane", "top", "lane", "bottom", color="colour", line_width=5, source=source)
    plot.add_tools(HoverTool(renderers=[lines], tooltips="@text"))
    return plot


def _merge_text(merge: Merge) -> str:
    return f"row {merge.row}: {merge.pieces} pieces of slots {merge.first_slot} to {merge.last_slot}"


def _columns(explanation: Explanation, colours: list[str]) -> dict[str, list[Any]]:
    works = explanation.works
    requests = explanation.question.request_ids.tolist()
    lengths = explanation.question.row_lengths.tolist()
    pieces = {merge.tile: merge.pieces for merge in explanation.merges}
    return {
        "row": [work.row for work in works],
        "tile": [work.tile for work in works],
        "request": [requests[work.row] for work in works],
        "slot": [work.slot for work in works],
        "top": [work.slot - 0.5 for work in works],
        "bottom": [work.slot + 0.5 for work in works],
        "start": [work.start for work in works],
        "body": [work.start + work.fixed for work in works],
        "end": [work.end for work in works],
        "cost": [work.cost for work in works],
        "colour": [colours[work.row] for work in works],
        "light": [_lighter(colours[work.row], _FIXED_SHARE) for work in works],
        "cut": [int(work.partial is not None) for work in works],
        "tokens": [f"{work.kv_start:,} to {work.kv_end:,} of {lengths[work.row]:,}" for work in works],
        "result": [
            "written by the work itself"
            if work.partial is None
            else f"partial {work.partial}, one of {pieces[work.tile]} to be merged"
            for work in works
        ],
    }


def _slots_shown(explanation: Explanation) -> int:
    return explanation.works[-1].slot + 1


def _check_size(explanation: Explanation) -> None:
    if not explanation.works:
        raise ValueError("the plan has no works: there is nothing to draw")
    if len(explanation.works) > MOST_WORKS:
        raise ValueError(f"the plan has {len(explanation.works):,} works, a picture holds at most {MOST_WORKS:,}")


def _lighter(colour: str, share: float) -> str:
    """Returns a colour, "#rrggbb", blended with white."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in _parts(colour))


def _parts(colour: str) -> list[int]:
    return [int(colour[a:b], 16) for a, b in pairwise((1, 3, 5, 7))]


def _is_dark(colour: str) -> bool:
    red, green, blue = _parts(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = f"a picture needs {package}: pip install 'mlaplan[plot]' ({error})"
        raise ImportError(message) from error
