"""The policies through the planner: one schedule whoever makes it, the same attention, and bits of one row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlaplan
from mlaplan import _core
from mlaplan.costs import DEFAULT, CostTable
from mlaplan.reference.attention import attention
from mlaplan.reference.plan import schedule, split_budget
from planning import assert_holds, batch, planner
from policy_cases import BF16_16, TABLES, lengths, parameters, table_of, tables

COSTS = CostTable(block_tokens=16, block=3, piece=7, whole=9, slot=2, merge=1, cut=11)
POLICIES: dict[str, dict[str, Any]] = {
    "aiter": {},
    "balanced": {"policy": "balanced", "cost_table": COSTS},
    "balanced folded": {"policy": "balanced", "cost_table": COSTS, "fold": 2},
    "balanced no budget": {"policy": "balanced", "cost_table": COSTS, "split_budget": -1},
    "balanced on few slots": {"policy": "balanced", "cost_table": COSTS, "split_budget": 2, "num_cus": 3},
    "invariant": {"policy": "invariant", "cost_table": COSTS, "piece_tokens": 40},
    "invariant folded": {"policy": "invariant", "cost_table": COSTS, "piece_tokens": 16, "fold": 2},
}


@given(
    lengths(rows=60), tables(200), st.sampled_from([1, 2, 7, 20, 132, 304]), st.sampled_from([None, -1, 1, 3, 16]),
    st.sampled_from([1, 1, 2, 8]), st.sampled_from(["balanced", "invariant"]), st.sampled_from([64, 100, 256, 9999]),
)  # fmt: skip
def test_the_core_makes_the_schedule_of_the_reference(
    rows: list[int], table: CostTable, num_cus: int, budget: int | None, fold: int, policy: str, piece_tokens: int
) -> None:
    params = parameters(policy, table, num_cus=num_cus, split_budget=budget, fold=fold, piece_tokens=piece_tokens)
    wanted = schedule(np.array(rows, np.int64), params)
    if policy == "balanced" and budget is None:
        budget = _core.split_budget(max(rows, default=0), cost_table=table.fields, num_cus=num_cus)
        assert budget == split_budget(max(rows, default=0), params)
    made = mlaplan.schedule(
        _core.kv_indptr(np.array(rows, np.int32)), num_cus=num_cus, max_split_per_batch=budget or -1, fold=fold,
        policy=policy, cost_table=table.fields, piece_tokens=piece_tokens,
    )  # fmt: skip
    for name in ("work_indptr", "work_info", "reduce_indptr", "reduce_partial_map"):
        np.testing.assert_array_equal(getattr(made, name), getattr(wanted, name), err_msg=name)
    assert made.is_safe


@given(st.lists(st.integers(1, 130), min_size=1, max_size=30), tables(40), st.sampled_from([2, 7, 304]))
def test_the_core_follows_where_tables_are_odd(rows: list[int], table: CostTable, num_cus: int) -> None:
    """Rows of one block and a little more, which is where the smallest capacities and aiter's cuts meet."""
    for odd in (
        table,
        table_of((64, 3, 1, 40, 0, 0, 2)),
        table_of((64, 3, 43, 40, 0, 0, 1)),
        table_of((100, 1, 0, 9, 0, 0, 0)),
    ):
        params = parameters("balanced", odd, num_cus=num_cus, split_budget=-1)
        wanted = schedule(np.array(rows, np.int64), params)
        made = mlaplan.schedule(
            _core.kv_indptr(np.array(rows, np.int32)), num_cus=num_cus, policy="balanced", cost_table=odd.fields
        )
        np.testing.assert_array_equal(made.work_info, wanted.work_info)
        np.testing.assert_array_equal(made.work_indptr, wanted.work_indptr)


