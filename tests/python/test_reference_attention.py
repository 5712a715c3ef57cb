"""The reference `slots`, `decode` and `merge`, against loops and against attention from its definition."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference.attention import attention
from mlaplan.reference.decode import decode
from mlaplan.reference.merge import merge
from mlaplan.reference.plan import plan, schedule
from mlaplan.reference.slots import slots

SENTINEL = -77
STALE = 1e30  # what buffers hold before; finite, so that a use shows as a wrong value
BLOCK_SIZE = 16


def as_int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def fresh_arrays(num_rows: int, params: PlanParams) -> PlanArrays:
    shapes = Layout.of(num_rows, num_cus=params.num_cus, fold=params.fold).shapes
    return PlanArrays(*(np.full(shape, SENTINEL, np.int32) for shape in shapes))


def arrays_of_lengths(lengths: list[int], params: PlanParams) -> PlanArrays:
    """A plan whose rows have any lengths, one request each."""
    arrays = fresh_arrays(len(lengths), params)
    plan(as_int32(range(len(lengths) + 1)), as_int32(lengths), arrays, params)
    return arrays


class Problem(NamedTuple):
    """One step: rows planned from a batch, random indices turned into slots, random q and KV."""

    q: np.ndarray
    kv_cache: np.ndarray
    kv_indices: np.ndarray
    arrays: PlanArrays
    params: PlanParams
    scale: float
    v_dim: int


def random_problem(
    rng: np.random.Generator,
    requests: list[tuple[int, int]],
    padded_rows: int,
    params: PlanParams,
    *,
    heads: int,
    dims: tuple[int, int],
) -> Problem:
    starts = np.cumsum([0, *(new for _, new in requests)]).astype(np.int32)
    lens = as_int32([context + new for context, new in requests])
    num_rows = max(padded_rows, int(starts[-1]))
    arrays = fresh_arrays(num_rows, params)
    plan(starts, lens, arrays, params)

    width = int(-(-lens.max(initial=1) // BLOCK_SIZE)) + 1
    num_blocks = max(8, 4 * width)
    table = rng.integers(0, num_blocks, (max(1, len(requests)), width)).astype(np.int32)
    indices = np.full((num_rows, params.topk), -1, np.int32)
    for row in range(int(starts[-1])):
        request = int(arrays.request_ids[row])
        context, new = requests[request]
        seen = context + row - int(starts[request]) + 1
        chosen = rng.permutation(seen)[: params.topk]
        indices[row, : chosen.size] = chosen
        assert new > 0
    kv_indices = np.full(num_rows * params.topk, SENTINEL, np.int32)
    slots(
        indices,
        table,
        arrays.request_ids,
        arrays.kv_indptr,
        kv_indices,
        block_size=BLOCK_SIZE,
        num_rows=num_rows,
    )
    dim, v_dim = dims
    kv_cache = rng.standard_normal((num_blocks * BLOCK_SIZE, dim))
    q = rng.standard_normal((num_rows, heads, dim))
    return Problem(q, kv_cache, kv_indices, arrays, params, 1.5 / np.sqrt(dim), v_dim)


def run(problem: Problem, *, empty_work_ends_slot: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Decodes and merges with buffers of stale values, each with a row behind its end that must stay."""
    q, params, v_dim = problem.q, problem.params, problem.v_dim
    num_rows, heads, _ = q.shape
    tiles = problem.arrays.reduce_indptr.size - 1
    partials = int(problem.arrays.reduce_indptr[-1])
    group = heads // params.fold
    out, lse = np.full((num_rows + 1, heads, v_dim), STALE), np.full((num_rows + 1, heads), STALE)
    partial_out, partial_lse = (
        np.full((partials + 1, group, v_dim), STALE),
        np.full((partials + 1, group), STALE),
    )
    decode(
        q,
        problem.kv_cache,
        problem.kv_indices,
        problem.arrays,
        fold=params.fold,
        scale=problem.scale,
        v_dim=v_dim,
        out=out[:num_rows],
        lse=lse[:num_rows],
        partial_out=partial_out[:partials],
        partial_lse=partial_lse[:partials],
        empty_work_ends_slot=empty_work_ends_slot,
    )
    query = np.arange(tiles, dtype=np.int32)
    merge(
        partial_out,
        partial_lse,
        problem.arrays,
        reduce_partial_map=np.arange(partials, dtype=np.int32),
        reduce_final_map=np.stack((query, query + 1), axis=1),
        out=out[:num_rows],
        lse=lse[:num_rows],
        fold=params.fold,
    )
    for buffer in (out, lse, partial_out, partial_lse):
        assert (buffer[-1] == STALE).all()
    return out[:num_rows], lse[:num_rows]


