"""`mlaplan tune`: a known table comes back from noisy times, bad times are refused, files are whole or not touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaplan import calibration, cli
from mlaplan.backends import portable
from mlaplan.calibration import Calibration, CalibrationError, Shape, load, path_of, save, stored
from mlaplan.commands import tune as command
from mlaplan.costs import DEFAULT, CostTable, portable_default
from mlaplan.device import HostDevice
from mlaplan.tuning import Load, Sample, TuningError, decode_loads, fit, measure, merge_loads, pairs, with_cut
from planning import batch, planner
from policy_cases import PORTABLE as UNCUT
from tuning_times import LOADS, clock, timer

PORTABLE = replace(UNCUT, cut=2700)
SHAPE = Shape(device="NVIDIA H200", capability="9.0", heads=16, q_dtype="bf16", kv_dtype="bf16")
CALIBRATION = Calibration(
    shape=SHAPE, table=PORTABLE, residual=0.031, num_cus=132, heads_per_tile=16, mlaplan="0.1.0", triton="3.7.1"
)


@given(
    st.integers(1, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 1 << 16),
    st.integers(0, 1 << 16),
)  # fmt: skip
def test_exact_times_give_the_table_back(block: int, piece: int, whole: int, slot: int, merge: int) -> None:
    table = CostTable(
        block_tokens=32, block=block, piece=min(piece, whole + block), whole=whole, slot=slot, merge=merge
    )
    fitted = fit(measure(timer(table), LOADS), block_tokens=32)
    assert fitted.table == table  # `cut` shows in none of the loads
    assert fitted.launch == pytest.approx(4000, rel=1e-6)
    assert fitted.residual < 1e-6
    assert not fitted.notes


def test_noisy_times_give_nearly_the_table(rng: np.random.Generator) -> None:
    for _ in range(20):
        fitted = fit(measure(timer(PORTABLE, noise=0.03, rng=rng), LOADS), block_tokens=32)
        assert fitted.table.block == pytest.approx(PORTABLE.block, rel=0.08)
        assert fitted.table.piece == pytest.approx(PORTABLE.piece, abs=600)
        assert fitted.table.whole == pytest.approx(PORTABLE.whole, abs=600)
        assert fitted.table.merge == pytest.approx(PORTABLE.merge, rel=0.15)
        assert 0.01 < fitted.residual < 0.06
        assert fitted.worst >= fitted.residual


def test_a_cost_below_nothing_is_said_and_taken_as_nothing() -> None:
    def time(load: Load) -> float:
        return timer(PORTABLE)(load) - (1500 if load.works else 0)  # the slot would cost -600

    fitted = fit(measure(time, LOADS), block_tokens=32)
    assert fitted.table.slot == 0
    assert any("slot came out as -600.0 ns" in note for note in fitted.notes)


def test_pieces_dearer_than_a_row_and_a_block_are_bent_and_said() -> None:
    table = replace(PORTABLE, whole=100, piece=0)

    def time(load: Load) -> float:
        return timer(table)(load) + (600 * load.works if load.cut else 0)

    fitted = fit(measure(time, LOADS), block_tokens=32)
    assert fitted.table.piece == fitted.table.whole + fitted.table.block
    assert any("piece came out as 600.0 ns" in note for note in fitted.notes)


def constant(load: Load) -> float:
    return 5000.0 + load.merged


def falling(load: Load) -> float:
    return 1e6 - 50 * load.works * load.blocks + load.merged


def jumping(load: Load) -> float:
    return timer(PORTABLE)(load) * (1 if (load.blocks + load.works) % 2 else 4)


@pytest.mark.parametrize(
    ("time", "loads", "message"),
    [
        (constant, LOADS, "they do not grow with the work"),
        (falling, LOADS, "they do not grow with the work"),
        (jumping, LOADS, "busy with something else"),
        (timer(PORTABLE), merge_loads(132, 64), "no decode was timed"),
        (timer(PORTABLE), decode_loads(32), "no merge was timed"),
        (timer(PORTABLE), [load for load in LOADS if not load.cut], "one cost is in none of them"),
        (timer(PORTABLE), [load for load in LOADS if load.works], "do not tell the costs apart"),
        (timer(PORTABLE), [load for load in LOADS if load.merged in (0, 2)], "do not tell the costs apart"),
        (timer(PORTABLE), [Load(0, 0), Load(1, 1), Load(1, 1, cut=True), Load(0, 0, merged=2)], "tell the costs apart"),
        (timer(replace(PORTABLE, block=1 << 24), launch=1e9), [*LOADS], None),
        (lambda load: 1e12 * (1 + load.works * load.blocks + load.merged), LOADS, "make no table"),
    ],
)
def test_times_that_make_no_table_are_refused(time: Any, loads: list[Load], message: str | None) -> None:
    samples = measure(time, loads)
    if message is None:
        assert fit(samples, block_tokens=32).table.block == 1 << 24
        return
    with pytest.raises(TuningError, match=message):
        fit(samples, block_tokens=32)


@pytest.mark.parametrize("time", [0.0, -3.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(time: float) -> None:
    samples = [*measure(timer(PORTABLE), LOADS)[:-1], Sample(LOADS[-1], time)]
    with pytest.raises(TuningError, match="which is no time"):
        fit(samples, block_tokens=32)


def test_a_calibration_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "costs.json"
    assert load(path) is None
    save(CALIBRATION, path)
    assert load(path) == CALIBRATION
    better = replace(CALIBRATION, table=replace(PORTABLE, block=409))
    save(better, path)
    assert load(path) == better
    assert [entry.name for entry in path.parent.iterdir()] == ["costs.json"]
    assert oct(path.stat().st_mode & 0o777) == "0o644"


def test_calibrations_lie_where_the_user_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert path_of(SHAPE) == tmp_path / "mlaplan" / "costs" / "nvidia-h200-9.0-16x576x512-bf16-bf16.json"
    # A relative one counts for nothing by the specification.
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert path_of(SHAPE).parent == tmp_path / "home" / ".config" / "mlaplan" / "costs"
    hostile = replace(SHAPE, device="../../etc/x\0y\n", capability="..")
    assert path_of(hostile).parent == path_of(SHAPE).parent
    assert set(path_of(hostile).name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")


@pytest.mark.parametrize("home", ["/dev/null", None])
def test_without_a_home_nothing_is_stored_and_nothing_fails(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if home is None:
        monkeypatch.setattr(Path, "home", nobody)
    else:
        monkeypatch.setenv("HOME", home)
    assert stored(SHAPE) is None


def test_shapes_do_not_share_a_file() -> None:
    changes: list[dict[str, Any]] = [{"heads": 128}, {"kv_dtype": "fp8"}, {"q_dtype": "fp16"}, {"capability": "10.0"},
               {"device": "NVIDIA H100"}, {"head_dim": 96}, {"v_head_dim": 96}]  # fmt: skip
    names = {path_of(replace(SHAPE, **change)).name for change in [{}, *changes]}
    assert len(names) == len(changes) + 1


@pytest.mark.parametrize("content", [b"", b"{}", b"my notes", b'{"format": "other"}', b"\xff\xfe", b"[" * 100_000])
def test_what_was_not_written_here_is_not_written_over(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(FileExistsError, match="was not written by 'mlaplan tune'"):
        save(CALIBRATION, path)
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["costs.json"]


def test_links_folders_and_pipes_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target.json"
    save(CALIBRATION, target)
    before = target.read_bytes()
    (tmp_path / "link.json").symlink_to(target)
    (tmp_path / "broken.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("link.json", "broken.json", "folder.json", "pipe.json"):
        with pytest.raises(FileExistsError, match=name):
            save(replace(CALIBRATION, num_cus=7), tmp_path / name)
    assert target.read_bytes() == before
    with pytest.raises(CalibrationError, match=r"pipe\.json"):
        load(tmp_path / "pipe.json")
    with pytest.raises(CalibrationError, match=r"folder\.json"):
        load(tmp_path / "folder.json")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.json"
    save(CALIBRATION, path)
    before = path.read_bytes()

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(replace(CALIBRATION, num_cus=7), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["costs.json"]


def document() -> dict[str, Any]:
    shape = {"device": "NVIDIA H200", "capability": "9.0", "heads": 16, "q_dtype": "bf16", "kv_dtype": "bf16"}
    table = {"block_tokens": 32, "block": 410, "piece": 1900, "whole": 1500, "slot": 900, "merge": 160, "cut": 2700}
    return {
        "format": "mlaplan cost table", "version": 2, **shape, "head_dim": 576, "v_head_dim": 512, "unit": "ns",
        "table": table, "residual": 0.031, "num_cus": 132, "heads_per_tile": 16, "mlaplan": "0.1.0",
        "triton": "3.7.1",
    }  # fmt: skip


def test_the_format_is_what_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of users must stay readable: this is the second version of the format, written by hand."""
    (tmp_path / "costs.json").write_text(json.dumps(document()))
    assert load(tmp_path / "costs.json") == CALIBRATION
    save(CALIBRATION, tmp_path / "costs.json")
    assert json.loads((tmp_path / "costs.json").read_text()) == document()
    assert not caplog.records


