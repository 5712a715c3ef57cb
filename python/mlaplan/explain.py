"""What one schedule looks like, in numbers: works on a time axis, merges, finish time, and what padding would cost.

The picture of these numbers is drawn by `mlaplan.picture`; nothing here draws.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlaplan import _core
from mlaplan._types import Int32Array
from mlaplan.report import Row, Section

ROWS_SHOWN = 32  # a row of its own for each row of the plan, up to here
_TILE, _PARTIAL, _KV_START, _KV_END = 0, 1, 4, 5  # columns of work_info


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to explain.

    Attributes:
        row_lengths: Length of each live row, in tokens. Shape (T,), int32, not negative.
        request_ids: Request of each live row. Shape (T,), int32.
        padding: Rows that a captured graph adds behind the live ones.
        topk: Longest row, in tokens; the split rule looks no further.
        num_cus: Compute units.
        fold: Planner rows per token row.
        split_budget: aiter's `max_split_per_batch`: -1 for no limit, None for the work-per-split rule, or under the
            policy "balanced" for the cost table's choice. "invariant" has none.
        min_tokens_per_split: Tokens per split that the rule aims for.
        costs: Name of the cost table, see `CostTable.named`.
        cost_table: The table itself, where it is none of those; `costs` is then what it is called.
        policy: "aiter", "balanced" or "invariant".
        piece_tokens: Tokens of a piece under "invariant".
    """

    row_lengths: Int32Array
    request_ids: Int32Array
    padding: int = 0
    topk: int = 2048
    num_cus: int = 304
    fold: int = 1
    split_budget: int | None = None
    min_tokens_per_split: int = 128
    costs: str = "aiter"
    policy: str = "aiter"
    piece_tokens: int = 256
    cost_table: _core.CostTable | None = None

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding is {self.padding}, must be at least 0")
        if self.row_lengths.size != self.request_ids.size:
            raise ValueError(f"request_ids has {self.request_ids.size} entries, expected {self.row_lengths.size}")
        if self.row_lengths.size and int(self.row_lengths.max()) > self.topk:
            index = int(self.row_lengths.argmax())
            raise ValueError(f"row_lengths[{index}] is {self.row_lengths[index]}, must be at most topk, {self.topk}")


@dataclass(frozen=True, slots=True)
class Work:
    """One work on the time axis of its slot.

    Attributes:
        row: Row of the plan.
        tile: Planner row, `row * fold` and up.
        slot: Which compute unit.
        start: When it starts, in the cost table's unit.
        fixed: Fixed part of its cost, before the first token.
        cost: Its cost, the fixed part included.
        kv_start: First token of the row that it covers.
        kv_end: End of those tokens.
        partial: Where its partial result goes, None where it writes the output itself.
    """

    row: int
    tile: int
    slot: int
    start: int
    fixed: int
    cost: int
    kv_start: int
    kv_end: int
    partial: int | None

    @property
    def end(self) -> int:
        """When it ends."""
        return self.start + self.cost


@dataclass(frozen=True, slots=True)
class Merge:
    """The pieces of one tile, which a second kernel merges when all slots are through.

    Attributes:
        row: Row of the plan.
        tile: Planner row.
        pieces: How many partial results.
        first_slot: Slot of the first piece.
        last_slot: Slot of the last piece.
    """

    row: int
    tile: int
    pieces: int
    first_slot: int
    last_slot: int


