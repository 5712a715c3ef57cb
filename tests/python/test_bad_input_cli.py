"""Wrong uses of the command line that `test_cli.py` and `test_explain.py` do not have, and what commands leave behind.

Numbers beyond any size, output that cannot be written, streams that are closed or full, interrupts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlaplan import cli

LOG = "arrival_ms,input_tokens,output_tokens\n" + "".join(
    f"{60 * index},{index * 37 % 90 + 1},9\n" for index in range(99)
)
SMALL = ("--device", "cpu", "--steps", "20", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--topk", "64",
         "--num-cus", "4", "--max-model-len", "400", "--num-kv-blocks", "400")  # fmt: skip
HUGE, DIGITS = "9" * 30, "9" * 5000

# Command, what is wrong with it, and the message. LOG stands for a good log, OUT for a folder to write to.
NUMBERS: list[tuple[str, str, str]] = [
    ("run LOG", f"--steps {HUGE}", f"steps is {HUGE}, must be at most 9223372036854775807"),
    ("run LOG", f"--check-every {HUGE}", f"check_every is {HUGE}, must be at most"),
    ("run LOG", f"--decode-every {HUGE}", f"decode_every is {HUGE}, must be at most"),
    ("run LOG", f"--steps {DIGITS}", "invalid int value"),
    ("run LOG", "--steps 1e3", "invalid int value: '1e3'"),
    ("run LOG", "--steps 0x10", "invalid int value: '0x10'"),
    ("run LOG", "--steps=", "invalid int value: ''"),
    ("run LOG", "--steps nan", "invalid int value: 'nan'"),
    ("run LOG", "--num-kv-blocks 67108865", "num_kv_blocks is 67108865, must be at most 67108864"),
    ("run LOG", f"--num-kv-blocks {HUGE}", f"num_kv_blocks is {HUGE}, must be at most"),
    ("run LOG", "--num-kv-blocks -1", "num_kv_blocks is -1"),
    ("run LOG", "--max-model-len 2000000000 --num-kv-blocks 60000000", "max_num_seqs is 8, must be at most 2 for a"),
    ("run LOG", f"--max-model-len {HUGE}", "num_kv_blocks is 400, must be at least"),
    ("run LOG", "--max-num-seqs 16777217 --max-model-len 64", "max_requests is 16777217, must be at most 16777216"),
    ("run LOG", f"--max-num-seqs {HUGE}", f"max_num_seqs is {HUGE}, must be at most"),
    ("run LOG", "--max-num-batched-tokens 0", "max_num_batched_tokens is 0"),
    ("run LOG", "--max-num-batched-tokens 16777217 --topk 1", "max_rows is 16777217, must be at most 16777216"),
    ("run LOG", "--max-num-batched-tokens 40000000 --topk 64", "max_rows is 40000000"),
    ("run LOG", "--topk 33554432", "max_rows x topk is 2147483648, must be at most 2147483647"),
    ("run LOG", "--topk 2147483648", "topk is 2147483648, must be at most 2147483647"),
    ("run LOG", f"--topk {HUGE}", "topk must be a number of at most 64 bits"),
    ("run LOG", "--heads 1025", "heads is 1025, must be at most 1024"),
    ("run LOG", "--heads -1", "heads is -1"),
    ("run LOG", "--num-cus 65537", "num_cus is 65537, must be at most 65536"),
    ("run LOG", "--num-cus -1", "num_cus is -1"),
    ("run LOG", "--split-budget -2", "split_budget is -2"),
    ("run LOG", f"--split-budget {HUGE}", "split_budget must be a number of at most 64 bits"),
    ("run LOG", "--split-budget 2147483648", "split_budget is 2147483648, must be at most"),
    ("run LOG", "--spec-tokens 64", "max_num_batched_tokens is 64, must be at least 65"),
    ("run LOG", f"--spec-tokens {HUGE}", "max_num_batched_tokens is 64, must be at least"),
    ("run LOG", "--acceptance-rate nan", "acceptance_rate is nan"),
    ("run LOG", "--acceptance-rate -0.1", "acceptance_rate is -0.1"),
    ("run LOG", "--acceptance-rate inf", "acceptance_rate is inf"),
    ("run LOG", "--load nan", "load is nan"),
    ("run LOG", "--load -1", "load is -1.0"),
    ("run LOG", "--load 1e999", "load is inf"),
    ("run LOG", "--step-ms 0", "step_ms is 0.0"),
    ("run LOG", "--step-ms -inf", "expected one argument"),
    ("run LOG", "--step-ms=-inf", "step_ms is -inf"),
    ("run LOG", f"--seed -{HUGE}", f"seed is -{HUGE}"),
    ("run LOG", "--device CPU", "device is 'CPU'"),
    ("run LOG", "--lengths Exact", "invalid choice: 'Exact'"),
    ("run LOG", "--arch gfx94", "gfx94"),
    ("run LOG", "--q-dtype bf16,", "q_dtype is 'bf16,'"),
    ("run LOG", "--check", "ambiguous option|expected one argument"),
    ("run LOG other.csv", "", "unrecognized arguments: other.csv"),
    ("run", "--json=yes", "ignored explicit argument 'yes'"),
    ("explain", "5 --padding 1048577", "padding is 1048577, must be at most 1048576"),
    ("explain", f"5 --padding {HUGE}", f"padding is {HUGE}, must be at most"),
    ("explain", "5 --num-cus 65537", "num_cus is 65537"),
    ("explain", "5 --fold 129", "fold is 129, must be at most 128"),
    ("explain", "5 --topk 2147483648", "topk is 2147483648"),
    ("explain", "5 --topk -1", "topk is -1"),
    ("explain", "5 --budget 1.5", "budget is '1.5'"),
    ("explain", "5 --budget -2", "is -2"),
    ("explain", f"5 --budget {HUGE}", "must be"),
    ("explain", f"5 --min-tokens-per-split {HUGE}", "min_tokens_per_split is"),
    ("explain", "1048576x1048576 --topk 2048", "tokens in kv_indptr: the batch needs 2147483648"),
    ("explain", "5x1048576 5", "more than 1,048,576 rows"),
    ("explain", "5x-1", "length '5x-1'"),
    ("explain", "5.5", "length '5.5'"),
    ("explain", "0x5x5", "length '0x5x5'"),
    ("explain", "--contexts 1073741824", "contexts[0] is 1073741824, must be at least 0 and below 2^30"),
    ("explain", "--contexts 5 --queries 1048577", "more than 1,048,576 rows"),
    ("explain", "--contexts 5 --queries -1", "queries[0] is -1"),
    ("explain", "--contexts", "expected at least one argument"),
    ("explain", f"--step {HUGE} --log LOG", "step is|islice"),
    ("explain", "--step 1 --log LOG --spec-tokens 9000", "max_num_batched_tokens is 8192, must be at least 9001"),
    ("explain", "5x20001 --output OUT/plan.svg --topk 64", "works, a picture holds at most"),
    ("doctor", "--quick=1", "ignored explicit argument '1'"),
    ("doctor", "now", "unrecognized arguments: now"),
]  # fmt: skip

# Where output cannot go.
PLACES: list[tuple[str, str, str]] = [
    ("explain 5 --output", "OUT", "ending must be one of"),
    ("explain 5 --output", "OUT/plan", "ending must be one of"),
    ("explain 5 --output", "OUT/plan.SVG.exe", "ending must be one of"),
    ("explain 5 --output", "OUT/folder.svg", "Is a directory"),
    ("explain 5 --output", "OUT/gone/plan.svg", "No such file"),
    ("explain 5 --output", "OUT/file/plan.png", "Not a directory"),
    ("explain 5 --output", "OUT/loop.svg", "symbolic link"),
    ("explain 5 --output", "OUT/" + "x" * 300 + ".svg", "File name too long"),
    ("explain 5 --output", "/proc/plan.svg", "No such file"),
    ("explain 5 --output", "OUT/full.svg", "No space left on device"),
    ("record LOG --out", "OUT", "there already|directory"),
    ("record LOG --out", "OUT/file", "there already"),
    ("record LOG --out", "OUT/gone/steps.trace", "No such file"),
    ("record LOG --out", "OUT/file/steps.trace", "Not a directory"),
    ("record LOG --out", "OUT/loop.svg", "symbolic link"),
    ("record LOG --out", "/proc/steps.trace", "No such file"),
    ("record LOG --force --out", "/dev/full", "not a regular file|No space left on device|there already"),
]


def tree(folder: Path) -> list[str]:
    """Everything below a folder, links not followed."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def call(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str, str]:
    """Runs a command in this process."""
    try:
        status = cli.main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a log, and `out` in it with things in the way; the current folder is another one, empty."""
    (tmp_path / "log.csv").write_text(LOG)
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("mine")
    (out / "folder.svg").mkdir()
    (out / "loop.svg").symlink_to("loop.svg")
    (out / "full.svg").symlink_to("/dev/full")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def words(place: Path, text: str) -> list[str]:
    """Arguments of a command."""
    return [word.replace("LOG", str(place / "log.csv")).replace("OUT", str(place / "out")) for word in text.split()]


@pytest.mark.parametrize(("command", "wrong", "message"), NUMBERS)
def test_a_wrong_option_is_named_and_changes_nothing(
    capsys: pytest.CaptureFixture[str], place: Path, command: str, wrong: str, message: str
) -> None:
    before = tree(place)
    small = SMALL if command.startswith("run") else ()
    status, out, errors = call(capsys, [*words(place, command), *small, *words(place, wrong)])
    assert (status, out) == (2, "")
    last = errors.splitlines()[-1]
    assert any(part in last for part in message.split("|")), errors
    assert last.startswith((f"mlaplan {command.split(maxsplit=1)[0]}: error: ", "mlaplan: error: "))
    assert "Traceback" not in errors
    assert tree(place) == before


@pytest.mark.parametrize(("command", "where", "message"), PLACES)
def test_output_that_cannot_be_written_is_named_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], place: Path, command: str, where: str, message: str
) -> None:
    if "--output" in command:
        pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    before = tree(place)
    options = SMALL if command.startswith("record") else ()
    status, out, errors = call(capsys, [*words(place, f"{command} {where}"), *options])
    assert (status, out) == (2, "")
    assert any(part in errors for part in message.split("|")), errors
    assert errors.count("\n") == 1
    assert tree(place) == before
    assert (place / "out" / "file").read_text() == "mine"


def test_a_picture_replaces_a_picture_and_nothing_else(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    (place / "out" / "plan.svg").write_text("old")
    before = tree(place)
    status, _, _ = call(capsys, words(place, "explain 5 --output OUT/plan.svg"))
    assert status == 0
    assert "</svg>" in (place / "out" / "plan.svg").read_text()
    assert tree(place) == before


def program(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Starts the command as a program."""
    command = [sys.executable, "-m", "mlaplan", *arguments]
    # Whoever runs the tests in the background may have them ignore interrupts, and a child inherits that.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - no threads here
    )


