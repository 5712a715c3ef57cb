"""Every kernel compiles for AMD GPUs without one, within limits, and once for batches of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton")

import offline_launches as launches
from decode_cases import DEPTH
from offline import HOPPER, LDS_BYTES, compile_amd, compile_for, cuda_usage, key_of, stray_scalar_loads, usage
from offline_launches import BF16, BF16_TYPES, FP8, fp8_type
from triton import language as tl

from mlaplan.costs import DEFAULT
from mlaplan.kernels.launch import Launch
from mlaplan.layout import PlanParams

_ARCHS = ("gfx942", "gfx950")
_CU_COUNT = {"gfx942": 304, "gfx950": 256}
_MOST_VGPRS = 512  # of a lane, accumulation registers included


def _check_limits(compiled: Any, arch: str) -> None:
    used = usage(compiled)
    assert used.lds_bytes <= LDS_BYTES[arch], used
    assert used.vgprs <= _MOST_VGPRS, used
    assert (used.scratch_bytes, used.vgpr_spills, used.sgpr_spills) == (0, 0, 0), used


@pytest.mark.parametrize("arch", _ARCHS)
@pytest.mark.parametrize(
    ("num_rows", "fold", "empty_rows", "variant"),
    [
        (1, 1, "skip", "parallel"),
        (64, 1, "skip", "parallel"),
        (1024, 4, "skip", "parallel"),
        (16384, 8, "skip", "parallel"),
        (256, 1, "aiter", "parallel"),
        (256, 8, "aiter", "serial"),
    ],
)
def test_plan(arch: str, num_rows: int, fold: int, empty_rows: str, variant: str) -> None:
    """No scalar load reads `query_start_loc` or `seq_lens`: none reads anything but the arguments."""
    params = PlanParams(topk=2048, num_cus=_CU_COUNT[arch], fold=fold, empty_rows=empty_rows, variant=variant)
    compiled = compile_amd(launches.plan(num_rows, 60, params), arch)
    _check_limits(compiled, arch)
    assert stray_scalar_loads(compiled.asm["amdgcn"]) == []


@pytest.mark.parametrize("arch", _ARCHS)
@pytest.mark.parametrize("policy", ["balanced", "invariant"])
def test_plan_under_other_policies(arch: str, policy: str) -> None:
    """Scalars may move to lanes of vector registers, which stays on the chip; nothing goes to memory."""
    for num_rows, fold in ((64, 1), (40, 7), (1024, 4)):
        params = PlanParams(topk=2048, num_cus=_CU_COUNT[arch], fold=fold, policy=policy, cost_table=DEFAULT)
        compiled = compile_amd(launches.plan(num_rows, 60, params), arch)
        used = usage(compiled)
        assert used.lds_bytes <= LDS_BYTES[arch], used
        assert used.vgprs <= _MOST_VGPRS, used
        assert (used.scratch_bytes, used.vgpr_spills) == (0, 0), used
        assert stray_scalar_loads(compiled.asm["amdgcn"]) == []


@pytest.mark.parametrize("arch", _ARCHS)
def test_slots(arch: str) -> None:
    _check_limits(compile_amd(launches.slots(64, 60), arch), arch)


@pytest.mark.parametrize("arch", _ARCHS)
@pytest.mark.parametrize(("heads", "fold"), [(8, 1), (16, 1), (128, 1), (128, 8)])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
def test_decode(arch: str, heads: int, fold: int, kind: str) -> None:
    types = {} if kind == "fp16" else dict(BF16_TYPES)
    dtypes: dict[str, Any] = {"dtype": np.float16, "kv_dtype": np.float16} if kind == "fp16" else {}
    if kind == "fp8":
        types["kv_cache_ptr"] = fp8_type(arch)
        dtypes["kv_dtype"] = FP8
    _check_limits(compile_amd(launches.decode(8, heads, fold, **dtypes), arch, types), arch)


@pytest.mark.parametrize("arch", _ARCHS)
@pytest.mark.parametrize("group", [8, 16, 128])
def test_merge(arch: str, group: int) -> None:
    _check_limits(compile_amd(launches.merge(8, group), arch, BF16_TYPES), arch)


@triton.jit  # type: ignore[untyped-decorator]
def _scalar_load_kernel(in_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.load(in_ptr))


@pytest.mark.parametrize("arch", _ARCHS)
def test_a_scalar_load_of_an_input_would_be_seen(arch: str) -> None:
    arrays = np.empty(4, np.int32), np.empty(256, np.int32)
    launch = Launch(_scalar_load_kernel, (1,), arrays, {"BLOCK": 256}, {"num_warps": 4})
    assert stray_scalar_loads(compile_amd(launch, arch).asm["amdgcn"]) != []


def test_an_overwritten_argument_pointer_would_be_seen() -> None:
    head = "\t.amdhsa_user_sgpr_kernarg_segment_ptr 1\n\ts_load_dwordx2 s[4:5], s[0:1], 0x0\n"
    assert stray_scalar_loads(head) == []
    assert stray_scalar_loads(head + "\ts_add_u32 s1, s4, s5\n\ts_load_dword s6, s[0:1], 0x0\n") != []
    assert stray_scalar_loads(head + "\ts_buffer_load_dword s6, s[8:11], 0x0\n") != []


def test_sizes_that_change_per_batch_change_no_code() -> None:
    """Sizes of 1, of multiples of 16 and others, which Triton would compile for apart if it could."""
    sizes = (1, 3, 16, 40, 48, 100)
    params = [PlanParams(topk=topk, num_cus=cus, split_budget=b) for topk, cus, b in ((16, 16, 1), (100, 7, None))]
    groups = {
        # Classes of one block size of which the tiles are a multiple of four, as those of a captured graph mostly are.
        "plan": [launches.plan(36 + 4 * (rows % 8), rows, params[rows % 2]) for rows in sizes],
        "plan of any class": [launches.plan(33 + 4 * (rows % 8), rows, params[rows % 2]) for rows in sizes],
        **{
            policy: [
                launches.plan(64, rows, replace(params[rows % 2], policy=policy, cost_table=DEFAULT)) for rows in sizes
            ]
            for policy in ("balanced", "invariant")
        },
        "slots": [launches.slots(rows, rows, width=rows) for rows in sizes],
        "decode": [launches.decode(rows, 16, pool=rows, partials=rows) for rows in sizes],
        "merge of few tiles": [launches.merge(rows, 16, partials=rows) for rows in sizes if rows < 64],
        "merge of many": [launches.merge(rows, 16, partials=rows) for rows in (64, 100, 333)],
    }
    for name, group in groups.items():
        keys = [key_of(launch, BF16_TYPES) for launch in group]
        assert all(key == keys[0] for key in keys), name


@pytest.mark.gpu
def test_batches_of_any_size_are_compiled_once(rng: np.random.Generator) -> None:
    """The same, counted: what Triton keeps for the kernel does not grow."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device: compilations were not counted")
    from plan_cases import Arena

    from mlaplan.kernels import plan as module

    counts = []
    for requests in (1, 2, 16, 17, 32, 64):
        params = PlanParams(topk=2048, num_cus=int(rng.integers(20, 305)), split_budget=requests)
        words = torch.from_numpy(Arena(64, params).words).cuda()
        # Slices, so that the inputs start at addresses of any alignment.
        starts = torch.arange(requests + 2, dtype=torch.int32, device="cuda")[1:]
        lengths = torch.full((requests + 1,), 900, dtype=torch.int32, device="cuda")[1:]
        module.plan(starts, lengths, Arena(64, params).views(words), params)
        cache = module._plan_kernel.device_caches[torch.cuda.current_device()][0]
        counts.append(len(cache))
    assert counts[0] == counts[-1], counts


_HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize(("heads", "kv_dtype"), [(16, None), (16, FP8), (32, None), (128, None), (128, FP8)])
def test_decode_fits_a_hopper_gpu(heads: int, kv_dtype: Any) -> None:
    """The form for any GPU; that of 128 heads spills."""
    types, given = dict(BF16_TYPES), {}
    if kv_dtype is not None:
        types["kv_cache_ptr"], given["kv_dtype"] = "*fp8e4nv", kv_dtype
    compiled = compile_for(launches.decode(8, heads, backend="cuda", **given), HOPPER, types)
    assert compiled.metadata.shared <= _HOPPER_SHARED_BYTES


@pytest.mark.parametrize("dtype", [BF16, np.float16])
@pytest.mark.parametrize(("heads", "fold"), [(8, 1), (16, 1), (24, 1), (64, 1), (128, 1), (128, 8)])
def test_the_hopper_form_fits_without_spills(heads: int, fold: int, dtype: Any) -> None:
    launch = launches.decode(8, heads, fold, backend="hopper", dtype=dtype, kv_dtype=dtype)
    assert launch.kernel.is_gluon()
    compiled = compile_for(launch, HOPPER, dict(BF16_TYPES) if dtype == BF16 else {})
    used = cuda_usage(compiled)
    assert used.shared_bytes <= _HOPPER_SHARED_BYTES, used
    assert used.stack_bytes == 0, used
    assert "wgmma.mma_async" in compiled.asm["ptx"]


def test_what_the_hopper_form_is_not_for_gets_the_other() -> None:
    """KV of 8 bits, and rows that do not start at multiples of 16 bytes."""
    for launch in (
        launches.decode(8, 16, backend="hopper", kv_dtype=FP8),
        launches.decode(8, 16, backend="hopper", kv_dtype=np.float16),
        launches.decode(8, 16, backend="hopper", kv_stride=DEPTH + 1),
    ):
        assert not hasattr(launch.kernel, "is_gluon") or not launch.kernel.is_gluon()


@pytest.mark.parametrize(
    ("capability", "release", "kind"),
    [
        ((9, 0), "3.6.0", "hopper"),
        ((9, 0), "3.7.1+git0", "hopper"),
        ((9, 0), "3.9.0", "cuda"),
        ((8, 0), "3.6.0", "cuda"),
        ((10, 0), "3.6.0", "cuda"),
    ],
)
def test_who_gets_the_hopper_form(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], release: str, kind: str
) -> None:
    """Only the GPUs and the releases of Triton that it was written for."""
    torch = pytest.importorskip("torch")
    from mlaplan.kernels import target

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _index: capability)
    monkeypatch.setattr(triton, "__version__", release)
    assert target._cuda_kind.__wrapped__(0) == kind


def test_an_overlapping_merge_waits_in_every_program() -> None:
    """On every path, and after no return: as deep in the function as its one return."""
    compiled = compile_for(launches.merge(8, 16, backend="hopper", after_decode=True), HOPPER, BF16_TYPES)
    lines = compiled.asm["ttir"].splitlines()
    waits = [line for line in lines if "griddepcontrol.wait" in line]
    returns = [line for line in lines if "tt.return" in line]
    assert (len(waits), len(returns)) == (1, 1)
    assert len(waits[0]) - len(waits[0].lstrip()) == len(returns[0]) - len(returns[0].lstrip())
    assert lines.index(waits[0]) < lines.index(returns[0])
    assert "griddepcontrol" not in compile_for(launches.merge(8, 16, backend="hopper"), HOPPER, BF16_TYPES).asm["ptx"]
