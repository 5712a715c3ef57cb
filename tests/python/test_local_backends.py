"""Backends that run the device's own ops: their plumbing, on the reference ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlaplan import Batch, Exact, Planner, PlannerConfig
from mlaplan.backends import UnsupportedError, make_backend
from mlaplan.backends.portable import PortableBackend
from mlaplan.device import HostDevice
from mlaplan.reference.attention import attention

TOPK, NUM_SLOTS = 200, 300


class PortableHost(HostDevice):
    """The host where a GPU would be."""

    backend = "portable"


def make_config(**settings: Any) -> PlannerConfig:
    values: dict[str, Any] = {"max_rows": 20, "max_requests": 20, "topk": TOPK, "num_cus": 24, "split_budget": -1}
    return PlannerConfig(**(values | {"heads": 32, "head_dim": 24, "v_head_dim": 16} | settings))


@pytest.mark.parametrize("device", [HostDevice, PortableHost])
@pytest.mark.parametrize("fold", [1, 2])
def test_decode_is_attention_whatever_was_decoded_before(
    rng: np.random.Generator, device: type[HostDevice], fold: int
) -> None:
    planner = Planner(make_config(fold=fold), device=device())
    assert planner.backend.name == device.backend
    for rows, padded in ((3, 5), (20, 20), (1, 1), (0, 4), (7, 20)):
        lengths = rng.choice([1, 16, 130, TOPK, TOPK + 9], rows).astype(np.int32)
        plan = planner.plan(Batch(np.arange(rows + 1, dtype=np.int32), Exact(lengths), padded_rows=padded))
        q = rng.standard_normal((padded, 32, 24)).astype(np.float32)
        kv_cache = rng.standard_normal((NUM_SLOTS, 24)).astype(np.float32)
        kv_indices = rng.integers(0, NUM_SLOTS, 20 * TOPK).astype(np.int32)
        out, lse = planner.backend.decode(plan, q, kv_cache, kv_indices, scale=0.3)
        clamped = np.minimum([*lengths, *[0] * (padded - rows)], TOPK)
        indptr = np.concatenate([[0], np.cumsum(clamped)]).astype(np.int32)
        want, want_lse = attention(q, kv_cache, kv_indices, indptr, 0.3, 16)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


def test_results_land_where_they_are_wanted(rng: np.random.Generator) -> None:
    planner = Planner(make_config(), device=HostDevice())
    plan = planner.plan(Batch(np.arange(3, dtype=np.int32), Exact(np.array([5, 9], np.int32))))
    given = (
        rng.standard_normal((2, 32, 24)).astype(np.float32),
        rng.standard_normal((NUM_SLOTS, 24)).astype(np.float32),
        rng.integers(0, NUM_SLOTS, 20 * TOPK).astype(np.int32),
    )
    out, lse = np.full((2, 32, 16), np.nan, np.float32), np.full((2, 32), np.nan, np.float32)
    made, made_lse = planner.backend.decode(plan, *given, scale=1.0, out=out, lse=lse)
    assert made is out
    assert made_lse is lse
    fresh, fresh_lse = planner.backend.decode(plan, *given, scale=1.0)
    np.testing.assert_array_equal(fresh.astype(np.float32), out)
    np.testing.assert_array_equal(fresh_lse.astype(np.float32), lse)


def test_what_the_ops_cannot_do_is_refused(rng: np.random.Generator) -> None:
    with pytest.raises(UnsupportedError, match="q_dtype is 'fp8'"):
        make_backend(make_config(q_dtype="fp8", kv_dtype="fp8").resolved(24), PortableHost())
    with pytest.raises(UnsupportedError, match="heads is 32, must be a multiple of the fold, 3"):
        make_backend(make_config(fold=3).resolved(24), HostDevice())
    with pytest.raises(UnsupportedError, match="'reference' does not run on"):
        make_backend(make_config(backend="reference").resolved(24), PortableHost())
    planner = Planner(make_config(), device=PortableHost())
    plan = planner.plan(Batch(np.arange(2, dtype=np.int32), Exact(np.array([5], np.int32))))
    given = (rng.random((1, 32, 24)), rng.random((NUM_SLOTS, 24)), np.zeros(TOPK, np.int32))
    for scales, message in (
        ((np.ones(1), 1.0), "factor of queries"),
        ((None, np.ones(1)), "must be a number"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            planner.backend.decode(plan, *given, scale=1.0, fp8_scales=scales)
    with pytest.raises(UnsupportedError, match="makes no schedules"):
        planner.backend.make_schedule(plan)
    assert isinstance(planner.backend, PortableBackend)
    assert planner.backend.describe()["fold"] == planner.config.fold
