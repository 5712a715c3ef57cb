"""Reports: the same figures with and without rich, on a terminal and off it, and for machines."""

from __future__ import annotations

import io
import json

import pytest

from mlaplan import report
from mlaplan.report import Row, Section, as_json, format_value, plain_text, progress, render

SECTIONS = [
    Section(
        "workload",
        "Workload",
        (
            Row("steps", "steps", 12_345),
            Row("log", "log", "a [bold]name[/bold].csv"),
            Row("p50_us", "median", 1.23456, "us", note="of 5"),
            Row("passed", "passed", value=True),
        ),
    ),
    Section("cost", "Cost", (Row("ratio", "ratio", None), Row("steps", "steps", -3))),
]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "us", "-"),
        (True, "", "yes"),
        (False, "", "no"),
        (1_234_567, "", "1,234,567"),
        (0, "B", "0 B"),
        (12_345.678, "us", "12,345.7 us"),
        (1.23456, "us", "1.235 us"),
        (-0.001234567, "", "-0.001235"),
        (float("inf"), "", "inf"),
        ("text", "", "text"),
    ],
)
def test_values_are_written_for_people(value: report.Value, unit: str, text: str) -> None:
    assert format_value(Row("key", "label", value, unit)) == text


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_every_figure_is_in_the_table(monkeypatch: pytest.MonkeyPatch, *, rich: bool, terminal: bool) -> None:
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(report, "_has_rich", lambda: rich)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = _Terminal() if terminal else io.StringIO()
    render(SECTIONS, stream)
    text = stream.getvalue()
    for part in ("Workload", "12,345", "a [bold]name[/bold].csv", "1.235 us", "of 5", "yes", "Cost", "-3"):
        assert part in text
    assert ("\x1b[" in text) == (rich and terminal)


def test_plain_text_is_aligned_and_without_trailing_space() -> None:
    lines = plain_text(SECTIONS).splitlines()
    assert lines[0] == "Workload"
    ends = {line.index("1.235 us") + len("1.235 us") for line in lines if "1.235 us" in line}
    ends |= {line.index("12,345") + len("12,345") for line in lines if "12,345" in line}
    assert len(ends) == 1
    assert all(line == line.rstrip() for line in lines)
    assert plain_text([]) == ""


def test_json_keeps_the_values() -> None:
    document = json.loads(as_json(SECTIONS))
    assert document["workload"] == {
        "steps": 12_345,
        "log": "a [bold]name[/bold].csv",
        "p50_us": 1.23456,
        "passed": True,
    }
    assert document["cost"] == {"ratio": None, "steps": -3}


def test_json_has_no_numbers_that_json_lacks() -> None:
    for value in (float("nan"), float("inf")):
        text = as_json([Section("a", "A", (Row("x", "x", value),))])
        assert json.loads(text, parse_constant=pytest.fail) == {"a": {"x": None}}


def test_json_refuses_two_values_of_one_name() -> None:
    twice = Section("a", "A", (Row("x", "x", 1), Row("x", "y", 2)))
    with pytest.raises(ValueError, match="two rows of section 'a' are called 'x'"):
        as_json([twice])
    with pytest.raises(ValueError, match="two sections are called 'a'"):
        as_json([Section("a", "A", ()), Section("a", "B", ())])


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_yields_everything_and_shows_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, *, rich: bool, terminal: bool
) -> None:
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(report, "_has_rich", lambda: rich)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = _Terminal() if terminal else io.StringIO()
    assert list(progress(iter(range(5)), total=5, label="planning", stream=stream)) == list(range(5))
    assert bool(stream.getvalue()) == (rich and terminal)


def test_progress_passes_an_error_on() -> None:
    def broken() -> object:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(progress(broken(), total=None, label="planning", stream=_Terminal()))  # type: ignore[arg-type]
