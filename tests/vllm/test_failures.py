"""Failures inside the adapter: a launch, a decode or the builder's own base raises, and the next step is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiter.mla
import batches
import engines
import numpy as np
import pytest
from engines import OURS, STOCK, Engine, Inputs, Sizes, Step
from rocm_stand_ins import AITER

from mlaplan.vllm import builder as ours_module

SIZES = Sizes(layers=2, drafts=2, max_rows=18, max_reqs=6, capture_sizes=(3, 6, 12, 18))


class BrokenError(RuntimeError):
    """What the runtime raises."""


def breaking(call: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    """The call, which raises in front of what it does or behind it."""

    def broken(*arguments: Any, **keywords: Any) -> Any:
        if not before:
            call(*arguments, **keywords)
        raise BrokenError

    return broken


def make() -> tuple[Engine, Engine, Inputs, np.random.Generator]:
    rng = np.random.default_rng(5)
    inputs = Inputs(SIZES, rng)
    return Engine(OURS, SIZES, inputs), Engine(STOCK, SIZES, inputs), inputs, rng


def assert_right(ours: Engine, theirs: Engine, given: dict[str, Any], rows: int) -> None:
    """Builds and runs a step; the plan is one from nothing and the metadata is the stock builder's."""
    found = ours.build(given)
    ours.forward(found, rows)
    if rows:
        engines.assert_made(found, ours, reqs=given["num_reqs"], visible=rows)
    wanted = theirs.build(given)
    engines.assert_same_fields(wanted, found)
    engines.assert_same_rows(wanted, found, theirs.builder, rows)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("what", ["plan", "check", "decode", "base"])
def test_a_step_that_failed_leaves_the_next_ones_right(
    monkeypatch: pytest.MonkeyPatch, what: str, before: bool
) -> None:
    ours, theirs, inputs, rng = make()
    device = ours.planner.device
    places: dict[str, tuple[Any, str]] = {
        "plan": (device, "plan"),
        "check": (device, "check"),
        "decode": (aiter.mla, "mla_decode_fwd"),
        "base": (ours_module, "_build_unplanned"),
    }
    place, name = places[what]
    failed = 0
    for turn in range(9):
        step = batches.random_step(rng, SIZES, str(rng.choice(["spec", "mixed", "ragged spec"])))
        given = inputs.write(step)
        if turn % 3 == 1:
            with monkeypatch.context() as patch:
                patch.setattr(place, name, breaking(getattr(place, name), before=before))
                with pytest.raises(BrokenError):
                    ours.forward(ours.build(given), step.rows)
            failed += 1
            if rng.random() < 0.5:  # the engine may run the step again, or go on with another
                continue
        assert_right(ours, theirs, given, step.rows)
    assert failed == 3


def test_layers_after_a_failed_one_make_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, inputs, _ = make()
    step = Step(query_lens=[3, 1], seq_lens=[70, 300])
    metadata = ours.build(inputs.write(step))
    with monkeypatch.context() as patch:
        patch.setattr(ours.planner.device, "plan", breaking(ours.planner.device.plan, before=True))
        with pytest.raises(BrokenError):
            ours.forward(metadata, step.rows)
    ours.forward(metadata, step.rows)
    engines.assert_made(metadata, ours, reqs=2, visible=step.rows)


def test_a_capture_that_is_abandoned_leaves_captures_and_steps_right(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, inputs, _ = make()
    queries = Step(query_lens=[3, 3], seq_lens=[3, 3], max_seq_len=SIZES.max_len, capture=True)
    metadata = ours.build(inputs.write(queries))
    with monkeypatch.context() as patch:
        patch.setattr(aiter.mla, "mla_decode_fwd", breaking(AITER._decode, before=True))
        with pytest.raises(BrokenError), ours.planner.device.record():
            ours.forward(metadata, 6)
    eager = Step(query_lens=[1, 2], seq_lens=[50, 400])
    assert_right(ours, theirs, inputs.write(eager), eager.rows)
    # The metadata of the abandoned capture is captured again, and the graph makes the plan of whatever comes.
    given = inputs.write(queries)
    metadata = ours.build(given)
    with ours.planner.device.record() as graph:
        ours.forward(metadata, 6)
    assert len(graph.ops) == 1
    step = Step(query_lens=[2, 3], seq_lens=[90, 700], padded_reqs=2, padded_rows=6)
    given = inputs.write(step)
    found = ours.build(given)
    graph.replay()
    engines.assert_made(found, ours, reqs=2, visible=6)
