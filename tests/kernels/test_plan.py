"""The plan kernel equals the reference, word for word, and touches nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_cases import (
    Arena,
    Case,
    golden_cases,
    golden_vectors,
    random_case,
    stale_starts,
    wild_case,
    with_policy,
)

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from plan_runs import check, check_vectors, run

from mlaplan.costs import DEFAULT, CostTable, portable_default
from mlaplan.kernels.plan import check_sizes, plan
from mlaplan.layout import PlanArrays, PlanParams

# Large enough for several blocks of the kernel, of 1024 rows at most.
_SEVERAL_BLOCKS = 1500
_UNITS = CostTable(block_tokens=1, block=1, piece=1, whole=1)


class Runner:
    """Runs the kernel between guard bands on one device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def words(self, case: Case) -> np.ndarray[Any, np.dtype[np.int32]]:
        """All words of the arena after the launch."""
        return run(case, self._device)

    def check(self, case: Case) -> None:
        check(case, self._device)

    def check_vectors(self, vectors: list[dict[str, Any]]) -> None:
        assert check_vectors(vectors, self._device) >= len(vectors)


@pytest.fixture
def runner(device: str) -> Runner:
    return Runner(device)


@pytest.mark.interpret
def test_random_batches_interpreted(runner: Runner, rng: np.random.Generator) -> None:
    for _ in range(40):
        runner.check(random_case(rng, max_rows=60))


@pytest.mark.interpret
def test_wild_inputs_interpreted(runner: Runner, rng: np.random.Generator) -> None:
    for case in stale_starts(64):
        runner.check(case)
    for _ in range(30):
        runner.check(wild_case(rng, max_rows=60))


@pytest.mark.interpret
@pytest.mark.parametrize("policy", ["balanced", "invariant"])
def test_policies_interpreted(runner: Runner, rng: np.random.Generator, policy: str) -> None:
    for number in range(10):
        case = random_case(rng, max_rows=30) if number % 4 else wild_case(rng, max_rows=30)
        runner.check(with_policy(rng, case, policy))


@pytest.mark.interpret
def test_an_even_share_beyond_the_circle_interpreted(runner: Runner, rng: np.random.Generator) -> None:
    """Blocks per slot on both sides of what the walk by groups takes, and a slot as small as the overhead or less."""
    for num_cus, split_budget, rows, length in ((1, -1, 60, 2048), (1, -1, 53, 2048), (304, -1, 30, 40), (7, 1, 9, 1)):
        lengths = rng.integers(1, length + 1, rows).astype(np.int32)
        params = PlanParams(topk=2048, num_cus=num_cus, split_budget=split_budget)
        runner.check(Case(f"{rows} on {num_cus}", np.arange(rows + 1, dtype=np.int32), lengths, rows, params))


@pytest.mark.interpret
def test_a_budget_of_more_slots_than_32_bits_count_interpreted(runner: Runner) -> None:
    """The budget times the tiles passes 2^31 before the compute units bound it."""
    rows = 257
    params = PlanParams(topk=16, num_cus=65_535, fold=128, split_budget=65_535)
    seq_lens = np.full(rows, 16, np.int32)
    runner.check(Case("slots", np.arange(rows + 1, dtype=np.int32), seq_lens, rows, params))


