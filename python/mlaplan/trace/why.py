"""Why a plan was or was not remade, in terms of requests: what the recorded reasons are about."""

from __future__ import annotations

import numpy as np

from mlaplan.trace.records import StepRecord

_SHOWN = 3


def why(before: StepRecord | None, step: StepRecord, topk: int) -> list[str]:
    """Says what changed between two steps, as far as rows depend on it.

    Args:
        before: The step before; None for the first one.
        step: The step.
        topk: Longest row, in tokens.

    Returns:
        A sentence for each thing that changed or is not known; a single one where nothing changed.
    """
    if before is None:
        return ["there is no step before it in the trace"]
    if step.kind == "unknown" or not step.boundaries_exact:
        unknown = [
            name
            for name, missing in (("lengths", step.kind == "unknown"), ("boundaries", not step.boundaries_exact))
            if missing
        ]
        return [f"the host did not know the {' and '.join(unknown)}"]
    found = []
    if before.num_requests != step.num_requests:
        found.append(f"{step.num_requests} requests after {before.num_requests}")
    if before.row_class != step.row_class:
        found.append(f"row class {step.row_class} after {before.row_class}")
    if before.num_requests == step.num_requests:
        found += _requests(before, step, topk)
    if step.kind == "bound":
        found += _not_saturated(step, topk)
    return found or [f"every request has the same query tokens and, up to topk ({topk:,}), the same context"]


def _requests(before: StepRecord, step: StepRecord, topk: int) -> list[str]:
    queries, old_queries = np.diff(step.query_start_loc), np.diff(before.query_start_loc)
    found = _listed("query tokens", old_queries, queries)
    if before.lengths is None or step.lengths is None or before.kind != step.kind:
        return [*found, "what the host knew of the lengths is of another kind than before"]
    # A row is min(context + i + 1, topk) long, so of a context of topk - 1 and more nothing can be seen.
    context = np.minimum(step.lengths.astype(np.int64) - queries, topk - 1)
    old_context = np.minimum(before.lengths.astype(np.int64) - old_queries, topk - 1)
    return found + _listed(f"context below topk ({topk:,})", old_context, context)


def _not_saturated(step: StepRecord, topk: int) -> list[str]:
    if step.lengths is None:
        return []
    queries = np.diff(step.query_start_loc)
    shortest = step.lengths.astype(np.int64) - step.max_rejects - queries + 1
    short = np.flatnonzero((shortest < topk) & (queries > 0))
    if not short.size:
        return []
    first = int(short[0])
    rule = f"bound {step.lengths[first]:,} less {step.max_rejects} rejects does not prove {topk:,} tokens"
    return [f"{_count(short.size)} below saturation: request {first}, {rule}"]


def _listed(what: str, old: np.ndarray, new: np.ndarray) -> list[str]:
    changed = np.flatnonzero(old != new)
    if not changed.size:
        return []
    shown = ", ".join(f"request {index} {old[index]:,} to {new[index]:,}" for index in changed[:_SHOWN].tolist())
    more = f" and {changed.size - _SHOWN:,} more" if changed.size > _SHOWN else ""
    return [f"{what}: {shown}{more}"]


def _count(number: int) -> str:
    return f"{number:,} request" if number == 1 else f"{number:,} requests"