def wait_until_under_way(running: subprocess.Popen[str]) -> None:
    """Waits until a program has loaded the extension, and a little longer: while Python starts, an interrupt is its."""
    maps = Path(f"/proc/{running.pid}/maps")
    deadline = time.monotonic() + 60
    while "_core.abi3" not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(3.0)
    assert running.poll() is None


def shell(place: Path, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command through a shell, which can close and turn streams."""
    command = f"exec {sys.executable} -m mlaplan run {place / 'log.csv'} {' '.join(SMALL)} {line}"
    return subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("> /dev/full", 2, "No space left on device"),
        ("--json > /dev/full", 2, "No space left on device"),
        (">&-", 0, ""),
        ("--json >&-", 0, ""),
        ("2>&-", 0, ""),
        ("2> /dev/full", 0, ""),
        ("--steps 0 2>&-", 2, ""),
        (">&- 2>&- <&-", 0, ""),
        ("< /dev/null", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full_are_no_crash(place: Path, line: str, status: int, message: str) -> None:
    ran = shell(place, line)
    assert ran.returncode == status
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
@pytest.mark.parametrize("name", [b"bad \xff.csv", "名 \u202e.csv".encode()])
def test_a_name_that_a_stream_cannot_say_is_printed_in_escapes(place: Path, encoding: str, name: bytes) -> None:
    path = os.path.join(os.fsencode(place), name)  # noqa: PTH118 - bytes
    os.link(place / "log.csv", path)
    for extra in ((), ("--json",)):
        ran = subprocess.run(
            [sys.executable, "-m", "mlaplan", "run", path, *SMALL, *extra], capture_output=True, check=False,
            timeout=120, env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert (ran.returncode, ran.stderr) == (0, b"")
        assert ran.stdout
        if extra:
            assert Path(json.loads(ran.stdout)["workload"]["log"]) == Path(os.fsdecode(path))


@pytest.mark.parametrize("options", [("--json",), ()])
def test_an_interrupt_ends_with_130_and_no_half_of_a_document(place: Path, options: tuple[str, ...]) -> None:
    running = program(
        "run", "--device", "cpu", "--steps", "1000000", "--decode-every", "0", *options, folder=place / "here"
    )
    wait_until_under_way(running)
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert running.returncode == 130
    assert out == ""
    assert errors.endswith("mlaplan run: interrupted\n")
    assert "Traceback" not in errors
    assert list((place / "here").iterdir()) == []


def test_an_interrupted_recording_leaves_a_trace_that_can_be_read_or_none(place: Path) -> None:
    trace = place / "here" / "steps.trace"
    running = program("record", "--device", "cpu", "--steps", "1000000", "--out", str(trace), folder=place / "here")
    wait_until_under_way(running)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in errors
    for path in (place / "here").iterdir():
        replayed = subprocess.run(
            [sys.executable, "-m", "mlaplan", "replay", str(path), "--steps", "5", "--device", "cpu"],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert replayed.returncode in {0, 2}
        assert "Traceback" not in replayed.stderr


COMMANDS = [
    ("--version", []),
    ("--help", []),
    ("run LOG", []),
    ("run LOG --json --lengths device --deferred", []),
    ("explain 2048x4", []),
    ("explain --step 3 --log LOG --json", []),
    ("explain 64x4 --output OUT/plan.html", ["out/plan.html"]),
    ("explain 64x4 --output OUT/plan.png", ["out/plan.png"]),
    ("record LOG --out OUT/steps.trace", ["out/steps.trace"]),
    ("doctor --quick", []),
]


@pytest.mark.parametrize(("command", "made"), COMMANDS)
def test_a_command_writes_what_was_named_and_nothing_else(place: Path, command: str, made: list[str]) -> None:
    for name in ("home", "tmp"):
        (place / name).mkdir()
    before = tree(place)
    options = SMALL if command.startswith(("run", "record")) else ()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL", "TRITON"))}
    ran = subprocess.run(
        [sys.executable, "-B", "-m", "mlaplan", *words(place, command), *options], capture_output=True, text=True,
        check=False, timeout=120, cwd=place / "here",
        env={**environment, "HOME": str(place / "home"), "TMPDIR": str(place / "tmp")},
    )  # fmt: skip
    if "--output" in command and "needs the extra" in ran.stderr:
        pytest.skip("pictures need the extra `plot`")
    assert ran.returncode == 0, ran.stderr
    # matplotlib keeps its list of fonts, for whoever draws with it.
    kept = {"home/.cache", "home/.config", "home/.cache/matplotlib", "home/.config/matplotlib"}
    allowed = {name for name in tree(place) if name in kept or name.startswith("home/.cache/matplotlib/fontlist")}
    assert set(tree(place)) - allowed == {*before, *made}
    assert not allowed or ".png" in command
