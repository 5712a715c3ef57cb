"""`mlaplan tune`: measures what works cost on the GPU at hand, for the policies that place works by their cost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaplan import calibration
from mlaplan.commands.options import UsageError
from mlaplan.report import Row, Section, as_json, progress, render

if TYPE_CHECKING:
    from mlaplan.calibration import Calibration
    from mlaplan.tuning import Fit

_MEANING = {
    "block": "each begun block",
    "piece": "a piece of a row that is cut",
    "whole": "a row that is not",
    "slot": "a compute unit that has work",
    "merge": "each piece that is merged",
    "cut": "anything to merge, whatever it is",
}


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "tune",
        help="measure what works cost on this GPU, for the policy balanced",
        description="Times decodes of many kinds on the GPU, fits the cost table that the policies 'balanced' and "
        "'invariant' place works by, and stores it for this device, head count and dtypes, where planners find it. "
        "Takes seconds, most of them for compiling; the GPU should be idle.",
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default: cuda)")
    parser.add_argument("--heads", type=int, default=16, help="query heads per planner row (default: 16)")
    parser.add_argument("--num-cus", type=int, metavar="N", help="compute units to fill (default: the device's)")
    parser.add_argument("--q-dtype", default="bf16", help="bf16 or fp16 (default: bf16)")
    parser.add_argument("--kv-dtype", default="bf16", help="bf16, fp16 or fp8 (default: bf16)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write instead of the one that planners look for"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns 1 if the times make no table."""
    from mlaplan.config import PlannerConfig
    from mlaplan.tuning import TuningError

    try:
        config = PlannerConfig(max_rows=1, max_requests=1, arch=None, backend="portable", heads=arguments.heads,
                               num_cus=arguments.num_cus, q_dtype=arguments.q_dtype,
                               kv_dtype=arguments.kv_dtype)  # fmt: skip
        device = _gpu(arguments.device)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    from mlaplan.tuning_gpu import shape_of, tune

    path = arguments.out or calibration.path_of(shape_of(device, config.resolved(device.num_cus)))
    calibration.refuse_foreign(path)  # before the work rather than after
    try:
        made, fitted = tune(config, device, watch=lambda loads: progress(loads, total=len(loads), label="timing"))
    except TuningError as error:
        sys.stderr.write(f"mlaplan tune: {error}\n")
        return 1
    calibration.save(made, path)
    sections = sections_of(made, fitted, path)
    if arguments.json:
        sys.stdout.write(as_json(sections) + "\n")
    else:
        render(sections)
    sys.stdout.flush()
    return 0


def sections_of(made: Calibration, fitted: Fit, path: Path) -> list[Section]:
    """Returns what was measured, as a table."""
    table, shape = made.table, made.shape
    costs = [Row(name, name, getattr(table, name), "ns", note=meaning) for name, meaning in _MEANING.items()]
    return [
        Section(
            "measured",
            "Measured",
            (
                Row("device", "device", shape.device, note=shape.capability),
                Row("heads", "query heads", shape.heads, note=f"{made.heads_per_tile} in a program"),
                Row("dtypes", "queries and KV", f"{shape.q_dtype} and {shape.kv_dtype}"),
                Row("num_cus", "compute units", made.num_cus),
            ),
        ),
        Section(
            "costs",
            "Costs",
            (
                Row("block_tokens", "block", table.block_tokens, "tokens"),
                *costs,
                Row("launch", "launch without works", fitted.launch, "ns"),
            ),
        ),
        Section(
            "fit",
            "Fit",
            (
                Row("residual", "times off the table's, mean", 100 * made.residual, "%"),
                Row("worst", "times off the table's, worst", 100 * fitted.worst, "%"),
                *(Row(f"note_{index}", "note", note) for index, note in enumerate(fitted.notes)),
                Row("file", "stored in", str(path)),
            ),
        ),
    ]


def _gpu(name: str) -> Any:
    from mlaplan.device import make_device

    device = make_device(name)
    if device.backend != "portable":
        raise UsageError(f"device is {name!r}, but a table is measured on a GPU: 'cuda' or 'cuda:N'")
    return device
