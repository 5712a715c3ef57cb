"""A planner with the aiter backend on one fake release, and inputs and results to compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fake_aiter import FP8, RELEASES, FakeAiter
from mlaplan import Batch, Exact, Plan, Planner, PlannerConfig
from mlaplan.backends.aiter import AiterBackend
from mlaplan.reference.attention import attention
from torch_host import TorchHostDevice

NUM_CUS, TOPK, NUM_SLOTS, MAX_ROWS = 40, 120, 200, 48
TOO_OLD = "0.1.7.post2.dev18"
MAIN = next(version for version in RELEASES if version.startswith("0.1.21"))
JULY_13 = next(version for version in RELEASES if "dev280" in version)
SUPPORTED = [version for version in RELEASES if version != TOO_OLD]
UNTOUCHED = 77.0


@dataclass
class Rig:
    """One planner and what it calls."""

    fake: FakeAiter
    planner: Planner
    backend: AiterBackend

    @property
    def config(self) -> PlannerConfig:
        return self.planner.config


def make_fake(version: str, arch: str, pair: tuple[str, str], num_cus: int = NUM_CUS) -> FakeAiter:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8[arch]}
    return FakeAiter(RELEASES[version], arch, num_cus, dtypes[pair[0]], dtypes[pair[1]])


def make_config(arch: str, heads: int, pair: tuple[str, str], /, **settings: Any) -> PlannerConfig:
    values: dict[str, Any] = {
        "max_rows": MAX_ROWS,
        "max_requests": MAX_ROWS,
        "topk": TOPK,
        "num_cus": NUM_CUS,
        "split_budget": -1,
    }
    values |= {"arch": arch, "heads": heads, "q_dtype": pair[0], "kv_dtype": pair[1], "backend": "aiter"}
    return PlannerConfig(**(values | settings))


def make_rig(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    arch: str,
    heads: int,
    pair: tuple[str, str],
    *,
    fake: FakeAiter | None = None,
    **settings: Any,
) -> Rig:
    fake = fake or make_fake(version, arch, pair)
    fake.install(monkeypatch)
    planner = Planner(make_config(arch, heads, pair, **settings), device=TorchHostDevice())
    assert isinstance(planner.backend, AiterBackend)
    return Rig(fake, planner, planner.backend)


def make_batch(
    lengths: list[int], *, padded: int | None = None, host_knows: bool = True, device_lengths: list[int] | None = None
) -> Batch:
    """A batch of single-token requests."""
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    values = np.array(lengths, np.int32)
    return Batch(
        starts,
        Exact(values) if host_knows else None,
        padded_rows=padded,
        device_query_start_loc=torch.from_numpy(starts.copy()),
        device_seq_lens=torch.tensor(device_lengths or lengths, dtype=torch.int32),
    )


def random_lengths(rng: np.random.Generator, rows: int) -> list[int]:
    lengths: list[int] = rng.choice([1, 15, 16, 17, 70, TOPK, TOPK + 1], rows).tolist()
    return lengths


def make_inputs(rng: np.random.Generator, rig: Rig, rows: int) -> dict[str, Any]:
    fake, fp8 = rig.fake, FP8[rig.fake.arch]
    scales = ((fake.q_dtype, 0.75), (fake.kv_dtype, 1.25))
    return {
        "q": torch.from_numpy(rng.standard_normal((rows, rig.config.heads, 576)) * 2).to(fake.q_dtype),
        "kv_cache": torch.from_numpy(rng.standard_normal((NUM_SLOTS, 576))).to(fake.kv_dtype),
        "kv_indices": torch.from_numpy(rng.integers(0, NUM_SLOTS, MAX_ROWS * TOPK).astype(np.int32)),
        "scale": 0.05,
        "fp8_scales": tuple(torch.tensor([value]) if dtype == fp8 else None for dtype, value in scales),
    }


def attend(given: dict[str, Any], lengths: list[int]) -> tuple[Any, Any]:
    """Attention of every row from the definition; rows behind `lengths` have no tokens."""
    factors = [1.0 if factor is None else float(factor) for factor in given["fp8_scales"]]
    q = given["q"].double().numpy() * factors[0]
    kv = given["kv_cache"].double().numpy() * factors[1]
    clamped = np.minimum([*lengths, *[0] * (q.shape[0] - len(lengths))], TOPK)
    indptr = np.concatenate([[0], np.cumsum(clamped)]).astype(np.int32)
    return attention(q, kv, given["kv_indices"].numpy(), indptr, given["scale"], 512)


def check_decode(rng: np.random.Generator, rig: Rig, plan: Plan, lengths: list[int], *, lse: bool = False) -> None:
    """Decodes by the plan and compares every row with the definition."""
    given = make_inputs(rng, rig, plan.padded_rows)
    out = torch.full((plan.padded_rows, rig.config.heads, 512), UNTOUCHED, dtype=torch.bfloat16)
    made = torch.full((plan.padded_rows, rig.config.heads), UNTOUCHED) if lse else None
    rig.backend.decode(plan, **given, out=out, lse=made)
    want, want_lse = attend(given, lengths)
    # bf16 keeps 8 bits; everything else here is double.
    np.testing.assert_allclose(out.double().numpy(), want, rtol=2**-8, atol=2**-12)
    if made is not None:
        np.testing.assert_allclose(made.double().numpy(), want_lse, rtol=1e-6, atol=1e-6)


def with_rules(fake: FakeAiter, rules: tuple[int, int]) -> FakeAiter:
    """The same release with another's head rules, as a build between releases may have."""
    return replace(fake, release=replace(fake.release, rules=rules), calls=[])
