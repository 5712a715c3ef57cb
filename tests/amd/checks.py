"""What the emulated code must do. Each check raises on a difference and returns a line for the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import emulator
import numpy as np
import numpy.typing as npt
from decode_cases import DEPTH, SCALE, V_DIM, Batch, lse_error, make_batch, relative_error
from plan_cases import (
    GUARD,
    Case,
    golden_cases,
    golden_difference,
    golden_vectors,
    random_case,
    stale_starts,
    wild_case,
    with_policy,
)

from mlaplan.kernels.decode import decode_launch
from mlaplan.kernels.launch import Launch
from mlaplan.kernels.merge import merge_launch
from mlaplan.kernels.plan import plan_launch
from mlaplan.kernels.slots import slots_launch
from mlaplan.layout import Layout, PlanArrays
from mlaplan.reference import decode as reference_decode
from mlaplan.reference import merge as reference_merge
from mlaplan.reference import plan as reference_plan
from mlaplan.reference import slots as reference_slots
from mlaplan.reference.attention import attention

# Weights are rounded to the type of q, and so is the output.
OUT_ERROR = {"bf16": 3e-3, "fp16": 4e-4, "fp8": 3e-3}
LSE_ERROR = 2e-5


@dataclass
class Result:
    """What one check saw."""

    check: str
    arch: str
    cases: int = 0
    instructions: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, **errors: float) -> None:
        for name, error in errors.items():
            self.worst[name] = max(self.worst.get(name, 0.0), error)


def fresh_arrays(case: Case) -> PlanArrays:
    """The arrays of a plan, each alone in memory and full of a value that no plan holds."""
    params = case.params
    layout = Layout.of(case.num_rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
    return PlanArrays(*(np.full(shape, GUARD, np.int32) for shape in layout.shapes))


def plan_launch_of(case: Case) -> Launch:
    """The launch of `plan` for a case; the arrays are among its arguments."""
    return plan_launch(case.query_start_loc, case.seq_lens, fresh_arrays(case), case.params)


def check_plan(case: Case, arch: str, order: int, result: Result) -> PlanArrays:
    """Compares one plan with the reference, word for word, with what is not to be written as well."""
    expected, arrays = fresh_arrays(case), fresh_arrays(case)
    reference_plan.plan(case.query_start_loc, case.seq_lens, expected, case.params)
    launch = plan_launch(case.query_start_loc, case.seq_lens, arrays, case.params)
    instructions = emulator.run(launch, arch, order=order)
    for name, want, got in zip(PlanArrays._fields, expected, arrays, strict=True):
        assert np.array_equal(want, got), f"{case.name} on {arch}: {name} differs; {case.params}"
    result.cases += 1
    result.instructions += instructions
    return arrays


def check_vectors(arch: str, numbers: Iterable[int]) -> Result:
    """The reference vectors of these numbers, every variant that they hold."""
    result = Result("plan, reference vectors", arch)
    shared = emulator.shared_folder()
    assert shared is not None
    vectors = golden_vectors(shared)
    for number in numbers:
        for case, wanted in golden_cases(vectors[number]):
            arrays = check_plan(case, arch, number, result)
            assert not golden_difference(vectors[number], arrays, wanted), case.name
    return result


def check_random(arch: str, numbers: Iterable[int]) -> Result:
    """Random batches of these numbers; every fifth is wild, and every fiftieth has several hundred rows."""
    result = Result("plan, random batches", arch)
    for number in numbers:
        rng = np.random.default_rng(number)
        if number % 5 == 4:
            case = wild_case(rng, max_rows=60, name=f"wild batch {number}")
        else:
            case = random_case(rng, max_rows=600 if number % 50 == 0 else 60, name=f"random batch {number}")
        check_plan(case, arch, number, result)
    return result


def check_policy(policy: str) -> Callable[[str, Iterable[int]], Result]:
    """Random batches under another policy than aiter's; every fifth is wild."""

    def check(arch: str, numbers: Iterable[int]) -> Result:
        result = Result(f"plan, {policy}", arch)
        for number in numbers:
            rng = np.random.default_rng(number)
            make = wild_case if number % 5 == 4 else random_case
            # Few rows, since every instruction is emulated.
            case = make(rng, max_rows=24, name=f"batch {number}")
            check_plan(with_policy(rng, case, policy), arch, number, result)
        return result

    return check


