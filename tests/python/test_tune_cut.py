"""`mlaplan tune`: what it costs to have anything to merge comes back from times of whole and of cut schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaplan.costs import CostTable
from mlaplan.tuning import TuningError, fit, measure, pairs, with_cut
from tuning_times import LOADS, clock, timer

TABLE = CostTable(block_tokens=64, block=2606, piece=1650, whole=1503, slot=4848, merge=243)


def test_batches_that_tell_what_a_cut_costs_are_whole_under_one_schedule_only() -> None:
    for slots in (132, 66, 304, 16):
        found = pairs(slots, 2048, TABLE)
        assert found
        for pair in found:
            rows = len(pair.whole.work_info)
            assert slots < rows <= 4 * slots
            assert pair.whole.num_partials == 0
            assert pair.cut.num_partials > 0
            slowest = [
                TABLE.finish_time(made.work_indptr, made.work_info.reshape(-1)) for made in (pair.cut, pair.whole)
            ]
            assert pair.longer == slowest[0] - slowest[1] <= 0
    assert len(pairs(132, 2048, TABLE)) == 4
    # What a cut is said to cost already does not matter.
    again = pairs(132, 2048, replace(TABLE, cut=1 << 24))
    assert [pair.longer for pair in again] == [pair.longer for pair in pairs(132, 2048, TABLE)]
    assert pairs(1, 2048, TABLE) == []


@given(st.integers(0, 1 << 24))
def test_exact_times_give_the_cost_of_a_cut_back(cut: int) -> None:
    fitted = fit(measure(timer(TABLE), LOADS), block_tokens=64)
    made = with_cut(fitted, pairs(132, 2048, fitted.table), clock(replace(TABLE, cut=cut)))
    assert made == fitted._replace(table=replace(TABLE, cut=cut))


def test_noisy_times_give_nearly_the_cost_of_a_cut(rng: np.random.Generator) -> None:
    fitted = fit(measure(timer(TABLE), LOADS), block_tokens=64)
    table = replace(TABLE, cut=7000)
    for _ in range(20):
        # One of eight times is wild: one or two of the ten of a pair.
        errors = [60_000.0 if call % 8 == 0 else rng.normal(0, 500) for call in range(40)]
        given = iter(errors)
        made = with_cut(fitted, pairs(132, 2048, TABLE), clock(table, error=lambda: next(given)))  # noqa: B023
        assert made.table.cut == pytest.approx(7000, abs=1000)
        assert next(given, None) is None  # all forty were asked for, five times both of four pairs


def test_a_clock_that_falls_while_it_is_timed_moves_the_cost_of_a_cut_by_one_step_at_most() -> None:
    fitted = fit(measure(timer(TABLE), LOADS), block_tokens=64)
    slower = iter(range(0, 40_000, 100))
    made = with_cut(fitted, pairs(132, 2048, TABLE), clock(replace(TABLE, cut=7000), error=lambda: next(slower)))
    assert made.table.cut == pytest.approx(7000, abs=100)


def test_a_cut_that_cannot_be_measured_costs_nothing_and_is_said() -> None:
    fitted = fit(measure(timer(TABLE), LOADS), block_tokens=64)
    made = with_cut(fitted, [], clock(TABLE))
    assert made.table.cut == 0
    assert "no batch to measure it by" in made.notes[-1]
    faster = with_cut(fitted, pairs(132, 2048, TABLE), lambda one: clock(TABLE)(one) - (90 if one.num_partials else 0))
    assert faster.table.cut == 0
    assert faster.notes == ("cut came out as -90.0 ns and was taken as 0",)
    for time in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TuningError, match="which is no time"):
            with_cut(fitted, pairs(132, 2048, TABLE), lambda _made, time=time: time)  # type: ignore[misc]
    with pytest.raises(TuningError, match="make no table: cut is"):
        with_cut(fitted, pairs(132, 2048, TABLE), lambda one: 1e9 if one.num_partials else 1e3)
