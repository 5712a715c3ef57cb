"""Small inputs from public reports about this path, each with the right answer."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import engines
import numpy as np
import pytest
import torch
from engines import OURS, STOCK, Engine, Inputs, Sizes, Step
from rocm_stand_ins import AITER

import mlaplan
from mlaplan.vllm import impl as impl_module
from mlaplan.vllm import serving


def engine(sizes: Sizes) -> tuple[Engine, Inputs]:
    inputs = Inputs(sizes, np.random.default_rng(0))
    return Engine(OURS, sizes, inputs), inputs


def made(ours: Engine, metadata: Any) -> Any:
    ours.planner.refresh(metadata.plan)
    return metadata


def lengths(metadata: Any) -> list[int]:
    return np.diff(metadata.paged_kv_indptr.numpy()).tolist()


@pytest.mark.parametrize("excess", [0, 3, 9])
def test_host_bounds_are_never_taken_for_lengths(excess: int) -> None:
    # vllm#40654: bound 2053 with 3 possible rejections leaves a row of 2047 possible.
    ours, inputs = engine(Sizes(topk=2048, max_len=4096, max_rows=8, max_reqs=2, drafts=3))
    given = inputs.write(Step(query_lens=[4], seq_lens=[2050], bound_excess=excess))
    assert lengths(made(ours, ours.build(given))) == [2047, 2048, 2048, 2048]


def test_host_lengths_are_optional() -> None:
    # vllm#29134
    ours, inputs = engine(Sizes())
    given = inputs.write(Step(query_lens=[1, 1], seq_lens=[3, 900])) | {"seq_lens_cpu_upper_bound": None}
    assert lengths(made(ours, ours.build(given))) == [3, 128]


def test_rows_behind_a_smaller_batch_name_no_request() -> None:
    # vllm#42982: 100 tokens, then 10, then 50.
    ours, inputs = engine(Sizes(max_rows=128, max_reqs=1))
    for tokens in (100, 10, 50):
        found = made(ours, ours.build(inputs.write(Step(query_lens=[tokens], seq_lens=[tokens], prefilling=[True]))))
        ids = found.plan.arrays.request_ids
        assert ids.tolist() == [0] * ids.shape[0]
        assert found.plan.arrays.kv_indptr[tokens:].unique().tolist() == [tokens * (tokens + 1) // 2]


def test_prompt_chunks_get_rows_of_their_own() -> None:
    # vllm#47042
    ours, inputs = engine(Sizes(topk=4, max_len=64))
    found = [
        lengths(made(ours, ours.build(inputs.write(Step(query_lens=[4], seq_lens=[seq_len], prefilling=[True])))))
        for seq_len in (4, 8)
    ]
    assert found == [[1, 2, 3, 4], [4, 4, 4, 4]]


def test_rows_of_a_dense_prefill_are_not_planned() -> None:
    # TensorRT-LLM#12161: a plan of the whole batch, read for the decodes alone.
    ours, inputs = engine(Sizes(topk=16, max_len=64, dense_prefill=True))
    found = ours.build(inputs.write(Step(query_lens=[1, 4], seq_lens=[40, 4], prefilling=[False, True])))
    if found.prefill is None:
        pytest.skip("this vLLM has no dense prefill here")
    made(ours, found)
    assert found.req_id_per_token.tolist() == [0]
    assert found.paged_kv_indptr.tolist() == [0, 16]
    assert (found.num_decodes, found.num_prefills, found.num_decode_tokens) == (1, 1, 1)


def test_pure_dense_prefill_has_no_sparse_rows() -> None:
    ours, inputs = engine(Sizes(topk=16, max_len=64, dense_prefill=True))
    theirs = Engine(STOCK, ours.sizes, inputs)
    given = inputs.write(Step(query_lens=[9, 7], seq_lens=[9, 7], prefilling=[True, True]))
    found, wanted = ours.build(given), theirs.build(given)
    if wanted.prefill is None:
        pytest.skip("this vLLM has no dense prefill here")
    engines.assert_same_fields(wanted, found)
    assert found.paged_kv_indptr.tolist() == wanted.paged_kv_indptr.tolist() == [0]
    assert found.plan is None
    assert found.work_indptr is None


def test_long_pure_bf16_prefill_has_no_schedule_where_stock_has_none() -> None:
    for cache_dtype in ("auto", "fp8"):
        ours, inputs = engine(Sizes(topk=16, max_len=64, dense_prefill=True, cache_dtype=cache_dtype))
        theirs = Engine(STOCK, ours.sizes, inputs)
        given = inputs.write(Step(query_lens=[9], seq_lens=[40], prefilling=[True]))
        found, wanted = ours.build(given), theirs.build(given)
        engines.assert_same_fields(wanted, made(ours, found))
        assert lengths(found) == [16] * 9


def test_micro_batches_have_a_planner_each() -> None:
    # vllm#50945: all micro-batches are built before any of them runs.
    sizes = Sizes(topk=64, max_rows=160, micro_batches=2)
    inputs, other = Inputs(sizes, np.random.default_rng(0)), Inputs(sizes, np.random.default_rng(1))
    ours = Engine(OURS, sizes, inputs)
    planners = [ours.group.get_metadata_builder(index)._serving.planner for index in range(2)]
    assert planners[0] is not planners[1]
    first = ours.build(inputs.write(Step(query_lens=[80], seq_lens=[80], prefilling=[True])), 0)
    second = ours.build(other.write(Step(query_lens=[80], seq_lens=[160], prefilling=[True])), 1)
    for planner, metadata in zip(planners, (first, second), strict=True):
        planner.refresh(metadata.plan)
    assert lengths(first) == [min(row + 1, 64) for row in range(80)]
    assert lengths(second) == [64] * 80


def test_requests_and_rows_of_a_padded_batch_are_told_apart() -> None:
    # rtp-llm#1181: 128 rows, then 118 with 128 padded.
    sizes = Sizes(max_rows=128, max_reqs=128, capture_sizes=(128,))
    ours, inputs = engine(sizes)
    made(ours, ours.build(inputs.write(Step(query_lens=[1] * 128, seq_lens=[100] * 128))))
    step = Step(query_lens=[1] * 118, seq_lens=[50] * 118, padded_reqs=128, padded_rows=128)
    found = made(ours, ours.build(inputs.write(step)))
    indptr = found.plan.arrays.kv_indptr
    assert np.diff(indptr.numpy()).tolist() == [50] * 118 + [0] * 10
    assert found.block_table.shape[0] == 128
    works = found.work_info_set[: int(found.work_indptr[-1])]
    assert int(works[:, 0].max()) == 117


def test_arrays_move_with_the_padded_size_and_views_with_them() -> None:
    ours, inputs = engine(Sizes(max_rows=300, max_reqs=300, capture_sizes=(100, 200)))
    for padded in (None, 100, 200, 100, None):
        step = Step(query_lens=[1] * 40, seq_lens=[50] * 40, padded_reqs=padded, padded_rows=padded)
        found = made(ours, ours.build(inputs.write(step)))
        assert found.paged_kv_indptr.data_ptr() == found.plan.arrays.kv_indptr.data_ptr()
        assert lengths(found)[:40] == [50] * 40


@pytest.mark.parametrize(("queries", "seqs", "rows"), [([0], [0], []), ([1], [1], [1]), ([1, 0], [1, 0], [1])])
def test_idle_ranks(queries: list[int], seqs: list[int], rows: list[int]) -> None:
    # sglang#39899, vllm#51984
    ours, inputs = engine(Sizes())
    found = ours.build(inputs.write(Step(query_lens=queries, seq_lens=seqs)))
    if found.plan is not None:
        made(ours, found)
    assert lengths(found) == rows


def test_each_plan_keeps_its_own_sizes() -> None:
    # vllm#45227: verify, decode, verify of another width.
    ours, inputs = engine(Sizes(drafts=3))
    kept = []
    for width in (4, 1, 3):
        found = ours.build(inputs.write(Step(query_lens=[width] * 2, seq_lens=[500, 600])))
        kept.append((found, width))
    for found, width in kept:
        assert found.plan.padded_rows == found.req_id_per_token.shape[0] == 2 * width
        assert found.max_query_len == width
    made(ours, kept[-1][0])
    assert lengths(kept[-1][0]) == [128] * 6


def test_metadata_names_the_page_size_that_rows_address() -> None:
    # vllm#54359
    ours, inputs = engine(Sizes())
    found = ours.build(inputs.write(Step(query_lens=[1], seq_lens=[9])))
    assert found.block_size == engines.BLOCK
    assert ours.planner.config.page_size == 1
    with pytest.raises(ValueError, match="page_size is 64"):
        mlaplan.PlannerConfig(max_rows=1, max_requests=1, page_size=64)


def test_fields_of_the_shared_layer_are_there() -> None:
    # vllm#50064
    ours, inputs = engine(Sizes(topk=4, max_len=64))
    found = ours.build(inputs.write(Step(query_lens=[1, 4], seq_lens=[16, 4], prefilling=[False, True])))
    assert (found.num_decodes, found.num_prefills, found.num_decode_tokens) == (1, 1, 1)
    assert found.prefill_max_seq_len == 0
    assert found.prefill is None


def test_another_impl_gets_its_plan_in_build() -> None:
    sizes = Sizes(drafts=1)
    inputs = Inputs(sizes, np.random.default_rng(0))
    ours = Engine(OURS, sizes, inputs, impl=STOCK[1])
    theirs = Engine(STOCK, sizes, inputs)
    for step in (Step(query_lens=[2, 2], seq_lens=[5, 700]), Step(query_lens=[1], seq_lens=[128])):
        given = inputs.write(step)
        wanted = theirs.build(given)
        waits = AITER.waits
        found = ours.build(given)
        assert AITER.waits == waits + 1
        engines.assert_same_fields(wanted, found)
        engines.assert_same_rows(wanted, found, theirs.builder, step.rows)
        engines.assert_same_schedule(wanted, found, step.rows)
        engines.assert_same_decodes(theirs.forward(wanted, step.rows), ours.forward(found, step.rows), step.rows)


def _hisparse(config: Any) -> None:
    config.attention_config.hisparse_config = SimpleNamespace()


def _decode_parallel(config: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2


def _prefill_parallel(config: Any) -> None:
    config.parallel_config.prefill_context_parallel_size = 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_hisparse, "HiSparse"), (_decode_parallel, "context parallelism"), (_prefill_parallel, "context parallelism")],
)
def test_what_is_not_ours_is_left_to_the_stock_builder(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, _ = engine(Sizes())
    config = engines.config(ours.sizes, ours.layers)
    change(config)
    ours.builder.vllm_config = config
    serving._SAID.clear()
    with caplog.at_level(logging.INFO, logger="vllm.mlaplan"):
        assert serving.serve(ours.builder) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert reason in caplog.text


@pytest.mark.parametrize("sizes", [Sizes(sinks=True), Sizes(rope_dim=0)], ids=["sinks", "no rotary part"])
def test_stock_results_field_for_field(sizes: Sizes) -> None:
    inputs = Inputs(sizes, np.random.default_rng(0))
    theirs, ours = Engine(STOCK, sizes, inputs), Engine(OURS, sizes, inputs)
    assert ours.builder._serving is None
    assert ours.builder.supports_draft_decode_metadata_update is False
    assert engines.varlen_bound(ours) is None
    for step in (Step(query_lens=[1, 1], seq_lens=[5, 700]), Step(query_lens=[9], seq_lens=[128], prefilling=[True])):
        given = inputs.write(step)
        wanted, found = theirs.build(given), ours.build(given)
        assert type(found) is type(wanted)
        engines.assert_same_fields(wanted, found)
        engines.assert_same_rows(wanted, found, theirs.builder, step.rows)


@pytest.mark.parametrize(
    ("name", "value"), [("MLAPLAN_DISABLE", "1"), ("MLAPLAN_MODE", "fast"), ("MLAPLAN_ALWAYS_REBUILD", "maybe")]
)
def test_switches_leave_a_working_builder(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    sizes = Sizes()
    inputs = Inputs(sizes, np.random.default_rng(0))
    ours = Engine(OURS, sizes, inputs)
    assert ours.builder._serving is None
    found = ours.build(inputs.write(Step(query_lens=[1], seq_lens=[9])))
    assert lengths(found) == [9]
    assert len(AITER.plans) == 1


def test_builder_made_without_init_is_the_stock_builder() -> None:
    bare = object.__new__(OURS[0])
    assert bare._serving is None


def test_one_line_says_that_it_is_active(caplog: pytest.LogCaptureFixture) -> None:
    serving._SAID.clear()
    with caplog.at_level(logging.INFO, logger="vllm.mlaplan"):
        engine(Sizes(micro_batches=3))
    assert len(caplog.records) == 1
    assert "mlaplan is active: mode graph, gfx942 with 304 compute units, 16 heads (fold 1)" in caplog.text


def test_slots_of_another_number_than_aiters_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = engine(Sizes())
    ours.builder._mla_work_indptr = torch.zeros(2 * 304 + 1)
    serving._SAID.clear()
    with caplog.at_level(logging.INFO, logger="vllm.mlaplan"):
        assert serving.serve(ours.builder) is None
    assert "aiter sizes its schedule for 608 slots, vLLM counts 304" in caplog.text


def test_a_pool_beyond_32_bits_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    impl_module._REPORTED.clear()
    pool = torch.zeros(1 << 15, 64, 1024, dtype=torch.bfloat16, device="meta")
    with caplog.at_level(logging.WARNING, logger="vllm.mlaplan"):
        for arch, cache in (("gfx950", pool), ("gfx942", pool[:-1]), ("gfx942", pool), ("gfx942", pool)):
            impl_module._report_large_pool(arch, cache)
    assert len(caplog.records) == 1
    assert "4294967296 bytes per layer" in caplog.text


def test_plan_survives_replace() -> None:
    ours, inputs = engine(Sizes())
    found = ours.build(inputs.write(Step(query_lens=[1], seq_lens=[9])))
    copy = dataclasses.replace(found, max_seq_len=1)
    assert copy.plan is found.plan
    assert copy.made_by_consumer
