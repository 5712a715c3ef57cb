"""What the aiter backend reads of an installation, and whether the fakes that it is tested with tell the truth."""

from __future__ import annotations

import ast
import gzip
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: the aiter backend was not checked")

from aiter_rig import (
    JULY_13,
    MAIN,
    NUM_CUS,
    SUPPORTED,
    TOO_OLD,
    check_decode,
    make_batch,
    make_config,
    make_fake,
    make_inputs,
    make_rig,
    with_rules,
)
from fake_aiter import EMPTY, RELEASES, FakeAbortError, Parameters, head_rules
from fake_aiter_kernels import FakeContractError, plan_walk
from mlaplan import Planner
from mlaplan.backends import BackendUnavailableError, UnsupportedError, partial_capacity
from mlaplan.backends.aiter import AiterBackend
from mlaplan.backends.aiter_release import effective_release, read_release
from torch_host import TorchHostDevice

BF16 = ("bf16", "bf16")
FP8_PAIR = ("fp8", "fp8")
SOURCES = {
    "get_mla_metadata_info_v1": "aiter/ops/attention.py",
    "get_mla_metadata_v1": "aiter/ops/attention.py",
    "mla_decode_fwd": "aiter/mla.py",
}
# The commit of each fake in ROCm/aiter, where it is not the tag of its version.
COMMITS = {JULY_13: "fede90f46", MAIN: "e4048607a"}


def declared(source: str, function: str) -> Parameters:
    """Parameters and defaults of a function of a module's source."""
    (node,) = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function]
    names = [argument.arg for argument in node.args.args]
    defaults = [_value(default) for default in node.args.defaults]
    return tuple(zip(names, [EMPTY] * (len(names) - len(defaults)) + defaults, strict=True))


def _value(node: ast.expr) -> Any:
    # One default is an enumeration's value, which is 32.
    return 32 if "MlaVersion" in ast.unparse(node) else ast.literal_eval(node)


def faked(version: str, function: str) -> Parameters:
    release = RELEASES[version]
    return {
        "get_mla_metadata_info_v1": release.sizing(),
        "get_mla_metadata_v1": release.planner(),
        "mla_decode_fwd": release.decode(),
    }[function]


@pytest.mark.parametrize("function", SOURCES)
def test_the_fake_of_the_published_wheel_has_its_signatures(function: str) -> None:
    folder = os.environ.get("MLAPLAN_AITER_WHEEL_DIR")
    if folder is None:
        pytest.skip("MLAPLAN_AITER_WHEEL_DIR (the unpacked wheel amd-aiter==0.1.7.post2.dev18) is not set")
    assert faked(TOO_OLD, function) == declared((Path(folder) / SOURCES[function]).read_text(), function)


@pytest.mark.parametrize("version", RELEASES)
def test_the_fakes_have_the_signatures_of_their_tags(version: str) -> None:
    folder = os.environ.get("MLAPLAN_AITER_REPOSITORY")
    if folder is None:
        pytest.skip("MLAPLAN_AITER_REPOSITORY (a clone of ROCm/aiter with its tags) is not set")
    if version == TOO_OLD:
        pytest.skip("a development build, which has no tag")
    for function, path in SOURCES.items():
        revision = f"{COMMITS.get(version, 'v' + version)}:{path}"
        shown = subprocess.run(
            ["git", "-C", folder, "show", revision],  # noqa: S607 - whichever git is there
            capture_output=True,
            check=True,
            text=True,
        )
        assert faked(version, function) == declared(shown.stdout, function), function