@pytest.mark.parametrize("name", POLICIES)
def test_copy_launch_and_refresh_leave_one_plan(name: str, rng: np.random.Generator) -> None:
    """The host's copy is Rust's, a launch and a refresh are the reference's."""
    ways = {"copy": planner(topk=300, **POLICIES[name]), "launch": planner(topk=300, **POLICIES[name]),
            "deferred": planner(topk=300, **POLICIES[name])}  # fmt: skip
    for _step in range(150):
        requests = int(rng.integers(0, 16))
        query_lens = rng.choice([1, 1, 1, 4], requests).tolist()
        seq_lens = [int(q + rng.choice([0, 30, 300, 4000, int(rng.integers(0, 400))])) for q in query_lens]
        for way, made in ways.items():
            unknown: dict[str, Any] = {"lengths": None} if way == "launch" else {}
            plan = made.plan(
                batch(query_lens, seq_lens, on_device=way != "copy", **unknown), deferred=way == "deferred"
            )
            assert plan.decision.action in (way, "nothing") or not requests
            made.refresh(plan) if way == "deferred" else None
            assert_holds(plan, query_lens, seq_lens)


@pytest.mark.parametrize("name", POLICIES)
def test_decode_is_dense_attention(name: str, rng: np.random.Generator) -> None:
    heads, depth, v_dim, topk, pool = 4, 12, 8, 300, 700
    made = planner(heads=heads, head_dim=depth, v_head_dim=v_dim, topk=topk, **POLICIES[name])
    kv_cache = rng.standard_normal((pool, depth))
    cut = 0
    for _step in range(12):
        requests = int(rng.integers(1, 12))
        query_lens = rng.choice([1, 1, 3], requests).tolist()
        seq_lens = [int(q + rng.choice([0, 15, 16, 17, 500, int(rng.integers(0, 310))])) for q in query_lens]
        rows = sum(query_lens)
        plan = made.plan(batch(query_lens, seq_lens, rows + 2))
        q = rng.standard_normal((rows + 2, heads, depth))
        indices = rng.integers(0, pool, 64 * topk).astype(np.int32)
        out, lse = made.backend.decode(plan, q, kv_cache, indices, scale=0.7)
        cut += int(plan.arrays.reduce_indptr[-1] > 0)
        want, want_lse = attention(q, kv_cache, indices, plan.kv_indptr, 0.7, v_dim)
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)
    assert cut > 0, "no row was cut: the test says nothing about pieces"


def outputs_of_one_row(settings: dict[str, Any], rng: np.random.Generator) -> set[bytes]:
    """Output and LSE of a row of 290 tokens among neighbours of every kind, as bits."""
    made = planner(heads=4, head_dim=12, v_head_dim=8, topk=300, max_rows=24, max_requests=24, num_cus=20, **settings)
    kv_cache = rng.standard_normal((700, 12))
    row_q, row_slots = rng.standard_normal((4, 12)), rng.integers(0, 700, 290).astype(np.int32)
    seen = set()
    for neighbours in range(16):
        before = rng.choice([1, 17, 120, 300], int(rng.integers(0, neighbours + 1))).tolist()
        behind = rng.choice([1, 17, 120, 300], int(rng.integers(0, 20 - len(before)))).tolist()
        seq_lens = [*before, 290, *behind]
        plan = made.plan(batch([1] * len(seq_lens), seq_lens, int(rng.integers(len(seq_lens), 25))))
        q = rng.standard_normal((plan.padded_rows, 4, 12))
        q[len(before)] = row_q
        indices = rng.integers(0, 700, 24 * 300).astype(np.int32)
        first = sum(before)
        indices[first : first + 290] = row_slots
        out, lse = made.backend.decode(plan, q, kv_cache, indices, scale=0.7)
        seen.add(out[len(before)].tobytes() + lse[len(before)].tobytes())
    return seen


def test_bits_of_an_invariant_row_depend_on_it_alone(rng: np.random.Generator) -> None:
    for settings in ({"piece_tokens": 40}, {"piece_tokens": 290}, {"piece_tokens": 64, "fold": 2}):
        assert len(outputs_of_one_row({"policy": "invariant", "cost_table": COSTS, **settings}, rng)) == 1