def first_version() -> dict[str, Any]:
    content = document()
    content["version"] = 1
    del content["table"]["cut"]
    return content


def test_a_file_of_the_first_version_is_read_with_a_word_about_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SAID", set())
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(first_version()))
    for _ in range(3):
        assert load(path) == replace(CALIBRATION, table=replace(PORTABLE, cut=0))
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is from before the cost 'cut' was measured, so it is taken as 0; 'mlaplan tune' measures it"
    ]
    save(CALIBRATION, path)  # tuning again writes over it
    assert load(path) == CALIBRATION
    path.write_text(json.dumps({**document(), "version": 1}))
    with pytest.raises(CalibrationError, match=r'"table" must hold block_tokens, .*, merge and nothing else'):
        load(path)


EDITS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("format"), '"format" is not'),
    (lambda d: d.update(version=3), '"version" is 3, this release reads 1 and 2'),
    (lambda d: d.update(version=True), '"version" is True'),
    (lambda d: d.update(version="1"), "\"version\" is '1'"),
    (lambda d: d["table"].pop("cut"), '"table" must hold'),
    (lambda d: d["table"].update(cut=-1), "cut is -1, must be at least 0"),
    (lambda d: d.update(unit="us"), "\"unit\" is 'us'"),
    (lambda d: d.pop("table"), '"table" must hold'),
    (lambda d: d["table"].pop("merge"), '"table" must hold'),
    (lambda d: d["table"].update(extra=1), '"table" must hold'),
    (lambda d: d["table"].update(block=0), "block is 0, must be at least 1"),
    (lambda d: d["table"].update(block="410"), "block must be a whole number, not str"),
    (lambda d: d["table"].update(block=4.5), "block must be a whole number, not float"),
    (lambda d: d["table"].update(piece=99999), "piece is 99999, must be at most whole"),
    (lambda d: d["table"].update(slot=10**30), "slot is 1000000000000000000000000000000"),
    (lambda d: d.update(heads=True), '"heads" is True'),
    (lambda d: d.update(heads=0), '"heads" is 0'),
    (lambda d: d.update(heads=1e9), '"heads" is'),
    (lambda d: d.update(q_dtype="int4"), "\"q_dtype\" is 'int4', known are"),
    (lambda d: d.update(device=""), '"device" is'),
    (lambda d: d.update(device=None), '"device" is missing'),
    (lambda d: d.update(device="x" * 1000), "has device"),
    (lambda d: d.update(residual=-1), '"residual" is -1'),
    (lambda d: d.update(residual=float("nan")), '"residual" is nan'),
    (lambda d: d.update(residual=10**400), "is damaged"),
    (lambda d: d.update(triton=["3"]), '"triton" is'),
    (lambda d: d.update(heads=128), "has heads 128 where 16 is looked for"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_a_file_that_was_edited_wrongly_is_named(
    edit: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    content = document()
    edit(content)
    path = path_of(SHAPE)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))
    with pytest.raises(CalibrationError) as caught:
        stored(SHAPE)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert message in text
    assert "mlaplan tune" in text
    assert len(text) < len(str(path)) + 1400


