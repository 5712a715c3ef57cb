"""The scheduler keeps the rules of continuous batching, whatever the log and the limits."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlaplan.workload import (
    Request,
    Scheduler,
    SchedulerConfig,
    Step,
    generated_log,
    read_log,
    rows_unchanged,
)


@st.composite
def engines(draw: st.DrawFn) -> SchedulerConfig:
    """Small engines: every limit is met now and then, the KV pool most of all."""
    drafts = draw(st.integers(0, 4))
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    max_model_len = draw(st.integers(8, 80))
    width = -(-(max_model_len + drafts) // block_size)
    return SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 7)),
        max_num_batched_tokens=draw(st.integers(1 + drafts, 40)),
        num_speculative_tokens=drafts,
        acceptance_rate=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        lengths=draw(st.sampled_from(["exact", "bound", "device"])),
        steps_in_flight=draw(st.integers(1, 3)),
        capture_sizes=tuple(draw(st.lists(st.integers(1, 12), max_size=4))),
        block_size=block_size,
        num_kv_blocks=width + 1 + draw(st.integers(0, 2 * width)),
        max_model_len=max_model_len,
        step_ms=draw(st.sampled_from([1.0, 30.0])),
        load=draw(st.sampled_from([0.1, 1.0, 7.0])),
        seed=draw(st.integers(0, 100)),
    )


logs = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 70), st.integers(0, 30)), min_size=1, max_size=25).map(
    lambda entries: [
        Request(float(arrival), inputs, outputs)
        for arrival, (_, inputs, outputs) in zip(
            itertools.accumulate(gap for gap, _, _ in entries), entries, strict=True
        )
    ]
)


@dataclass
class _Live:
    """What the steps so far say about a request."""

    context: int
    generated: int
    blocks: list[int]


class _Observer:
    """Follows the steps and checks each against those before; knows the log, not the scheduler's state."""

    def __init__(self, config: SchedulerConfig, log: list[Request]) -> None:
        self.config = config
        self.log = log
        self.live: dict[int, _Live] = {}
        self.generated: dict[int, int] = {}
        self.resumed = 0
        self.first_seen: list[int] = []
        self.before: list[Step] = []

    def check(self, scheduler: Scheduler, step: Step) -> None:
        config = self.config
        queries = np.diff(step.query_start_loc)
        assert step.query_start_loc[0] == 0
        assert step.query_start_loc.dtype == step.seq_lens.dtype == np.int32
        assert (queries >= 1).all()
        assert 1 <= step.num_requests <= config.max_num_seqs
        assert step.rows <= config.max_num_batched_tokens
        assert len(set(step.keys.tolist())) == step.num_requests
        self._check_padding(step)
        self._check_blocks(scheduler, step)
        for position in range(step.num_requests):
            self._check_request(step, position, int(queries[position]))
        self._check_host_view(step)
        self.before = [*self.before, step][-config.steps_in_flight :]

    def _check_padding(self, step: Step) -> None:
        per_request = self.config.decode_tokens
        sizes = [-(-size // per_request) * per_request for size in self.config.capture_sizes]
        fitting = [size for size in sizes if size >= step.rows]
        want = min(fitting) if fitting and step.is_pure_decode else step.rows
        assert step.padded_rows == want
        assert step.padded_rows <= self.config.max_rows

    def _check_blocks(self, scheduler: Scheduler, step: Step) -> None:
        table, counts = step.block_table, scheduler.num_blocks(step)
        assert table.shape == (step.num_requests, self.config.table_width)
        assert table.dtype == np.int32
        owned = [table[row, : counts[row]].tolist() for row in range(step.num_requests)]
        everyone = [block for blocks in owned for block in blocks]
        assert len(everyone) == len(set(everyone)), "a block belongs to two requests"
        assert all(1 <= block < self.config.num_kv_blocks for block in everyone)
        for key, blocks, length in zip(step.keys.tolist(), owned, step.seq_lens.tolist(), strict=True):
            assert len(blocks) * self.config.block_size >= length
            context = length - int(np.diff(step.query_start_loc)[step.keys.tolist().index(key)])
            if key in self.live and context:
                kept = self.live[key].blocks
                assert blocks[: len(kept)] == kept, "a running request lost a block"
        self.owned = dict(zip(step.keys.tolist(), owned, strict=True))

    def _check_request(self, step: Step, position: int, query: int) -> None:
        key = int(step.keys[position])
        request = self.log[key]
        context = int(step.seq_lens[position]) - query
        made = int(step.new_tokens[position])
        known = self.live.get(key)
        if known is None:
            assert context == 0
            assert request.arrival_ms / self.config.load <= step.time_ms
            self.first_seen.append(key)
            generated = 0
        else:
            generated = known.generated
            if context == 0 and known.context > 0:
                self.resumed += 1
            else:
                assert context == known.context
        # What has to be in the cache before a token is sampled: all that is known, its last token included.
        missing = request.input_tokens + generated - context
        left = request.output_tokens - generated
        if position < step.num_decodes:
            assert query == self.config.decode_tokens
            assert missing == 1, "a decode feeds the last token only"
            assert generated >= 1
            assert 1 <= made <= min(query, left)
            gained = made
        else:
            assert query <= missing
            assert made == (min(1, left) if query == missing else 0)
            gained = query
        self.live[key] = _Live(context + gained, generated + made, self.owned[key])
        self.generated[key] = generated + made

    def _check_host_view(self, step: Step) -> None:
        host = step.host_seq_lens
        if step.lengths == "device":
            assert host is None
            return
        assert host is not None
        if step.lengths == "exact":
            assert step.max_rejects == 0
            assert np.array_equal(host, step.seq_lens)
            return
        decodes = step.num_decodes
        assert (host >= step.seq_lens).all()
        assert (host - step.max_rejects <= step.seq_lens).all()
        assert np.array_equal(host[decodes:], step.seq_lens[decodes:])
        # By its definition: every draft of the steps that the host has not seen the outcome of was accepted.
        for position in range(decodes):
            key = step.keys[position]
            rejected = 0
            for earlier in reversed(self.before):
                if key in earlier.keys[earlier.num_decodes :]:
                    break  # a prompt's length is exact, also that of one computed again
                (where,) = np.nonzero(earlier.keys[: earlier.num_decodes] == key)
                rejected += int((self.config.decode_tokens - earlier.new_tokens[where]).sum())
            assert host[position] == step.seq_lens[position] + rejected


def _observe(config: SchedulerConfig, log: list[Request]) -> _Observer:
    """Runs a log to its end and checks every step and what is left behind."""
    scheduler = Scheduler(config, log)
    observer = _Observer(config, log)
    for index, step in enumerate(scheduler):
        assert step.index == index
        assert index < 20_000, "the scheduler does not come to an end"
        observer.check(scheduler, step)
    longest = config.max_model_len
    accepted = [key for key, entry in enumerate(log) if entry.input_tokens + entry.output_tokens <= longest]
    assert observer.first_seen == accepted, "first come first served, and nobody left out"
    assert all(observer.generated[key] == log[key].output_tokens for key in accepted)
    stats = scheduler.stats
    assert stats.refused == len(log) - len(accepted)
    assert stats.admitted == stats.finished == len(accepted)
    assert stats.new_tokens == sum(log[key].output_tokens for key in accepted)
    assert stats.preemptions == observer.resumed
    assert scheduler._pool.num_free == config.num_kv_blocks - 1, "blocks leaked"
    return observer


@given(engines(), logs)
def test_every_step_follows_from_the_ones_before(config: SchedulerConfig, log: list[Request]) -> None:
    _observe(config, log)


def test_steps_follow_where_blocks_and_budget_are_short(rng: np.random.Generator) -> None:
    resumed = 0
    for seed in range(40):
        drafts = int(rng.integers(0, 4))
        config = SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=int(rng.integers(1 + drafts, 30)),
            num_speculative_tokens=drafts,
            acceptance_rate=0.4,
            lengths="bound",
            steps_in_flight=int(rng.integers(1, 4)),
            capture_sizes=(4, 8),
            block_size=2,
            num_kv_blocks=40,
            max_model_len=64,
            seed=seed,
        )
        sizes = zip(rng.integers(1, 20, 20).tolist(), rng.integers(5, 40, 20).tolist(), strict=True)
        resumed += _observe(config, [Request(0.0, inputs, outputs) for inputs, outputs in sizes]).resumed
    assert resumed > 400  # ten a log: what is checked here does happen


@given(engines(), logs)
def test_equal_seeds_give_equal_steps_whatever_the_host_knows(config: SchedulerConfig, log: list[Request]) -> None:
    for other in (config, replace(config, lengths="exact"), replace(config, lengths="device")):
        for left, right in itertools.zip_longest(Scheduler(config, log), Scheduler(other, log)):
            assert left is not None
            assert right is not None
            for name in ("query_start_loc", "seq_lens", "keys", "new_tokens"):
                assert np.array_equal(getattr(left, name), getattr(right, name))
            assert (left.time_ms, left.padded_rows) == (right.time_ms, right.padded_rows)
            assert np.array_equal(left.block_table, right.block_table)


@given(st.integers(0, 1000), st.integers(2, 6))
@example(889, 5)
def test_the_latest_are_put_back_and_they_resume_first(seed: int, requests: int) -> None:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=2,
        num_kv_blocks=34,
        max_model_len=64,
        capture_sizes=(),
    )
    rng = np.random.default_rng(seed)
    log = [Request(0.0, int(rng.integers(1, 20)), int(rng.integers(10, 40))) for _ in range(requests)]
    order: list[int] = []
    preempted: set[int] = set()
    begun: set[int] = set()  # those that have ended among them
    generated = dict.fromkeys(range(requests), 0)
    for step in Scheduler(config, log):
        keys = step.keys.tolist()
        # The budget holds everybody, so who is missing was put back: the end of the order, nobody in between.
        gone = [key for key in order if key not in keys]
        order = [key for key in order if key in keys]
        assert all(key > other for key in gone for other in order)
        preempted |= set(gone)
        new = [key for key in keys if key not in order]
        assert not (gone and new), "a place was given away in the step that took one back"
        waiting = sorted(preempted) + [key for key in range(requests) if key not in begun]
        assert new == waiting[: len(new)]
        preempted -= set(new)
        begun |= set(new)
        order += new
        for key, made in zip(keys, step.new_tokens.tolist(), strict=True):
            generated[key] += made
        order = [key for key in order if generated[key] < log[key].output_tokens]


