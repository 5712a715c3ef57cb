"""Runs every kernel's gfx942 and gfx950 code in emulation, and aiter's decode on our schedules, and writes a report.

    TINYGRAD=... AITER_HSA=... python tests/amd/report.py --out docs/results

Ends with 1 on a difference. Says what is missing and ends with 0 where the emulator cannot run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime as dt
import functools
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1] / "python"), str(_HERE), str(_HERE.parent / "kernels")]

import emulator

_NUM_VECTORS = 300
_SEEN = """\
Triton {triton}, compiled offline; tinygrad checkout of August 2026; {jobs} processes, {minutes:.0f} minutes.
Plans: {vectors}, both variants where they differ, and random batches of which a fifth is wild; every word is
compared, and every access of memory is checked. Errors of decode and merge are `||out - ref|| / ||ref||` against
float64, of LSE the largest difference; of aiter's binaries the largest difference relative to the largest value.
aiter's binaries ran on decode steps of the real logs with rows capped at 160 tokens and 2 to 8 slots.
Nothing here was run on a GPU, and no time is one of a GPU."""
_CHUNK = {"vectors": 10, "random": 20, "slots": 25, "aiter": 10, "balanced": 10, "invariant": 10}


def _check(name: str) -> Callable[[str, Iterable[int]], Any]:
    import aiter_checks
    import checks

    if name.startswith("decode "):
        return checks.check_decode(name.removeprefix("decode "))
    return {
        "vectors": checks.check_vectors,
        "random": checks.check_random,
        "balanced": checks.check_policy("balanced"),
        "invariant": checks.check_policy("invariant"),
        "stale": checks.check_stale,
        "slots": checks.check_slots,
        "aiter": aiter_checks.check_aiter,
    }[name]


def _run(name: str, arch: str, numbers: tuple[int, ...], until: float) -> Any:
    """One part of one check, in another process; None if the time was up before it began."""
    import checks

    if time.time() > until:
        return None
    try:
        return checks.timed(_check(name), arch, numbers)
    except Exception as error:  # noqa: BLE001 - a failed part is a line of the report, whatever it was
        return f"{name} on {arch}, cases {numbers[0]} to {numbers[-1]}: {type(error).__name__}: {error}"


def _parts(given: argparse.Namespace) -> list[tuple[str, str, tuple[int, ...]]]:
    import aiter_checks

    # What the time limit leaves out is some of the last: random batches.
    counts = {"vectors": _NUM_VECTORS, "stale": 1, "slots": given.slots}
    counts |= {f"decode {kind}": given.decode for kind in ("bf16", "fp16", "fp8")}
    counts |= dict.fromkeys(("balanced", "invariant"), given.policies)
    counts |= {"aiter": 0 if aiter_checks.missing() else given.aiter, "random": given.random}
    parts = []
    for name, count in counts.items():
        numbers = tuple(range(0, count, given.every if name == "vectors" else 1))
        chunk = _CHUNK.get(name, 3)
        parts += [
            (name, arch, numbers[first : first + chunk])
            for first in range(0, len(numbers), chunk)
            for arch in emulator.ARCHS
        ]
    return parts


def _merge(results: list[Any]) -> dict[tuple[str, str], Any]:
    """Adds up the parts of each check on each architecture."""
    merged: dict[tuple[str, str], Any] = {}
    for result in results:
        total = merged.setdefault((result.check, result.arch), result)
        if total is not result:
            total.cases += result.cases
            total.instructions += result.instructions
            total.seconds += result.seconds
            total.note(**result.worst)
    return merged


def _table(results: list[Any]) -> str:
    lines = [
        "| check | code | cases | differences or largest error | instructions | time of its parts |",
        "|---|---|---|---|---|---|",
    ]
    for total in _merge(results).values():
        seen = ", ".join(f"{name} {error:.1e}" for name, error in sorted(total.worst.items())) or "0 differences"
        cells = (total.check, total.arch, total.cases, seen, f"{total.instructions:,}", f"{total.seconds:.0f} s")
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _text(given: argparse.Namespace, results: list[Any], failures: list[str], left: int, seconds: float) -> str:
    import aiter_checks
    import triton

    vectors = "all 300 reference vectors" if given.every == 1 else f"every {given.every}th of 300 reference vectors"
    aiter = aiter_checks.missing() or "binaries " + ", ".join(f"{b.arch}/{b.name}" for b in aiter_checks.BINARIES)
    return "\n".join(
        (
            f"# AMD machine code in emulation, {dt.datetime.now(tz=dt.timezone.utc):%Y-%m-%d}",
            "",
            f"    {shlex.join(['python', 'tests/amd/report.py', *sys.argv[1:]])}",
            "",
            _SEEN.format(triton=triton.__version__, jobs=given.jobs, minutes=seconds / 60, vectors=vectors),
            "",
            _table(results),
            "",
            f"aiter: {aiter}.",
            "",
            f"{len(failures)} parts failed." if failures else "Nothing failed.",
            *((f"{left} parts, the last of the table, were left out because the time was up.",) if left else ()),
            *failures,
            "",
        )
    )


def _collect(given: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Any], list[str], int]:
    """Runs all parts; returns what they saw, the failures, and the parts for which there was no time."""
    begin, until = time.monotonic(), time.time() + 60 * given.minutes
    results: list[Any] = []
    failures: list[str] = []
    left = 0
    # Processes are kept: Triton and the emulator remember what they compiled.
    with concurrent.futures.ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_run, *part, until) for part in _parts(given)]
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            done = future.result()
            if done is None:
                left += 1
                continue
            (failures if isinstance(done, str) else results).append(done)
            state = done if isinstance(done, str) else f"{done.check}, {done.arch}: {done.cases} cases"
            say(f"{time.monotonic() - begin:6.0f} s  {number}/{len(futures)}  {state}")
    return results, failures, left


def main() -> int:
    """Runs the checks and returns the exit code."""
    say = functools.partial(print, flush=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for <date>-amd-emulation.md; printed otherwise")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=240.0, help="start no further part after this time")
    parser.add_argument("--every", type=int, default=1, help="run every n-th reference vector")
    parser.add_argument("--random", type=int, default=500, help="random batches of the plan")
    parser.add_argument("--policies", type=int, default=100, help="random batches of each other policy")
    parser.add_argument("--slots", type=int, default=100)
    parser.add_argument("--decode", type=int, default=12, help="batches per type of KV rows")
    parser.add_argument("--aiter", type=int, default=100, help="log batches for aiter's binaries")
    given = parser.parse_args()
    if emulator.missing():
        say(f"skipped: {emulator.missing()}")
        return 0
    begin = time.monotonic()
    results, failures, left = _collect(given, say)
    text = _text(given, results, failures, left, time.monotonic() - begin)
    if given.out is None:
        say(text)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"{dt.datetime.now(tz=dt.timezone.utc):%Y-%m-%d}-amd-emulation.md"
        path.write_text(text, encoding="utf-8")
        say(f"written: {path}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
