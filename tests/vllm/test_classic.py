"""The mode `classic`: a plan is taken over only where aiter's planner would be given the same again."""

from __future__ import annotations

from typing import Any

import batches
import engines
import numpy as np
import pytest
from engines import OURS, STOCK, Engine, Inputs, Sizes, Step
from rocm_stand_ins import AITER


@pytest.fixture(autouse=True)
def _classic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPLAN_MODE", "classic")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sizes", [Sizes(drafts=2), Sizes(dense_prefill=True), Sizes(cache_dtype="fp8")])
def test_no_call_means_the_same_call(sizes: Sizes) -> None:
    rng = np.random.default_rng(11)
    inputs = Inputs(sizes, rng)
    theirs, ours = Engine(STOCK, sizes, inputs), Engine(OURS, sizes, inputs)
    last: dict[str, Any] = {}
    calls = skipped = 0
    step = batches.random_step(rng, sizes, "spec")
    for _ in range(60):
        again = rng.random()
        if again < 0.6 and step.kind in ("decode", "spec", "next"):
            step = batches.next_step(rng, sizes, step)
        elif again > 0.8:
            step = batches.random_step(rng, sizes)
        if step.capture:
            step.max_seq_len = None  # a loose bound gives the stock call another budget
        given = inputs.write(step)
        theirs.builder._prev_metadata_key = None
        AITER.plans.clear()
        theirs.build(given)
        wanted = AITER.plans[-1] if AITER.plans else None
        AITER.plans.clear()
        waits = AITER.waits
        metadata = ours.build(given)
        if metadata.plan is None or wanted is None:
            continue
        if AITER.plans:
            last = AITER.plans[-1]
            calls += 1
            assert AITER.waits == waits + 1
        else:
            skipped += 1
            assert AITER.waits == waits
        if engines.padding_is_planned(theirs.builder):
            # Until 0.31: padding rows are planned, and aiter is told no dtypes, so that it plans for bf16.
            for name, entries in (("qo_indptr", 1), ("kv_indptr", 1), ("kv_last_page_lens", 0)):
                wanted[name] = wanted[name][: step.rows + entries]
            wanted["dtypes"] = last["dtypes"]
        assert last == wanted
    assert calls > 5
    assert skipped > 5


def test_saturated_requests_are_planned_once() -> None:
    # vllm#54369: eight requests far above topk, three steps of them.
    sizes = Sizes(topk=2048, max_len=32768, max_reqs=8, max_rows=16)
    inputs = Inputs(sizes, np.random.default_rng(0))
    ours = Engine(OURS, sizes, inputs)
    for grown in range(3):
        ours.build(inputs.write(Step(query_lens=[1] * 8, seq_lens=[16384 + grown] * 8)))
    assert len(AITER.plans) == 1
    assert AITER.plans[0]["kv_indptr"] == [2048 * row for row in range(9)]


def test_prompt_chunks_of_one_clamped_length_are_told_apart() -> None:
    # vllm#47042: chunks of 4 tokens with topk 4; both requests have min(seq_len, topk) = 4.
    sizes = Sizes(topk=4, max_len=64)
    inputs = Inputs(sizes, np.random.default_rng(0))
    ours = Engine(OURS, sizes, inputs)
    for seq_len in (4, 8):
        ours.build(inputs.write(Step(query_lens=[4], seq_lens=[seq_len], prefilling=[True])))
    assert [call["kv_indptr"] for call in AITER.plans] == [[0, 1, 3, 6, 10], [0, 4, 8, 12, 16]]


def test_always_rebuild_calls_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPLAN_ALWAYS_REBUILD", "1")
    sizes = Sizes()
    inputs = Inputs(sizes, np.random.default_rng(0))
    ours = Engine(OURS, sizes, inputs)
    given = inputs.write(Step(query_lens=[1, 1], seq_lens=[500, 600]))
    for _ in range(3):
        ours.build(given)
    assert len(AITER.plans) == 3


def test_waking_up_forgets_the_plan() -> None:
    from mlaplan import vllm as plugin

    sizes = Sizes()
    inputs = Inputs(sizes, np.random.default_rng(0))
    ours = Engine(OURS, sizes, inputs)
    given = inputs.write(Step(query_lens=[1, 1], seq_lens=[500, 600]))
    ours.build(given)
    ours.build(given)
    assert len(AITER.plans) == 1
    assert plugin.invalidate() >= 1
    ours.build(given)
    assert len(AITER.plans) == 2


def test_idle_dummy_request_gets_no_empty_work() -> None:
    sizes = Sizes()
    inputs = Inputs(sizes, np.random.default_rng(0))
    ours = Engine(OURS, sizes, inputs)
    metadata = ours.build(inputs.write(Step(query_lens=[1, 1, 1], seq_lens=[0, 70, 0])))
    assert AITER.plans == []
    assert AITER.waits == 1
    works = int(metadata.work_indptr[-1])
    assert metadata.work_info_set[:works, 0].tolist() == [1] * works
    assert metadata.paged_kv_indptr.tolist() == [0, 0, 70, 70]