def truth(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    indptr = problem.arrays.kv_indptr
    return attention(problem.q, problem.kv_cache, problem.kv_indices, indptr, problem.scale, problem.v_dim)


def assert_is_attention(problem: Problem) -> None:
    out, lse = run(problem)
    want, want_lse = truth(problem)
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)


# slots.


def convert(indices: Any, table: Any, *, block_size: int, request: int = 0, lengths: Any = None) -> list[int]:
    indices, table = as_int32(indices), as_int32(table)
    lengths = [indices.shape[1]] * indices.shape[0] if lengths is None else lengths
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    out = np.full(int(indptr[-1]) + 3, SENTINEL, np.int32)
    ids = np.full(indices.shape[0], request, np.int32)
    slots(indices, table, ids, indptr, out, block_size=block_size, num_rows=indices.shape[0])
    assert (out[indptr[-1] :] == SENTINEL).all()
    return [int(slot) for slot in out[: indptr[-1]]]


def test_bad_indices_become_slot_zero() -> None:
    assert convert([[5, -1, 9, 16]], [[2, 4]], block_size=8) == [21, 0, 33, 0]
    assert convert([[5, -1, 9]], [[2, -4]], block_size=8) == [21, 0, 0]
    assert convert([[2**31 - 1, -(2**31), 0]], [[2, 4]], block_size=1) == [0, 0, 2]
    for request in (1, -1, 2**31 - 1, -(2**31)):
        assert convert([[5, 0]], [[2, 4]], block_size=8, request=request) == [0, 0]
    assert convert([[5, 0]], np.zeros((1, 0)), block_size=8) == [0, 0]
    assert convert([[5, 0]], np.zeros((0, 2)), block_size=8) == [0, 0]
    assert convert([[7, 8]], [[2**28 - 1, 2**28]], block_size=8) == [2**31 - 1, 0]


def test_a_narrow_table_is_not_read_past_its_row() -> None:
    # 200000 tokens in blocks of 64 are 3125 columns; three draft tokens behind them need one more.
    table = np.arange(2 * 3125).reshape(2, 3125)
    assert convert([[199999, 200000, 200002]], table, block_size=64) == [199999, 0, 0]


