"""A part of what `report.py` runs: the code for both architectures gives the references' results."""

from __future__ import annotations

from typing import Any

import aiter_checks
import checks
import emulator
import numpy as np
import pytest
from plan_cases import random_case

pytestmark = [pytest.mark.amd, pytest.mark.timeout(1200)]
both_archs = pytest.mark.parametrize("arch", emulator.ARCHS)


@both_archs
def test_plan_gives_the_reference_vectors(arch: str) -> None:
    assert checks.check_vectors(arch, range(0, 300, 30)).cases >= 10


@both_archs
def test_plan_equals_the_reference_on_random_batches(arch: str) -> None:
    assert checks.check_random(arch, range(1, 21)).cases == 20


@both_archs
@pytest.mark.parametrize("policy", ["balanced", "invariant"])
def test_plan_equals_the_reference_under_other_policies(arch: str, policy: str) -> None:
    assert checks.check_policy(policy)(arch, range(8)).cases == 8


@both_archs
def test_plan_stays_inside_with_stale_boundaries(arch: str) -> None:
    assert checks.check_stale(arch, ()).cases == 3


@both_archs
def test_slots_equal_the_reference(arch: str) -> None:
    assert checks.check_slots(arch, range(20)).cases == 20


@both_archs
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
def test_decode_and_merge_equal_the_references(arch: str, kind: str) -> None:
    assert checks.check_decode(kind)(arch, range(3)).cases == 3


@both_archs
def test_aiter_decodes_our_schedules(arch: str) -> None:
    if aiter_checks.missing():
        pytest.skip(aiter_checks.missing())
    assert checks.timed(aiter_checks.check_aiter, arch, range(4)).cases == 4


@both_archs
def test_a_store_outside_an_array_is_seen(arch: str) -> None:
    """The harness stops a plan whose kernel is told of more rows than its arrays have."""
    case = random_case(np.random.default_rng(0), max_rows=30)
    launch = checks.plan_launch_of(case)
    args: list[Any] = list(launch.args)
    args[8] += 4000
    with pytest.raises(Exception, match="request_ids_ptr"):
        emulator.run(launch._replace(args=tuple(args)), arch)