def test_a_small_pool_does_preempt() -> None:
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=4,
        num_kv_blocks=17,
        max_model_len=60,
        capture_sizes=(),
    )
    scheduler = Scheduler(config, [Request(0.0, 10, 40) for _ in range(6)])
    steps = list(scheduler)
    assert scheduler.stats.preemptions > 0
    assert sum(int(step.new_tokens.sum()) for step in steps) == 6 * 40


def test_freed_blocks_go_to_the_next_request_and_old_entries_stay() -> None:
    config = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=64,
        block_size=4,
        num_kv_blocks=100,
        max_model_len=64,
        capture_sizes=(),
    )
    scheduler = Scheduler(config, [Request(0.0, 40, 1), Request(0.0, 5, 1)])
    first = next(scheduler).block_table[0].copy()
    second = next(scheduler)
    # Last freed first: the head of the old table, and behind it still what the first request had.
    assert second.block_table[0, :2].tolist() == first[:2].tolist()
    assert second.block_table[0, 2:10].tolist() == first[2:10].tolist()
    assert scheduler.num_blocks(second).tolist() == [2]


def test_a_step_outlived_by_the_scheduler_has_no_block_table() -> None:
    scheduler = Scheduler(SchedulerConfig(), generated_log(0, 5))
    old = next(scheduler)
    next(scheduler)
    with pytest.raises(RuntimeError, match="block_table of step 0"):
        _ = old.block_table