@given(st.data(), st.sampled_from([1, 8, 16, 64]), st.integers(1, 6), st.integers(0, 5), st.integers(0, 7))
def test_slots_equal_a_loop_over_entries(
    data: st.DataObject, block_size: int, num_rows: int, num_reqs: int, width: int
) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, num_rows)
    # A view with a row stride above its width, and a table cut out of a larger one.
    indices = rng.integers(-4, width * block_size + 5, (num_rows + 2, 20)).astype(np.int32)[1:-1, 3:16]
    table = rng.integers(-2, 50, (num_reqs + 1, width + 3)).astype(np.int32)[:num_reqs, 1 : width + 1]
    ids = rng.integers(-1, num_reqs + 2, num_rows).astype(np.int32)
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    out = np.full(int(indptr[-1]) + 5, SENTINEL, np.int32)
    slots(indices, table, ids, indptr, out, block_size=block_size, num_rows=num_rows)
    want = []
    for row in range(num_rows):
        for i in indices[row, : lengths[row]].tolist():
            request, slot = int(ids[row]), 0
            if i >= 0 and i // block_size < width and 0 <= request < num_reqs:
                block = int(table[request, i // block_size])
                slot = block * block_size + i % block_size if block >= 0 else 0
            want.append(slot)
    assert out.tolist() == want + [SENTINEL] * 5


def test_slots_refuses_arrays_that_are_too_small() -> None:
    indices, table, ids = np.zeros((2, 4), np.int32), as_int32([[1]]), as_int32([0, 0])
    indptr, out = as_int32([0, 3, 7]), np.full(7, SENTINEL, np.int32)
    cases = {
        "topk_indices": (indices[:, :3], ids, indptr, out),
        "request_ids": (indices, ids[:1], indptr, out),
        "kv_indptr": (indices, ids, indptr[:2], out),
        "kv_indices": (indices, ids, indptr, out[:6]),
    }
    for name, (some, some_ids, some_indptr, some_out) in cases.items():
        with pytest.raises(ValueError, match=name):
            slots(some, table, some_ids, some_indptr, some_out, block_size=4, num_rows=2)
    assert (out == SENTINEL).all()


# decode and merge.


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("topk", [512, 1024, 2048])
def test_decode_and_merge_are_attention_at_every_shape(heads: int, topk: int, rng: np.random.Generator) -> None:
    for fold, budget in ((1, -1), (heads // 16, None), (1, 3)):
        params = PlanParams(topk=topk, num_cus=80, fold=fold, split_budget=budget)
        requests = [(0, 3), (topk - 2, 3), (3 * topk, 1), (16, 1)]
        assert_is_attention(random_problem(rng, requests, 11, params, heads=heads, dims=(12, 8)))


@pytest.mark.parametrize(("heads", "fold", "budget"), [(16, 1, 16), (128, 8, None), (128, 1, -1)])
def test_decode_and_merge_are_attention_at_full_width(
    heads: int, fold: int, budget: int | None, rng: np.random.Generator
) -> None:
    params = PlanParams(topk=2048, num_cus=304, fold=fold, split_budget=budget)
    assert_is_attention(random_problem(rng, [(5000, 2), (700, 1)], 4, params, heads=heads, dims=(576, 512)))


@given(
    seed=st.integers(0, 2**32 - 1),
    requests=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 4)), max_size=8),
    padding=st.integers(1, 5),
    fold=st.integers(1, 8),
    num_cus=st.sampled_from([1, 3, 8, 38, 304]),
    budget=st.one_of(st.none(), st.just(-1), st.integers(1, 40)),
    variant=st.sampled_from(["parallel", "serial"]),
    topk=st.sampled_from([5, 16, 64, 512]),
)
def test_decode_and_merge_are_attention_for_any_plan(
    seed: int,
    requests: list[tuple[int, int]],
    padding: int,
    fold: int,
    num_cus: int,
    budget: int | None,
    variant: str,
    topk: int,
) -> None:
    params = PlanParams(topk=topk, num_cus=num_cus, fold=fold, split_budget=budget, variant=variant)
    rng = np.random.default_rng(seed)
    padded_rows = sum(new for _, new in requests) + padding
    problem = random_problem(rng, requests, padded_rows, params, heads=2 * fold, dims=(6, 4))
    assert_is_attention(problem)
    out, lse = run(problem)
    assert not out[-padding:].any()
    assert np.isneginf(lse[-padding:]).all()


def test_large_scores_neither_overflow_nor_vanish(rng: np.random.Generator) -> None:
    params = PlanParams(topk=512, num_cus=38, split_budget=-1)
    problem = random_problem(rng, [(600, 1), (300, 2)], 3, params, heads=16, dims=(12, 8))
    for scale in (300.0, 1e-9):
        assert_is_attention(problem._replace(scale=scale))


def test_works_of_rows_that_q_does_not_have_are_not_run(rng: np.random.Generator) -> None:
    params = PlanParams(topk=512, num_cus=38, fold=2, split_budget=-1)
    problem = random_problem(rng, [(600, 3), (300, 3)], 6, params, heads=4, dims=(6, 4))
    short = problem._replace(q=problem.q[:2])
    out, _ = run(short)
    np.testing.assert_allclose(out, truth(problem)[0][:2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("lengths", "lost"),
    [([16, 0, 16, 0, 16, 0, 16], [2, 6]), ([40, 0, 17, 33], [2])],
    ids=["lose whole", "lose piece"],
)
def test_an_empty_work_ends_its_slot(lengths: list[int], lost: list[int], rng: np.random.Generator) -> None:
    params = PlanParams(topk=64, num_cus=2, split_budget=-1, variant="serial", empty_rows="aiter")
    arrays = arrays_of_lengths(lengths, params)
    total = int(arrays.kv_indptr[-1])
    q, kv_cache = rng.standard_normal((len(lengths), 4, 6)), rng.standard_normal((total, 6))
    problem = Problem(q, kv_cache, np.arange(total, dtype=np.int32), arrays, params, 0.4, 4)
    want, want_lse = truth(problem)

    out, lse = run(problem)
    wrong = [row for row in range(len(lengths)) if not np.allclose(out[row], want[row], rtol=1e-12, atol=1e-12)]
    assert wrong == lost
    out, lse = run(problem, empty_work_ends_slot=False)
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-12)

    skipping = PlanParams(topk=64, num_cus=2, split_budget=-1, variant="serial")
    assert_is_attention(problem._replace(arrays=arrays_of_lengths(lengths, skipping)))


def test_folded_tiles_are_head_groups_of_one_row(rng: np.random.Generator) -> None:
    params = PlanParams(topk=64, num_cus=1, fold=2, split_budget=-1)
    arrays = arrays_of_lengths([3, 5], params)
    assert arrays.work_info[:4, 0].tolist() == [0, 1, 2, 3]
    assert arrays.work_info[:4, 4:6].tolist() == [[0, 3], [0, 3], [3, 8], [3, 8]]
    q, kv_cache = rng.standard_normal((2, 32, 6)), rng.standard_normal((8, 6))
    folded = Problem(q, kv_cache, np.arange(8, dtype=np.int32), arrays, params, 0.4, 4)
    flat = PlanParams(topk=64, num_cus=1, split_budget=-1)
    plain = folded._replace(arrays=arrays_of_lengths([3, 5], flat), params=flat)
    np.testing.assert_array_equal(run(folded)[0].shape, run(plain)[0].shape)
    np.testing.assert_allclose(run(folded)[0], run(plain)[0], rtol=1e-13, atol=1e-13)


def test_merge_follows_its_maps_and_ignores_pieces_without_weight() -> None:
    arrays = PlanArrays(None, as_int32([0, 9, 18, 27]), None, as_int32([0, 2, 4, 6]), None)
    partial_out = np.array([0.0, 7.0, 8.0, 4.0, 0.0, 2.0]).reshape(6, 1, 1)
    partial_lse = np.array([-np.inf, -np.inf, np.log(3.0), 2.0, -np.inf, 0.0]).reshape(6, 1)
    out, lse = np.full((3, 1, 1), STALE), np.full((3, 1), STALE)
    merge(
        partial_out,
        partial_lse,
        arrays,
        reduce_partial_map=as_int32([3, 1, 0, 4, 5, 2]),
        reduce_final_map=as_int32([[2, 3], [0, 1], [1, 2]]),
        out=out,
        lse=lse,
        fold=1,
    )
    np.testing.assert_allclose(out.ravel(), [0.0, 6.5, 4.0], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), [-np.inf, np.log(4.0), 2.0], rtol=1e-15)


