"""`mlaplan replay`: a trace planned again, and what its dumps say."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mlaplan.commands.options import UsageError, budget_or_rule
from mlaplan.report import Row, Section, as_json, progress, render

if TYPE_CHECKING:
    from mlaplan.costs import CostTable
    from mlaplan.replay import Replayed, WhatIf
    from mlaplan.trace import Record, TraceReader

EXAMPLES = """\
examples:
  mlaplan replay steps.trace                     the same decisions again, every plan compared with one from nothing
  mlaplan replay steps.trace --num-cus 256 --policy balanced
                                                 what other hardware and another policy would make of it
  mlaplan replay steps.trace --lengths bound --max-rejects 3
                                                 how often there is nothing to do if the host only knows bounds
  mlaplan replay difference.trace                what a self-check found: where the buffers are wrong

exit status: 0 when all is as it should be, 1 when a dump or a plan differs or the trace is damaged, 2 for a wrong
option or a file that is no trace
"""


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "replay",
        help="plan a trace again, as recorded or with other settings",
        description="Plans the steps of a trace again and compares decisions, operations, finish times and host time "
        "with what was recorded. Dumps of the buffers are compared with plans made from nothing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", metavar="TRACE", help="the trace; see `mlaplan record` and docs/traces.md")
    group = parser.add_argument_group("replay")
    group.add_argument("--device", default="cpu", help="auto, cpu, cuda or cuda:N (default: cpu)")
    group.add_argument("--steps", type=int, metavar="N", help="most steps (default: all)")
    group.add_argument(
        "--check-every",
        type=int,
        default=1,
        metavar="M",
        help="compare every M-th plan with one made from nothing; 0: none (default: 1)",
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    what_if = parser.add_argument_group("what if")
    what_if.add_argument("--num-cus", type=int, metavar="N", help="compute units")
    what_if.add_argument("--topk", type=int, metavar="N", help="KV slots per row at most")
    what_if.add_argument(
        "--split-budget",
        type=budget_or_rule,
        metavar="N",
        help="slots per row, -1 for no limit, or rule: by the longest row",
    )
    what_if.add_argument("--policy", metavar="NAME", help="who shares the work out: aiter, balanced or invariant")
    what_if.add_argument(
        "--schedule-maker", metavar="NAME", help="core or device: who makes a plan that the host knows"
    )
    what_if.add_argument("--lengths", choices=("exact", "bound", "device"), help="what the host knows of the lengths")
    what_if.add_argument("--max-rejects", type=int, metavar="N", help="tokens of a bound that may be too many")
    what_if.add_argument(
        "--deferred", action=argparse.BooleanOptionalAction, default=None, help="leave every plan to its consumer"
    )
    parser.set_defaults(function=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UsageError: An option is out of range, or the file is no trace.
        OSError: The file cannot be read.
    """
    from mlaplan.replay import replay
    from mlaplan.trace import TraceError, TraceReader

    try:
        reader = TraceReader(arguments.trace)
        what_if = _what_if(arguments)
        costs = _common_costs(reader, what_if, arguments.device)
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(str(error)) from error

    def watch(records: Iterable[Record]) -> Iterator[Record]:
        return progress(records, total=None, label="replaying")

    options: dict[str, Any] = {"device": arguments.device, "watch": watch, "costs": costs}
    try:
        plain = None
        if what_if.changes:
            from mlaplan.replay import WhatIf

            plain = replay(reader, WhatIf(steps=what_if.steps), check_every=0, **options)
        result = replay(reader, what_if, check_every=arguments.check_every, **options)
    except TraceError as error:
        raise UsageError(f"{arguments.trace}: {error}") from error
    sections = sections_of(reader, result, plain, costs)
    differences = [*result.dump_differences, *result.differences]
    if arguments.json:
        document = json.loads(as_json(sections))
        document["dumps"]["differences"] = [difference.as_dict() for difference in result.dump_differences]
        document["replayed"]["differences"] = [difference.as_dict() for difference in result.differences]
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        render(sections)
    for difference in result.dump_differences:
        sys.stderr.write(f"mlaplan replay: dump of {difference}\n")
    for difference in result.differences:
        sys.stderr.write(f"mlaplan replay: made now, {difference}\n")
    if reader.damage is not None:
        sys.stderr.write(f"mlaplan replay: {arguments.trace}: {reader.damage}\n")
    sys.stdout.flush()
    return 1 if differences or reader.damage is not None else 0


