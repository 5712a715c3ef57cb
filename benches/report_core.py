"""What the core costs beside memory and beside NumPy, as a dated file.

    cargo bench --bench core -- --noplot --warm-up-time 0.1 --measurement-time 0.4
    python benches/report_core.py --out docs/results

Reads what Criterion left in `target/criterion` and runs `benches/python/bench_numpy.py`. Each figure is the lowest of
Criterion's samples, each of many iterations: on a machine with other work nothing else is comparable.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "python"))

import bench_numpy
import numpy as np

from mlaplan import _core

ROWS = (1, 8, 64, 256, 1024, 8192)
LINES = (
    ("step, unchanged", "step_unchanged/saturated"),
    ("step, changed, uniform lengths", "step_changed/uniform"),
    ("step, changed, skewed lengths", "step_changed/skewed"),
    ("schedule, uniform", "schedule_walk/uniform"),
    ("schedule, skewed", "schedule_walk/skewed"),
    ("`balanced` schedule, uniform", "schedule_balanced/uniform"),
    ("`balanced` schedule, skewed", "schedule_balanced/skewed"),
    ("`balanced` step, changed, uniform lengths", "step_changed_balanced/uniform"),
    ("`balanced` step, changed, skewed lengths", "step_changed_balanced/skewed"),
    ("step, a token more, uniform lengths", "step_grown/uniform"),
    ("step, a token more, skewed lengths", "step_grown/skewed"),
    ("`balanced` step, a token more, uniform lengths", "step_grown_balanced/uniform"),
    ("`balanced` step, a token more, skewed lengths", "step_grown_balanced/skewed"),
)
KINDS = ("uniform", "skewed", "saturated", "drafts", "prompt")
AGAINST = (
    ("memcpy of the bytes of request_ids and kv_indptr", "write_rows/memcpy"),
    *((f"written, {kind}", f"write_rows/{kind}") for kind in KINDS),
    ("memcmp of as many bytes", "unchanged/memcmp"),
    *((f"checked and compared, {kind}", f"unchanged/{kind}") for kind in KINDS),
)


def lowest_ns(criterion: Path) -> dict[str, float]:
    """The lowest sample of each case, in nanoseconds per iteration."""
    found = {}
    for path in criterion.glob("**/new/sample.json"):
        sample = json.loads(path.read_text())
        name = json.loads(path.with_name("benchmark.json").read_text())["full_id"]
        found[name] = min(time / count for time, count in zip(sample["times"], sample["iters"], strict=True))
    return found


def table(found: dict[str, float], lines: tuple[tuple[str, str], ...]) -> str:
    """A Markdown table in microseconds by rows; cases that were not run are left out."""
    text = ["| what, in us | " + " | ".join(f"{rows:,}" for rows in ROWS) + " rows |", "| --- " * (len(ROWS) + 1) + "|"]
    for title, name in lines:
        times = [found.get(f"{name}/{rows}") for rows in ROWS]
        if any(times):
            text.append(f"| {title} | " + " | ".join("" if ns is None else f"{ns / 1e3:.3g}" for ns in times) + " |")
    return "\n".join(text)


def against_numpy(found: dict[str, float]) -> str:
    """A Markdown table of NumPy's and the core's times, from this process, and the ratio without the crossing."""
    core_ns = found.get("step_unchanged/saturated/256", 0.0)
    note = ""
    text = ["| what | requests | NumPy, us | one call of the core, us | times |", "| --- | --- | --- | --- | --- |"]
    for question, make in bench_numpy.QUESTIONS.items():
        for requests in (1, 64, 256, 1024):
            by_numpy, by_core = (bench_numpy.lowest_us(call) for call in make(requests))
            if question == "unchanged" and requests == 256 and core_ns:
                times = 1e3 * by_numpy / core_ns
                note = f"Without the crossing, as Criterion has it, unchanged at 256 requests is {times:.0f} times."
            text.append(f"| {question} | {requests} | {by_numpy:.1f} | {by_core:.2f} | {by_numpy / by_core:.0f} |")
    return "\n".join([*text, "", note])


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--criterion", type=Path, default=Path("target/criterion"))
    arguments = parser.parse_args()
    if _core.build_profile != "release":
        sys.exit(f"mlaplan._core is a {_core.build_profile} build: build with --release")
    found = lowest_ns(arguments.criterion)
    if not found:
        sys.exit(f"{arguments.criterion} holds no samples: run cargo bench first")
    day = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    told = subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True)  # noqa: S607
    rust = told.stdout.split()[1]
    text = f"""# The Rust core, {day}

{processor()}; Rust {rust}, baseline x86-64; Python {platform.python_version()}, NumPy {np.__version__}. Made by
`cargo bench --bench core -- --noplot --warm-up-time 0.1 --measurement-time 0.4`, then `python benches/report_core.py`.
Lowest of Criterion's samples, for the machine had other work; compute units: {bench_numpy.NUM_CUS}.

{table(found, LINES)}

{table(found, AGAINST)}

`drafts` has four rows per request, `prompt` one request. How the loops were made and checked is in
[design.md](../design.md), section 10.

{against_numpy(found)}

Lowest times from Python; `rows` takes three calls of the core. A crossing into Rust is part of each, so the smaller the
batch the more of it is that.
"""
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{day}-core.md").write_text(text)


if __name__ == "__main__":
    main()