def test_bits_of_a_row_depend_on_its_neighbours_under_the_other_policies(rng: np.random.Generator) -> None:
    assert len(outputs_of_one_row({}, rng)) > 1
    assert len(outputs_of_one_row({"policy": "balanced", "cost_table": COSTS}, rng)) > 1


def test_a_policy_without_a_table_takes_the_one_of_its_kernel(caplog: pytest.LogCaptureFixture) -> None:
    counted = planner(policy="balanced", arch="gfx942", heads=16).params.cost_table
    assert counted == CostTable.named("bf16 16")
    # 64 heads are four planner rows of 16 there.
    assert planner(policy="balanced", arch="gfx942", heads=64).params.cost_table == counted
    fp8 = planner(policy="balanced", arch="gfx942", heads=128, q_dtype="fp8", kv_dtype="fp8").params.cost_table
    assert fp8 == CostTable.named("gfx942 fp8 128")
    assert planner(policy="invariant", arch="gfx942", heads=16).params.cost_table == counted
    assert planner(arch="gfx942").params.cost_table is None
    assert not caplog.records
    with caplog.at_level("WARNING", "mlaplan"):
        assert planner(policy="balanced", heads=6).params.cost_table == DEFAULT
        planner(policy="balanced", heads=6)
    (record,) = caplog.records
    assert "6 heads" in record.getMessage()
    assert "cost_table" in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"policy": "fair"}, ValueError, "policy is 'fair', known are 'aiter', 'balanced', 'invariant'"),
        ({"cost_table": (16, 1, 1, 1, 1, 1)}, TypeError, "cost_table must be a mlaplan.CostTable or None, not tuple"),
        ({"cost_table": CostTable.named("aiter").core}, TypeError, "cost_table must be a mlaplan.CostTable"),
        ({"policy": "invariant", "split_budget": 4}, ValueError, "split_budget is 4, but policy 'invariant'"),
        ({"piece_tokens": 0}, ValueError, "piece_tokens is 0, must be at least 1"),
        ({"piece_tokens": 2.5}, TypeError, "piece_tokens must be a whole number, not float"),
        (
            {"policy": "balanced", "backend": "aiter", "schedule_maker": "aiter", "arch": "gfx942", "heads": 16},
            ValueError, "schedule_maker is 'aiter', but policy is 'balanced'",
        ),
        (
            {"policy": "invariant", "piece_tokens": 1, "max_rows": 1 << 18, "topk": 2048},
            mlaplan.PlanError, "piece_tokens is 1, which cuts 262144 planner rows into 536870912 works",
        ),
        (
            {"policy": "balanced", "cost_table": table_of((1, 1 << 24, 0, 0, 0, 0, 0)), "topk": 2048, "max_rows": 256},
            mlaplan.PlanError, r"cost_table lets a slot cost \d+, must stay below 1073741824",
        ),
        (
            {"policy": "invariant", "cost_table": table_of((1, 1 << 24, 0, 0, 0, 0, 0)), "topk": 2048,
             "max_rows": 1 << 18, "num_cus": 1 << 16},
            mlaplan.PlanError, r"cost_table lets 2097152 works cost \d+, must stay below",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        planner(**settings)


def test_the_same_costs_in_a_larger_unit_are_accepted() -> None:
    small: dict[str, Any] = {"policy": "balanced", "topk": 2048, "max_rows": 256, "heads": 16, "num_cus": 1}
    with pytest.raises(mlaplan.PlanError, match="32 bits"):
        planner(cost_table=CostTable(block_tokens=16, block=1 << 20, piece=1 << 20, whole=1 << 20), **small)
    table = CostTable(block_tokens=16, block=1 << 10, piece=1 << 10, whole=1 << 10)
    assert planner(cost_table=table, **small).params.cost_table == table


def test_settings_keep_the_table_they_were_given() -> None:
    for table in TABLES:
        made = planner(policy="balanced", cost_table=table, arch="gfx942", heads=16)
        assert made.params.cost_table == made.config.cost_table == table
    assert planner(policy="balanced", cost_table=BF16_16).params.split_budget is None
