"""`Planner.defer`: a batch of which the host has the sizes alone, against `plan(deferred=True)` of the same batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mlaplan
from planning import assert_holds, batch, ints, planner, starts


def arrays(query_lens: list[int], seq_lens: list[int]) -> tuple[Any, Any]:
    return starts(query_lens), np.array(seq_lens, np.int32)


def test_it_is_the_plan_of_the_devices_arrays_whatever_came_before(rng: np.random.Generator) -> None:
    made = planner()
    for _ in range(300):
        query_lens = rng.integers(1, 4, int(rng.integers(1, 12))).tolist()
        seq_lens = [int(length + rng.integers(0, 40)) for length in query_lens]
        rows, more = sum(query_lens), int(rng.integers(0, 9))
        if rng.random() < 0.3:
            made.plan(batch(query_lens, seq_lens, on_device=bool(rng.random() < 0.5)))
        if rng.random() < 0.1:
            made.invalidate()
        plan = made.defer(len(query_lens), rows, rows + more, *arrays(query_lens, seq_lens))
        assert (plan.decision.action, plan.decision.reasons) == ("deferred", ("deferred",))
        assert (plan.padded_rows, plan.decision.rows, plan.rows) == (rows + more, rows, None)
        made.refresh(plan)
        assert_holds(plan, query_lens, seq_lens)


def test_nothing_is_held_afterwards_however_often_the_size_was_met() -> None:
    made = planner()
    known = batch([1, 1], [5, 9], on_device=True)
    for _ in range(3):
        assert made.plan(known).decision.action == "copy"
        assert made.plan(known).decision.action == "nothing"
        # A replay that the host does not see may have written another plan since.
        made.defer(2, 2, 2, *arrays([1, 1], [7, 3]))


def test_a_plan_that_waits_to_be_committed_is_given_up() -> None:
    made = planner()
    plan = made.defer(1, 1, 1, *arrays([1], [4]))
    decision = made._step.decide(ints(0, 1), ints(9), None, None, True, True, False)
    made.defer(1, 1, 1, *arrays([1], [4]))
    with pytest.raises(mlaplan.PlanError, match="no plan"):
        made._step.write(decision, np.zeros(1 << 12, np.int32))
    made.refresh(plan)
    assert_holds(plan, [1], [4])


def test_each_plan_is_made_once_and_none_is_another() -> None:
    made = planner()
    first, second = (made.defer(2, 3, 4, *arrays([1, 2], lengths)) for lengths in ([5, 6], [2, 30]))
    launches = made.stats.launches
    for plan, lengths in ((first, [5, 6]), (second, [2, 30]), (first, [5, 6])):
        for _layer in range(3):
            made.refresh(plan)
        launches += 1
        assert made.stats.launches == launches
        assert_holds(plan, [1, 2], lengths)


def test_constants_lost_are_written_again() -> None:
    made = planner()
    made.defer(1, 1, 1, *arrays([1], [4]))
    made._constants[0].qo_indptr.fill(9)
    made.invalidate()
    plan = made.defer(1, 1, 1, *arrays([1], [4]))
    assert plan.constants.qo_indptr[:3].tolist() == [0, 1, 2]


def test_it_counts_as_a_plan() -> None:
    made = planner()
    for rows in (1, 2, 1):
        made.defer(rows, rows, rows, *arrays([1] * rows, [4] * rows))
    made.plan(batch([1], [4], on_device=True), deferred=True)
    assert (made.stats.steps, made.stats.actions) == (4, {"deferred": 4})


def test_its_batch_tells_no_more_than_is_true() -> None:
    given = arrays([2, 3], [9, 9])
    told = planner().defer(2, 5, 8, *given).batch
    assert told.query_start_loc.tolist() == [0, 5, 5]
    assert (told.lengths, told.padded_rows, told.boundaries_exact) == (None, 8, False)
    assert told.device_query_start_loc is given[0]
    assert told.device_seq_lens is given[1]


class Listener:
    """Keeps what an observer tells of."""

    def __init__(self) -> None:
        self.plans: list[mlaplan.Plan] = []

    def before(self) -> None: ...

    def planned(self, plan: mlaplan.Plan, deferred: bool, host_ns: int) -> None:
        assert deferred
        assert host_ns > 0
        self.plans.append(plan)

    def refreshed(self, plan: mlaplan.Plan) -> None: ...

    def remade(self, plan: mlaplan.Plan) -> None: ...

    def failed(self) -> None: ...

    def dropped(self) -> None: ...

    def invalidated(self) -> None: ...


def test_who_listens_hears_of_each() -> None:
    from mlaplan.observer import unwatch, watch

    made, listener = planner(), Listener()
    made.defer(1, 1, 1, *arrays([1], [4]))
    watch(made, listener)
    heard = [made.defer(1, 1, 1, *arrays([1], [4])) for _ in range(2)]
    assert listener.plans == heard
    unwatch(made, listener)
    made.defer(1, 1, 1, *arrays([1], [4]))
    assert len(listener.plans) == 2
    assert made.stats.steps == 4


WRONG: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((-1, 0, 0), ValueError, "num_requests is -1"),
    (("2", 2, 2), TypeError, "num_requests must be a whole number, not str"),
    (([], 2, 2), TypeError, "num_requests must be a whole number, not list"),
    ((2.5, 2, 2), TypeError, "num_requests must be a whole number, not float"),
    ((2, -2, 2), ValueError, "rows is -2"),
    ((2, 2, 1), ValueError, "padded_rows is 1"),
    ((2, 2, 1 << 70), ValueError, "padded_rows is"),
    ((2, 2, None), TypeError, "padded_rows must be a whole number, not NoneType"),
    ((2, 2, 65), mlaplan.PlanError, "max_rows"),
    ((17, 17, 17), ValueError, "device_query_start_loc has 3 entries, expected 18"),
    ((0, 2, 2), ValueError, "rows is 2, but num_requests is 0"),
    ((1, 2, 2), ValueError, "device_query_start_loc has 3 entries, expected 2"),
]


@pytest.mark.parametrize(("sizes", "error", "message"), WRONG)
def test_wrong_sizes_are_refused_and_change_nothing(
    sizes: tuple[Any, Any, Any], error: type[Exception], message: str
) -> None:
    made = planner()
    known = batch([1, 1], [5, 9], on_device=True)
    made.plan(known)
    with pytest.raises(error, match=message):
        made.defer(*sizes, *arrays([1, 1], [5, 9]))
    assert made.plan(known).decision.action == "nothing"


@pytest.mark.parametrize("met", [False, True])
def test_wrong_arrays_are_refused_and_change_nothing(met: bool) -> None:
    made = planner()
    known, right = batch([1, 1], [5, 9], on_device=True), arrays([1, 1], [5, 9])
    if met:
        made.defer(2, 2, 2, *right)
    made.plan(known)
    for wrong, error, message in (
        ((None, right[1]), (TypeError, mlaplan.PlanError), "device_query_start_loc"),
        ((right[0], None), (TypeError, mlaplan.PlanError), "device_seq_lens"),
        ((right[0], right[0]), ValueError, "device_seq_lens has 3 entries, expected 2"),
        ((right[0].astype(np.int64), right[1]), TypeError, "device_query_start_loc must be"),
        ((right[0], right[1][None]), TypeError, "device_seq_lens must be"),
        ((right[0], [5, 9]), TypeError, "device_seq_lens must be"),
        ((np.repeat(right[0], 2)[::2], right[1]), ValueError, "device_query_start_loc must be contiguous"),
    ):
        with pytest.raises(error, match=message):
            made.defer(2, 2, 2, *wrong)
        assert made.plan(known).decision.action == "nothing"


def test_as_many_sizes_as_ever_come_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaplan.planner._MOST_DEFERRALS", 5)
    made = planner()
    for step in range(40):
        rows = 1 + 7 * step % 16
        plan = made.defer(rows, rows, rows, *arrays([1] * rows, [step + 1] * rows))
        assert len(made._deferrals) <= 5
        made.refresh(plan)
        assert_holds(plan, [1] * rows, [step + 1] * rows)