def _what_if(arguments: argparse.Namespace) -> WhatIf:
    from mlaplan.replay import WhatIf

    for name, least in (("steps", 1), ("check_every", 0), ("max_rejects", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}, must be at least {least}")
    names = ("num_cus", "topk", "policy", "schedule_maker")
    settings = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.split_budget is not None:
        settings["split_budget"] = None if arguments.split_budget == "rule" else arguments.split_budget
    return WhatIf(
        settings=settings,
        lengths=arguments.lengths,
        max_rejects=arguments.max_rejects,
        deferred=arguments.deferred,
        steps=arguments.steps,
    )


def _common_costs(reader: TraceReader, what_if: WhatIf, device: str) -> CostTable | None:
    """Returns what to price two policies by: the table of the one that plans by one; None where both are aiter's.

    The planner is also made for its errors: in the middle of a replay they would be the trace's.
    """
    from mlaplan.replay import make_planner

    recorded, asked = reader.header.config, make_planner(reader.header.config, what_if.settings, device).config
    if recorded.policy == asked.policy:
        return None
    return asked.cost_table if asked.policy != "aiter" else recorded.cost_table


def sections_of(
    reader: TraceReader, result: Replayed, plain: Replayed | None = None, costs: CostTable | None = None
) -> list[Section]:
    """Returns a replay as a table.

    Args:
        reader: The trace, read.
        result: What came out.
        plain: What comes out with the recorded settings, to compare with; None where those were used.
        costs: What schedules were priced by; None for the policy's own.
    """
    sections = [Section("trace", "Trace", _trace_rows(reader, result))]
    if result.steps:
        title = "Planned now, as recorded" if plain is None else "Planned now, with other settings"
        sections.append(Section("recorded", "As recorded", _recorded_rows(result)))
        sections.append(Section("replayed", title, _replayed_rows(result, plain)))
        sections.append(Section("schedules", "Schedules", _schedule_rows(result, plain, costs)))
    else:
        sections.append(Section("replayed", "Planned now", (Row("steps", "steps", 0),)))
    sections.append(Section("dumps", "Dumps of the buffers", _dump_rows(result)))
    return sections


def _trace_rows(reader: TraceReader, result: Replayed) -> tuple[Row, ...]:
    header, config = reader.header, reader.header.config
    end = reader.end or {}
    complete = "" if reader.end is not None or result.stopped else "recording was cut short"
    if end.get("full"):
        complete = "recording ended, the file was full"
    if end.get("dropped"):
        complete = f"{end['dropped']} steps in front of them were dropped"
    steps = max(result.steps, 1)
    return (
        Row("file", "file", str(reader.path)),
        Row("made_by", "made by", ", ".join(f"{name} {version}" for name, version in header.versions.items())),
        Row("device", "device", header.device, note=f"backend {header.backend}"),
        Row("num_cus", "compute units", config.num_cus),
        Row("topk", "longest row allowed", config.topk, "tokens"),
        Row("fold", "planner rows per row", config.fold),
        Row("policy", "policy", config.policy),
        Row("steps", "steps", result.steps, note=complete),
        Row("mean_requests", "requests, mean", result.requests / steps),
        Row("rows", "rows", result.rows),
        Row("damage", "damage", reader.damage or "none"),
    )


def _recorded_rows(result: Replayed) -> tuple[Row, ...]:
    return (
        *(Row(action, action, result.recorded_actions[action]) for action in _ACTIONS),
        Row("plan_us_p50", "host time of plan(), median", _percentile(result.recorded_ns, 50) / 1000, "us"),
        Row("plan_us_p99", "host time of plan(), 99 of 100", _percentile(result.recorded_ns, 99) / 1000, "us"),
    )


_ACTIONS = ("nothing", "copy", "launch", "deferred")


def _replayed_rows(result: Replayed, plain: Replayed | None) -> tuple[Row, ...]:
    done = result.operations
    in_call = "launches included, the host is the device" if result.device == "cpu" and done.launches else ""
    other = ""
    if result.first_other is not None:
        step, action, reasons = result.first_other
        other = (
            f"first: step {step.index}, {action} ({', '.join(reasons)}) instead of "
            f"{step.action} ({', '.join(step.reasons)})"
        )

    def row(key: str, label: str, value: float, before: float | None, unit: str = "") -> Row:
        return Row(key, label, value, unit, note=_before(before))

    def count(key: str, label: str) -> Row:
        return row(key, label, getattr(done, key), None if plain is None else getattr(plain.operations, key))

    return (
        *(
            row(action, action, result.actions[action], None if plain is None else plain.actions[action])
            for action in _ACTIONS
        ),
        Row("same", "decided as recorded", result.same, note=other),
        count("launches", "launches"),
        Row("graph_plans", "plans left to graphs", result.graph_plans),
        count("copies", "copies"),
        count("bytes_copied", "bytes copied"),
        count("waits", "waits for the device"),
        count("read_backs", "read-backs"),
        Row("plan_us_p50", "host time of plan(), median", _percentile(result.plan_us, 50), "us", note=in_call),
        Row("plan_us_p99", "host time of plan(), 99 of 100", _percentile(result.plan_us, 99), "us"),
        Row("compared", "plans compared with one from nothing", result.compared),
        Row("num_differences", "differences", len(result.differences)),
    )


def _schedule_rows(result: Replayed, plain: Replayed | None, costs: CostTable | None) -> tuple[Row, ...]:
    def row(key: str, label: str, value: float | None, before: float | None) -> Row:
        return Row(key, label, value, note=_before(before))

    if not result.finish:
        return (Row("plans", "plans whose lengths are known", 0, note="record with read_lengths to know more"),)
    old = plain if plain is not None and plain.finish else None
    blind = f"of {result.blind} steps nobody recorded the lengths" if result.blind else ""
    return (
        Row("plans", "plans whose lengths are known", len(result.finish), note=blind),
        Row("policy", "policy", result.config.policy, note="" if old is None else f"as recorded: {old.config.policy}"),
        Row("costs", "priced by", *_priced_by(result, costs)),
        row("finish_sum", "finish time, sum", round(sum(result.finish)), sum(old.finish) if old else None),
        row("finish_max", "finish time, longest", round(max(result.finish)), max(old.finish) if old else None),
        row("ratio", "finish time over its lower bound", result.ratio, old.ratio if old else None),
        row("ratio_max", "the same, worst plan", result.worst_ratio, old.worst_ratio if old else None),
    )


def _before(value: float | None) -> str:
    if value is None:
        return ""
    return f"as recorded: {value:,.0f}" if float(value).is_integer() else f"as recorded: {value:,.4g}"


def _priced_by(result: Replayed, costs: CostTable | None) -> tuple[str, str, str]:
    """Returns the name of a cost table, no unit, and a note."""
    if costs is not None:
        return "one cost table", "", "the bound is for all compute units"
    if result.config.policy == "aiter":
        return "aiter's units", "", "16 tokens each; the bound is for the slots that the budget allows"
    return "the policy's cost table", "", "the bound is for the slots that the budget allows"


def _dump_rows(result: Replayed) -> tuple[Row, ...]:
    equal = result.dumps - len(result.dump_differences)
    return (
        Row("dumps", "dumps", result.dumps),
        Row("equal", "equal to a plan made from nothing", equal),
        *(
            Row(f"difference_{index}", "the first entry that differs", str(difference))
            for index, difference in enumerate(result.dump_differences[:3])
        ),
    )


def _percentile(values: Any, share: float) -> float:
    from mlaplan.runner import percentile

    return percentile(values, share) or 0.0
