"""The planner on a GPU: what it does not do (read back, allocate, move, wait), and what a captured graph makes."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

import mlaplan
from mlaplan._types import Int32Array
from mlaplan.device.ring import StagingRing
from mlaplan.graphs import DecodeGraphs, DecodeInputs
from mlaplan.kernels.launch import CompiledLaunch
from mlaplan.layout import Layout, PlanArrays
from mlaplan.reference.attention import attention
from mlaplan.reference.plan import plan as plan_from_nothing
from mlaplan.reference.slots import slots

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


def config(**settings: object) -> mlaplan.PlannerConfig:
    given: dict = {
        "max_rows": 64,
        "max_requests": 64,
        "arch": None,
        "num_cus": 40,
        "topk": 64,
        "min_tokens_per_split": 8,
    }
    return mlaplan.PlannerConfig(**(given | settings))


def batch(
    rng: np.random.Generator, *, known: bool = True, on_device: bool = True, padded: bool = True
) -> mlaplan.Batch:
    query = rng.integers(1, 3, int(rng.integers(1, 24)))
    boundaries = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    seq_lens = (query + rng.integers(0, 100, len(query))).astype(np.int32)
    device = {}
    if on_device:
        device = {
            "device_query_start_loc": torch.from_numpy(boundaries).cuda(),
            "device_seq_lens": torch.from_numpy(seq_lens).cuda(),
        }
    rows = int(boundaries[-1])
    return mlaplan.Batch(
        boundaries,
        mlaplan.Exact(seq_lens) if known else None,
        padded_rows=min(64, rows + int(rng.integers(0, 9))) if padded else None,
        **device,
    )


def expected(boundaries: np.ndarray, seq_lens: np.ndarray, rows: int, params: mlaplan.PlanParams) -> PlanArrays:
    shapes = Layout.of(rows, num_cus=params.num_cus, fold=params.fold).shapes
    arrays = PlanArrays(*(np.full(shape, -77, np.int32) for shape in shapes))
    plan_from_nothing(boundaries, seq_lens, arrays, params)
    return arrays


def same(actual: PlanArrays, wanted: PlanArrays) -> bool:
    works = int(wanted.work_indptr[-1])
    pairs = list(zip(actual, wanted, strict=True))
    whole = all(np.array_equal(a.cpu().numpy(), w) for a, w in pairs[:-1])
    return whole and np.array_equal(actual.work_info[:works].cpu().numpy(), wanted.work_info[:works])


def steps(planner: mlaplan.Planner, pool: list[mlaplan.Batch], count: int, rng: np.random.Generator) -> set[str]:
    taken = set()
    for step in range(count):
        given = pool[int(rng.integers(0, len(pool)))] if step % 3 else pool[0]
        plan = planner.plan(given, deferred=bool(rng.random() < 0.2))
        planner.refresh(plan)
        taken.add(plan.decision.action)
    return taken


@contextlib.contextmanager
def read_backs_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ten_thousand_steps_read_nothing_back_and_allocate_nothing(rng: np.random.Generator) -> None:
    planner = mlaplan.Planner(config(), "cuda")
    pool = [batch(rng, known=known) for known in [True] * 30 + [False] * 10]
    pool.append(dataclasses.replace(pool[0], padded_rows=None))
    steps(planner, pool, 2000, rng)  # every kernel compiled, every slice made
    torch.cuda.synchronize()
    addresses = [[array.data_ptr() for array in arrays] for arrays in planner._arrays]
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    mine = planner.stats.allocations
    with read_backs_are_errors():
        taken = steps(planner, pool, 10_000, rng)
    assert taken == {"nothing", "copy", "launch", "deferred"}
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert planner.stats.allocations == mine
    assert planner.stats.read_backs == 0
    assert [[array.data_ptr() for array in arrays] for arrays in planner._arrays] == addresses


def test_the_watch_over_read_backs_and_allocations_sees_them(rng: np.random.Generator) -> None:
    planner = mlaplan.Planner(config(), "cuda")
    given = batch(rng)
    plan = planner.plan(given)
    with read_backs_are_errors(), pytest.raises(RuntimeError, match="synchroniz"):
        planner.device.to_host(plan.arrays.kv_indptr)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    planner.device.allocate(16)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] > allocated


def queue_behind_a_busy_stream(planner: mlaplan.Planner, plans: int, *, on_device: bool) -> int:
    """Queues plans, each with other lengths, and a snapshot after each; returns how many snapshots are wrong."""
    rng = np.random.default_rng(7)
    batches = [batch(rng, on_device=on_device, padded=False) for _ in range(plans)]
    snapshots = torch.zeros(plans, planner._arena.shape[0], dtype=torch.int32, device="cuda")
    classes = []
    for given in batches:  # so that nothing is compiled while the device sleeps
        planner.plan(given)
        if on_device:
            planner.refresh(planner.plan(given, deferred=True))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9))  # about a second, in which nothing that is queued runs
    for snapshot, given in zip(snapshots, batches, strict=True):
        plan = planner.plan(given)
        snapshot.copy_(planner._arena)
        classes.append(plan.decision.row_class)
    torch.cuda.synchronize()
    wrong = 0
    for snapshot, given, row_class in zip(snapshots, batches, classes, strict=True):
        layout = planner._layouts[row_class]
        views = zip(layout.offsets, layout.shapes, strict=True)
        arrays = PlanArrays(*(planner.device.view(snapshot, offset, shape) for offset, shape in views))
        assert isinstance(given.lengths, mlaplan.Exact)
        wrong += not same(arrays, expected(given.query_start_loc, given.lengths.seq_lens, layout.rows, planner.params))
    return wrong


def test_two_thousand_plans_behind_a_busy_stream_are_each_their_own() -> None:
    planner = mlaplan.Planner(config(staging_slots=4), "cuda")
    assert queue_behind_a_busy_stream(planner, 2000, on_device=True) == 0
    # The driver queues about a thousand launches; then the host is held up there, and the ring is free again.
    assert planner.stats.reasons["staging busy"] > 300
    assert planner.stats.waits == 0


def test_without_device_arrays_the_ring_waits_instead() -> None:
    planner = mlaplan.Planner(config(staging_slots=4), "cuda")
    assert queue_behind_a_busy_stream(planner, 300, on_device=False) == 0
    assert planner.stats.waits > 0


def test_without_its_guard_the_ring_would_mix_plans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(self: StagingRing) -> Int32Array:
        self.ready = self.areas[self._next]
        return self.ready

    monkeypatch.setattr(StagingRing, "reserve", reserve)
    planner = mlaplan.Planner(config(staging_slots=4), "cuda")
    assert queue_behind_a_busy_stream(planner, 300, on_device=True) > 100


def test_a_plan_that_two_graphs_hold_is_a_node_of_each(rng: np.random.Generator) -> None:
    planner = mlaplan.Planner(config(), "cuda")
    inputs = batch(rng, known=False)
    boundaries, seq_lens = inputs.device_query_start_loc, inputs.device_seq_lens
    planner.refresh(planner.plan(inputs, deferred=True))
    plan = planner.plan(inputs, deferred=True)
    graphs = []
    for _ in range(2):
        launches = planner.stats.launches
        with planner.device.record() as graph:
            for _layer in range(61):
                planner.refresh(plan)
        assert planner.stats.launches == launches + 1
        graphs.append(graph)
    for round_, graph in enumerate(graphs):
        seq_lens += 3 + round_
        graph.replay()
        rows = len(plan.arrays.request_ids)
        assert same(plan.arrays, expected(boundaries.cpu().numpy(), seq_lens.cpu().numpy(), rows, planner.params))


def test_the_runtime_tells_captures_apart(rng: np.random.Generator) -> None:
    planner = mlaplan.Planner(config(), "cuda")
    inputs = batch(rng, known=False)
    planner.refresh(planner.plan(inputs, deferred=True))
    assert planner.device.capture() is None
    seen = []
    for _ in range(2):
        with planner.device.record():
            first, again = planner.device.capture(), planner.device.capture()
            planner.refresh(planner.plan(inputs, deferred=True))
        assert first is not None
        assert first is again
        seen.append(first)
    assert seen[0] is not seen[1]
    with planner.device.record():
        planner.refresh(planner.plan(inputs, deferred=True))  # an empty graph draws a warning
        with pytest.raises(mlaplan.PlanError, match="captured"):
            planner.plan(batch(rng, on_device=False))


def test_arrays_of_the_wrong_kind_are_refused() -> None:
    planner = mlaplan.Planner(config(), "cuda")
    boundaries = np.array([0, 1], np.int32)
    right = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    for wrong, message in (
        (right.cpu(), "is on cpu"),
        (right.long(), "int32"),
        (right.float(), "int32"),
        (right[:1], "1 entries, expected 2"),
        (right.repeat(2)[::2], "contiguous"),
        (right[None], "one-dimensional"),
        (boundaries, "int32 tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            planner.plan(mlaplan.Batch(boundaries, device_query_start_loc=wrong, device_seq_lens=right[:1]))
    assert planner.stats.launches == 0


@pytest.mark.parametrize("fold", [1, 2])
def test_a_captured_step_attends_to_what_its_inputs_say(rng: np.random.Generator, fold: int) -> None:
    heads, dim, value, topk, block = 16 * fold, 576, 512, 128, 64
    settings = {"heads": heads, "fold": fold, "topk": topk, "capture_sizes": (4, 8)}
    planner = mlaplan.Planner(config(**settings), "cuda")

    def half(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to("cuda", torch.bfloat16)

    inputs = DecodeInputs(
        query_start_loc=torch.zeros(9, dtype=torch.int32, device="cuda"),
        seq_lens=torch.zeros(8, dtype=torch.int32, device="cuda"),
        q=half(8, heads, dim),
        kv_cache=half(40 * block, dim),
        topk_indices=torch.zeros(8, topk, dtype=torch.int32, device="cuda"),
        block_table=torch.from_numpy(rng.permutation(39)[:32].reshape(8, 4).astype(np.int32) + 1).cuda(),
        out=torch.full((8, heads, value), 7.0, dtype=torch.bfloat16, device="cuda"),
        lse=torch.full((8, heads), 7.0, device="cuda"),
    )
    graphs = DecodeGraphs(planner, inputs, block_size=block)
    for rows in (4, 8):
        graphs.capture(rows, 8)
    for rows in (4, 8, 4, 8, 8):
        requests = int(rng.integers(1, rows + 1))
        boundaries = np.minimum(np.arange(9), requests).astype(np.int32)
        seq_lens = np.where(np.arange(8) < requests, rng.integers(1, 4 * block, 8), 0).astype(np.int32)
        indices = rng.integers(0, np.maximum(seq_lens, 1)[:, None], (8, topk)).astype(np.int32)
        inputs.query_start_loc.copy_(torch.from_numpy(boundaries))
        inputs.seq_lens.copy_(torch.from_numpy(seq_lens))
        inputs.topk_indices.copy_(torch.from_numpy(indices))
        inputs.out.fill_(7.0)
        graphs.replay(planner.plan(graphs.batch(rows, 8), deferred=True), 8)
        wanted = expected(boundaries, seq_lens, rows, planner.params)
        kv_indices = np.zeros(rows * topk, np.int32)
        table = inputs.block_table.cpu().numpy()
        slots(indices, table, wanted.request_ids, wanted.kv_indptr, kv_indices, block_size=block, num_rows=rows)
        q, kv_cache = (tensor.double().cpu().numpy() for tensor in (inputs.q[:rows], inputs.kv_cache))
        out, lse = attention(q, kv_cache, kv_indices, wanted.kv_indptr, dim**-0.5, value)
        got = inputs.out[:rows].double().cpu().numpy()
        assert np.linalg.norm(got - out) < 4e-3 * np.linalg.norm(out)
        assert (got[requests:] == 0).all()
        assert np.isneginf(inputs.lse[requests:rows].cpu().numpy()).all()
        assert np.allclose(inputs.lse[:requests].cpu().numpy(), lse[:requests], atol=1e-3)
        assert (inputs.out[rows:] == 7.0).all()
    with pytest.raises(ValueError, match="deferred"):
        graphs.replay(planner.plan(batch(rng)), 8)


def check_unknown(planner: mlaplan.Planner, rng: np.random.Generator, *, shift: int = 0) -> None:
    """Plans a batch by a launch, its inputs `shift` words behind an allocation's start, and compares."""
    given = batch(rng, known=False)
    moved = {}
    for name in ("device_query_start_loc", "device_seq_lens"):
        array = getattr(given, name)
        room = torch.zeros(array.shape[0] + shift, dtype=torch.int32, device="cuda")
        room[shift:] = array
        moved[name] = room[shift:]
    plan = planner.plan(dataclasses.replace(given, **moved))
    assert plan.decision.action == "launch"
    rows, lengths = len(plan.arrays.request_ids), given.device_seq_lens.cpu().numpy()
    assert same(plan.arrays, expected(given.query_start_loc, lengths, rows, planner.params))


