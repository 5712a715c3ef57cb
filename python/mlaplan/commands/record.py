"""`mlaplan record`: a trace of a request log's steps, without a service."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaplan.commands.options import UsageError, add_engine_options
from mlaplan.report import Row, Section, as_json, progress, render

if TYPE_CHECKING:
    from mlaplan.recorder import Recorder
    from mlaplan.runner import RunOptions
    from mlaplan.workload import Step

EXAMPLES = """\
examples:
  mlaplan record requests.csv --out steps.trace  every step of a log, planned on the host
  mlaplan record --steps 500 --spec-tokens 3 --lengths bound --out steps.trace
                                                 the built-in log with drafts, lengths one step behind
  mlaplan replay steps.trace --num-cus 80        what 80 compute units would make of it

A service records by `Planner.record`, vLLM by MLAPLAN_RECORD; see docs/traces.md.
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Adds the command to a parser's commands, and returns its own parser, which lacks the planner's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "record",
        help="make a trace of a request log's steps",
        description="Turns a request log into the batches of a continuous-batching engine, plans every step, and "
        "writes what the planner was given and decided into a trace.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", nargs="?", metavar="LOG", help="request log in CSV, may be .gz; default: a built-in one")
    group = parser.add_argument_group("record")
    group.add_argument("--out", required=True, metavar="FILE", help="the trace to write")
    group.add_argument("--force", action="store_true", help="replace FILE if it is there")
    group.add_argument("--max-bytes", type=int, default=64 << 20, metavar="N", help="largest trace (default: 64 MiB)")
    group.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N (default: cpu)")
    group.add_argument("--steps", type=int, default=2000, metavar="N", help="most steps (default: 2000)")
    group.add_argument("--deferred", action="store_true", help="plan pure decodes deferred, and refresh them")
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(parser)
    parser.set_defaults(function=run, graphs=False, check_every=0, decode_every=0)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UsageError: An option is out of range.
        LogError: The log is not valid.
        OSError: A file cannot be read or written.
    """
    from mlaplan.cli import options_of
    from mlaplan.runner import make_planner

    try:
        options = options_of(arguments)
        planner = make_planner(options)
        recorder = planner.record(
            arguments.out, max_bytes=arguments.max_bytes, read_lengths=True, overwrite=arguments.force
        )
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    with recorder:
        _plan(options, recorder, planner)
    if recorder.steps == 0:
        raise UsageError("the log gives no step")
    if recorder.error is not None:
        raise OSError(f"{arguments.out}: {recorder.error}")
    section = _section(recorder)
    if arguments.json:
        sys.stdout.write(as_json([section]) + "\n")
    else:
        render([section])
    sys.stdout.flush()
    return 0


def _plan(options: RunOptions, recorder: Recorder, planner: Any) -> None:
    from mlaplan.runner import batch_of, requests_of
    from mlaplan.workload import Scheduler

    def watch(steps: Iterable[Step]) -> Iterator[Step]:
        return progress(steps, total=options.steps, label="recording")

    for step in watch(itertools.islice(Scheduler(options.scheduler, requests_of(options)), options.steps)):
        deferred = options.deferred and step.is_pure_decode
        plan = planner.plan(batch_of(step, planner), deferred=deferred)
        if deferred:
            planner.refresh(plan)
        if not recorder.recording:
            return


def _section(recorder: Recorder) -> Section:
    size = Path(recorder.path).stat().st_size
    full = recorder.written < recorder.steps
    return Section(
        "trace",
        "Trace",
        (
            Row("file", "file", str(recorder.path)),
            Row("steps", "steps", recorder.written, note="the file is full: raise --max-bytes" if full else ""),
            Row("bytes", "bytes", size),
            Row("bytes_per_step", "bytes per step", size / max(recorder.written, 1)),
            Row("full", "ended because it is full", full),
        ),
    )
