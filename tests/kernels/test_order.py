"""What kernels pass through global memory is put in order by barriers, and each barrier is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_cases import Case, random_case, wild_case, with_policy

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from access_order import Watch, watching
from plan_runs import run

from mlaplan.costs import CostTable
from mlaplan.layout import PlanParams

_TABLE = CostTable(block_tokens=64, block=2606, piece=1650, whole=1503, slot=4848, merge=243)
_HANDLING = (("skip", "parallel"), ("aiter", "parallel"), ("aiter", "serial"))


def _cases(rng: np.random.Generator) -> list[Case]:
    """Batches for every form of the kernel: one block and several, each handling of empty rows, falling boundaries."""
    params = PlanParams(topk=2048, num_cus=80)
    falling = np.array([0, 5, 3, 9], np.int32)
    cases = [Case("falling", falling, np.array([700, 40, 9], np.int32), 12, params)]
    for fold, (empty_rows, variant) in enumerate(_HANDLING, 1):
        params = PlanParams(topk=2048, num_cus=80, fold=fold, empty_rows=empty_rows, variant=variant)
        cases += [replace(make(rng, max_rows=30), params=params) for make in (random_case, wild_case)]
        # Where the walk goes tile by tile, as with "aiter", the interpreter takes long: few live rows of a large class.
        queries = rng.integers(0, 3, 1100 if fold == 1 else 40)
        starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
        lens = (queries + rng.integers(0, 400, queries.size)).astype(np.int32)
        if fold == 1:
            starts[300:310] = starts[300:310][::-1]
        cases.append(Case("several blocks", starts, lens, 1200, params))
    return cases


def _policy_cases(rng: np.random.Generator, policy: str) -> list[Case]:
    """Few rows and many, of which several share a slot or none does; a dummy request; falling boundaries."""
    cases = [with_policy(rng, make(rng, max_rows=20), policy) for make in (random_case, wild_case)]
    falling = Case(
        "falling",
        np.array([0, 5, 3, 9], np.int32),
        np.array([700, 40, 9], np.int32),
        12,
        PlanParams(topk=2048, num_cus=80),
    )
    cases.append(with_policy(rng, falling, policy))
    lens = rng.integers(1, 2049, 70).astype(np.int32)
    lens[7] = 0
    for num_cus in (256, 7):
        params = PlanParams(topk=2048, num_cus=num_cus, split_budget=-1, policy=policy, cost_table=_TABLE)
        cases.append(Case(f"70 rows on {num_cus}", np.arange(71, dtype=np.int32), lens, 75, params))
    return cases


def _run(cases: list[Case], skipped: frozenset[str] = frozenset()) -> Watch:
    """Watches all cases; with barriers left out, those up to the first conflict."""
    with watching(skipped=skipped) as watch:
        for case in cases:
            run(case, "cpu")
            if skipped and watch.conflicts:
                break
    return watch


@pytest.mark.interpret
def test_the_plan_kernel_orders_what_it_passes_on(rng: np.random.Generator) -> None:
    """And without any one of its barriers it does not: so the barriers are needed, and the watch sees."""
    cases = _cases(rng)
    watch = _run(cases)
    assert watch.accesses > 200
    assert not watch.conflicts, "\n".join(watch.conflicts)
    for barrier in sorted(watch.barriers):
        assert _run(cases, frozenset([barrier])).conflicts, f"the barrier at {barrier} orders nothing"


@pytest.mark.interpret
@pytest.mark.parametrize("policy", ["balanced", "invariant"])
def test_the_plan_kernels_of_policies_order_what_they_pass_on(rng: np.random.Generator, policy: str) -> None:
    cases = _policy_cases(rng, policy)
    watch = _run(cases)
    assert not watch.conflicts, "\n".join(watch.conflicts)
    own = f"plan_{policy}.py"
    barriers = sorted(barrier for barrier in watch.barriers if barrier.startswith(own))
    assert barriers
    for barrier in barriers:
        assert _run(cases[::-1], frozenset([barrier])).conflicts, f"the barrier at {barrier} orders nothing"
