"""A request log made from a seed, for runs without a file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlaplan.workload.log import Request

_DRAW = 256  # requests drawn at a time; fixed, so that a longer log begins with the shorter one


def generated_log(
    seed: int = 0,
    num_requests: int | None = None,
    *,
    requests_per_second: float = 3.5,
    median_input: float = 1_500.0,
    median_output: float = 220.0,
    long_share: float = 0.25,
    max_input: int = 65_536,
    max_output: int = 2_000,
) -> Iterator[Request]:
    """Yields a synthetic request log: lognormal lengths, arrivals in bursts.

    Lengths lie below, across and above the usual `topk` of 2048 on purpose: a short majority, and a share of
    long prompts eight times the median. Every other stretch of 64 requests arrives four times as fast as the
    one before it, at the same mean rate.

    Args:
        seed: Equal seeds give equal logs, and a longer log begins with the shorter one.
        num_requests: How many, or None for no end.
        requests_per_second: Mean arrival rate.
        median_input: Median prompt of the short requests, in tokens.
        median_output: Median number of generated tokens.
        long_share: Share of requests with long prompts, 0 to 1.
        max_input: Longest prompt.
        max_output: Most tokens generated.

    Returns:
        An iterator that draws a few hundred requests at a time.

    Raises:
        ValueError: A number is out of its range.
    """
    if num_requests is not None and num_requests < 0:
        raise ValueError(f"num_requests is {num_requests}, must be at least 0")
    if seed < 0:
        raise ValueError(f"seed is {seed}, must be at least 0")
    for name, value in (
        ("requests_per_second", requests_per_second),
        ("median_input", median_input),
        ("median_output", median_output),
    ):
        if not (value > 0 and np.isfinite(value)):
            raise ValueError(f"{name} is {value}, must be positive and finite")
    if not 0 <= long_share <= 1:
        raise ValueError(f"long_share is {long_share}, must be between 0 and 1")
    if max_input < 1 or max_output < 1:
        raise ValueError(f"max_input is {max_input} and max_output {max_output}, both must be at least 1")
    return _draw(
        np.random.default_rng(seed),
        num_requests,
        1000.0 / requests_per_second,
        (median_input, median_output, long_share),
        (max_input, max_output),
    )


def _draw(
    rng: np.random.Generator,
    num_requests: int | None,
    mean_gap_ms: float,
    shape: tuple[float, float, float],
    longest: tuple[int, int],
) -> Iterator[Request]:
    median_input, median_output, long_share = shape
    # Gaps of 1.6 and 0.4 times the mean: a factor of four, and the mean of both is the mean.
    burst = np.where(np.arange(_DRAW) // 64 % 2 == 0, 1.6, 0.4)
    now = 0.0
    made = 0
    while num_requests is None or made < num_requests:
        gaps = rng.exponential(mean_gap_ms, _DRAW) * burst
        is_long = rng.random(_DRAW) < long_share
        inputs = rng.lognormal(np.log(median_input), 0.9, _DRAW) * np.where(is_long, 8.0, 1.0)
        outputs = rng.lognormal(np.log(median_output), 0.8, _DRAW)
        input_tokens = np.clip(inputs, 1, longest[0]).astype(np.int64)
        output_tokens = np.clip(outputs, 1, longest[1]).astype(np.int64)
        take = _DRAW if num_requests is None else min(_DRAW, num_requests - made)
        for gap, tokens_in, tokens_out in zip(
            gaps[:take].tolist(), input_tokens[:take].tolist(), output_tokens[:take].tolist(), strict=True
        ):
            now += gap
            yield Request(now, tokens_in, tokens_out)
        made += take