def test_a_kept_launch_serves_inputs_at_any_address(rng: np.random.Generator) -> None:
    planner = mlaplan.Planner(config(), "cuda")
    for step in range(400):
        check_unknown(planner, rng, shift=step % 7)
    launches = planner.device._launches
    assert all(compiled is not None for compiled, _ in launches.values())
    # 23 request counts, aligned or not, and 7 classes at most: far fewer than there were addresses.
    assert len({key[2:] for key in launches}) == 4


def test_a_launcher_that_takes_other_arguments_is_given_up(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0

    def refuse(*_arguments: object, **_named: object) -> None:
        nonlocal refused
        refused += 1
        raise TypeError("function takes 31 arguments")

    planner = mlaplan.Planner(config(), "cuda")
    pool = [batch(rng, known=False, padded=False) for _ in range(8)]
    for given in pool:
        planner.plan(given)
    monkeypatch.setattr(CompiledLaunch, "run", refuse)
    launches = planner.stats.launches
    for given in (*pool, *pool):
        plan = planner.plan(given)
        rows, lengths = len(plan.arrays.request_ids), given.device_seq_lens.cpu().numpy()
        assert same(plan.arrays, expected(given.query_start_loc, lengths, rows, planner.params))
    # Each kept launch is tried once, then never again; and each plan is one launch all the same.
    assert 0 < refused == len(planner.device._launches) <= len(pool)
    assert planner.stats.launches == launches + 2 * len(pool)


def test_without_a_known_launcher_the_public_one_is_used(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlaplan.kernels.launch._DIRECT", ())
    planner = mlaplan.Planner(config(), "cuda")
    for _ in range(60):
        check_unknown(planner, rng)
    assert all(compiled._hooks is None for compiled, _ in planner.device._launches.values())


def test_hooks_of_profilers_see_repeated_launches(rng: np.random.Generator) -> None:
    knobs = pytest.importorskip("triton").knobs.runtime
    planner = mlaplan.Planner(config(), "cuda")
    given = batch(rng, known=False)
    planner.plan(given)
    seen: list[object] = []
    knobs.launch_enter_hook.add(seen.append)
    try:
        for _ in range(3):
            planner.plan(given)
    finally:
        knobs.launch_enter_hook.remove(seen.append)
    planner.plan(given)
    assert len(seen) == 3


def test_torch_copies_where_the_runtime_does_not(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = mlaplan.Planner(config(staging_slots=2), "cuda")
    asked = 0

    def refuse(*_arguments: int) -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(planner.device, "_copy", refuse)
    for _ in range(12):
        given = batch(rng, on_device=False)
        plan = planner.plan(given)
        assert isinstance(given.lengths, mlaplan.Exact)
        rows = len(plan.arrays.request_ids)
        assert same(plan.arrays, expected(given.query_start_loc, given.lengths.seq_lens, rows, planner.params))
    assert asked == 10, "the first copy of each area is torch's, so that its allocator knows the stream"


def test_copies_on_two_streams_keep_their_order(rng: np.random.Generator) -> None:
    planner = mlaplan.Planner(config(staging_slots=4), "cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step in range(200):
        given = batch(rng, on_device=False)
        stream = streams[step % 3 % 2]
        if step % 5 == 0:
            with torch.cuda.stream(streams[(step + 1) % 2]):
                torch.cuda._sleep(1_000_000)
        with torch.cuda.stream(stream):
            plan = planner.plan(given)
            held = PlanArrays(*(array.clone() for array in plan.arrays))
        stream.synchronize()
        assert isinstance(given.lengths, mlaplan.Exact)
        rows = len(plan.arrays.request_ids)
        assert same(held, expected(given.query_start_loc, given.lengths.seq_lens, rows, planner.params))


@pytest.mark.parametrize("action", ["copy", "launch", "refresh", "graph"])
def test_constants_are_written_again_after_memory_was_lost(rng: np.random.Generator, action: str) -> None:
    planner = mlaplan.Planner(config(capture_sizes=(8,), fold=2, heads=32), "cuda")
    given = batch(rng, known=action == "copy")
    wanted = [[array.clone() for array in constants] for constants in planner._constants]
    planner.refresh(planner.plan(given, deferred=True))
    for constants in planner._constants:
        for array in constants:
            array.view(torch.uint8).fill_(0xAB)
    planner._arena.fill_(-1)
    planner.invalidate()
    if action in ("refresh", "graph"):
        plan = planner.plan(given, deferred=True)
        if action == "graph":
            with planner.device.record() as graph:
                planner.refresh(plan)
            graph.replay()
        planner.refresh(plan)
    else:
        plan = planner.plan(given)
    for constants, before in zip(planner._constants, wanted, strict=True):
        for array, value in zip(constants, before, strict=True):
            assert torch.equal(array.view(torch.uint8), value.view(torch.uint8))
    lengths = given.device_seq_lens.cpu().numpy()
    rows = len(plan.arrays.request_ids)
    assert same(plan.arrays, expected(given.query_start_loc, lengths, rows, planner.params))


def test_a_batch_of_sizes_alone_is_made_from_the_devices_arrays(rng: np.random.Generator) -> None:
    planner = mlaplan.Planner(config(), "cuda")
    for _ in range(100):
        given = batch(rng, known=False)
        requests, total = len(given.query_start_loc) - 1, int(given.query_start_loc[-1])
        arrays = given.device_query_start_loc, given.device_seq_lens
        plan = planner.defer(requests, total, given.padded_rows, *arrays)
        with pytest.raises(ValueError, match="device_seq_lens has"):
            planner.defer(requests, total, given.padded_rows, arrays[0], arrays[0])
        planner.refresh(plan)
        wanted = planner.plan(given, deferred=True).decision
        assert (plan.decision.row_class, plan.decision.rows) == (wanted.row_class, wanted.rows)
        rows = len(plan.arrays.request_ids)
        assert same(plan.arrays, expected(given.query_start_loc, arrays[1].cpu().numpy(), rows, planner.params))