@dataclass(frozen=True, slots=True)
class WithPadding:
    """The same rows planned together with their padding, as aiter's planner plans them.

    Attributes:
        slots_used: Slots that have a work of a live row.
        finish_time: Cost of the longest slot.
        is_safe: Whether a decode kernel may run it: an empty work ends its slot in aiter's kernels.
    """

    slots_used: int
    finish_time: int
    is_safe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One schedule, explained.

    Attributes:
        question: What was asked.
        works: The works, by slot and then in order.
        merges: The tiles that are cut, in order.
        split_budget: The budget taken; -1 for no limit.
        budget_reason: Why that budget.
        num_slots: Slots that the budget allows.
        slots_used: Slots that have works.
        blocks_per_slot: Blocks of 16 tokens that aiter's walk gives a slot, overhead included; None for other policies.
        finish_time: Cost of the longest slot, in the cost table's unit.
        lower_bound: No schedule on `num_slots` slots can finish earlier.
        lower_bound_all: The same for all compute units.
        unit: The cost table's unit, in words.
        with_padding: What planning the padding rows as well would give; None without padding.
    """

    question: Question
    works: tuple[Work, ...]
    merges: tuple[Merge, ...]
    split_budget: int
    budget_reason: str
    num_slots: int
    slots_used: int
    blocks_per_slot: int | None
    finish_time: int
    lower_bound: int
    lower_bound_all: int
    unit: str
    with_padding: WithPadding | None

    @property
    def ratio(self) -> float:
        """Finish time over lower bound; 1 for an empty plan."""
        return self.finish_time / self.lower_bound if self.lower_bound else 1.0

    @property
    def rows(self) -> int:
        """Live rows."""
        return self.question.row_lengths.size


def explain(question: Question) -> Explanation:
    """Plans the rows and says what comes out.

    Args:
        question: The rows and what they are planned for.

    Returns:
        The explanation. The schedule is the one that a `Planner` makes for these rows.

    Raises:
        ValueError: A number breaks a rule, or the cost table is not known.
    """
    table = _table(question)
    lengths = np.ascontiguousarray(question.row_lengths, np.int32)
    budget, reason = _budget(question)
    sizes: dict[str, Any] = {"num_cus": question.num_cus, "max_split_per_batch": budget, "fold": question.fold}
    shared_out: dict[str, Any] = {"policy": question.policy, "cost_table": table, "piece_tokens": question.piece_tokens}
    schedule = _core.schedule(_core.kv_indptr(lengths), skip_empty=True, **sizes, **shared_out)
    works = _works(schedule, _core.kv_indptr(lengths), question.fold, table)
    slots = max(schedule.num_slots, 1)
    return Explanation(
        question=question,
        works=works,
        merges=_merges(works),
        split_budget=budget,
        budget_reason=reason,
        num_slots=schedule.num_slots,
        slots_used=int(np.count_nonzero(np.diff(schedule.work_indptr))),
        blocks_per_slot=schedule.blocks_per_slot if question.policy == "aiter" else None,
        finish_time=_finish_time(works, table),
        lower_bound=table.lower_bound(lengths, slots, fold=question.fold) if works else 0,
        lower_bound_all=table.lower_bound(lengths, question.num_cus, fold=question.fold) if works else 0,
        unit=_unit(question),
        with_padding=_with_padding(lengths, question, sizes, table) if question.padding else None,
    )


def _table(question: Question) -> _core.CostTable:
    return _core.CostTable.named(question.costs) if question.cost_table is None else question.cost_table


def _unit(question: Question) -> str:
    if question.cost_table is not None:
        return "the table's own unit"
    return "blocks of 16 tokens" if question.costs == "aiter" else "tenths of an instruction per wave"


def _budget(question: Question) -> tuple[int, str]:
    given = question.split_budget
    if question.policy == "invariant":
        if given is not None:
            raise ValueError(f"split_budget is {given}, but policy 'invariant' cuts every row by piece_tokens alone")
        return -1, f"none: pieces of {question.piece_tokens:,} tokens"
    if given is not None:
        return given, "given, no limit" if given == -1 else "given"
    longest = int(question.row_lengths.max(initial=0))
    if question.policy == "balanced":
        table = _table(question)
        budget = _core.split_budget(longest, cost_table=table, num_cus=question.num_cus)
        return budget, f"cost table: {budget} pieces finish the longest row, of {longest:,} tokens, first"
    least = question.min_tokens_per_split
    budget = _core.max_split_per_batch(
        longest, topk=question.topk, num_cus=question.num_cus, min_tokens_per_split=least
    )
    return budget, f"rule: longest row {longest:,} // {least}, up to a power of two, at most {question.num_cus} CUs"


def _works(schedule: _core.Schedule, kv_indptr: Int32Array, fold: int, table: _core.CostTable) -> tuple[Work, ...]:
    starts = kv_indptr.tolist()
    bounds = schedule.work_indptr.tolist()
    columns = schedule.work_info.tolist()
    works = []
    for slot in range(len(bounds) - 1):
        now = table.slot
        for work in columns[bounds[slot] : bounds[slot + 1]]:
            tile, partial = work[_TILE], work[_PARTIAL]
            row = tile // fold
            tokens = work[_KV_END] - work[_KV_START]
            fixed = table.whole if partial == -1 else table.piece
            cost = fixed + table.block * -(-tokens // max(table.block_tokens, 1))
            begin = work[_KV_START] - starts[row]
            place = None if partial == -1 else partial
            works.append(Work(row, tile, slot, now, fixed, cost, begin, begin + tokens, place))
            now += cost
    return tuple(works)


def _merges(works: tuple[Work, ...]) -> tuple[Merge, ...]:
    pieces: dict[int, list[Work]] = {}
    for work in works:
        if work.partial is not None:
            pieces.setdefault(work.tile, []).append(work)
    return tuple(
        Merge(own[0].row, tile, len(own), min(w.slot for w in own), max(w.slot for w in own))
        for tile, own in sorted(pieces.items())
    )


def _finish_time(works: tuple[Work, ...], table: _core.CostTable) -> int:
    return max((work.end for work in works), default=table.slot)


def _with_padding(
    lengths: Int32Array, question: Question, sizes: dict[str, Any], table: _core.CostTable
) -> WithPadding:
    """Plans the padding rows as rows of length 0, which is what a captured graph hands to aiter's planner."""
    padded = np.concatenate([lengths, np.zeros(question.padding, np.int32)])
    schedule = _core.schedule(_core.kv_indptr(padded), **sizes)
    slots = np.repeat(np.arange(question.num_cus), np.diff(schedule.work_indptr))
    tokens = schedule.work_info[:, _KV_END] - schedule.work_info[:, _KV_START]
    return WithPadding(
        slots_used=int(np.unique(slots[tokens > 0]).size),
        finish_time=table.finish_time(schedule.work_indptr, schedule.work_info.reshape(-1)),
        is_safe=schedule.is_safe,
    )


