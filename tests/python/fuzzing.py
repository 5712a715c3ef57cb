"""Runs the state machine of `test_fuzz_api.py` until time is up, and says what it did and covered.

Hypothesis draws other histories in every round. A finding is shrunk, printed with the calls that lead to it, and kept
in the example database, which later runs begin with. `make fuzz-python` runs this.
"""

from __future__ import annotations

import argparse
import sys
import time
import tokenize
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import run_state_machine_as_test

import mlaplan
from test_fuzz_api import Api

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGE = Path(mlaplan.__file__).parent
# What the public calls of the state machine run through; kernels, vLLM and the command line have tests of their own.
_COVERED = (
    "arguments.py", "batch.py", "config.py", "layout.py", "plan.py", "planner.py",
    "device/host.py", "device/ring.py", "reference/decode.py", "reference/merge.py", "reference/plan.py",
    "reference/slots.py",
)  # fmt: skip


class _Counted(Api):
    """The state machine, and how many histories it was taken through."""

    histories = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).histories += 1


def _lines(code: CodeType) -> set[int]:
    """Lines of a code object and of everything defined in it."""
    found = {line for _, _, line in code.co_lines() if line}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _lines(constant)
    return found


class _Coverage:
    """Lines of the files in `_COVERED` that ran, by a trace function: slow, so for one round only."""

    def __init__(self) -> None:
        self._names = {str(_PACKAGE / name): name for name in _COVERED}
        self._hit: dict[str, set[int]] = {name: set() for name in _COVERED}

    def trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        """See `sys.settrace`."""
        name = self._names.get(frame.f_code.co_filename)
        if name is None:
            return None
        if event in {"call", "line"}:
            self._hit[name].add(frame.f_lineno)
        return self.trace

    def report(self) -> list[str]:
        """Share of the lines inside functions that ran, and which did not, by file."""
        out = []
        for path, name in self._names.items():
            with tokenize.open(path) as source:
                code = compile(source.read(), path, "exec")
            inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            bodies = [part for body in inner for part in ([body] if body.co_flags & 2 else _methods(body))]
            lines = set().union(*(_lines(body) for body in bodies), set())
            missed = sorted(lines - self._hit[name])
            out.append(f"  {name:<22} {len(lines) - len(missed):>4} of {len(lines):>4} lines; not: {_ranges(missed)}")
        return out


def _methods(code: CodeType) -> list[CodeType]:
    """Functions of a class's body, whose own lines run when the module is imported."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType) and constant.co_flags & 2]


def _ranges(lines: list[int]) -> str:
    parts: list[list[int]] = []
    for line in lines:
        if parts and line - parts[-1][1] <= 1:
            parts[-1][1] = line
        else:
            parts.append([line, line])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def _round(examples: int, database: Path) -> None:
    run_state_machine_as_test(
        _Counted,
        settings=settings(
            max_examples=examples,
            deadline=None,
            print_blob=True,
            database=DirectoryBasedExampleDatabase(database),
            suppress_health_check=list(HealthCheck),
        ),
    )


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Runs rounds until time is up; returns 1 with the first finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="wall time (default: 60)")
    parser.add_argument("--examples", type=int, default=500, help="histories of a round (default: 500)")
    parser.add_argument("--database", type=Path, default=_REPOSITORY / "fuzz" / "corpus" / "api")
    options = parser.parse_args()
    begin = time.monotonic()
    rounds, total, calls = 0, 0, Counter[str]()
    while rounds == 0 or time.monotonic() - begin < options.seconds:
        Api.seen.clear()
        _Counted.histories = 0
        _round(options.examples, options.database)
        rounds += 1
        total += _Counted.histories
        calls += Counter(Api.seen)
        _say(f"{time.monotonic() - begin:.0f} s: {total:,} histories, {sum(calls.values()):,} calls")
    coverage = _Coverage()
    sys.settrace(coverage.trace)
    try:
        _round(max(options.examples // 5, 20), options.database)
    finally:
        sys.settrace(None)
    _say(f"no difference in {rounds} rounds; calls by kind: {dict(calls.most_common())}")
    _say("lines of one more round:", *coverage.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
