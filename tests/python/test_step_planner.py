"""The step planner as Python sees it: what one call does, and which plan is held afterwards."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import _core
from mlaplan._types import Int32Array
from mlaplan.device import HostDevice
from planning import assert_holds, batch, ints, planner, starts


def decide(
    step: _core.StepPlanner, seq_len: int, arrived: int = 0, staging: Int32Array | None = None
) -> _core.Decision:
    return step.decide(starts([2]), ints(seq_len), None, 8, True, True, False, arrived, staging)


def area(made: mlaplan.Planner) -> Int32Array:
    return np.zeros(made._layouts[-1].words, np.int32)


def test_one_call_decides_and_writes_what_two_would() -> None:
    made = planner()
    at_once, later = area(made), area(made)
    decision = decide(made._step, 9, staging=at_once)
    other = planner()._step
    written = other.write(decide(other, 9), later)
    assert np.array_equal(at_once, later)
    assert at_once[: decision.words].any()
    fields = ("action", "reasons", "words", "num_works", "split_budget", "ticket")
    assert [getattr(decision, name) for name in fields] == [getattr(written, name) for name in fields]


def test_only_the_ticket_of_the_last_plan_makes_it_held() -> None:
    step = planner()._step
    staging = area(planner())
    first = decide(step, 9, staging=staging)
    assert decide(step, 9, first.ticket + 1, staging).action == "copy"
    second = decide(step, 9, first.ticket, staging)
    assert second.action == "copy"
    assert decide(step, 9, second.ticket, staging).action == "nothing"
    # Told again, and told nothing: it is held by now.
    assert decide(step, 9, second.ticket, staging).action == "nothing"
    assert decide(step, 9, 0, staging).action == "nothing"
    third = decide(step, 10, second.ticket, staging)
    assert third.reasons == ("lengths changed",)
    # The third never arrived, and it may have overwritten the second half way.
    assert decide(step, 9, second.ticket, staging).reasons == ("invalidated",)


@pytest.mark.parametrize("call", ["invalidate", "made_on_device", "defer"])
def test_what_was_forgotten_is_not_held_when_its_ticket_comes(call: str) -> None:
    step = planner()._step
    staging = area(planner())
    ticket = decide(step, 9, staging=staging).ticket
    step.defer(starts([2]), None, None, 8, True) if call == "defer" else getattr(step, call)()
    assert decide(step, 9, ticket, staging).action == "copy"


def test_a_plan_arrives_though_the_next_batch_is_wrong() -> None:
    step = planner()._step
    staging = area(planner())
    ticket = decide(step, 9, staging=staging).ticket
    with pytest.raises(mlaplan.PlanError, match="max_rows"):
        step.decide(starts([2]), ints(9), None, 65, True, True, False, ticket, staging)
    assert decide(step, 9, 0, staging).action == "nothing"


def test_a_ticket_says_nothing_of_a_plan_that_was_only_decided_on() -> None:
    step = planner()._step
    staging = area(planner())
    held = decide(step, 9, staging=staging)
    assert decide(step, 10, held.ticket).ticket == 0
    assert decide(step, 9, held.ticket, staging).action == "nothing"


class Counted:
    """A step planner that counts the calls."""

    def __init__(self, step: _core.StepPlanner) -> None:
        self.step, self.calls = step, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.step, name)


@pytest.mark.parametrize("schedule_maker", ["core", "device"])
def test_a_step_crosses_into_rust_once(schedule_maker: str, rng: np.random.Generator) -> None:
    """Whatever it does, so long as the device keeps up."""
    made = planner(schedule_maker=schedule_maker, staging_slots=3)
    counted: Any = Counted(made._step)
    made._step = counted
    for steps in range(1, 400):
        seq_lens = [int(rng.choice([4, 5, 900])) for _ in range(2)]
        knows = {"lengths": None} if rng.random() < 0.2 else {}
        plan = made.plan(batch([1, 2], seq_lens, on_device=True, **knows))
        assert counted.calls == {"decide": steps}, plan.decision
        assert_holds(plan, [1, 2], seq_lens)
    assert set(made.stats.actions) >= ({"launch", "nothing"} | ({"copy"} if schedule_maker == "core" else set()))
    assert min(count for action, count in made.stats.actions.items() if action != "deferred") > 20 or (
        schedule_maker == "device"
    )


def test_a_full_ring_costs_a_second_call_and_no_more() -> None:
    device = HostDevice(delayed=True)
    made = planner(device, staging_slots=2)
    counted: Any = Counted(made._step)
    made._step = counted
    for seq_len in range(2, 12):
        made.plan(batch([1], [seq_len], on_device=True))
    assert counted.calls == {"decide": 10, "launch_instead": 8}
    device.advance(device.submitted)
    made.plan(batch([1], [20], on_device=True))
    assert counted.calls == {"decide": 11, "launch_instead": 8, "write": 1}


def test_a_copy_that_capture_forbids_leaves_the_old_plan_held() -> None:
    made = planner()
    made.plan(batch([1], [5], on_device=True))
    with made.device.record(), pytest.raises(mlaplan.PlanError, match="cannot be captured"):
        made.plan(batch([1], [6], on_device=True))
    plan = made.plan(batch([1], [5], on_device=True))
    assert plan.decision.action == "nothing"
    assert_holds(plan, [1], [5])