@given(st.integers(0, 500), st.binary(max_size=4))
def test_a_truncated_or_scribbled_file_is_named_or_read(cut: int, junk: bytes) -> None:
    whole = json.dumps(document()).encode()
    content = whole[: min(cut, len(whole) - 1)] + junk
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"mlaplan-test-{os.getpid()}.json"  # noqa: S108
    path.write_bytes(content)
    try:
        with pytest.raises(CalibrationError, match="is damaged"):
            load(path)
    finally:
        path.unlink()


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(json.dumps(document()).encode() + b" " * (1 << 20))
    with pytest.raises(CalibrationError, match="more than 65536 bytes"):
        load(path)


def test_every_load_is_a_schedule_in_which_all_slots_do_the_same() -> None:
    tuning_gpu = pytest.importorskip("mlaplan.tuning_gpu")
    made = planner(max_rows=28, max_requests=28, topk=256, num_cus=7, heads=16)
    bench = tuning_gpu.Bench.__new__(tuning_gpu.Bench)  # what it does on a GPU beside this needs one
    bench.planner, bench.num_slots, bench._device = made, 7, made.device
    bench.tile = SimpleNamespace(tokens=32)
    bench._plan = made.plan(batch([1] * 28, [256] * 28))
    arrays, partials = bench._plan.arrays, made.backend.describe()["partial_rows"]
    for one in decode_loads(8) + merge_loads(7, 64):
        bench._set(one)
        works = arrays.work_info[: 7 * one.works]
        assert np.diff(arrays.work_indptr).tolist() == [one.works] * 7
        assert np.all(works[:, 5] - works[:, 4] == one.blocks * 32)
        assert np.all(works[:, 5] + works[:, 6] == 256 * (works[:, 0] + 1))
        assert sorted(works[:, 0]) == list(range(7 * one.works))
        if one.cut:
            assert np.all((works[:, 1] >= 0) & (works[:, 1] < partials))
        else:
            assert np.all(works[:, 1] == -1)
        merged = np.diff(arrays.reduce_indptr)
        assert set(merged.tolist()) <= {0, one.merged}
        assert np.count_nonzero(merged) == (7 // one.merged if one.merged else 0)
        assert arrays.reduce_indptr[-1] <= 7
    for pair in pairs(7, 256, replace(PORTABLE, whole=200, piece=100)):
        for schedule in (pair.cut, pair.whole):  # the longer one first: nothing of it may stay behind
            bench._set_schedule(schedule)
            rows, works = len(schedule.reduce_indptr) - 1, len(schedule.work_info)
            assert 7 < rows < 28
            assert np.array_equal(arrays.work_info[:works], schedule.work_info)
            assert np.array_equal(arrays.work_indptr, schedule.work_indptr)
            assert np.array_equal(arrays.reduce_indptr[: rows + 1], schedule.reduce_indptr)
            assert np.all(arrays.reduce_indptr[rows:] == schedule.num_partials)
            assert schedule.num_partials <= partials


class Gpu(HostDevice):
    """The host where a GPU would be, as far as a calibration can tell."""

    backend = "portable"
    device = SimpleNamespace(type="cuda")
    num_cus = 132


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A device whose calibrations lie in a folder of the test's own."""
    tuning_gpu = pytest.importorskip("mlaplan.tuning_gpu")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(tuning_gpu, "shape_of", lambda _device, config: replace(SHAPE, heads=config.heads))
    monkeypatch.setattr(portable, "tile_of", lambda _config: SimpleNamespace(tokens=32, heads=16))
    monkeypatch.setattr(calibration, "_SAID", set())
    return Gpu()


def test_a_planner_finds_what_was_stored(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    unknown = planner(gpu, policy="balanced", arch=None, heads=16).params.cost_table
    assert unknown == portable_default(16, 32) != portable_default(128, 32)
    assert unknown.block_tokens == 32  # the fake kernel's, of which the H200's costs half
    assert unknown.block == portable_default(16, 64).block // 2
    assert all(
        portable_default(heads, tokens).block_tokens == tokens for heads in (1, 16, 128) for tokens in (1, 16, 128)
    )
    assert "mlaplan tune --heads 16" in caplog.text
    save(CALIBRATION, path_of(SHAPE))
    caplog.clear()
    assert planner(gpu, policy="balanced", heads=16).params.cost_table == PORTABLE
    # On a GPU the portable kernel decodes, whatever aiter's kernel of the architecture would cost.
    assert planner(gpu, policy="balanced", heads=16, arch="gfx942").params.cost_table == PORTABLE
    assert planner(gpu, policy="invariant", heads=16).params.cost_table == PORTABLE
    assert planner(gpu, policy="balanced", heads=16, cost_table=DEFAULT).params.cost_table == DEFAULT
    assert not caplog.records
    assert planner(gpu, policy="balanced", heads=32).params.cost_table == portable_default(32, 32)


def test_a_planner_refuses_a_damaged_or_outdated_file(gpu: Gpu) -> None:
    save(replace(CALIBRATION, table=replace(PORTABLE, block_tokens=64)), path_of(SHAPE))
    with pytest.raises(CalibrationError, match="blocks of 64 tokens, but the kernel of this release takes 32"):
        planner(gpu, policy="balanced", heads=16)
    path_of(SHAPE).write_text("{")
    with pytest.raises(CalibrationError, match="is damaged"):
        planner(gpu, policy="balanced", heads=16)
    planner(gpu, heads=16)  # nobody looks


def test_a_planner_fills_the_gpu_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each slot and block of heads: more slots than that run in rounds."""
    monkeypatch.setattr(portable, "tile_of", lambda _config: SimpleNamespace(tokens=32, heads=64))
    for heads, fold, slots in ((16, None, 132), (64, None, 132), (65, None, 66), (128, None, 66), (128, 8, 132)):
        assert planner(gpu, heads=heads, fold=fold, num_cus=None).params.num_cus == slots
        assert planner(gpu, heads=heads, fold=fold, num_cus=100).params.num_cus == 100
    assert planner(HostDevice(), heads=128, num_cus=None, arch="gfx942").params.num_cus == 304


def test_the_command_measures_stores_and_says_where(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlaplan import tuning_gpu

    def measured(config: Any, device: Any, *, watch: Any) -> Any:
        fitted = fit(measure(timer(UNCUT), watch(LOADS)), block_tokens=32)
        fitted = with_cut(fitted, pairs(132, 2048, fitted.table), clock(PORTABLE))
        assert device is gpu
        return replace(CALIBRATION, shape=replace(SHAPE, heads=config.heads), table=fitted.table), fitted

    monkeypatch.setattr(command, "_gpu", lambda _name: gpu)
    monkeypatch.setattr(tuning_gpu, "tune", measured)
    assert cli.main(["tune", "--heads", "16"]) == 0
    printed = capsys.readouterr().out
    assert "410" in printed
    assert stored(SHAPE) == CALIBRATION
    assert cli.main(["tune", "--heads", "128", "--json", "--out", str(tmp_path / "mine.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["costs"]["piece"] == 1900
    assert document["costs"]["cut"] == 2700
    assert document["fit"]["file"] == str(tmp_path / "mine.json")
    loaded = load(tmp_path / "mine.json")
    assert loaded is not None
    assert loaded.shape.heads == 128
    assert stored(replace(SHAPE, heads=128)) is None
    (tmp_path / "mine.json").write_text("mine")
    assert cli.main(["tune", "--out", str(tmp_path / "mine.json")]) == 2
    assert "was not written by 'mlaplan tune'" in capsys.readouterr().err
    monkeypatch.setattr(tuning_gpu, "tune", lambda *_args, **_more: fit(measure(constant, LOADS), block_tokens=32))
    assert cli.main(["tune", "--heads", "16"]) == 1
    assert "do not grow with the work" in capsys.readouterr().err
    assert stored(SHAPE) == CALIBRATION


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu"], "measured on a GPU"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--heads", "0"], "heads is 0"),
        (["--kv-dtype", "int8"], "kv_dtype is 'int8'"),
        (["--num-cus", "-1"], "num_cus is -1"),
    ],
)
def test_the_command_refuses_what_it_cannot_measure(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
