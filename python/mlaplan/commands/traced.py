"""A step of a trace, as `mlaplan explain` shows it: its rows, what was decided, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlaplan.report import Row, Section

if TYPE_CHECKING:
    from mlaplan.explain import Question
    from mlaplan.trace import DumpRecord, StepRecord, TraceReader


def traced_step(path: str, number: int, costs: str, padding: int | None) -> tuple[Question, Section]:
    """Returns what to explain of a recorded step, and what was decided in it.

    Args:
        path: The trace.
        number: The step's number.
        costs: Cost table, see `CostTable.named`; for a policy that plans by one, the trace's own is taken.
        padding: Padding rows; None for the step's own.

    Raises:
        ValueError: It is no trace, has no such step, or nobody recorded the step's lengths.
        OSError: It cannot be read.
    """
    from mlaplan.explain import Question
    from mlaplan.reference.plan import rows as reference_rows
    from mlaplan.trace import TraceReader

    reader = TraceReader(path)
    before, step, dump = _find(reader, number)
    lengths, source = _lengths(step, dump, path)
    config = reader.header.config.resolved(None)
    boundaries, seq_lens = lengths
    # As the plan op takes them, which makes sense of whatever the device held.
    live = min(max(int(boundaries[1:].max(initial=0)), 0), config.max_rows)
    requests, row_lengths = reference_rows(boundaries, seq_lens, config.topk, live)
    visible = live if step is None or step.padded_rows is None else max(step.padded_rows, live)
    own = None if config.policy == "aiter" else config.cost_table
    question = Question(
        row_lengths=row_lengths,
        request_ids=requests,
        padding=visible - live if padding is None else padding,
        topk=config.topk,
        num_cus=config.num_cus or 1,
        fold=config.fold or 1,
        split_budget=config.split_budget,
        min_tokens_per_split=config.min_tokens_per_split,
        costs=costs if own is None else "the trace's",
        policy=config.policy,
        piece_tokens=config.piece_tokens,
        cost_table=None if own is None else own.core,
    )
    return question, Section("step", "Step", _rows(reader, before, step, dump, number, source))


def _find(reader: TraceReader, number: int) -> tuple[StepRecord | None, StepRecord | None, DumpRecord | None]:
    """Returns the step before, the step and its dump, each None where the trace has none."""
    from mlaplan.trace import DumpRecord, StepRecord

    before = step = dump = None
    last = None
    for record in reader.records():
        if isinstance(record, StepRecord):
            if record.index == number:
                before, step = last, record
            elif record.index > number and step is not None:
                break
            last = record
        elif isinstance(record, DumpRecord) and record.index == number:
            dump = record
    if step is None and dump is None:
        end = "it holds no step" if last is None else f"its last one is {last.index}"
        damage = "" if reader.damage is None else f"; {reader.damage}"
        raise ValueError(f"{reader.path} has no step {number}, {end}{damage}")
    return before, step, dump


def _lengths(step: StepRecord | None, dump: DumpRecord | None, path: str) -> tuple[tuple[Any, Any], str]:
    if dump is not None:
        return (dump.query_start_loc, dump.seq_lens), "the device's, read back for the dump"
    if step is not None and step.truth is not None:
        read = step.device_seq_lens is not None
        return step.truth, "the device's, read back" if read else "the host's, exact"
    if step is not None and step.lengths is not None and step.boundaries_exact:
        rejects = f"up to {step.max_rejects} too many" if step.max_rejects else "exact"
        return (step.query_start_loc, step.lengths), f"the host's bounds, {rejects}"
    raise ValueError(f"{path}: nobody recorded the lengths of this step; record with read_lengths to know them")


def _rows(
    reader: TraceReader,
    before: StepRecord | None,
    step: StepRecord | None,
    dump: DumpRecord | None,
    number: int,
    source: str,
) -> tuple[Row, ...]:
    from mlaplan.replay import check_size
    from mlaplan.selfcheck import difference_of
    from mlaplan.trace.why import why

    config = reader.header.config.resolved(None)
    rows = [Row("step", "step", number), Row("trace", "trace", str(reader.path))]
    if step is not None:
        note = "left to its first consumer" if step.deferred else ""
        rows += [
            Row("requests", "requests", step.num_requests),
            Row("action", "what the planner did", step.action, note=note),
            Row("reasons", "because", ", ".join(step.reasons)),
            *(
                Row(f"why_{index}", "that is" if index == 0 else "and", text)
                for index, text in enumerate(why(before, step, config.topk))
            ),
        ]
    rows.append(Row("lengths", "lengths shown", source))
    if dump is not None:
        check_size(config)
        difference = difference_of(dump, config.params)
        rows.append(Row("dump", "the buffers held this plan", difference is None, note=str(difference or "")))
    return tuple(rows)
