"""The crossing into Rust: nothing is copied, results are read-only and live on, threads and forks do no harm."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import _core
from planning import assert_holds, batch, definition, ints, planner, starts

SCHEDULE_ARRAYS = ("work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")


def schedule_array(name: str) -> Any:
    return getattr(mlaplan.schedule(ints(0, 90, 95), num_cus=4), name)


RESULTS: dict[str, Callable[[], Any]] = {
    "segment_lengths": lambda: mlaplan.segment_lengths(ints(0, 2, 3)),
    "request_ids": lambda: mlaplan.request_ids(ints(0, 2, 3), 5),
    "row_lengths": lambda: mlaplan.row_lengths(ints(0, 2, 3), ints(7, 8), 6),
    "kv_indptr": lambda: mlaplan.kv_indptr(ints(3, 4)),
    **{name: partial(schedule_array, name) for name in SCHEDULE_ARRAYS},
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_read_only_views_of_rust_memory(name: str) -> None:
    made = RESULTS[name]()
    assert made.dtype == np.int32
    assert made.flags.c_contiguous
    assert made.flags.aligned
    assert not made.flags.writeable
    assert not made.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        made[...] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        made.flags.writeable = True


@pytest.mark.parametrize("name", RESULTS)
def test_results_live_on_after_everything_else(name: str) -> None:
    made = RESULTS[name]()
    kept = made.tolist()
    views = [made[index:] for index in range(len(made))]
    del made
    gc.collect()
    _ = [np.full(1000, -1, np.int32) for _ in range(100)]
    for index, view in enumerate(views):
        assert view.tolist() == kept[index:]


def test_a_schedule_hands_out_the_same_arrays() -> None:
    made = mlaplan.schedule(ints(0, 90, 95), num_cus=4)
    first = made.work_info
    assert made.work_info is first
    address = first.ctypes.data
    kept = first.tolist()
    del made
    gc.collect()
    assert (first.ctypes.data, first.tolist()) == (address, kept)


def peak_kib(code: str) -> int:
    """Most memory that a fresh interpreter had in use while it ran `code`, in KiB."""
    head = "import numpy as np, mlaplan\nbig = np.zeros(1 << 26, np.int32)\n"
    # Of this process's own memory; what getrusage tells starts with its parent's.
    tail = "\nprint(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    done = subprocess.run([sys.executable, "-c", head + code + tail], capture_output=True, check=True, text=True)
    return int(done.stdout)


def test_inputs_are_borrowed_and_not_copied() -> None:
    """256 MiB of zeros that were never written take no memory, until somebody copies them."""
    idle = peak_kib("")
    borrowed = peak_kib("assert mlaplan.CostTable.named('aiter').lower_bound(big, 4) == 0")
    copied = peak_kib("assert mlaplan.CostTable.named('aiter').lower_bound(big + 0, 4) == 0")
    assert borrowed - idle < 40_000
    assert copied - idle > 200_000


def test_inputs_are_left_as_they_are() -> None:
    query_start_loc, seq_lens, indptr = ints(0, 2, 3), ints(7, 8), ints(0, 7, 15)
    for array in (query_start_loc, seq_lens, indptr):
        array.flags.writeable = False  # read-only inputs are as good as others
    mlaplan.row_lengths(query_start_loc, seq_lens, 6, 9)
    mlaplan.request_ids(query_start_loc, 9)
    mlaplan.schedule(indptr, num_cus=5)
    plan = planner().plan(mlaplan.Batch(query_start_loc, mlaplan.Exact(seq_lens)))
    assert_holds(plan, [2, 1], [7, 8])
    assert (query_start_loc.tolist(), seq_lens.tolist(), indptr.tolist()) == ([0, 2, 3], [7, 8], [0, 7, 15])


def test_a_plan_is_written_into_the_callers_memory() -> None:
    made = planner(max_rows=8)
    layout = made._layouts[-1]
    staging = np.full(layout.words + 10, -3, np.int32)
    area = staging[5:-5]
    decision = made._step.decide(starts([2]), ints(9), None, 8, True, False, False)
    written = made._step.write(decision, area)
    assert decision.words == 0
    assert written.num_works is not None
    assert written.words == layout.words_used(written.num_works) <= layout.words
    assert (staging[:5] == -3).all()
    assert (staging[-5:] == -3).all()
    assert area[layout.offsets[1] : layout.offsets[1] + 9].tolist() == [0, 8, 17, *[17] * 6]
    assert (area[written.words :] == -3).all()


def test_plan_arrays_are_views_of_one_arena() -> None:
    made = planner()
    plan = made.plan(batch([1, 2], [5, 6], 8))
    for array in (*plan.arrays, plan.request_ids, plan.kv_indptr):
        assert np.shares_memory(array, made._arena)
    assert plan.request_ids.ctypes.data == plan.arrays.request_ids.ctypes.data
    pointers = [plan.arrays.work_indptr.ctypes.data, plan.arrays.work_info.ctypes.data]
    assert plan.constants.work_metadata_ptrs.tolist() == pointers


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:  # noqa: BLE001 - passed on below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_functions_may_be_called_from_many_threads_on_the_same_arrays() -> None:
    query_lens, seq_lens = [3] * 50, list(range(3, 53))
    query_start_loc, lengths = starts(query_lens), ints(*seq_lens)
    ids, row_lengths = definition(query_lens, seq_lens, 16)
    indptr = mlaplan.kv_indptr(mlaplan.row_lengths(query_start_loc, lengths, 16))
    wanted = mlaplan.schedule(indptr, num_cus=20).work_info.tolist()

    def work(_index: int) -> None:
        for _ in range(50):
            assert mlaplan.request_ids(query_start_loc).tolist() == ids
            assert mlaplan.row_lengths(query_start_loc, lengths, 16).tolist() == row_lengths
            assert mlaplan.schedule(indptr, num_cus=20).work_info.tolist() == wanted
            with pytest.raises(ValueError, match="topk"):
                mlaplan.row_lengths(query_start_loc, lengths, 0)

    in_threads(work)


def test_one_step_planner_survives_many_threads() -> None:
    made = planner(max_rows=8, max_requests=8)
    step, words = made._step, made._layouts[-1].words
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(index: int) -> None:
        staging = np.zeros(words, np.int32)
        ticket = 0
        for turn in range(200):
            decision = step.decide(
                starts([1] * (1 + index % 7)),
                np.full(1 + index % 7, turn + 1, np.int32),
                None,
                None,
                True,
                False,
                False,
                ticket,
                staging if turn % 2 else None,
            )
            ticket = decision.ticket
            assert decision.action in ("copy", "nothing")
            for call in (step.write, step.withdraw, step.invalidate, step.made_on_device):
                try:
                    call(*((decision, staging) if call == step.write else ()))
                except mlaplan.PlanError as error:  # noqa: PERF203 - another thread's step came between
                    assert "no plan" in str(error)  # noqa: PT017

    try:
        in_threads(work)
    finally:
        sys.setswitchinterval(switch)
    made._generation += 1
    for seq_len in (5, 6):
        assert_holds(made.plan(batch([2], [seq_len])), [2], [seq_len])


def test_planners_of_many_threads_do_not_meet() -> None:
    def work(index: int) -> None:
        made = planner()
        for turn in range(60):
            lengths = [1 + (turn * 7 + index) % 40, 30]
            assert_holds(made.plan(batch([1, 2], [lengths[0], lengths[1]])), [1, 2], lengths)

    in_threads(work, 4)


def test_a_forked_child_plans_on() -> None:
    code = """