def test_attention_of_one_query_by_hand() -> None:
    kv_cache = np.array([[0.0, 1.0], [np.log(3.0), 5.0], [9.0, 9.0]])
    out, lse = attention(np.array([[[1.0, 0.0]]]), kv_cache, as_int32([1, 0]), as_int32([0, 2]), 1.0, 2)
    np.testing.assert_allclose(out, [[[0.75 * np.log(3.0), 4.0]]], rtol=1e-15)
    np.testing.assert_allclose(lse, [[np.log(4.0)]], rtol=1e-15)


def test_all_works_run_once_whatever_the_schedule_order(rng: np.random.Generator) -> None:
    # Scattered partial locations and other slots change nothing: decode reads them, it does not derive them.
    params = PlanParams(topk=512, num_cus=9, split_budget=-1)
    problem = random_problem(rng, [(600, 2), (300, 1)], 3, params, heads=2, dims=(6, 4))
    made = schedule(np.diff(problem.arrays.kv_indptr).astype(np.int32), params)
    works = made.work_info[rng.permutation(made.work_info.shape[0])]
    info = problem.arrays.work_info.copy()
    info[: works.shape[0]] = works
    indptr = np.sort(rng.integers(0, works.shape[0] + 1, 10)).astype(np.int32)
    indptr[0], indptr[-1] = 0, works.shape[0]
    assert_is_attention(problem._replace(arrays=problem.arrays._replace(work_info=info, work_indptr=indptr)))