def test_a_prompt_longer_than_the_budget_comes_in_chunks_behind_decodes() -> None:
    config = SchedulerConfig(max_num_batched_tokens=8, max_model_len=100, num_kv_blocks=100, block_size=4)
    log = [Request(0.0, 2, 5), Request(0.0, 20, 2)]
    batches = [(np.diff(step.query_start_loc).tolist(), step.seq_lens.tolist()) for step in Scheduler(config, log)]
    # The second prompt: 6 tokens beside the first, 7 and 7 behind its decodes.
    assert batches == [([2, 6], [2, 6]), ([1, 7], [3, 13]), ([1, 7], [4, 20]), ([1, 1], [5, 21]), ([1], [6])]


def test_a_bound_counts_the_drafts_in_flight_as_accepted() -> None:
    config = SchedulerConfig(num_speculative_tokens=3, acceptance_rate=0.0, lengths="bound")
    steps = list(Scheduler(config, [Request(0.0, 10, 4)]))
    assert [step.seq_lens.tolist() for step in steps] == [[10], [14], [15], [16]]
    assert [step.host_seq_lens.tolist() for step in steps if step.host_seq_lens is not None] == [
        [10],
        [14],
        [18],
        [19],
    ]
    assert {step.max_rejects for step in steps} == {3}


def test_drafts_are_accepted_up_to_the_first_that_is_not() -> None:
    config = SchedulerConfig(num_speculative_tokens=2, acceptance_rate=0.5, num_kv_blocks=3000)
    made = np.concatenate(
        [step.new_tokens for step in Scheduler(config, [Request(0.0, 1, 100_000)]) if step.is_pure_decode]
    )
    shares = np.bincount(made, minlength=4) / len(made)
    # A half, a quarter and a quarter; with 57,000 steps the standard error is 0.2 points.
    assert len(made) > 50_000
    assert np.abs(shares - [0.0, 0.5, 0.25, 0.25]).max() < 0.01