@pytest.mark.interpret
@pytest.mark.parametrize("policy", ["aiter", "balanced"])
def test_more_blocks_than_32_bits_count_are_refused(runner: Runner, policy: str) -> None:
    """Folded tiles share a row's tokens, so that rows * topk bounds those but not the blocks that are weighed."""
    table = CostTable(block_tokens=1 << 12, block=1, piece=1, whole=1)
    params = PlanParams(topk=(1 << 27) - 1, num_cus=304, fold=40, split_budget=-1, policy=policy, cost_table=table)
    lengths = np.full(16, params.topk, np.int32)
    with pytest.raises(ValueError, match=r"640 tiles weigh 5368719664 blocks"):
        runner.words(Case("folded", np.arange(17, dtype=np.int32), lengths, 16, params))


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (64, {"num_cus": 65_536}, r"num_cus is 65536"),
        (1 << 15, {"topk": 4, "fold": 129}, r"32768 rows times fold 129 are 4227072 tiles, at most 4194304 fit"),
        (1 << 12, {"topk": 1 << 19}, r"topk is 524288, expected rows \* topk below 2\*\*31 for 4096 rows"),
        (16, {"policy": "balanced"}, r"cost_table is None"),
        (16, {"policy": "balanced", "topk": (1 << 20) + 1, "cost_table": _UNITS}, r"1048577 blocks"),
        (16, {"policy": "balanced", "cost_table": replace(_UNITS, block=1 << 24)}, r"cost_table gives a slot up to"),
        (
            1 << 15,
            {"policy": "invariant", "num_cus": 65_535, "piece_tokens": 1, "cost_table": replace(_UNITS, block=1 << 24)},
            r"cost_table lets 67108864 works cost \d+, times num_cus that is above 2\*\*62",
        ),
    ],
)
def test_sizes_that_the_kernel_has_no_words_for_are_refused(rows: int, changes: dict[str, Any], message: str) -> None:
    check_sizes(rows, PlanParams(topk=2048, num_cus=304))
    with pytest.raises(ValueError, match=message):
        check_sizes(rows, replace(PlanParams(topk=2048, num_cus=304), **changes))


@pytest.mark.interpret
@pytest.mark.parametrize("empty_rows", ["skip", "aiter"])
def test_several_blocks_interpreted(runner: Runner, rng: np.random.Generator, empty_rows: str) -> None:
    """More requests than a block, one that spans two, and live rows that end inside the second."""
    queries = rng.integers(0, 2, 1300)
    queries[100] = 500
    seq_lens = np.maximum(queries, rng.integers(0, 700, queries.size))
    seq_lens[rng.random(queries.size) < 0.1] = 0
    case = Case(
        "several blocks",
        np.concatenate(([0], np.cumsum(queries))).astype(np.int32),
        seq_lens.astype(np.int32),
        _SEVERAL_BLOCKS,
        PlanParams(topk=512, num_cus=304, empty_rows=empty_rows, variant="serial"),
    )
    runner.check(case)


@pytest.mark.interpret
def test_reference_vectors_interpreted(runner: Runner, shared: Path) -> None:
    """The small reference vectors; the compiled kernel is compared with all of them."""
    vectors = [vector for vector in golden_vectors(shared) if vector["qk_batch_ratio"] * len(vector["kv_indptr"]) < 40]
    assert len(vectors) >= 40
    runner.check_vectors(vectors[::2])


@pytest.mark.interpret
def test_reference_batches_are_balanced_interpreted(runner: Runner, shared: Path) -> None:
    """The batches of small reference vectors under `balanced`; the compiled kernel is compared for all of them."""
    vectors = [vector for vector in golden_vectors(shared) if vector["qk_batch_ratio"] * len(vector["kv_indptr"]) < 40]
    _check_balanced(runner, vectors[::4])


@pytest.mark.interpret
def test_a_difference_would_be_seen(runner: Runner, rng: np.random.Generator) -> None:
    """Every word of the arena is compared: changing any one of them is noticed."""
    case = random_case(rng, max_rows=20)
    words = runner.words(case)
    arena = Arena(case.num_rows, case.params)
    assert not arena.difference(case, words)
    for at in range(words.size):
        words[at] += 1
        assert arena.difference(case, words)
        words[at] -= 1


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fold": 2}, "reduce_indptr has shape"),
        ({"num_cus": 5}, "work_indptr has shape"),
        ({"variant": "both"}, "variant is 'both'"),
        ({"empty_rows": "keep"}, "empty_rows is 'keep'"),
        ({"split_budget": 0}, "split_budget is 0"),
        ({"policy": "fair"}, "policy is 'fair'"),
        ({"policy": "balanced"}, "cost_table is None"),
        ({"policy": "invariant"}, "cost_table is None"),
        ({"topk": 0}, "topk is 0"),
        ({"topk": 1 << 29}, "topk is 536870912"),
    ],
)
def test_refusals_write_nothing(change: dict[str, Any], message: str) -> None:
    params = PlanParams(topk=64, num_cus=4)
    words = torch.from_numpy(Arena(8, params).words)
    before = words.clone()
    inputs = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        plan(*inputs, Arena(8, params).views(words), replace(params, **change))
    with pytest.raises(ValueError, match="query_start_loc has shape"):
        plan(inputs[0][:2], inputs[1], Arena(8, params).views(words), params)
    assert torch.equal(words, before)


