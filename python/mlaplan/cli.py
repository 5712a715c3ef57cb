"""The command `mlaplan`."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mlaplan import __version__
from mlaplan.commands import compare, doctor, explain, record, replay, tune
from mlaplan.commands.options import UsageError, add_engine_options, add_policy_options, scheduler_of
from mlaplan.report import Row, Section, as_json, progress, render
from mlaplan.workload import LogError

if TYPE_CHECKING:
    from mlaplan.runner import RunOptions, RunResult
    from mlaplan.workload import Step

_EXAMPLES = """\
examples:
  mlaplan run                                    the built-in log, host only
  mlaplan run requests.csv --steps 5000          a log with arrival_ms,input_tokens,output_tokens
  mlaplan run requests.csv.gz --spec-tokens 3 --lengths bound
                                                 speculative decoding, host lengths one step behind
  mlaplan run --lengths device --deferred        nothing known on the host, plans made where graphs make them
  mlaplan run --load 0.2 --max-num-seqs 8 --json few requests at a time, for a machine to read
  mlaplan explain 2048x8 --output plan.svg       one plan: a table and a picture
  mlaplan record requests.csv --out steps.trace  a trace of what is planned for a log
  mlaplan replay steps.trace --num-cus 256       the same steps with other settings; what a self-check found
  mlaplan compare requests.csv                   beside a builder as one writes it first
  mlaplan tune --heads 16                        what works cost on this GPU, for the policy balanced
  mlaplan doctor                                 what is installed and whether it works, for an issue

exit status: 0 when every check passed, 1 when one differed, 2 for a wrong option or log
"""

OK, DIFFERENT, USAGE, INTERRUPTED = 0, 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="mlaplan",
        description="Plans sparse MLA decode: per-token rows and the work schedule of the compute units.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mlaplan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="plan and check every step of a request log",
        description="Turns a request log into the batches of a continuous-batching engine, plans every step, "
        "and compares every plan and sampled decodes with references.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "log",
        nargs="?",
        metavar="LOG",
        help="request log in CSV, may be .gz: any number of lines of at most 65,536 characters (default: built-in)",
    )
    _add_run_options(run)
    add_engine_options(run)
    _add_planner_options(run)
    run.set_defaults(function=_run)
    explain.add_parser(commands)
    _add_planner_options(record.add_parser(commands))
    replay.add_parser(commands)
    _add_planner_options(compare.add_parser(commands))
    tune.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--steps", type=int, default=2000, metavar="N", help="most steps (default: 2000)")
    group.add_argument(
        "--deferred",
        action="store_true",
        help="plan pure decodes deferred and refresh them, as an engine without graphs does",
    )
    group.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run pure decodes through captured graphs that make their own plan (default: on a GPU)",
    )
    group.add_argument(
        "--check-every",
        type=int,
        default=1,
        metavar="M",
        help="compare every M-th plan with one made from nothing; 0: none (default: 1)",
    )
    group.add_argument(
        "--decode-every",
        type=int,
        default=100,
        metavar="M",
        help="decode about every M-th step and compare with dense attention; 0: none (default: 100)",
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_planner_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("planner")
    group.add_argument("--topk", type=int, default=2048, help="KV slots per row at most (default: 2048)")
    group.add_argument("--heads", type=int, default=16, help="query heads of a rank (default: 16)")
    group.add_argument("--arch", default="gfx942", help="gfx942 or gfx950 (default: gfx942)")
    group.add_argument("--num-cus", type=int, metavar="N", help="compute units (default: the architecture's)")
    group.add_argument("--q-dtype", default="bf16", help="bf16, fp16 or fp8 (default: bf16)")
    group.add_argument("--kv-dtype", default="bf16", help="bf16, fp16 or fp8 (default: bf16)")
    group.add_argument(
        "--split-budget",
        type=int,
        metavar="N",
        help="slots per row, -1 for no limit (default: by the longest row)",
    )
    add_policy_options(group)


def options_of(arguments: argparse.Namespace) -> RunOptions:
    """Returns the options of `mlaplan run`.

    Raises:
        ValueError: One of them is out of range.
    """
    from mlaplan.runner import RunOptions  # `--version` and `--help` need none of it

    return RunOptions(
        log=arguments.log,
        steps=arguments.steps,
        device=arguments.device,
        scheduler=scheduler_of(arguments),
        topk=arguments.topk,
        heads=arguments.heads,
        arch=arguments.arch,
        num_cus=arguments.num_cus,
        q_dtype=arguments.q_dtype,
        kv_dtype=arguments.kv_dtype,
        split_budget=arguments.split_budget,
        policy=arguments.policy,
        piece_tokens=arguments.piece_tokens,
        deferred=arguments.deferred,
        graphs=arguments.graphs,
        check_every=arguments.check_every,
        decode_every=arguments.decode_every,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit status. A wrong option exits with status 2 by itself.
    """
    _mend_streams()
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.function(arguments)
    except BrokenPipeError:  # somebody has read enough; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DIFFERENT
    except (UsageError, LogError, OSError) as error:
        sys.stderr.write(f"mlaplan {arguments.command}: error: {error}\n")
        return USAGE
    except MemoryError as error:
        sys.stderr.write(f"mlaplan {arguments.command}: error: out of memory: {error}\n")
        return USAGE
    except KeyboardInterrupt:
        sys.stderr.write(f"mlaplan {arguments.command}: interrupted\n")
        return INTERRUPTED
    return status