def test_drafts_may_pass_the_longest_request() -> None:
    config = SchedulerConfig(num_speculative_tokens=3, max_model_len=200_000, acceptance_rate=0.0)
    assert config.table_width == 3126
    steps = list(Scheduler(config, [Request(0.0, 199_990, 10)]))
    assert steps[-1].seq_lens.max() == 199_999 + 3


def test_idle_time_is_skipped() -> None:
    steps = list(Scheduler(SchedulerConfig(load=2.0), [Request(0.0, 5, 1), Request(1e6, 5, 1)]))
    assert [step.time_ms for step in steps] == [0.0, 5e5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"num_speculative_tokens": 9, "max_num_batched_tokens": 9}, "max_num_batched_tokens is 9"),
        ({"acceptance_rate": 1.5}, "acceptance_rate is 1.5"),
        ({"acceptance_rate": float("nan")}, "acceptance_rate is nan"),
        ({"lengths": "guess"}, "lengths is 'guess'"),
        ({"steps_in_flight": 0}, "steps_in_flight is 0"),
        ({"capture_sizes": (4, 0)}, r"capture_sizes\[1\] is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_kv_blocks": 10}, "num_kv_blocks is 10"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"step_ms": 0.0}, "step_ms is 0.0"),
        ({"load": float("inf")}, "load is inf"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_a_wrong_limit_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**change)  # type: ignore[arg-type]


def test_memory_does_not_grow_over_steps() -> None:
    scheduler = Scheduler(SchedulerConfig(num_speculative_tokens=2, lengths="bound", max_num_seqs=32), generated_log(1))
    tracemalloc.start()
    try:
        _exhaust(itertools.islice(scheduler, 500))
        before, _ = tracemalloc.get_traced_memory()
        _exhaust(itertools.islice(scheduler, 4000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Two stretches end in different batches; a request kept per step would be hundreds of kilobytes.
    assert after - before < 32_768


def _exhaust(steps: Iterator[Step]) -> None:
    for _ in steps:
        pass


def _shares(log: Iterator[Request], **change: object) -> tuple[float, float, float]:
    """Mean running requests, shares of pure decodes and of steps with nothing to do, over 6,000 steps."""
    scheduler = Scheduler(SchedulerConfig(**change), log)  # type: ignore[arg-type]
    before: Step | None = None
    running = pure = nothing = steps = 0
    for step in itertools.islice(scheduler, 6000):
        steps += 1
        running += step.num_requests
        pure += step.is_pure_decode
        nothing += rows_unchanged(before, step, topk=2048)
        before = step
    assert steps == 6000
    return running / steps, pure / steps, nothing / steps


@pytest.mark.parametrize(
    ("name", "load", "seqs", "running", "pure", "nothing"),
    [
        ("mooncake_conversation", 1.0, 1, (1.0, 1.0), (0.99, 0.99), (0.95, 0.95)),
        ("mooncake_conversation", 0.2, 8, (6.1, 6.1), (0.97, 0.97), (0.51, 0.56)),
        ("mooncake_conversation", 0.2, 256, (6.1, 6.1), (0.97, 0.97), (0.51, 0.56)),
        ("mooncake_conversation", 1.0, 8, (8.0, 8.0), (0.95, 0.95), (0.31, 0.31)),
        ("mooncake_conversation", 1.0, 256, (32.0, 32.0), (0.84, 0.84), (0.03, 0.03)),
        ("azure_conv_2023", 1.0, 1, (1.0, 3.6), (0.98, 0.99), (0.03, 0.08)),
        ("azure_conv_2023", 0.2, 256, (1.0, 3.6), (0.98, 0.99), (0.03, 0.08)),
        ("azure_conv_2023", 1.0, 8, (8.0, 34.0), (0.88, 0.97), (0.0, 0.0)),
        ("azure_conv_2023", 1.0, 256, (8.0, 34.0), (0.88, 0.97), (0.0, 0.0)),
    ],
)
def test_real_logs_give_the_shares_that_were_measured(
    shared: Path,
    name: str,
    load: float,
    seqs: int,
    running: tuple[float, float],
    pure: tuple[float, float],
    nothing: tuple[float, float],
) -> None:
    """The table "What real traffic looks like" of `../shared`, made by another simulation over the same logs.

    Its figures are rounded to whole percents, and the two simulations differ in when exactly a request is
    admitted within a step: one that comes or goes a step later changes a few steps of 6,000. One percentage
    point covers both; the mean of running requests gets 5%.
    """
    found = _shares(read_log(shared / "data" / f"{name}.csv"), load=load, max_num_seqs=seqs)
    assert running[0] * 0.95 <= found[0] <= running[1] * 1.05
    assert pure[0] - 0.01 <= found[1] <= pure[1] + 0.01
    assert nothing[0] - 0.01 <= found[2] <= nothing[1] + 0.01