import os, numpy as np, mlaplan
planner = mlaplan.Planner(mlaplan.PlannerConfig(max_rows=8, max_requests=8), "cpu")
def plan(length):
    return planner.plan(mlaplan.Batch(np.array([0, 1], np.int32), mlaplan.Exact(np.array([length], np.int32))))
plan(5)
child = os.fork()
if child == 0:
    same, other = plan(5), plan(9)
    right = (same.decision.action, other.decision.action, other.kv_indptr.tolist()) == ("nothing", "copy", [0, 9])
    os._exit(0 if right else 1)
status = os.waitpid(child, 0)[1]
assert plan(5).decision.action == "nothing" and plan(5).kv_indptr.tolist() == [0, 5]
print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "0"


CONFIG = mlaplan.PlannerConfig(
    max_rows=64, max_requests=8, capture_sizes=(3, 24), split_budget=-1, aiter_version="0.1.18"
)


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, sent])
def test_settings_and_batches_can_be_copied_and_sent(through: Callable[[Any], Any]) -> None:
    for value in (CONFIG, CONFIG.resolved(None), CONFIG.resolved(None).params):
        assert through(value) == value
        assert hash(through(value)) == hash(value)
    some = through(batch([1, 2], [5, 6], 4))
    assert_holds(planner().plan(some), [1, 2], [5, 6])


@pytest.mark.parametrize("name", ["Decision", "Schedule", "StepPlanner", "CostTable"])
def test_compiled_objects_are_immutable_and_not_sent(name: str) -> None:
    made = planner()
    value: Any = {
        "Decision": made.plan(batch([1], [5])).decision,
        "Schedule": mlaplan.schedule(ints(0, 5), num_cus=2),
        "StepPlanner": made._step,
        "CostTable": _core.CostTable.named("aiter"),
    }[name]
    with pytest.raises(AttributeError):
        value.rows = 3
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(value)
    assert type(value).__module__ == "mlaplan._core"


def test_one_error_is_a_value_error_of_its_own() -> None:
    assert issubclass(mlaplan.PlanError, ValueError)
    assert mlaplan.PlanError is _core.PlanError
    assert sent(mlaplan.PlanError("why")).args == ("why",)
