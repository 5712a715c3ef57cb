"""The policies on the aiter backend: aiter's kernels follow any schedule, and its limits are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the aiter backend was not checked")

from aiter_rig import MAIN, SUPPORTED, TOPK, check_decode, make_batch, make_rig, random_lengths
from mlaplan.backends import UnsupportedError
from mlaplan.costs import DEFAULT, CostTable

BF16, FP8 = ("bf16", "bf16"), ("fp8", "fp8")
POLICIES: list[dict[str, Any]] = [
    {"policy": "balanced", "split_budget": None},
    {"policy": "balanced", "split_budget": -1},
    # The table chooses far more pieces than the rule of work per split would.
    {"policy": "balanced", "split_budget": None, "min_tokens_per_split": 4096,
     "cost_table": CostTable(block_tokens=16, block=9, piece=1, whole=1)},
    {"policy": "invariant", "split_budget": None, "piece_tokens": 16},
    {"policy": "invariant", "split_budget": None, "piece_tokens": 50},
    {"policy": "invariant", "split_budget": None, "piece_tokens": TOPK},
]  # fmt: skip


@pytest.mark.parametrize(("version", "maker"), [(SUPPORTED[0], "device"), (MAIN, "core")])
@pytest.mark.parametrize(("heads", "pair"), [(16, BF16), (64, BF16), (128, FP8)])
def test_aiter_decodes_what_a_policy_makes(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, heads: int, pair: Any, version: str, maker: str
) -> None:
    for settings in POLICIES:
        rig = make_rig(monkeypatch, version, "gfx942", heads, pair, schedule_maker=maker, **settings)
        for rows, padded in ((1, None), (3, 5)):
            lengths = random_lengths(rng, rows) if rows > 1 else [TOPK]
            check_decode(rng, rig, rig.planner.plan(make_batch(lengths, padded=padded)), lengths)


def test_aiter_gets_its_own_kernels_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for heads, pair, name in ((16, BF16, "bf16 16"), (64, BF16, "bf16 16"), (128, FP8, "gfx942 fp8 128")):
        rig = make_rig(monkeypatch, MAIN, "gfx942", heads, pair, policy="balanced", split_budget=None)
        assert rig.config.cost_table == CostTable.named(name)
        assert rig.planner.params.cost_table == CostTable.named(name)


def test_pieces_that_aiter_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**settings: Any) -> Any:
        merged = {"policy": "invariant", "split_budget": None, "cost_table": DEFAULT, **settings}
        return make_rig(monkeypatch, MAIN, merged.pop("arch", "gfx942"), 16, BF16, **merged)

    make(piece_tokens=3)
    with pytest.raises(UnsupportedError, match=r"piece_tokens is 2, so a row has up to 60 pieces.* holds 40 of a row"):
        make(piece_tokens=2)
    # 131,072 partial outputs of 16 heads are 4 GiB, which 32-bit offsets on gfx942 do not reach beyond.
    monkeypatch.setattr("mlaplan.device.host.HostDevice.staging", lambda *_args: None)
    make(piece_tokens=60, max_rows=65_000)
    with pytest.raises(UnsupportedError, match="needs 132000 partial outputs, but 32-bit offsets reach 131071"):
        make(piece_tokens=60, max_rows=66_000)
    make(piece_tokens=60, max_rows=66_000, arch="gfx950")
    make(piece_tokens=TOPK, max_rows=66_000)