def sections_of(explanation: Explanation) -> list[Section]:
    """Returns the explanation as a table."""
    question = explanation.question
    sections = [Section("plan", "Plan", _plan_rows(explanation)), Section("time", "Time", _time_rows(explanation))]
    if explanation.with_padding is not None:
        title = "Had the padding rows been planned too, as aiter does"
        sections.append(Section("with_padding", title, _padding_rows(explanation, explanation.with_padding)))
    if 0 < question.row_lengths.size <= ROWS_SHOWN:
        sections.append(Section("rows", "Rows", _row_rows(explanation)))
    return sections


def _plan_rows(explanation: Explanation) -> tuple[Row, ...]:
    question = explanation.question
    lengths = question.row_lengths
    cut = len({merge.row for merge in explanation.merges})
    partials = sum(merge.pieces for merge in explanation.merges)
    return (
        Row("rows", "rows", explanation.rows, note=_span(lengths)),
        Row("requests", "requests", int(np.unique(question.request_ids).size)),
        Row(
            "padding", "padding rows", question.padding, note="no work; their output is zeros" * bool(question.padding)
        ),
        Row("fold", "planner rows per row", question.fold),
        Row("topk", "longest row allowed", question.topk, "tokens"),
        Row("num_cus", "compute units", question.num_cus),
        Row("policy", "policy", question.policy),
        Row("split_budget", "split budget", explanation.split_budget, note=explanation.budget_reason),
        Row("num_slots", "slots that it allows", explanation.num_slots, note=_slots_reason(explanation)),
        Row("slots_used", "slots used", explanation.slots_used, note=_share(explanation.slots_used, question.num_cus)),
        Row("works", "works", len(explanation.works)),
        Row("rows_cut", "rows cut", cut, note=_share(cut, explanation.rows, "of rows")),
        Row("merged_tiles", "merges", len(explanation.merges)),
        Row("partials", "partial results merged", partials),
        Row("blocks_per_slot", "blocks that a slot is given", explanation.blocks_per_slot),
    )