def _mend_streams() -> None:
    """Makes what is printed fit any stream: one that is closed is None, and a file name may hold any bytes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: argparse.Namespace) -> int:
    from mlaplan.runner import make_planner, run

    # Only here are these errors the user's: from inside the loop they would be ours, with their place.
    try:
        options = options_of(arguments)
        planner = make_planner(options)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error

    def watch(steps: Iterable[Step]) -> Iterator[Step]:
        return progress(steps, total=options.steps, label="planning")

    result = run(options, planner, watch=watch)
    sections = sections_of(options, result)
    if arguments.json:
        document = json.loads(as_json(sections))
        document["differences"] = [difference.as_dict() for difference in result.differences]
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        render(sections)
    for difference in result.differences:
        sys.stderr.write(f"mlaplan run: {difference}\n")
    sys.stdout.flush()
    return OK if result.passed else DIFFERENT


def sections_of(options: RunOptions, result: RunResult) -> list[Section]:
    """Returns what a run has to say, as a table."""
    return [
        Section("workload", "Workload", _workload_rows(options, result)),
        Section("decisions", "Decisions", _decision_rows(result)),
        Section("reasons", "Why", _reason_rows(result)),
        Section("cost", "Cost of planning", _cost_rows(result)),
        Section("checks", "Checks", _check_rows(result)),
    ]


def _workload_rows(options: RunOptions, result: RunResult) -> tuple[Row, ...]:
    steps = max(result.steps, 1)
    stats = result.scheduler
    return (
        Row("log", "log", options.log or "built-in"),
        Row("device", "device", result.device),
        Row("lengths", "lengths known to the host", options.scheduler.lengths),
        Row("spec_tokens", "draft tokens", options.scheduler.num_speculative_tokens),
        Row("steps", "steps", result.steps),
        Row("rows", "rows", result.rows),
        Row("padded_rows", "rows with padding", result.padded_rows),
        Row("mean_requests", "requests running, mean", result.requests / steps),
        Row("finished", "requests finished", stats.finished, note=f"{stats.new_tokens:,} tokens generated"),
        Row("preemptions", "preemptions", stats.preemptions),
        Row("refused", "requests too long", stats.refused),
        Row("pure_decode_share", "pure decode steps", 100 * result.pure_decodes / steps, "%"),
        Row("unchanged_share", "pure decode and no row changed", 100 * result.unchanged / steps, "%"),
    )


def _decision_rows(result: RunResult) -> tuple[Row, ...]:
    steps = max(result.steps, 1)
    rows = [
        Row(
            action,
            action,
            result.actions[action],
            note=f"{100 * result.actions[action] / steps:.1f}% of steps",
        )
        for action in ("nothing", "copy", "launch", "deferred")
    ]
    return (
        *rows,
        Row("replays", "of these, replayed graphs", result.replays),
        Row("nothing_share", "steps with nothing to do", 100 * result.actions["nothing"] / steps, "%"),
    )


def _reason_rows(result: RunResult) -> tuple[Row, ...]:
    return tuple(
        Row(f"{action}: {reason}", f"{action}: {reason}", count)
        for (action, reason), count in sorted(result.reasons.items(), key=lambda item: (item[0][0], -item[1]))
    )


def _cost_rows(result: RunResult) -> tuple[Row, ...]:
    from mlaplan.runner import percentile

    done = result.operations
    ratios = result.finish_ratios
    return (
        Row("plan_us_p50", "host time of plan(), median", percentile(result.plan_us, 50), "us"),
        Row("plan_us_p99", "host time of plan(), 99 of 100", percentile(result.plan_us, 99), "us"),
        Row("launches", "launches", done.launches),
        Row("copies", "copies", done.copies),
        Row("bytes_copied", "bytes copied", done.bytes_copied),
        Row("waits", "waits for the device", done.waits),
        Row("read_backs", "read-backs", done.read_backs),
        Row("allocations", "device allocations", done.allocations),
        Row(
            "finish_ratio_mean",
            "finish time over its lower bound, mean",
            sum(ratios) / len(ratios) if ratios else None,
        ),
        Row("finish_ratio_max", "finish time over its lower bound, worst", max(ratios, default=None)),
    )


def _check_rows(result: RunResult) -> tuple[Row, ...]:
    return (
        Row("plans", "plans compared with one from nothing", result.plans_checked),
        Row(
            "decodes",
            "decodes compared with dense attention",
            result.decodes_checked,
            note=f"{result.decode_rows_checked:,} rows",
        ),
        Row("num_differences", "differences", len(result.differences)),
        Row("passed", "all passed", result.passed),
        Row("seconds", "wall time", result.seconds, "s"),
    )
