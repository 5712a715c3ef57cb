"""Request logs on this GPU: every plan compared, pure decodes run as captured graphs that make their own plan."""

from __future__ import annotations

from pathlib import Path

from common import parser, publish, table

from mlaplan.runner import RunOptions, run
from mlaplan.workload import SchedulerConfig


def main() -> None:
    options = parser(__doc__)
    options.add_argument("logs", nargs="+", help="request logs")
    options.add_argument("--steps", type=int, default=2000)
    arguments = options.parse_args()
    lines = []
    failed = False
    for log in arguments.logs:
        for spec_tokens in (0, 3):
            for lengths in ("exact", "bound", "device"):
                scheduler = SchedulerConfig(num_speculative_tokens=spec_tokens, lengths=lengths, seed=arguments.seed)
                result = run(
                    RunOptions(log=log, steps=arguments.steps, device="cuda", scheduler=scheduler, decode_every=20)
                )
                failed |= not result.passed
                actions = [result.actions[action] for action in ("nothing", "copy", "launch", "deferred")]
                checks = (result.plans_checked, result.decodes_checked, len(result.differences))
                lines.append([Path(log).stem, spec_tokens, lengths, result.steps, *actions, result.replays, *checks])
    header = ["log", "drafts", "lengths", "steps", "nothing", "copy", "launch", "deferred", "replayed graphs"]
    publish("Request logs", table([*header, "plans compared", "decodes compared", "differences"], lines), arguments.out)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