def _slots_reason(explanation: Explanation) -> str:
    question = explanation.question
    if explanation.split_budget == -1:
        return "all"
    tiles = int(np.count_nonzero(question.row_lengths)) * question.fold
    return f"min({question.num_cus} CUs, budget {explanation.split_budget:,} x {tiles:,} planner rows)"


def _time_rows(explanation: Explanation) -> tuple[Row, ...]:
    question = explanation.question
    rows = [
        Row("costs", "cost table", question.costs, note=f"in {explanation.unit}"),
        Row("finish_time", "finish time", explanation.finish_time, note="cost of the longest slot"),
        Row("lower_bound", "lower bound", explanation.lower_bound, note=f"on {explanation.num_slots} slots"),
        Row("ratio", "finish time over lower bound", explanation.ratio),
    ]
    if explanation.lower_bound_all != explanation.lower_bound:
        note = f"on all {question.num_cus} compute units, which the budget does not give"
        rows.insert(3, Row("lower_bound_all", "lower bound without the budget", explanation.lower_bound_all, note=note))
    return tuple(rows)


def _padding_rows(explanation: Explanation, padded: WithPadding) -> tuple[Row, ...]:
    slower = padded.finish_time / explanation.finish_time if explanation.finish_time else 1.0
    pace = f"{slower:.3g} times as long"
    if slower < 1:
        pace += ": the budget counts padding rows too"
    lost = "an empty work ends its slot: later works would be lost"
    return (
        Row(
            "slots_used", "slots with work of live rows", padded.slots_used, note=f"instead of {explanation.slots_used}"
        ),
        Row("finish_time", "finish time", padded.finish_time, note=pace),
        Row("is_safe", "safe to run", padded.is_safe, note="" if padded.is_safe else lost),
    )


def _row_rows(explanation: Explanation) -> tuple[Row, ...]:
    rows = []
    for index, length in enumerate(explanation.question.row_lengths.tolist()):
        works = [work for work in explanation.works if work.row == index]
        first, last = (works[0].slot, works[-1].slot) if works else (0, 0)
        where = f"slot {first}" if first == last else f"slots {first} to {last}"
        request = int(explanation.question.request_ids[index])
        what = f"request {request}, {_count(len(works), 'work')} on {where}" if works else "empty, no work"
        rows.append(Row(f"row {index}", f"row {index}", length, "tokens", note=what))
    return tuple(rows)


def _span(lengths: Int32Array) -> str:
    if not lengths.size:
        return ""
    low, high = int(lengths.min()), int(lengths.max())
    return f"{low:,} tokens each" if low == high else f"{low:,} to {high:,} tokens"


def _share(part: int, whole: int, of: str = "of compute units") -> str:
    return f"{100 * part / whole:.0f}% {of}" if whole else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def document_of(explanation: Explanation) -> dict[str, Any]:
    """Returns the explanation for JSON: the table's sections, then every row, work and merge."""
    question = explanation.question
    sections = {
        section.key: {row.key: row.value for row in section.rows}
        for section in sections_of(explanation)
        if section.key != "rows"
    }
    sections["plan"]["split_budget_reason"] = explanation.budget_reason
    return {
        **sections,
        "rows": [
            {"row": index, "request": request, "length": length}
            for index, (request, length) in enumerate(
                zip(question.request_ids.tolist(), question.row_lengths.tolist(), strict=True)
            )
        ],
        "works": [asdict(work) for work in explanation.works],
        "merges": [asdict(merge) for merge in explanation.merges],
    }
