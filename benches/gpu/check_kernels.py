"""Does the plan kernel equal the reference on this GPU? All vectors, then random batches.

    python benches/gpu/check_kernels.py --seconds 200

Batches are drawn by `tests/kernels/plan_cases.py`. Every word of the plan's arrays is compared, guard words
between them included.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import parser, publish, table

_REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_REPOSITORY / "python"), str(_REPOSITORY / "tests" / "kernels")]

from plan_cases import (  # noqa: E402
    Case,
    golden_vectors,
    random_case,
    stale_starts,
    wild_case,
    with_policy,
)
from plan_runs import check, check_vectors  # noqa: E402

# One code is compiled per block size, fold, policy and handling of empty rows, so a few classes stand for all.
_CLASSES = (64, 512, 4096)
_FOLDS = ((1, 8), (1, 3), (1, 8))
# Batches of sixty that are planned under another policy, in the two smaller classes: the reference of "balanced" tries
# its capacities one after the other and takes seconds for thousands of rows.
_POLICIES = dict.fromkeys((3, 7, 12, 16, 24, 28, 36, 40, 48, 52), "balanced") | dict.fromkeys((10, 33), "invariant")


def random_batch(rng: np.random.Generator, number: int) -> Case:
    """A batch whose rows lie anywhere below one of the classes; every tenth is wild."""
    num_rows = _CLASSES[number % len(_CLASSES)]
    live = max(1, int(num_rows ** rng.uniform(0.2, 1.0)))
    case = wild_case(rng, max_rows=num_rows) if number % 10 == 9 else random_case(rng, max_rows=live)
    params = case.params if num_rows == _CLASSES[1] else replace(case.params, empty_rows="skip", variant="parallel")
    params = replace(params, fold=int(rng.choice(_FOLDS[number % len(_CLASSES)])))
    case = replace(case, name=f"batch {number}", num_rows=num_rows, params=params)
    policy = _POLICIES.get(number % 60)
    return case if policy is None else with_policy(rng, case, policy)


def check_random(seconds: float, seed: int) -> int:
    """Compares random batches until the time is up; returns how many."""
    rng = np.random.default_rng(seed)
    for case in stale_starts():
        check(case, "cuda")
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        check(random_batch(rng, number), "cuda")
        number += 1
        if number % 1000 == 0:
            print(f"{number} random batches", flush=True)
    return number


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="time for random batches")
    options.add_argument("--shared", type=Path, default=_REPOSITORY.parent / "shared")
    given = options.parse_args()
    folder = given.shared if given.shared.is_dir() else _REPOSITORY / "shared"
    vectors = check_vectors(golden_vectors(folder), "cuda") if (folder / "golden").is_dir() else 0
    batches = check_random(given.seconds, given.seed)
    lines = [
        ["reference vectors", vectors or "not checked: no folder", 0 if vectors else ""],
        ["random batches, one in six under balanced and one in thirty under invariant", batches, 0],
    ]
    text = "Every word of the plan's arrays is compared, and the guard words between them."
    publish(
        "The plan kernels against the reference",
        f"{table(['plans', 'number', 'differences'], lines)}\n\n{text}",
        given.out,
    )


if __name__ == "__main__":
    main()
