"""`mlaplan compare`: a straightforward builder and mlaplan over the same log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaplan.commands.options import UsageError, add_engine_options
from mlaplan.report import progress, render_columns

if TYPE_CHECKING:
    from mlaplan.compare import Comparison, Side
    from mlaplan.workload import Step

EXAMPLES = """\
examples:
  mlaplan compare requests.csv                   host time and device operations per step, on the host
  mlaplan compare requests.csv --device cuda --output compare.svg
                                                 the same on a GPU, with a chart
  mlaplan compare --spec-tokens 3 --lengths bound --json

Straightforward is a builder as one writes it first: lengths read back, rows made in NumPy and uploaded, and where they
changed a schedule launched and waited for. "In graphs" leaves the plans of pure decodes to captured graphs.

exit status: 0 when every plan that was looked at is right, 1 when one is not, 2 for a wrong option or log
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Adds the command to a parser's commands, and returns its own parser, which lacks the planner's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="plan a log with a straightforward builder and with mlaplan",
        description="Plans each step of a request log in three ways, and shows host time, launches, copies, read-backs "
        "and waits per step.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", nargs="?", metavar="LOG", help="request log in CSV, may be .gz; default: a built-in one")
    group = parser.add_argument_group("compare")
    group.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N (default: cpu)")
    group.add_argument("--steps", type=int, default=1000, metavar="N", help="most steps (default: 1000)")
    group.add_argument(
        "--check-every",
        type=int,
        default=100,
        metavar="M",
        help="compare the arrays of every M-th step with a plan from nothing; 0: none (default: 100)",
    )
    group.add_argument("--output", metavar="FILE", help="draw a chart: .svg or .png; needs the extra `plot`")
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(parser)
    parser.set_defaults(function=run, graphs=False, deferred=False, decode_every=0)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UsageError: An option is out of range, or something is not installed.
        LogError: The log is not valid.
        OSError: A file cannot be read or written.
    """
    from mlaplan import comparison_chart
    from mlaplan.cli import options_of
    from mlaplan.compare import compare
    from mlaplan.runner import make_planner

    try:
        if arguments.output:  # before the work, not after it
            comparison_chart.check_suffix(Path(arguments.output))
        options = options_of(arguments)
        make_planner(options)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error

    def watch(steps: Iterable[Step]) -> Iterator[Step]:
        return progress(steps, total=options.steps, label="comparing")

    result = compare(options, watch=watch)
    if not result.steps:
        raise UsageError("the log gives no step")
    document = document_of(result)
    if arguments.json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        title, columns, rows = table_of(result)
        render_columns(title, columns, rows)
    for side in result.sides:
        if side.wrong is not None:
            sys.stderr.write(f"mlaplan compare: step {side.wrong}: {side.name} does not hold the plan\n")
    if arguments.output:
        comparison_chart.save(result, arguments.output)
        sys.stderr.write(f"mlaplan compare: wrote {arguments.output}\n")
    sys.stdout.flush()
    return 1 if any(side.wrong is not None for side in result.sides) else 0


def document_of(result: Comparison) -> dict[str, Any]:
    """Returns a comparison for JSON."""
    return {
        "device": result.device,
        "steps": result.steps,
        "checked": result.checked,
        "sides": {side.name: _numbers(side, result.steps) for side in result.sides},
    }


def _numbers(side: Side, steps: int) -> dict[str, Any]:
    from mlaplan.compare import OPERATIONS
    from mlaplan.runner import percentile

    return {
        "host_us_p50": percentile(side.host_us, 50),
        "host_us_p99": percentile(side.host_us, 99),
        "host_us_mean": sum(side.host_us) / steps,
        **{name: side.total(name) for name in OPERATIONS},
        **{f"{name}_per_step": side.total(name) / steps for name in OPERATIONS},
        "wrong_step": side.wrong,
    }


def table_of(result: Comparison) -> tuple[str, list[str], list[tuple[str, list[str]]]]:
    """Returns a comparison as a title, the names of its columns, and rows of a label and a text for each column."""
    from mlaplan.compare import OPERATIONS, where

    every = [_numbers(side, result.steps) for side in result.sides]
    rows = []
    for key, label in (
        ("host_us_p50", "host time, median, us"),
        ("host_us_p99", "host time, 99 of 100, us"),
        ("host_us_mean", "host time, mean, us"),
    ):
        rows.append((label, [f"{numbers[key]:,.2f}" for numbers in every]))
    rows.append(("times less than straightforward", [_ratio(every[0], numbers) for numbers in every]))
    rows += [
        (f"{name.replace('_', '-')} per step", [f"{numbers[name + '_per_step']:.3f}" for numbers in every])
        for name in OPERATIONS
    ]
    rows.append(
        (
            f"plans looked at: {result.checked:,}",
            [_verdict(numbers["wrong_step"], result.checked) for numbers in every],
        )
    )
    return f"{result.steps:,} steps on {where(result)}", [side.name for side in result.sides], rows


def _verdict(wrong: int | None, checked: int) -> str:
    if not checked:
        return "-"
    return "all right" if wrong is None else f"step {wrong} wrong"


def _ratio(first: dict[str, Any], numbers: dict[str, Any]) -> str:
    return f"{first['host_us_p50'] / numbers['host_us_p50']:.1f}"
