"""Are the steps of real request logs planned right on a GPU, and on the host?

    python benches/gpu/check_logs.py --logs azure_conv_2023.csv mooncake_conversation.csv

Each line is one run of `mlaplan run`: every step's whole plan is compared with one from nothing, pure decodes are
replayed as captured graphs that make their own plan, and every twentieth step is decoded and compared too.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import parser, publish, table

_SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def run(device: str, log: Path, drafts: int, lengths: str, steps: int) -> dict[str, Any]:
    """What one run printed.

    Raises:
        SystemExit: It found a difference, or did not run.
    """
    options = {"device": device, "steps": steps, "spec-tokens": drafts, "lengths": lengths, "decode-every": 20}
    command = [sys.executable, "-m", "mlaplan", "run", "--json", str(log)]
    command += itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in options.items())
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (the installed package)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def line(told: dict[str, Any]) -> list[object]:
    """The line of a run in the table."""
    workload, checks = told["workload"], told["checks"]
    decided = [told["decisions"][name] for name in ("nothing", "copy", "launch", "replays")]
    named = [workload["device"], Path(workload["log"]).stem, workload["spec_tokens"], workload["lengths"]]
    return [*named, *decided, checks["plans"], checks["decodes"], told["cost"]["read_backs"], checks["num_differences"]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--logs", type=Path, nargs="+", default=sorted(_SHARED.glob("*.csv")))
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--jobs", type=int, default=8, help="runs side by side")
    arguments = options.parse_args()
    if not arguments.logs:
        raise SystemExit(f"no log in {_SHARED}: name some by --logs")
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    cases = list(itertools.product(devices, arguments.logs, (0, 3), ("exact", "bound", "device")))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        told = list(pool.map(lambda case: run(*case, arguments.steps), cases))
    header = ["device", "log", "drafts", "lengths", "nothing", "copy", "launch", "replayed graphs"]
    header += ["plans compared", "decodes compared", "read-backs", "differences"]
    total = sum(one["checks"]["plans"] for one in told)
    text = f"{total:,} plans compared in {len(cases)} runs of {arguments.steps:,} steps at most, no difference."
    publish("Request logs", f"{text}\n\n{table(header, [line(one) for one in told])}", arguments.out)


if __name__ == "__main__":
    main()