def check_stale(arch: str, _numbers: Iterable[int]) -> Result:
    """Boundaries of another step, in a class of 1,024 rows."""
    result = Result("plan, stale boundaries", arch)
    for case in stale_starts():
        check_plan(case, arch, 1, result)
    return result


def check_slots(arch: str, numbers: Iterable[int]) -> Result:
    """Random indices, some of which are no slots, with strided tables."""
    result = Result("slots", arch)
    for number in numbers:
        rng = np.random.default_rng(number)
        rows, requests, width = int(rng.integers(1, 5)), int(rng.integers(1, 6)), int(rng.integers(1, 9))
        block_size = int(rng.choice([1, 3, 16, 64]))
        topk = rng.integers(-2, width * block_size + 2, (rows, 2 * int(rng.integers(1, 100)))).astype(np.int32)[:, ::2]
        table = rng.integers(-1, 1 << 27, (requests, 2 * width)).astype(np.int32)[:, ::2]
        table[rng.random(table.shape) < 0.1] = (1 << 31) - 1
        request_ids = rng.integers(-1, requests + 1, rows).astype(np.int32)
        lengths = rng.integers(0, topk.shape[1] + 1, rows)
        kv_indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        given = {"block_size": block_size, "num_rows": rows}
        expected = np.full(max(1, int(kv_indptr[-1])), GUARD, np.int32)
        got = expected.copy()
        reference_slots.slots(topk, table, request_ids, kv_indptr, expected, **given)
        # The harness copies arrays, and a copy has no strides: hand it whole rows and ask for every second column.
        launch = slots_launch(topk, table, request_ids, kv_indptr, got, **given)
        args = (*(_whole(array) for array in (topk, table)), *launch.args[2:])
        result.instructions += emulator.run(launch._replace(args=args), arch, order=number)
        assert np.array_equal(got, expected), f"slots {number} on {arch}"
        result.cases += 1
    return result