def test_the_fakes_planner_makes_aiters_arrays(shared: Path) -> None:
    compared = 0
    with gzip.open(shared / "golden" / "aiter_mla_metadata_v1_2.jsonl.gz", "rt") as lines:
        for line in lines:
            case = json.loads(line)
            lengths = np.diff(case["kv_indptr"])
            if lengths.size == 0 or lengths.min() < 1 or lengths.size > 600:
                continue
            cap = case["max_split_per_batch"]
            budget = case["num_cu"] if cap < 0 else cap
            (fold,) = {case[name] for name in case if name == "qk_batch_ratio"}
            plan = plan_walk(
                lengths.tolist(), fold=fold, queries=1, num_cus=case["num_cu"], budget=min(budget, case["num_cu"])
            )
            assert plan.slots == case["work_indptr"], case["id"]
            assert plan.works == np.reshape(case["work_info"], (-1, 8)).tolist(), case["id"]
            pieces = [count if count > 1 else 0 for count in plan.pieces]
            assert np.cumsum(pieces).tolist() == case["reduce_indptr"][1 : len(pieces) + 1], case["id"]
            compared += 1
    assert compared > 200


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize(
    "spoil",
    [
        {"max_split_per_batch": -1},
        {"max_split_per_batch": 0},
        {"kv_granularity": 32},
        {"uni_seqlen_qo": 2},
        {"topk": 40},
        {"dtype_q": None, "dtype_q_nope": None},
        {"swap": True},
        {"short": True},
        {"empty": True},
        {"heads": 32},
    ],
    ids=lambda spoil: next(iter(spoil)),
)
def test_the_fake_planner_notices(monkeypatch: pytest.MonkeyPatch, version: str, spoil: dict[str, Any]) -> None:
    fake = make_fake(version, "gfx942", BF16)
    fake.install(monkeypatch)
    release = read_release()
    release.sizing(4, 1, 16, torch.bfloat16, torch.bfloat16, is_sparse=True)
    sizes: list[tuple[int, ...]] = [(2,), (40, 8), (NUM_CUS + 1,), (5,), (4, 2), (60,)]
    buffers = [torch.zeros(size, dtype=torch.int32 if number else torch.uint64) for number, size in enumerate(sizes)]
    lengths = [0, 5, 9]
    keywords: dict[str, Any] = {"kv_granularity": 16, "max_seqlen_qo": 1, "uni_seqlen_qo": 1, "fast_mode": True}
    keywords |= {"max_split_per_batch": 2, **release.dtype_arguments(torch.bfloat16, torch.bfloat16)}

    def call(heads: int) -> None:
        starts, rows = torch.arange(3, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        pages = (torch.ones(2, dtype=torch.int32),) if release.takes_last_page_lens else ()
        release.planner(starts, rows, *pages, heads, 1, True, *buffers, **keywords)

    call(16)
    if "swap" in spoil:
        buffers[1], buffers[2] = buffers[2], buffers[1]
    elif "short" in spoil:
        buffers[1] = buffers[1][:1]
    elif "empty" in spoil:
        lengths = [0, 5, 5]
    keywords |= {name: value for name, value in spoil.items() if name in keywords or name == "topk"}
    with pytest.raises((FakeContractError, FakeAbortError)):
        call(spoil.get("heads", 16))


@pytest.mark.parametrize("spoil", ["pointers", "grid", "partials", "map", "rows", "work", "empty", "double"])
def test_the_fake_decode_notices(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, spoil: str) -> None:
    rig = make_rig(monkeypatch, MAIN, "gfx942", 16, BF16)
    plan = rig.planner.plan(make_batch([120, 120, 7, 1]))
    check_decode(rng, rig, plan, [120, 120, 7, 1])
    call = dict(rig.fake.made("decode")[-1])
    works = call["work_info_set"]
    cut = int(np.flatnonzero(works[:, 1].numpy() >= 0)[0])
    if spoil == "pointers":
        call["work_meta_data"] = call["work_meta_data"].view(torch.int64).flip(0).view(torch.uint64)
    elif spoil == "grid":
        call["work_indptr"] = call["work_indptr"][:-1]
    elif spoil == "partials":
        call["reduce_partial_map"] = call["reduce_partial_map"][:1]
    elif spoil == "map":
        call["reduce_partial_map"] = call["reduce_partial_map"].flip(0)
    elif spoil == "rows":
        call["reduce_indptr"] = call["reduce_indptr"][:2]
    elif spoil == "work":
        works[0, 0] += 1
    elif spoil == "empty":
        works[cut, 5] = works[cut, 4]
    else:
        works[cut + 1] = works[cut].clone()
    decode = sys.modules["aiter.mla"].mla_decode_fwd
    with pytest.raises((FakeContractError, KeyError)):
        decode(**call)


@pytest.mark.parametrize(
    ("version", "features", "release"),
    [
        ("0.1.18", {"causal"}, "0.1.18"),
        ("0.1.16.post4", set(), "0.1.16.post4"),
        ("0.1.18+rocm7.2", {"dtype_q_nope"}, "0.1.18"),
        (JULY_13, {"dtype_q_nope", "g_kv_indptr"}, "0.1.18"),
        (MAIN, {"dtype_q_nope", "causal"}, MAIN),
        ("0.1.13.dev4+gabc", {"page_size"}, "0.1.13.dev4+gabc"),
        ("unknown", {"dtype_q_nope", "page_size"}, "0.1.18"),
        ("unknown", set(), None),
    ],
)
def test_head_rules_follow_the_release_or_newer_signatures(
    version: str, features: set[str], release: str | None
) -> None:
    assert effective_release(version, features) == release


@pytest.mark.parametrize("version", SUPPORTED)
def test_signatures_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    make_fake(version, "gfx950", FP8_PAIR).install(monkeypatch)
    release, fake = read_release(), RELEASES[version]
    assert release.takes_last_page_lens == (fake.rules >= (10, 2))
    assert release.arch == "gfx950"
    assert set(release.dtype_names) == (
        {"dtype_q_nope", "dtype_q_rope", "dtype_kv_nope", "dtype_kv_rope"}
        if version == JULY_13
        else {"dtype_q", "dtype_kv"}
    )


def test_an_aiter_that_is_missing_broken_or_strange_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, config = AiterBackend(), make_config("gfx942", 16, BF16)
    monkeypatch.setitem(sys.modules, "aiter", None)
    with pytest.raises(BackendUnavailableError, match="needs ROCm's aiter"):
        backend.prepare(config, TorchHostDevice())
    make_fake(TOO_OLD, "gfx942", BF16).install(monkeypatch)
    with pytest.raises(BackendUnavailableError, match=r"v0\.1\.7\.post3 or newer"):
        backend.prepare(config, TorchHostDevice())
    make_fake(MAIN, "gfx942", BF16).install(monkeypatch)
    package: Any = sys.modules["aiter"]
    monkeypatch.setattr(package, "get_mla_metadata_v1", lambda *_, **__: None)
    with pytest.raises(BackendUnavailableError, match="not an order of arguments"):
        backend.prepare(config, TorchHostDevice())
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    with pytest.raises(BackendUnavailableError, match="AttributeError"):
        backend.prepare(config, TorchHostDevice())


def test_a_build_that_plans_otherwise_than_its_version_says_is_found_out(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    # v0.1.15 takes 32 fp8 heads natively on gfx950, v0.1.16 folds them again.
    assert [head_rules(rules, "gfx950", 32, q_fp8=True, kv_fp8=True).planned for rules in ((15, 0), (16, 0))] == [
        (1, 1),
        (2, 1),
    ]
    fake = with_rules(make_fake("0.1.15", "gfx950", FP8_PAIR), (16, 0))
    with pytest.raises(UnsupportedError, match=r"2 works of one row, .* 0\.1\.15 say 1"):
        make_rig(monkeypatch, "0.1.15", "gfx950", 32, FP8_PAIR, fake=fake)
    assert fake.made("decode") == []
    rig = make_rig(monkeypatch, "0.1.15", "gfx950", 32, FP8_PAIR, fake=fake, aiter_version="0.1.16")
    check_decode(rng, rig, rig.planner.plan(make_batch([40, 3])), [40, 3])
    # Queries instead of rows, as v0.1.12 does it, is another layout altogether.
    queries = with_rules(make_fake("0.1.10.post2", "gfx950", FP8_PAIR), (12, 0))
    with pytest.raises(UnsupportedError, match="one query each"):
        make_rig(monkeypatch, "0.1.10.post2", "gfx950", 64, FP8_PAIR, fake=queries)


def test_aiters_idea_of_the_gpu_must_be_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="arch is 'gfx942', but aiter takes the GPU for 'gfx950'"):
        make_rig(monkeypatch, MAIN, "gfx942", 16, BF16, fake=make_fake(MAIN, "gfx950", BF16))
    monkeypatch.setenv("CU_NUM", "20")
    with pytest.raises(UnsupportedError, match="num_cus is 40, but aiter plans for 20 slots"):
        make_rig(monkeypatch, MAIN, "gfx942", 16, BF16)
    monkeypatch.delenv("CU_NUM")
    monkeypatch.setenv("AITER_ENABLE_EXPERIMENTAL", "1")
    with pytest.raises(UnsupportedError, match="plans for 80 slots"):
        make_rig(monkeypatch, MAIN, "gfx950", 64, FP8_PAIR)
    make_rig(monkeypatch, MAIN, "gfx950", 32, FP8_PAIR)


def test_what_changes_aiter_is_read_once_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MLA_META_USE_PARALLEL", "0")
    monkeypatch.setenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "16")
    rig = make_rig(monkeypatch, MAIN, "gfx950", 16, BF16)
    monkeypatch.setenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "2")
    told = rig.backend.describe()
    assert told["environment"] == {
        "AITER_MLA_META_USE_PARALLEL": "0",
        "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH": "16",
    }
    assert (told["aiter"], told["arch"], told["num_cus"], told["fold"]) == (MAIN, "gfx950", NUM_CUS, 1)
    assert rig.backend.needs_schedule(15)
    assert not rig.backend.needs_schedule(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 144}, "more than 128 heads"),
        ({"q_dtype": "fp16", "kv_dtype": "fp16"}, "bf16/bf16"),
        ({"head_dim": 512}, "made for 576 and 512"),
        ({"max_rows": 2**22 // 16, "max_requests": 8, "topk": 16}, "32-bit offsets reach 262143 rows"),
    ],
)
def test_what_no_kernel_is_made_for_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    fake = make_fake(MAIN, "gfx942", BF16)
    fake.install(monkeypatch)
    config = make_config("gfx942", 16, BF16, **change)
    with pytest.raises(UnsupportedError, match=message):
        Planner(config, device=TorchHostDevice())
    assert fake.calls == []


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.sampled_from([1, 2, 8]),
    st.integers(1, 80),
    st.integers(1, 80),
)
def test_no_schedule_uses_more_partials_than_are_sized(
    lengths: list[int], fold: int, num_cus: int, budget: int
) -> None:
    plan = plan_walk(lengths, fold=fold, queries=1, num_cus=num_cus, budget=budget)
    tiles = len(lengths) * fold
    slots = min(num_cus, budget * tiles)
    used = sum(pieces for pieces in plan.pieces if pieces > 1)
    assert used <= partial_capacity(tiles, slots) <= partial_capacity(tiles, slots, multiple=fold)
    assert partial_capacity(tiles, slots, multiple=fold) % fold == 0
    # Row lengths in blocks bound the pieces: 20 tokens are two pieces at most, whatever the budget.
    assert all(pieces <= -(-length // 16) for pieces, length in zip(plan.pieces, np.repeat(lengths, fold), strict=True))


def test_scratch_is_sized_by_the_call_and_not_by_the_capacity(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    # At most min(512 + 256 - 1, 2 * 255) partials, where 768 rows were thought enough.
    assert partial_capacity(512, 256) == 510
    rig = make_rig(monkeypatch, MAIN, "gfx942", 16, BF16, split_budget=2)
    for rows, partials in ((1, 2), (2, 5), (48, 78)):
        plan = rig.planner.plan(make_batch([40] * rows))
        rig.backend.decode(plan, **make_inputs(rng, rig, rows))
        assert rig.fake.made("decode")[-1]["reduce_partial_map"].shape[0] == partials
    assert rig.backend.describe()["scratch_bytes"] == 78 * 16 * 513 * 4


@pytest.fixture(autouse=True)
def _no_real_installation() -> Iterator[None]:
    """The fakes stand in for a package that must not be there as well."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("amd-aiter")
    yield
    assert "aiter" not in sys.modules
    assert inspect.ismodule(torch)
