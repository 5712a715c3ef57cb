"""The aiter backend through the interface of every release; see `fake_aiter`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the aiter backend was not checked")

from aiter_rig import (
    JULY_13,
    MAIN,
    MAX_ROWS,
    NUM_CUS,
    NUM_SLOTS,
    SUPPORTED,
    TOPK,
    UNTOUCHED,
    Rig,
    attend,
    check_decode,
    make_batch,
    make_config,
    make_fake,
    make_inputs,
    make_rig,
    random_lengths,
)
from fake_aiter import RELEASES, Release, has_fallback_kernel, has_kernel, head_rules
from mlaplan.backends import UnsupportedError
from mlaplan.backends.aiter import AiterBackend, kv_pool_refusal
from mlaplan.backends.aiter_shape import fallback_splits
from mlaplan.reference.attention import attention
from torch_host import TorchHostDevice

PAIRS = (("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"))
HEADS = (8, 16, 24, 32, 48, 64, 128)
BF16 = ("bf16", "bf16")
FP8_PAIR = ("fp8", "fp8")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are small: sharing them out among threads takes longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flags(pair: tuple[str, str]) -> dict[str, bool]:
    return {"q_fp8": pair[0] == "fp8", "kv_fp8": pair[1] == "fp8"}


def is_possible(release: Release, arch: str, padded: int, pair: tuple[str, str]) -> bool:
    """Whether the library plans and decodes the shape alike, one query per planner row, and has a binary for it."""
    rules = head_rules(release.rules, arch, padded, **flags(pair))
    if rules.planned is None or rules.planned != rules.decoded or rules.planned[1] != 1:
        return False
    return has_kernel(release.rules, arch, padded // rules.planned[0], lse=False, **flags(pair))


def lacks_facts(release: Release, arch: str, padded: int, pair: tuple[str, str]) -> bool:
    """gfx950, bf16, heads beside 16, 32, 64 and 128: nobody has run the planners of v0.1.13 to v0.1.17 on them."""
    odd = padded not in (16, 32, 64, 128) and (13, 0) <= release.rules < (18, 0)
    return arch == "gfx950" and pair == BF16 and odd


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_every_shape_runs_as_the_release_wants_it_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, version: str, arch: str, pair: tuple[str, str]
) -> None:
    release = RELEASES[version]
    for heads in HEADS:
        padded = -(-heads // 16) * 16
        if not is_possible(release, arch, padded, pair) or lacks_facts(release, arch, padded, pair):
            fake = make_fake(version, arch, pair)
            with pytest.raises(UnsupportedError, match=rf"(?s)^{heads} heads, q {pair[0]}.*{arch}.{{20}}"):
                make_rig(monkeypatch, version, arch, heads, pair, fake=fake)
            assert fake.made("planner") == fake.made("decode") == []
            continue
        rig = make_rig(monkeypatch, version, arch, heads, pair)
        sizes = ((1, None), (5, 7), (33, 40)) if heads <= 16 else ((1, None), (3, 4))
        for rows, target in sizes:
            lengths = random_lengths(rng, rows) if rows > 1 else [TOPK]
            check_decode(rng, rig, rig.planner.plan(make_batch(lengths, padded=target)), lengths)
        assert len(rig.fake.made("sizing")) == 1
        assert len(rig.fake.made("decode")) == len(sizes)
        assert rig.fake.merged_rows >= rig.backend.shape.fold


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize(
    ("arch", "heads", "pair"),
    [("gfx942", 8, BF16), ("gfx942", 128, BF16), ("gfx942", 128, FP8_PAIR), ("gfx950", 32, ("bf16", "fp8"))],
)
def test_the_makers_make_one_schedule(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, version: str, arch: str, heads: int, pair: Any
) -> None:
    rigs = [
        make_rig(monkeypatch, version, arch, heads, pair, schedule_maker=maker, split_budget=None)
        for maker in ("core", "device", "aiter")
    ]
    for rows, padded in ((5, 5), (3, 8), (24, 24), (1, 2), (9, 30)):
        lengths = random_lengths(rng, rows)
        made = []
        for rig in rigs:
            plan = rig.planner.plan(make_batch(lengths, padded=padded))
            if padded < 8:
                check_decode(rng, rig, plan, lengths)
            works = int(plan.arrays.work_indptr[-1])
            made.append([a.tolist() for a in plan.arrays[:4]] + [plan.arrays.work_info[:works].tolist()])
            pointers = plan.constants.work_metadata_ptrs.tolist()
            assert pointers == [plan.arrays.work_indptr.data_ptr(), plan.arrays.work_info.data_ptr()]
        assert made[0] == made[1] == made[2]
    # One call when the backend was prepared, and then one for each plan, by the one maker that calls.
    assert [len(rig.fake.made("planner")) for rig in rigs] == [1, 1, 6]


def test_aiter_plans_live_rows_with_a_budget_and_never_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget, passed in ((-1, NUM_CUS), (3, 3), (1000, NUM_CUS)):
        rig = make_rig(monkeypatch, MAIN, "gfx942", 16, BF16, schedule_maker="aiter", split_budget=budget)
        rig.planner.plan(make_batch([TOPK, 3, 1], padded=9))
        call = rig.fake.made("planner")[-1]
        assert call["max_split_per_batch"] == passed
        assert call["seqlens_kv_indptr"].tolist() == [0, TOPK, TOPK + 3, TOPK + 4]
        before = len(rig.fake.calls)
        empty = rig.planner.plan(make_batch([], padded=4))
        given = make_inputs(np.random.default_rng(0), rig, 4)
        out, _ = rig.backend.decode(empty, **given)
        assert len(rig.fake.calls) == before
        assert not out.any()


def test_aiter_does_not_plan_what_the_host_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(monkeypatch, MAIN, "gfx942", 16, BF16, schedule_maker="aiter")
    plan = rig.planner.plan(make_batch([5, 6], host_knows=False))
    assert plan.decision.action == "launch"
    assert len(rig.fake.made("planner")) == 1  # the one of `prepare`
    with pytest.raises(UnsupportedError, match="rows and lengths on the host"):
        rig.backend.make_schedule(plan)


@pytest.mark.parametrize(
    ("version", "limit", "first_ignored"),
    [
        ("0.1.17", None, None),
        (JULY_13, None, None),
        ("0.1.18", None, 32),
        ("0.1.20", None, 32),
        (MAIN, None, 32),
        (MAIN, "8", 8),
        (MAIN, "0", None),
        (MAIN, "many", 32),
    ],
)
def test_no_schedule_where_aiter_would_ignore_it(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    version: str,
    limit: str | None,
    first_ignored: int | None,
) -> None:
    if limit is not None:
        monkeypatch.setenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", limit)
    rig = make_rig(monkeypatch, version, "gfx950", 16, BF16, schedule_maker="aiter")
    assert rig.backend.describe()["metadata_ignored_from_rows"] == first_ignored
    for rows in (7, 8, 31, 32, 40):
        before = len(rig.fake.made("planner"))
        lengths = random_lengths(rng, rows - 2)
        plan = rig.planner.plan(make_batch(lengths, padded=rows))
        ignored = first_ignored is not None and rows >= first_ignored
        assert plan.kind == ("none" if ignored else "persistent")
        assert len(rig.fake.made("planner")) - before == (not ignored)
        check_decode(rng, rig, plan, lengths)
        call = rig.fake.made("decode")[-1]
        assert (call["work_meta_data"] is None) == ignored
    for heads, arch, pair in ((32, "gfx950", BF16), (16, "gfx950", FP8_PAIR), (16, "gfx942", BF16)):
        other = make_rig(monkeypatch, version, arch, heads, pair)
        assert all(other.backend.needs_schedule(rows) for rows in (1, 32, 48))


@pytest.mark.parametrize("version", ["0.1.7.post5", "0.1.9", "0.1.10.post2", "0.1.18", MAIN])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_a_fallback_has_a_kernel_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, version: str, arch: str, pair: tuple[str, str]
) -> None:
    release = RELEASES[version]
    for heads in (16, 32, 64, 128):
        rig = make_rig(monkeypatch, version, arch, heads, pair)
        backend, resolved = AiterBackend(persistent=False), make_config(arch, heads, pair)
        if not has_fallback_kernel(release.rules, arch, heads, **flags(pair)):
            with pytest.raises(UnsupportedError, match="no kernel without metadata"):
                backend.prepare(resolved, TorchHostDevice())
            assert "no kernel without metadata" in str(rig.backend.fallback_refusal())
            continue
        assert rig.backend.fallback_refusal() is None
        backend.prepare(resolved, TorchHostDevice())
        rig.backend, rig.planner.backend = backend, backend
        addresses = set()
        for rows in (5, 7, 5, 3):
            lengths = random_lengths(rng, rows)
            plan = rig.planner.plan(make_batch(lengths, padded=9))
            assert plan.kind == "none"
            check_decode(rng, rig, plan, lengths)
            addresses.add(rig.fake.made("decode")[-1]["num_kv_splits_indptr"].data_ptr())
        assert len(addresses) == 1


def test_fallback_splits_depend_on_the_batch_size_alone_and_fit_the_rows() -> None:
    for rows in (1, 8, 33, 512):
        for topk in (16, 20, 300, 2048):
            for heads, q_is_fp8 in ((16, False), (16, True), (128, True)):
                splits = fallback_splits(rows, topk, 256, heads, q_is_fp8=q_is_fp8)
                assert 1 <= splits <= min(16, -(-topk // 16))
    # By hand from the rule: 8 rows of 2048 on 256 units. 16 splits occupy half, and (16 / 32) * 2048 / (2048 + 84.1 *
    # 16) beats every smaller number; 512 rows fill two waves without a cut.
    assert fallback_splits(8, 2048, 256, 16, q_is_fp8=False) == 16
    assert fallback_splits(512, 2048, 256, 16, q_is_fp8=False) == 1


@pytest.mark.parametrize("version", ["0.1.17", JULY_13, "0.1.18", MAIN])
def test_the_faulting_64_head_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, version: str
) -> None:
    rig = make_rig(monkeypatch, version, "gfx942", 64, FP8_PAIR)
    native = RELEASES[version].rules >= (18, 0)
    lengths = random_lengths(rng, 6)
    check_decode(rng, rig, rig.planner.plan(make_batch(lengths, padded=8)), lengths)
    call, sized = rig.fake.made("decode")[-1], rig.fake.made("sizing")[-1]
    assert tuple(call["q"].shape) == ((32, 16, 576) if native else (8, 64, 576))
    assert (sized["batch_size"], sized["num_head_qo"]) == ((4 * MAX_ROWS, 16) if native else (MAX_ROWS, 64))
    assert rig.config.fold == 4
    if native:
        with pytest.raises(UnsupportedError, match="4363"):
            make_rig(monkeypatch, version, "gfx942", 64, FP8_PAIR, schedule_maker="aiter")


def test_planner_rows_of_a_folded_row_share_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(monkeypatch, MAIN, "gfx942", 32, BF16)
    plan = rig.planner.plan(make_batch([20, 7]))
    works = plan.arrays.work_info[: int(plan.arrays.work_indptr[-1])].tolist()
    spans: dict[int, list[tuple[int, int]]] = {}
    for tile, _, _, _, start, stop, _, _ in works:
        spans.setdefault(tile, []).append((start, stop))
    covered = {tile: (min(pieces)[0], max(pieces)[1]) for tile, pieces in spans.items()}
    assert covered == {0: (0, 20), 1: (0, 20), 2: (20, 27), 3: (20, 27)}


def test_one_config_feeds_sizing_planning_and_decoding(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    rig = make_rig(monkeypatch, MAIN, "gfx950", 32, FP8_PAIR, schedule_maker="aiter")
    plan = rig.planner.plan(make_batch([9, 9]))
    check_decode(rng, rig, plan, [9, 9])
    given = make_inputs(rng, rig, 2)
    calls = len(rig.fake.calls)
    with pytest.raises(UnsupportedError, match=r"q is torch\.bfloat16, must be torch\.float8"):
        rig.backend.decode(plan, **(given | {"q": given["q"].bfloat16()}))
    with pytest.raises(UnsupportedError, match=r"kv_cache is torch\.bfloat16"):
        rig.backend.decode(plan, **(given | {"kv_cache": given["kv_cache"].bfloat16()}))
    assert len(rig.fake.calls) == calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(2, 16, 512)}, "out is torch.float32, must be torch.bfloat16 or torch.float16"),
        ({"out": torch.zeros(2, 16, 512, dtype=torch.float8_e4m3fnuz)}, "out is torch.float8"),
        ({"out": torch.zeros(3, 16, 512, dtype=torch.bfloat16)}, "out has shape"),
        ({"fp8_scales": (None, torch.ones(1))}, "no factor of queries"),
        ({"fp8_scales": (torch.ones(1), None)}, "no factor of KV"),
        ({"lse": torch.zeros(2, 16)}, "LSE"),
        ({"q": torch.zeros(2, 576, 16, dtype=torch.float8_e4m3fnuz).mT}, "q has shape .* contiguous"),
        ({"q": torch.zeros(3, 16, 576, dtype=torch.float8_e4m3fnuz)}, "q has shape"),
        ({"kv_cache": torch.zeros(9, 512, dtype=torch.float8_e4m3fnuz)}, "kv_cache is"),
        ({"kv_cache": torch.empty(2**32 // 576 + 1, 576, dtype=torch.float8_e4m3fnuz, device="meta")}, "bytes per"),
    ],
)
def test_a_call_that_cannot_be_right_is_refused_before_it(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, change: dict[str, Any], message: str
) -> None:
    rig = make_rig(monkeypatch, MAIN, "gfx942", 16, FP8_PAIR)
    plan = rig.planner.plan(make_batch([9, 9]))
    given = make_inputs(rng, rig, 2)
    calls = len(rig.fake.calls)
    with pytest.raises(UnsupportedError, match=message):
        rig.backend.decode(plan, **(given | change))
    assert len(rig.fake.calls) == calls


def test_only_gfx942_refuses_a_pool_of_4_gib() -> None:
    last_whole_slot = 2**32 // 1152 * 1152
    assert kv_pool_refusal("gfx942", last_whole_slot) is None
    assert "32-bit" in str(kv_pool_refusal("gfx942", 2**32))
    assert kv_pool_refusal("gfx950", 2**40) is None


@pytest.mark.parametrize("heads", [16, 24])
def test_rows_that_only_the_device_knows_to_be_empty_give_zeros(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, heads: int
) -> None:
    for version, arch, pair in ((MAIN, "gfx942", BF16), (MAIN, "gfx950", BF16), ("0.1.8", "gfx942", FP8_PAIR)):
        rig = make_rig(monkeypatch, version, arch, heads, pair)
        for padded in (6, 9, 33):
            device_lengths = [TOPK, 0, 17, 0, 1, 0]
            unknown = make_batch([1] * 6, padded=padded, host_knows=False, device_lengths=device_lengths)
            check_decode(rng, rig, rig.planner.plan(unknown), device_lengths)
            deferred = rig.planner.plan(unknown, deferred=True)
            rig.planner.refresh(deferred)
            check_decode(rng, rig, deferred, device_lengths)


@pytest.mark.parametrize("action", ["copy", "nothing"])
def test_a_plan_made_again_on_the_device_may_have_empty_rows(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """What the host knew of the lengths is of no worth then, though the plan was once made of it."""
    rig = make_rig(monkeypatch, MAIN, "gfx950", 16, ("bf16", "bf16"))
    batch = make_batch([70, 16, 33, 5])
    plan = rig.planner.plan(batch)
    if action == "nothing":
        plan = rig.planner.plan(batch)
    assert (plan.decision.action, plan.lengths_known) == (action, True)
    batch.device_seq_lens[1] = 0
    rig.planner.remake(plan)
    assert not plan.lengths_known
    check_decode(rng, rig, plan, [70, 0, 33, 5])


def test_a_captured_decode_is_right_for_the_batch_of_each_replay(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    for version, arch, rows in ((MAIN, "gfx942", 8), (MAIN, "gfx950", 40)):
        rig = make_rig(monkeypatch, version, arch, 16, BF16)
        device: Any = rig.planner.device
        starts = torch.zeros(rows + 1, dtype=torch.int32)
        lengths = torch.ones(rows, dtype=torch.int32)
        batch = make_batch([1] * rows)
        batch = type(batch)(
            batch.query_start_loc, batch.lengths, device_query_start_loc=starts, device_seq_lens=lengths
        )
        given = make_inputs(rng, rig, rows)
        out = torch.full((rows, 16, 512), UNTOUCHED, dtype=torch.bfloat16)
        # A plan that the host knows all about: under capture that must not count.
        plan = rig.planner.plan(batch)
        with device.record() as graph:
            rig.planner.refresh(plan)
            rig.backend.decode(plan, **given, out=out)
        for live in (rows, 1, 0, rows - 1, 2):
            now = rng.integers(1, TOPK + 9, live).tolist()
            starts.copy_(torch.clamp(torch.arange(rows + 1), max=live))
            lengths[:live] = torch.tensor(now, dtype=torch.int32)
            lengths[live:] = 0
            out.fill_(UNTOUCHED)
            graph.replay()
            want, _ = attend(given, now)
            np.testing.assert_allclose(out.double().numpy(), want, rtol=2**-8, atol=2**-12)


@pytest.mark.parametrize(
    ("version", "arch", "heads", "pair", "has_lse"),
    [
        (MAIN, "gfx950", 16, FP8_PAIR, True),
        (MAIN, "gfx950", 24, BF16, True),
        (MAIN, "gfx950", 64, BF16, True),
        ("0.1.20", "gfx950", 128, FP8_PAIR, True),
        (MAIN, "gfx950", 48, FP8_PAIR, True),
        (MAIN, "gfx950", 16, ("bf16", "fp8"), False),
        (MAIN, "gfx942", 16, FP8_PAIR, False),
        (MAIN, "gfx942", 64, FP8_PAIR, False),
        (MAIN, "gfx942", 128, BF16, False),
        ("0.1.10.post2", "gfx950", 16, FP8_PAIR, False),
        ("0.1.7.post3", "gfx950", 16, BF16, False),
    ],
)
def test_an_lse_comes_where_a_binary_writes_it_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    version: str,
    arch: str,
    heads: int,
    pair: tuple[str, str],
    *,
    has_lse: bool,
) -> None:
    rig: Rig = make_rig(monkeypatch, version, arch, heads, pair)
    lengths = random_lengths(rng, 4)
    assert rig.backend.describe()["lse"] == has_lse
    for batch in (
        make_batch(lengths, padded=6),
        make_batch([1] * 4, padded=6, host_knows=False, device_lengths=[*lengths[:2], 0, lengths[3]]),
    ):
        plan = rig.planner.plan(batch)
        truth = batch.device_seq_lens.tolist()
        if has_lse:
            check_decode(rng, rig, plan, truth, lse=True)
        else:
            with pytest.raises(UnsupportedError, match="LSE"):
                check_decode(rng, rig, plan, truth, lse=True)
            assert rig.fake.made("decode") == []


@pytest.mark.parametrize("heads", [8, 24, 12])
def test_heads_are_padded_and_dropped_again(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, heads: int
) -> None:
    rig = make_rig(monkeypatch, MAIN, "gfx942", heads, BF16)
    plan = rig.planner.plan(make_batch([20, 3]))
    given = make_inputs(rng, rig, 2)
    out, lse = rig.backend.decode(plan, **given)
    assert lse is None
    shown = rig.fake.made("decode")[-1]["q"]
    padded = -(-heads // 16) * 16
    assert tuple(shown.shape) == (2, padded, 576)
    source = [head * heads // padded if padded % heads == 0 else head % heads for head in range(padded)]
    assert torch.equal(shown, given["q"][:, source])
    np.testing.assert_allclose(out.double().numpy(), attend(given, [20, 3])[0], rtol=2**-8, atol=2**-12)


@pytest.mark.parametrize(("budget", "partials"), [(2, 2), (4, 4), (8, 8)])
def test_the_shortest_scratch_holds_a_row_cut_for_every_slot(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, budget: int, partials: int
) -> None:
    settings: dict[str, Any] = {"topk": 2048, "max_rows": 2, "max_requests": 2, "split_budget": budget}
    rig = make_rig(monkeypatch, MAIN, "gfx942", 16, BF16, **settings)
    given = make_inputs(rng, rig, 1)
    given["kv_indices"] = torch.from_numpy(rng.integers(0, NUM_SLOTS, 2048).astype(np.int32))
    plan = rig.planner.plan(make_batch([2048]))
    out, _ = rig.backend.decode(plan, **given)
    call = rig.fake.made("decode")[-1]
    assert call["reduce_partial_map"].shape[0] == partials == int(plan.arrays.reduce_indptr[1])
    kv, q = given["kv_cache"].double().numpy(), given["q"].double().numpy()
    want, _ = attention(q, kv, given["kv_indices"].numpy(), np.array([0, 2048], np.int32), given["scale"], 512)
    np.testing.assert_allclose(out.double().numpy(), want, rtol=2**-8, atol=2**-12)


def test_a_long_run_of_any_steps_decodes_by_the_step_at_hand(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    rigs = [
        make_rig(monkeypatch, MAIN, "gfx942", 32, ("bf16", "fp8"), schedule_maker=maker, split_budget=None)
        for maker in ("core", "device", "aiter")
    ]
    lengths = random_lengths(rng, 6)
    for _ in range(30):
        kind = rng.integers(0, 4)
        if kind == 0:
            lengths = random_lengths(rng, int(rng.integers(1, 9)))
        elif kind == 1:
            lengths = [length + 1 for length in lengths]
        padded = len(lengths) + int(rng.choice([0, 0, 3]))
        for rig in rigs:
            batch = make_batch(lengths, padded=padded, host_knows=bool(kind != 2))
            plan = rig.planner.plan(batch, deferred=bool(kind == 3))
            rig.planner.refresh(plan)
            check_decode(rng, rig, plan, lengths)
    assert {NUM_SLOTS} == {rig.fake.made("decode")[-1]["kv_buffer"].shape[0] for rig in rigs}