@pytest.mark.gpu
def test_random_batches(runner: Runner, rng: np.random.Generator) -> None:
    for _ in range(300):
        runner.check(random_case(rng, max_rows=int(rng.choice([4, 64, 300, 2000]))))


@pytest.mark.gpu
def test_wild_inputs(runner: Runner, rng: np.random.Generator) -> None:
    for case in stale_starts():
        runner.check(case)
    for _ in range(300):
        runner.check(wild_case(rng, max_rows=int(rng.choice([4, 64, 2000]))))


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["balanced", "invariant"])
def test_policies(runner: Runner, rng: np.random.Generator, policy: str) -> None:
    for number in range(60):
        # One code is compiled per size of a block and fold. The reference takes seconds for thousands of rows.
        live, num_rows, fold = ((50, 64, 1), (300, 512, 3), (1500, 4096, 8))[2 if number % 20 == 7 else number % 2]
        case = random_case(rng, max_rows=live) if number % 10 else wild_case(rng, max_rows=live)
        case = replace(case, num_rows=num_rows, params=replace(case.params, fold=fold))
        runner.check(with_policy(rng, case, policy))


@pytest.mark.gpu
@pytest.mark.parametrize("fold", [1, 8])
def test_as_many_rows_as_a_plan_may_have(runner: Runner, rng: np.random.Generator, fold: int) -> None:
    params = PlanParams(topk=2048, num_cus=304, fold=fold)
    seq_lens = rng.integers(1, 5000, 16384).astype(np.int32)
    runner.check(Case("full", np.arange(16385, dtype=np.int32), seq_lens, 16384, params))


@pytest.mark.gpu
def test_reference_vectors(runner: Runner, shared: Path) -> None:
    runner.check_vectors(golden_vectors(shared))


@pytest.mark.gpu
def test_reference_batches_are_balanced(runner: Runner, shared: Path) -> None:
    """Those without fold, in a few classes of rows: each class and fold is a compilation."""
    vectors = [vector for vector in golden_vectors(shared) if vector["qk_batch_ratio"] == 1]
    _check_balanced(runner, vectors, classes=(64, 256, 1024, 4096))


@pytest.mark.gpu
def test_replay_is_a_plan_of_what_the_device_holds(device: str, rng: np.random.Generator) -> None:
    """One capture, replayed for other boundaries and lengths, stale and wild ones between good ones."""
    params = PlanParams(topk=2048, num_cus=304)
    num_rows, num_requests = 256, 40
    arena = Arena(num_rows, params)
    words = torch.from_numpy(arena.words).to(device)
    starts = torch.zeros(num_requests + 1, dtype=torch.int32, device=device)
    lengths = torch.zeros(num_requests, dtype=torch.int32, device=device)
    arrays: PlanArrays = arena.views(words)
    plan(starts, lengths, arrays, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(starts, lengths, arrays, params)
    for step in range(200):
        queries = rng.integers(0, 9, num_requests)
        host_starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
        if step % 7 == 0:
            host_starts = rng.permutation(host_starts)
        host_lengths = rng.integers(0, 5000, num_requests).astype(np.int32)
        starts.copy_(torch.from_numpy(host_starts))
        lengths.copy_(torch.from_numpy(host_lengths))
        words.copy_(torch.from_numpy(arena.words))
        graph.replay()
        case = Case(f"step {step}", host_starts, host_lengths, num_rows, params)
        assert not arena.difference(case, words.cpu().numpy())


def _check_balanced(runner: Runner, vectors: list[dict[str, Any]], classes: tuple[int, ...] = ()) -> None:
    for vector in vectors:
        case, _ = golden_cases(vector)[0]
        num_rows = min((size for size in classes if size >= case.num_rows), default=case.num_rows)
        for table in (DEFAULT, portable_default(16, 64)):
            params = replace(case.params, policy="balanced", cost_table=table, empty_rows="skip", variant="parallel")
            runner.check(replace(case, name=f"{case.name}, balanced", num_rows=num_rows, params=params))
