"""A plan made by the first layer: captured once, replayed for every batch, made again between draft steps."""

from __future__ import annotations

from typing import Any

import batches
import engines
import numpy as np
import pytest
import torch
from engines import OURS, STOCK, Engine, Inputs, Sizes, Step
from rocm_stand_ins import AITER, KernelDevice
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from mlaplan.layout import PlanArrays
from mlaplan.reference.plan import plan as reference_plan
from mlaplan.vllm import serving


def engine(sizes: Sizes, seed: int = 0) -> tuple[Engine, Inputs, np.random.Generator]:
    rng = np.random.default_rng(seed)
    inputs = Inputs(sizes, rng)
    return Engine(OURS, sizes, inputs), inputs, rng


def capture(ours: Engine, inputs: Inputs, reqs: int, rows: int, widest: int) -> tuple[Any, Any]:
    """Captures one forward as the V2 runner does: a dummy batch, warmed up, built afresh, recorded."""
    queries = [rows // reqs + (index < rows % reqs) for index in range(reqs)]
    assert max(queries) <= widest
    step = Step(query_lens=queries, seq_lens=queries, max_seq_len=ours.sizes.max_len, capture=True)
    ours.forward(ours.build(inputs.write(step)), rows)
    metadata = ours.build(inputs.write(step))
    with ours.planner.device.record() as graph:
        ours.forward(metadata, rows)
    return graph, metadata


def planned_tensors(metadata: Any) -> list[Any]:
    names = (*engines.ROWS, "paged_kv_indices", "work_meta_data", "work_indptr", "work_info_set", "reduce_indptr")
    return [getattr(metadata, name).data_ptr() for name in names]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_replays_make_the_plan_of_every_batch(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(drafts=2, capture_sizes=(3, 6, 12, 24, 48), layers=2)
    if kernel:
        monkeypatch.setattr(serving, "make_device", lambda _device: KernelDevice())
        sizes = Sizes(drafts=2, capture_sizes=(3, 6), max_rows=24, max_reqs=6, layers=2)
    ours, inputs, rng = engine(sizes)
    theirs = Engine(STOCK, sizes, inputs)
    graphs = {}
    for rows in sizes.capture_sizes:
        graph, metadata = capture(ours, inputs, rows // 3, rows, 3)
        assert len(graph.ops) == 1, "one node, for two layers"
        graphs[rows] = graph, planned_tensors(metadata)
    for _ in range(12 if kernel else 120):
        if rng.random() < 0.3:  # an eager step in between
            step = batches.random_step(rng, sizes, str(rng.choice(["mixed", "prefill", "ragged spec"])))
            given = inputs.write(step)
            found = ours.build(given)
            found.plan.planner.refresh(found.plan)
            engines.assert_made(found, ours, reqs=given["num_reqs"], visible=step.rows)
            continue
        step = batches.random_step(rng, sizes, "spec")
        rows = next((size for size in sizes.capture_sizes if size >= step.rows), None)
        if rows is None:
            continue
        step.padded_reqs, step.padded_rows = rows // 3, rows
        given = inputs.write(step)
        before = ours.planner.stats.launches, AITER.waits
        found = ours.build(given)
        assert planned_tensors(found) == graphs[rows][1]
        assert (ours.planner.stats.launches, AITER.waits) == before
        graphs[rows][0].replay()
        engines.assert_made(found, ours, reqs=rows // 3, visible=rows)
        wanted = theirs.build(given)
        engines.assert_same_fields(wanted, found)
        engines.assert_same_rows(wanted, found, theirs.builder, rows)
        if not engines.padding_is_planned(theirs.builder):
            engines.assert_same_schedule(wanted, found, step.rows)


def test_the_plan_comes_before_everything_that_reads_it() -> None:
    # vllm#47196: a graph must not read a plan whose writing it does not wait for.
    ours, inputs, _ = engine(Sizes())
    order: list[str] = []
    run, decode = ours.planner.device.plan, AITER._decode
    ours.planner.device.plan = lambda *args: (order.append("plan"), run(*args))
    import aiter.mla

    aiter.mla.mla_decode_fwd = lambda *args, **kwargs: (order.append("decode"), decode(*args, **kwargs))[1]
    try:
        ours.forward(ours.build(inputs.write(Step(query_lens=[1], seq_lens=[9]))), 1)
    finally:
        aiter.mla.mla_decode_fwd = decode
    assert order == ["plan", "decode"]


def test_a_step_of_61_layers_makes_one_launch() -> None:
    sizes = Sizes(layers=61, max_rows=2, max_reqs=2)
    ours, inputs, _ = engine(sizes)
    found = ours.build(inputs.write(Step(query_lens=[1], seq_lens=[100])))
    ours.forward(found, 1)
    assert ours.planner.stats.launches == 1


def test_metadata_captured_twice_has_a_node_in_each_graph() -> None:
    ours, inputs, _ = engine(Sizes(layers=3))
    found = ours.build(inputs.write(Step(query_lens=[1], seq_lens=[100])))
    ours.forward(found, 1)
    counts = []
    for _ in range(2):
        with ours.planner.device.record() as graph:
            ours.forward(found, 1)
        counts.append(len(graph.ops))
    assert counts == [1, 1]


@pytest.mark.parametrize("mode", ["graph", "build"])
def test_draft_loop_in_one_graph(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPLAN_MODE", mode)
    sizes = Sizes(drafts=3, layers=1)
    ours, inputs, rng = engine(sizes)
    assert ours.group.supports_draft_decode_metadata_update
    reqs, drafts = 6, 3
    device, params = ours.planner.device, ours.planner.params
    metadata = ours.build(inputs.write(Step(query_lens=[1] * reqs, seq_lens=[1] * reqs, capture=True)))
    seen: list[list[int]] = []
    seq_lens = inputs.seq_lens[:reqs]

    def check() -> None:
        arrays = PlanArrays(*(array.numpy() for array in metadata.plan.arrays))
        wanted = PlanArrays(*(np.full_like(array, -7) for array in arrays))
        reference_plan(metadata.query_start_loc.numpy(), seq_lens.numpy(), wanted, params)
        works = int(wanted.work_indptr[-1])
        for index in range(4):
            assert np.array_equal(arrays[index], wanted[index]), PlanArrays._fields[index]
        assert np.array_equal(arrays.work_info[:works], wanted.work_info[:works])
        seen.append(np.diff(arrays.kv_indptr[: reqs + 1]).tolist())

    with device.record() as graph:
        for _ in range(drafts):
            ours.group.update_draft_decode_metadata({"layer.0": metadata})
            ours.forward(metadata, reqs)
            device.run(check)
            device.run(lambda: seq_lens.add_(1))
    assert len(graph.ops) == 3 * drafts, "one plan for each draft step, though the layer comes by as well"

    lengths = rng.integers(1, sizes.topk + 20, reqs)
    lengths[0], lengths[1], lengths[2] = 5, sizes.topk - 1, sizes.topk
    for _ in range(40):
        # Padding requests of a graph have no KV, and here a query that starts where the last one ends.
        inputs.write(Step(query_lens=[1] * (reqs - 1), seq_lens=lengths[: reqs - 1].tolist()))
        graph.replay()
        assert [row[0] for row in seen[-drafts:]] == [min(int(lengths[0]) + k, sizes.topk) for k in range(drafts)]
        lengths += rng.integers(1, drafts + 2, reqs)
        if lengths.max() > sizes.max_len - drafts:
            lengths -= sizes.max_len // 2
            lengths = np.maximum(lengths, 1)


def test_draft_steps_run_eagerly_are_as_a_fresh_build() -> None:
    sizes = Sizes(drafts=3)
    ours, inputs, _ = engine(sizes)
    theirs = Engine(STOCK, sizes, inputs)
    lengths = [5, sizes.topk - 1, 700]
    found = ours.build(inputs.write(Step(query_lens=[1] * 3, seq_lens=lengths)))
    for grown in range(3):
        given = inputs.write(Step(query_lens=[1] * 3, seq_lens=[length + grown for length in lengths]))
        ours.group.update_draft_decode_metadata({"layer.0": found})
        wanted = theirs.build(given)
        calls = theirs.forward(wanted, 3), ours.forward(found, 3)
        engines.assert_same_rows(wanted, found, theirs.builder, 3)
        engines.assert_same_schedule(wanted, found, 3)
        engines.assert_same_decodes(*calls, 3)
    assert found.paged_kv_indptr.tolist()[1] == 7


def test_v1_drafting_changes_the_batch_in_place() -> None:
    sizes = Sizes(drafts=3)
    ours, inputs, _ = engine(sizes)
    theirs = Engine(STOCK, sizes, inputs)
    lengths = [126, 5, 500]
    given = inputs.write(Step(query_lens=[4, 4, 4], seq_lens=lengths))
    common = CommonAttentionMetadata(
        query_start_loc=given["query_start_loc_gpu"],
        query_start_loc_cpu=given["query_start_loc_cpu"],
        seq_lens=inputs.seq_lens[:3],
        num_reqs=3,
        num_actual_tokens=12,
        max_query_len=4,
        max_seq_len=500,
        block_table_tensor=inputs.block_table[:3],
        slot_mapping=torch.zeros(12, dtype=torch.int64),
        seq_lens_cpu_upper_bound=None,
    )
    for index in range(3):
        if index:
            inputs.seq_lens[:3] += 1
            common = common.replace(
                query_start_loc=torch.arange(4, dtype=torch.int32),
                query_start_loc_cpu=torch.arange(4, dtype=torch.int32),
                num_actual_tokens=3,
                max_query_len=1,
                max_seq_len=common.max_seq_len + 1,
                slot_mapping=torch.zeros(3, dtype=torch.int64),
                _token_to_req_indices_cache=None,
            )
        wanted = theirs.builder.build_for_drafting(common, index)
        found = ours.builder.build_for_drafting(common, index)
        rows = common.num_actual_tokens
        calls = theirs.forward(wanted, rows), ours.forward(found, rows)
        engines.assert_same_fields(wanted, found)
        engines.assert_same_rows(wanted, found, theirs.builder, rows)
        engines.assert_same_schedule(wanted, found, rows)
        engines.assert_same_decodes(*calls, rows)


def test_device_boundaries_are_the_truth() -> None:
    sizes = Sizes(drafts=3)
    ours, inputs, rng = engine(sizes)
    assert engines.varlen_bound(ours) == 4
    graph, _ = capture(ours, inputs, 12, 12, 4)
    for _ in range(60):
        # Adaptive verification: the total and the bound are the host's, the boundaries only the device's.
        queries = rng.integers(1, 5, int(rng.integers(1, 4))).tolist()
        even = [sum(queries) // len(queries) + (i < sum(queries) % len(queries)) for i in range(len(queries))]
        step = Step(
            query_lens=even,
            device_query_lens=queries,
            seq_lens=[int(rng.integers(q, sizes.max_len)) for q in queries],
        )
        if rng.random() < 0.5:
            step.padded_reqs = step.padded_rows = 12
        given = inputs.write(step)
        found = ours.build(given)
        if step.padded_rows:
            graph.replay()
        else:
            ours.forward(found, step.rows)
        engines.assert_made(found, ours, reqs=given["num_reqs"], visible=step.visible_rows)
        assert found.plan.arrays.request_ids[: step.rows].tolist() == np.repeat(range(len(queries)), queries).tolist()


def test_bound_is_advertised_only_where_the_graph_makes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(drafts=3)
    inputs = Inputs(sizes, np.random.default_rng(0))
    assert engines.varlen_bound(Engine(OURS, sizes, inputs, impl=STOCK[1])) is None
    for mode in ("build", "classic"):
        monkeypatch.setenv("MLAPLAN_MODE", mode)
        assert engines.varlen_bound(Engine(OURS, sizes, inputs)) is None


def test_support_and_class_are_the_stock_ones() -> None:
    # vllm#36681, #34552: an allow-list of metadata classes, and an under-reported graph support.
    ours, inputs, _ = engine(Sizes(drafts=1))
    theirs = Engine(STOCK, ours.sizes, inputs)
    found = ours.build(inputs.write(Step(query_lens=[2], seq_lens=[9])))
    assert isinstance(found, engines.stock.ROCMAiterMLASparseMetadata)
    support = ours.builder.get_cudagraph_support(ours.config, None)
    assert support == theirs.builder.get_cudagraph_support(theirs.config, None) == AttentionCGSupport.UNIFORM_BATCH
    assert ours.builder.reorder_batch_threshold == theirs.builder.reorder_batch_threshold == 2


class TouchedOps(TorchDispatchMode):
    """Operations on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs, result))):
            self.names.append(str(func))
        return result


@pytest.mark.parametrize("seq_len", [5, 16384])
def test_build_of_decodes_makes_no_device_operation(seq_len: int) -> None:
    sizes = Sizes(topk=2048, max_len=32768, max_reqs=8, max_rows=16)
    ours, inputs, _ = engine(sizes)
    given = inputs.write(Step(query_lens=[1] * 8, seq_lens=[seq_len] * 8))
    common = CommonAttentionMetadata(
        query_start_loc=given["query_start_loc_gpu"].to("meta"),
        query_start_loc_cpu=given["query_start_loc_cpu"],
        seq_lens=inputs.seq_lens[:8].to("meta"),
        num_reqs=8,
        num_actual_tokens=8,
        max_query_len=1,
        max_seq_len=seq_len,
        block_table_tensor=inputs.block_table[:8].to("meta"),
        slot_mapping=torch.zeros(8, dtype=torch.int64, device="meta"),
        seq_lens_cpu_upper_bound=None,
    )
    with TouchedOps() as touched:
        ours.builder.build(0, common)
    assert touched.names == []
