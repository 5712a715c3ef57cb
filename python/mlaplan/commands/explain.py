"""`mlaplan explain`: one plan as a table, as JSON, or as a picture."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaplan.commands.options import UsageError, add_engine_options, add_policy_options, budget_or_rule, scheduler_of
from mlaplan.commands.traced import traced_step
from mlaplan.report import Row, Section, render

if TYPE_CHECKING:
    from mlaplan.explain import Question

EXAMPLES = """\
examples:
  mlaplan explain 2048 2048 700                  three rows of these lengths on a full MI300X
  mlaplan explain 2048x8 --padding 56            eight rows, and what padding would cost if it was planned
  mlaplan explain 2048x8 --fold 8 --budget -1 --output plan.svg
  mlaplan explain --contexts 9000 100 --queries 4
                                                 two requests with four query tokens each
  mlaplan explain --log requests.csv --step 500 --output plan.html
  mlaplan explain --step 500                     a step of the built-in log
  mlaplan explain --trace steps.trace --step 500 a step of a trace or dump, and why it was or was not remade

`--output` needs the extra `plot`: pip install 'mlaplan[plot]'
"""

_MOST_ROWS = 1 << 20
_FULL_CHIP = 304


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "explain",
        help="show one plan: a table, or a picture of what each compute unit does",
        description="Plans one batch and shows the schedule, its finish time against the lower bound, and what padding "
        "would cost.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "length",
        nargs="*",
        metavar="LENGTH",
        help="row length in tokens, or LENGTHxCOUNT; cut to topk",
    )
    batch = parser.add_argument_group("batch")
    batch.add_argument("--contexts", type=int, nargs="+", metavar="N", help="tokens in the cache, for each request")
    batch.add_argument(
        "--queries", type=int, nargs="+", metavar="N", help="query tokens of each request, or one number for all"
    )
    batch.add_argument("--log", metavar="FILE", help="request log in CSV; with --step")
    batch.add_argument("--trace", metavar="FILE", help="trace or dump, whose settings hold; with --step")
    batch.add_argument("--step", type=int, metavar="N", help="step of the log, from 0; without --log: the built-in log")
    batch.add_argument("--padding", type=int, metavar="N", help="rows that a graph adds (default: 0; the step's own)")
    plan = parser.add_argument_group("planner")
    plan.add_argument("--topk", type=int, default=2048, help="KV slots per row at most (default: 2048)")
    plan.add_argument(
        "--num-cus", type=int, default=_FULL_CHIP, metavar="N", help=f"compute units (default: {_FULL_CHIP}, MI300X)"
    )
    plan.add_argument("--fold", type=int, default=1, metavar="N", help="planner rows per row (default: 1)")
    plan.add_argument(
        "--budget",
        type=budget_or_rule,
        default="rule",
        metavar="N",
        help="split budget: a number, -1 for no limit, or rule (default: rule, by the longest row)",
    )
    plan.add_argument("--min-tokens-per-split", type=int, default=128, metavar="N", help="for the rule (default: 128)")
    plan.add_argument("--costs", default="aiter", metavar="NAME", help="cost table, see CostTable (default: aiter)")
    add_policy_options(plan)
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="FILE", help="draw a picture: .svg, .png or .html")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_engine_options(parser)
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UsageError: Options do not go together, or one is out of range.
        LogError: The log is not valid.
        OSError: A file cannot be read or written.
    """
    from mlaplan import picture
    from mlaplan.explain import document_of, explain, sections_of

    try:
        if arguments.output:  # before the work, not after it
            picture.check_suffix(Path(arguments.output))
        question, decision = _question(arguments)
        explanation = explain(question)
        if arguments.output:
            picture.save(explanation, arguments.output)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    sections = sections_of(explanation)
    document = document_of(explanation)
    if decision is not None:
        sections.insert(0, decision)
        document = {decision.key: {row.key: row.value for row in decision.rows}, **document}
    if arguments.json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        render(sections)
    if arguments.output:
        sys.stderr.write(f"mlaplan explain: wrote {arguments.output}\n")
    sys.stdout.flush()
    return 0


