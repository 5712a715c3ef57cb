"""Recording: what a planner was given and decided is in the file, and recording never disturbs planning."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlaplan
from mlaplan import recorder as recording
from mlaplan.device import HostDevice
from mlaplan.trace import EventRecord, TraceReader
from planning import assert_holds, batch, ints, planner, starts


def read(path: Path) -> list[Any]:
    reader = TraceReader(path)
    records = list(reader.records())
    assert reader.damage is None
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.trace"


def test_every_kind_of_step_is_kept(path: Path) -> None:
    made = planner()
    bound = mlaplan.UpperBound(ints(30, 40), 2)
    given = [
        (batch([1, 2], [9, 20]), False),
        (batch([1, 2], [9, 20], 8, on_device=True), False),
        (batch([1, 1], [28, 39], on_device=True, lengths=bound), False),
        (batch([1, 1], [5, 6], on_device=True, lengths=mlaplan.UpperBound(ints(5, 6), 2)), False),
        (batch([2, 2], [5, 6], 8, on_device=True, lengths=None, boundaries_exact=False), False),
        (batch([1], [3], 4, on_device=True), True),
    ]
    with made.record(path, read_lengths=True) as recorder:
        plans = [made.plan(some, deferred=deferred) for some, deferred in given]
        made.refresh(plans[-1])
    assert made.observer is None
    assert (recorder.steps, recorder.written, recorder.error) == (6, 6, None)
    *records, event = read(path)
    assert (event.what, event.index) == ("refreshed", 6)
    for index, ((some, deferred), plan, record) in enumerate(zip(given, plans, records, strict=True)):
        assert (record.index, record.deferred) == (index, deferred)
        assert (record.action, record.reasons) == (plan.decision.action, plan.decision.reasons)
        assert (record.rows, record.row_class) == (plan.decision.rows, plan.decision.row_class)
        assert (record.padded_rows, record.boundaries_exact) == (some.padded_rows, some.boundaries_exact)
        assert (record.num_works, record.split_budget) == (plan.num_works, plan.split_budget)
        assert record.query_start_loc.tolist() == some.query_start_loc.tolist()
        assert record.has_device_lengths == record.has_device_boundaries == some.on_device
        assert record.host_ns > 0
        if some.on_device:
            assert record.device_seq_lens.tolist() == some.device_seq_lens.tolist()
            assert record.device_query_start_loc.tolist() == some.device_query_start_loc.tolist()
        else:
            assert record.device_seq_lens is record.device_query_start_loc is None
    assert [record.kind for record in records] == ["exact", "exact", "bound", "bound", "unknown", "exact"]
    assert records[2].lengths.tolist() == [30, 40]
    assert [record.max_rejects for record in records] == [0, 0, 2, 2, 0, 0]
    assert [record.action for record in records] == ["copy", "copy", "copy", "launch", "launch", "deferred"]


def test_what_the_caller_writes_later_is_not_what_was_recorded(path: Path) -> None:
    made, lengths, boundaries = planner(), ints(9, 20), starts([1, 2])
    with made.record(path):
        for turn in range(3):
            lengths[:] = (turn + 3, turn + 4)
            made.plan(mlaplan.Batch(boundaries, mlaplan.Exact(lengths)))
        lengths[:] = -1
        boundaries[:] = -1
    assert [record.lengths.tolist() for record in read(path)] == [[3, 4], [4, 5], [5, 6]]
    assert all(record.query_start_loc.tolist() == [0, 1, 3] for record in read(path))


def test_events_stand_where_they_happened(path: Path) -> None:
    made = planner()
    some = batch([1], [3], on_device=True, lengths=None)
    with made.record(path):
        plan = made.plan(some, deferred=True)
        with made.device.record():
            made.refresh(plan)
            made.remake(plan)
        made.invalidate()
        made.remake(made.plan(some))
    found = [record.what if isinstance(record, EventRecord) else record.action for record in read(path)]
    captured = ["refreshed in a graph", "remade in a graph", "refreshed in a graph"]
    assert found == ["deferred", *captured, "invalidated", "launch", "remade", "refreshed"]


def test_what_is_refused_is_not_recorded_and_changes_nothing(path: Path) -> None:
    made = planner()
    with made.record(path):
        made.plan(batch([1], [3]))
        with pytest.raises(ValueError, match="seq_lens"):
            made.plan(batch([2], [1]))
        assert made.observer is not None
        assert made.plan(batch([1], [3])).decision.action == "nothing"
    assert [record.action for record in read(path)] == ["copy", "nothing"]


def test_recorded_planning_is_the_same_planning(path: Path, rng: np.random.Generator) -> None:
    plain, watched = planner(), planner()
    with watched.record(path), watched.self_check(3):
        for _ in range(200):
            queries = rng.integers(0, 3, rng.integers(1, 6)).tolist()
            lengths = [q + int(rng.integers(0, 20)) for q in queries]
            more = {"on_device": True, "lengths": None} if rng.random() < 0.3 else {}
            one, other = (some.plan(batch(queries, lengths, **more)) for some in (plain, watched))
            assert (one.decision.action, one.decision.reasons) == (other.decision.action, other.decision.reasons)
            assert_holds(other, queries, lengths)
    assert len(read(path)) == 200
    assert plain.stats.actions == watched.stats.actions


def random_steps(made: mlaplan.Planner, count: int, rng: np.random.Generator) -> None:
    for _ in range(count):
        made.plan(batch([1] * 16, rng.integers(1, 2**30, 16).tolist()))


def test_a_full_file_ends_the_recording(path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    made = planner()
    with caplog.at_level(logging.INFO, "mlaplan"), made.record(path, max_bytes=1 << 16) as recorder:
        random_steps(made, 3000, rng)
        assert not recorder.recording
        assert made.observer is None, "what comes after costs nothing"
    assert path.stat().st_size <= 1 << 16
    reader = TraceReader(path)
    records = list(reader.records())
    assert [record.index for record in records] == list(range(recorder.written))
    assert reader.end == {"steps": recorder.written, "full": True, "dropped": 0}
    assert 100 < recorder.written < 3000
    assert [record.getMessage().endswith("the file is full") for record in caplog.records] == [True]


def test_the_last_steps_can_be_kept(path: Path, rng: np.random.Generator) -> None:
    made = planner()
    with made.record(path, max_bytes=1 << 16, keep="last") as recorder:
        random_steps(made, 3000, rng)
        assert path.stat().st_size < 2000, "written when it ends"
    assert path.stat().st_size <= 1 << 16
    reader = TraceReader(path)
    records = list(reader.records())
    assert [record.index for record in records] == list(range(3000 - recorder.written, 3000))
    assert reader.end == {"steps": recorder.written, "full": False, "dropped": 3000 - recorder.written}
    assert 100 < recorder.written < 3000


class _Broken:
    """A file that takes some bytes and then fails."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, content: Any) -> int:
        self._room -= len(content)
        if self._room < 0:
            raise OSError(28, "No space left on device")
        return int(self._file.write(content))

    def close(self) -> None:
        self._file.close()


