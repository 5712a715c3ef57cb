"""Results on a terminal, in a file or for a machine.

rich draws the table and the progress bar where it is installed; nothing here needs it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO, TypeVar

T = TypeVar("T")

Value = int | float | str | bool | None

_PLAIN_WIDTH = 120  # for output that is not a terminal, where there is no width to ask for


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report.

    Attributes:
        key: Name in JSON.
        label: Name on screen.
        value: What it is; None where there is nothing to say.
        unit: Unit on screen, as in "us" or "%".
        note: Further text on screen.
    """

    key: str
    label: str
    value: Value
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Lines of a report that belong together.

    Attributes:
        key: Name in JSON.
        title: Name on screen.
        rows: The lines.
    """

    key: str
    title: str
    rows: tuple[Row, ...]


def format_value(row: Row) -> str:
    """Returns a row's value as text, with its unit."""
    value = row.value
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        text = f"{value:,}"
    elif isinstance(value, float):
        text = f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    else:
        text = value
    return f"{text} {row.unit}" if row.unit else text


def render(sections: Sequence[Section], stream: TextIO | None = None) -> None:
    """Writes sections as a table: with rich where it is installed, else as aligned text.

    Args:
        sections: What to show.
        stream: Where to; standard output by default. Colour only on a terminal.
    """
    target = sys.stdout if stream is None else stream
    if _has_rich():
        _render_rich(sections, target)
    else:
        target.write(plain_text(sections))


def plain_text(sections: Sequence[Section]) -> str:
    """Returns sections as aligned plain text."""
    rows = [row for section in sections for row in section.rows]
    label_width = max((len(row.label) for row in rows), default=0)
    value_width = max((len(format_value(row)) for row in rows if not row.note), default=0)
    lines = []
    for section in sections:
        lines += ["", section.title]
        for row in section.rows:
            value = format_value(row)
            line = f"  {row.label:<{label_width}}  {value:>{value_width}}  {row.note}"
            lines.append(line.rstrip())
    return "\n".join(lines[1:]) + "\n" if lines else ""


def as_json(sections: Sequence[Section]) -> str:
    """Returns sections as JSON, `{section key: {row key: value}}`; numbers that JSON lacks are null.

    Raises:
        ValueError: Two sections, or two rows of one, share a key.
    """
    result: dict[str, dict[str, Value]] = {}
    for section in sections:
        if section.key in result:
            raise ValueError(f"two sections are called {section.key!r}")
        values: dict[str, Value] = {}
        for row in section.rows:
            if row.key in values:
                raise ValueError(f"two rows of section {section.key!r} are called {row.key!r}")
            unsayable = isinstance(row.value, float) and not math.isfinite(row.value)
            values[row.key] = None if unsayable else row.value
        result[section.key] = values
    return json.dumps(result, indent=2, allow_nan=False)


def render_columns(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], stream: TextIO | None = None
) -> None:
    """Writes a table of several columns: with rich where it is installed, else as aligned text.

    Args:
        title: What the table shows.
        columns: Names of the columns.
        rows: A label and a text for each column.
        stream: Where to; standard output by default. Colour only on a terminal.
    """
    target = sys.stdout if stream is None else stream
    cells = [(title, *columns), *((label, *texts) for label, texts in rows)]
    if _has_rich():
        _render_rich_columns(cells, target)
        return
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for label, *texts in cells:
        aligned = [f"{text:>{width}}" for text, width in zip(texts, widths[1:], strict=True)]
        target.write("  ".join([f"{label:<{widths[0]}}", *aligned]).rstrip() + "\n")


def progress(items: Iterable[T], *, total: int | None, label: str, stream: TextIO | None = None) -> Iterator[T]:
    """Yields `items`, with a progress bar on a terminal; silent elsewhere and without rich.

    Args:
        items: What to go through.
        total: How many there are at most, or None.
        label: Text in front of the bar.
        stream: Where the bar goes; standard error by default.
    """
    target = sys.stderr if stream is None else stream
    if not (target.isatty() and _has_rich()):
        yield from items
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=target), transient=True) as bar:
        task = bar.add_task(label, total=total)
        for item in items:
            yield item
            bar.advance(task)


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _render_rich_columns(cells: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = stream.isatty()
    console = Console(file=stream, no_color=not terminal, width=None if terminal else _PLAIN_WIDTH)
    table = Table(box=box.SIMPLE_HEAD if terminal else box.ASCII2, pad_edge=False)
    for index, name in enumerate(cells[0]):
        table.add_column(Text(name), justify="right" if index else "left", overflow="fold")
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    console.print(table)


def _render_rich(sections: Sequence[Section], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = stream.isatty()
    console = Console(file=stream, no_color=not terminal, width=None if terminal else _PLAIN_WIDTH)
    table = Table(box=box.SIMPLE_HEAD if terminal else box.ASCII2, show_header=False, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    table.add_column(overflow="fold")
    for section in sections:
        table.add_section()
        table.add_row(Text(section.title, style="bold"))
        for row in section.rows:
            # Text, so that brackets in a value are not taken for markup.
            table.add_row(Text("  " + row.label), Text(format_value(row)), Text(row.note, style="dim"))
    console.print(table)