def _question(arguments: argparse.Namespace) -> tuple[Question, Section | None]:
    from mlaplan.explain import Question

    given = {
        "LENGTH": bool(arguments.length),
        "--contexts": arguments.contexts is not None,
        "--step": arguments.step is not None,
    }
    if sum(given.values()) != 1:
        raise UsageError(
            f"give one of {', '.join(given)}; {' and '.join(n for n, g in given.items() if g) or 'none'} given"
        )
    if arguments.trace is not None and arguments.log is not None:
        raise UsageError("--trace and --log name the same thing twice")
    for name, needed in (("log", "step"), ("trace", "step"), ("queries", "contexts")):
        if getattr(arguments, name) is not None and getattr(arguments, needed) is None:
            raise UsageError(f"--{name} goes with --{needed}")
    section, padding = None, 0
    if arguments.trace is not None:
        return traced_step(arguments.trace, arguments.step, arguments.costs, arguments.padding)
    if arguments.step is not None:
        lengths, requests, padding, section = _of_step(arguments)
    elif arguments.contexts is not None:
        lengths, requests = _of_contexts(arguments)
    else:
        lengths, requests = _of_lengths(arguments.length, arguments.topk)
    padding = padding if arguments.padding is None else arguments.padding
    if padding > _MOST_ROWS:
        raise ValueError(f"padding is {padding}, must be at most {_MOST_ROWS}")
    question = Question(
        row_lengths=lengths,
        request_ids=requests,
        padding=padding,
        topk=arguments.topk,
        num_cus=arguments.num_cus,
        fold=arguments.fold,
        split_budget=None if arguments.budget == "rule" else arguments.budget,
        min_tokens_per_split=arguments.min_tokens_per_split,
        costs=arguments.costs,
        policy=arguments.policy,
        piece_tokens=arguments.piece_tokens,
    )
    return question, section


def _of_lengths(texts: list[str], topk: int) -> tuple[Any, Any]:
    import numpy as np

    if topk < 1:
        raise ValueError(f"topk is {topk}, must be at least 1")
    lengths: list[int] = []
    for text in texts:
        match = re.fullmatch(r"(\d{1,9})(?:[xX](\d{1,7}))?", text, re.ASCII)
        if match is None:
            raise ValueError(f"length {text!r} must be a number of tokens, or LENGTHxCOUNT, as in 2048x8")
        count = int(match[2] or 1)
        if len(lengths) + count > _MOST_ROWS:
            raise ValueError(f"more than {_MOST_ROWS:,} rows")
        lengths += [min(int(match[1]), topk)] * count
    return np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)


def _of_contexts(arguments: argparse.Namespace) -> tuple[Any, Any]:
    import numpy as np

    from mlaplan import _core

    contexts = arguments.contexts
    queries = arguments.queries or [1]
    if len(queries) == 1:
        queries = queries * len(contexts)
    if len(queries) != len(contexts):
        raise ValueError(f"queries has {len(queries)} numbers, expected {len(contexts)} (one per context) or one")
    for name, values, least in (("contexts", contexts, 0), ("queries", queries, 0)):
        for index, value in enumerate(values):
            if not least <= value < 1 << 30:
                raise ValueError(f"{name}[{index}] is {value}, must be at least {least} and below 2^30")
    if sum(queries) > _MOST_ROWS:
        raise ValueError(f"more than {_MOST_ROWS:,} rows")
    boundaries = np.array([0, *itertools.accumulate(queries)], np.int32)
    seq_lens = np.array(contexts, np.int32) + np.array(queries, np.int32)
    return _core.row_lengths(boundaries, seq_lens, arguments.topk), _core.request_ids(boundaries)


def _of_step(arguments: argparse.Namespace) -> tuple[Any, Any, int, Section]:
    """Returns a step's rows and padding, and what a planner that has made the step before decides."""
    from mlaplan import _core
    from mlaplan.runner import RunOptions, batch_of, make_planner, requests_of
    from mlaplan.workload import Scheduler

    if arguments.step < 0:
        raise ValueError(f"step is {arguments.step}, must be at least 0")
    options = RunOptions(
        log=arguments.log,
        device="cpu",
        scheduler=scheduler_of(arguments),
        topk=arguments.topk,
        num_cus=arguments.num_cus,
        split_budget=None if arguments.budget == "rule" else arguments.budget,
    )
    planner = make_planner(options)
    step = decision = None
    for step in itertools.islice(Scheduler(options.scheduler, requests_of(options)), arguments.step + 1):
        # Only what the last step finds on the device counts, so the one before is all that has to be planned.
        if step.index >= arguments.step - 1:
            decision = planner.plan(batch_of(step, planner)).decision
    if decision is None or step is None or step.index != arguments.step:
        raise ValueError(f"step is {arguments.step}, the log ends after {0 if step is None else step.index + 1} steps")
    note = "after the step before" if arguments.step else "as the first step"
    rows = (
        Row("step", "step", step.index),
        Row("log", "log", arguments.log or "built-in"),
        Row("requests", "requests", step.num_requests, note=f"{step.num_decodes:,} of them decoding"),
        Row("action", "what the planner does", decision.action, note=note),
        Row("reasons", "because", ", ".join(decision.reasons)),
    )
    lengths = _core.row_lengths(step.query_start_loc, step.seq_lens, arguments.topk)
    requests = _core.request_ids(step.query_start_loc)
    return lengths, requests, step.padded_rows - step.rows, Section("step", "Step", rows)