def test_a_disk_that_fills_up_ends_the_recording_with_one_line(
    path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    made = planner()
    recorder = made.record(path)
    recorder._file = _Broken(recorder._file, 20_000)  # type: ignore[assignment]
    random_steps(made, 2000, rng)
    plan = made.plan(batch([1], [7]))
    recorder.close()
    assert_holds(plan, [1], [7])
    assert made.observer is None
    assert isinstance(recorder.error, OSError)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    reader = TraceReader(path)
    assert len(list(reader.records())) == recorder.written > 0
    assert reader.end is None


def test_a_listener_that_raises_is_dropped_and_planning_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planner()

    def broken(*_args: Any) -> None:
        raise RuntimeError("broken")

    made.record(path)
    monkeypatch.setattr(recording, "step_record", broken)
    assert_holds(made.plan(batch([1], [3])), [1], [3])
    assert made.observer is None
    assert [record.getMessage() for record in caplog.records] == ["mlaplan: Recorder is off: RuntimeError: broken"]


@pytest.mark.parametrize(
    ("options", "message"), [({"keep": "some"}, "keep is 'some'"), ({"max_bytes": 5}, "max_bytes is 5")]
)
def test_wrong_arguments_are_named_and_make_no_file(path: Path, options: dict[str, Any], message: str) -> None:
    made = planner()
    with pytest.raises(ValueError, match=message):
        made.record(path, **options)
    assert not path.exists()
    assert made.observer is None


def test_a_file_that_is_there_is_kept(path: Path) -> None:
    path.write_text("mine")
    made = planner()
    with pytest.raises(FileExistsError):
        made.record(path)
    assert path.read_text() == "mine"
    with made.record(path, overwrite=True):
        made.plan(batch([1], [3]))
    assert len(read(path)) == 1


def test_two_recorders_see_the_same_steps_and_leave_one_by_one(tmp_path: Path) -> None:
    made = planner()
    first, second = made.record(tmp_path / "a"), made.record(tmp_path / "b")
    made.plan(batch([1], [3]))
    first.close()
    first.close()
    made.plan(batch([1], [4]))
    second.close()
    assert [len(read(tmp_path / name)) for name in "ab"] == [1, 2]
    assert made.observer is None


def test_nothing_is_read_from_the_device_unless_it_is_asked_for(path: Path) -> None:
    made = planner(HostDevice(delayed=True))
    with made.record(path):
        for length in range(3, 40):
            made.plan(batch([1], [length], on_device=True, lengths=None))
    assert (made.stats.read_backs, made.stats.waits) == (0, 0)


def test_a_killed_process_leaves_what_was_written_and_a_normal_end_leaves_all(path: Path) -> None:
    code = """
import os, sys, numpy as np, mlaplan
made = mlaplan.Planner(mlaplan.PlannerConfig(max_rows=4, max_requests=4), device="cpu")
recorder = made.record(sys.argv[1])
for length in range(1, 601):
    made.plan(mlaplan.Batch(np.array([0, 1], np.int32), mlaplan.Exact(np.array([length], np.int32))))
if sys.argv[2] == "kill":
    os._exit(0)
if sys.argv[2] == "fork":
    child = os.fork()
    made.plan(mlaplan.Batch(np.array([0, 1], np.int32), mlaplan.Exact(np.array([9], np.int32))))
    if not child:
        recorder.close()
        os._exit(0)
    os.waitpid(child, 0)
"""
    for how, expected in (("kill", 512), ("end", 600), ("fork", 601)):
        subprocess.run([sys.executable, "-c", code, str(path), how], check=True, timeout=120)
        steps = read(path)
        assert [step.index for step in steps] == list(range(expected)), how
        path.unlink()


def test_a_planner_without_a_recorder_is_not_slowed_by_one_that_left(path: Path) -> None:
    made = planner()
    made.record(path).close()
    assert made.observer is None
    assert isinstance(read(path), list)
    assert os.path.getsize(path) < 2000  # noqa: PTH202