def _whole(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The memory behind a view of every second column, as an array of its own."""
    wide = np.full((array.shape[0], array.strides[0] // array.itemsize), 1 << 30, np.int32)
    wide[:, ::2][:, : array.shape[1]] = array
    return wide


def _bits(values: npt.NDArray[Any], kind: str, arch: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Values as the harness takes them, and what they are in float64."""
    import aiter_case  # type: ignore[import-not-found]

    if kind == "fp16":
        return values.astype(np.float16), values.astype(np.float16).astype(np.float64)
    if kind == "bf16":
        bits = aiter_case.bf16_bits(values)
        return bits, aiter_case.bf16_values(bits).astype(np.float64)
    table = aiter_case.e4m3_values(arch == "gfx942")
    codes = aiter_case.e4m3_codes(values, arch == "gfx942")
    return codes, table[codes].astype(np.float64)


_OLD = 7.0


def _decode_and_merge(batch: Batch, kind: str, arch: str, order: int, result: Result) -> None:
    rng = np.random.default_rng(order)
    kv_scale = 0.75 if kind == "fp8" else 1.0
    q_kind = "bf16" if kind == "fp8" else kind
    q, q_values = _bits(rng.standard_normal((batch.num_rows, batch.heads, DEPTH)), q_kind, arch)
    pool, pool_values = _bits(rng.standard_normal((batch.pool, DEPTH)), kind, arch)
    pool_values = pool_values * kv_scale
    rows, group, fold = (batch.num_rows, batch.heads), batch.group, batch.params.fold
    shapes = {"out": (*rows, V_DIM), "lse": rows}
    shapes |= {"partial_out": (batch.num_partials, group, V_DIM), "partial_lse": (batch.num_partials, group)}
    expected: dict[str, Any] = {name: np.full(shape, _OLD) for name, shape in shapes.items()}
    got: dict[str, Any] = {name: np.full(shape, _OLD, np.float32) for name, shape in shapes.items()}
    got["out"] = _bits(got["out"], q_kind, arch)[0]
    types = {"q_ptr": f"*{q_kind}", "out_ptr": f"*{q_kind}", "kv_cache_ptr": f"*{kind}"}
    if kind == "fp8":
        types["kv_cache_ptr"] = "*fp8e4b8" if arch == "gfx942" else "*fp8e4nv"

    def compare(names: Iterable[str], step: str) -> None:
        for name in names:
            value = _bits_to_values(got[name], q_kind) if name == "out" else got[name].astype(np.float64)
            if name.endswith("lse"):
                result.note(lse=lse_error(value, expected[name]))
            else:
                result.note(**{step: relative_error(value, expected[name])})
            assert (value[expected[name] == _OLD] == _OLD).all(), f"{step} wrote {name} where no work does"

    reference_decode.decode(q_values, pool_values, batch.kv_indices, batch.arrays, fold=fold, scale=SCALE, **expected)
    launch = decode_launch(
        q, pool, batch.kv_indices, batch.arrays, fold=fold, scale=SCALE, **got, k_scale=kv_scale, backend="hip"
    )
    result.instructions += emulator.run(launch, arch, types, order=order)
    compare(expected, "decode")
    partial_map, final_map = batch.maps
    maps: dict[str, Any] = {"reduce_partial_map": partial_map, "reduce_final_map": final_map, "fold": fold}
    partials = [expected.pop("partial_out"), expected.pop("partial_lse")]
    reference_merge.merge(partials[0], partials[1], batch.arrays, **maps, **expected)
    partials = [got.pop("partial_out"), got.pop("partial_lse")]
    result.instructions += emulator.run(
        merge_launch(partials[0], partials[1], batch.arrays, **maps, **got), arch, types, order=order
    )
    compare(expected, "merge")
    out, lse = attention(q_values, pool_values, batch.kv_indices, batch.arrays.kv_indptr, SCALE, V_DIM)
    result.note(attention=relative_error(_bits_to_values(got["out"], q_kind), out), lse=lse_error(got["lse"], lse))
    limits = {"lse": LSE_ERROR, **dict.fromkeys(("decode", "merge", "attention"), OUT_ERROR[kind])}
    assert all(error < limits[name] for name, error in result.worst.items()), (kind, arch, result.worst)
    result.cases += 1


def _bits_to_values(bits: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float64]:
    import aiter_case

    values = bits if kind == "fp16" else aiter_case.bf16_values(bits)
    return np.asarray(values, np.float64)


def check_decode(kind: str) -> Callable[[str, Iterable[int]], Result]:
    """The check of decode and merge for one type of KV rows."""

    def check(arch: str, numbers: Iterable[int]) -> Result:
        result = Result(f"decode and merge, {kind}", arch)
        for number in numbers:
            rng = np.random.default_rng(number)
            heads, fold = ((16, 1), (8, 1), (32, 2), (24, 1), (128, 8), (64, 1))[number % 6]
            lengths = rng.integers(1, 260, int(rng.integers(1, 4))).tolist()
            batch = make_batch(rng, [*lengths, 0, 40], heads=heads, fold=fold, num_cus=int(rng.integers(4, 24)))
            _decode_and_merge(batch, kind, arch, number, result)
        return result

    return check


def timed(check: Callable[[str, Iterable[int]], Result], arch: str, numbers: Iterable[int]) -> Result:
    """Runs a check and notes the time it took."""
    emulator.connect()
    begin = time.monotonic()
    result = check(arch, numbers)
    result.seconds = time.monotonic() - begin
    return result
