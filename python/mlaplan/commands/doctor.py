"""`mlaplan doctor`: what is installed, what is recognised, and whether planning works, as text for an issue."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mlaplan.report import Section, as_json, format_value


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, what is recognised and whether planning works",
        description="Prints versions, the GPU, aiter's signatures, environment switches, the state of the vLLM "
        "plugin and the outcome of a two-second self-test: text to paste into an issue. The exit status is 1 if the "
        "self-test failed.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="read versions only; do not load torch, aiter and vLLM")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns 1 if the self-test failed."""
    from mlaplan.doctor import examine

    sections, passed = examine(probe=not arguments.quick)
    sys.stdout.write(as_json(sections) + "\n" if arguments.json else text_of(sections))
    sys.stdout.flush()
    return 0 if passed else 1


def text_of(sections: Sequence[Section]) -> str:
    """Returns sections as plain lines, values to the left: they are words rather than numbers."""
    width = max((len(row.label) for section in sections for row in section.rows), default=0)
    lines = []
    for section in sections:
        lines += ["", section.title]
        lines += [
            f"  {row.label:<{width}}  {format_value(row)}{f' ({row.note})' if row.note else ''}" for row in section.rows
        ]
        if not section.rows:
            lines.append("  none set")
    return "\n".join(lines[1:]) + "\n"
