"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

from mlaplan.workload import SchedulerConfig


class UsageError(Exception):
    """Options that do not go together, or that ask for something that is not there."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the simulated engine."""
    standard = SchedulerConfig()
    group = parser.add_argument_group("simulated engine")
    group.add_argument("--spec-tokens", type=int, default=0, metavar="K", help="draft tokens (default: 0)")
    group.add_argument(
        "--acceptance-rate",
        type=float,
        default=standard.acceptance_rate,
        metavar="P",
        help=f"chance of a draft to be accepted (default: {standard.acceptance_rate})",
    )
    group.add_argument(
        "--lengths",
        choices=("exact", "bound", "device"),
        default=standard.lengths,
        help="what the host knows of the lengths (default: exact)",
    )
    for name, value, meaning in (
        ("max_num_seqs", standard.max_num_seqs, "most requests at once"),
        ("max_num_batched_tokens", standard.max_num_batched_tokens, "most query tokens in a step"),
        ("num_kv_blocks", standard.num_kv_blocks, f"KV blocks of {standard.block_size} tokens"),
        ("max_model_len", standard.max_model_len, "longest request; longer ones are skipped and counted"),
    ):
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=int, default=value, metavar="N", help=f"{meaning} (default: {value})")
    group.add_argument("--load", type=float, default=1.0, help="factor on the arrival rate (default: 1)")
    group.add_argument("--step-ms", type=float, default=30.0, help="length of a step (default: 30)")
    group.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")


def add_policy_options(group: Any) -> None:
    """Adds the choice of a policy to a group of options."""
    group.add_argument(
        "--policy",
        choices=("aiter", "balanced", "invariant"),
        default="aiter",
        help="who shares the work out: aiter's own schedule, one with a shorter longest slot, or one in which a row's "
        "pieces depend on that row alone (default: aiter)",
    )
    group.add_argument(
        "--piece-tokens", type=int, default=256, metavar="N", help="tokens of a piece, for invariant (default: 256)"
    )


def budget_or_rule(text: str) -> int | str:
    """Reads a split budget: a whole number, or "rule" for the one by the longest row.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    if text == "rule":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"budget is {text!r}, must be a whole number or 'rule'") from None


def scheduler_of(arguments: argparse.Namespace) -> SchedulerConfig:
    """Returns the simulated engine that the options ask for.

    Raises:
        ValueError: An option is out of range.
    """
    return SchedulerConfig(
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        num_speculative_tokens=arguments.spec_tokens,
        acceptance_rate=arguments.acceptance_rate,
        lengths=arguments.lengths,
        num_kv_blocks=arguments.num_kv_blocks,
        max_model_len=arguments.max_model_len,
        step_ms=arguments.step_ms,
        load=arguments.load,
        seed=arguments.seed,
    )
