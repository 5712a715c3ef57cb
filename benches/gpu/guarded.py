"""Every op over buffers between guard bands, with inputs that an engine makes and with wild ones.

A rig owns the buffers of one op. `fill` puts new inputs where the old ones lay, so that what a graph captured can be
replayed over them; `damage` says which byte outside a buffer changed, which input was written, and for sane inputs
where the result is not the reference's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

_REPOSITORY = Path(__file__).resolve().parents[2]
sys.path += [str(_REPOSITORY / "python"), str(_REPOSITORY / "tests" / "kernels")]

from decode_cases import DEPTH, SCALE, V_DIM, lse_error, make_batch, relative_error  # noqa: E402
from plan_cases import random_case, wild_case  # noqa: E402

from mlaplan.costs import DEFAULT  # noqa: E402
from mlaplan.kernels.decode import decode  # noqa: E402
from mlaplan.kernels.merge import merge  # noqa: E402
from mlaplan.kernels.plan import plan  # noqa: E402
from mlaplan.kernels.slots import slots  # noqa: E402
from mlaplan.layout import Layout, PlanArrays, PlanParams  # noqa: E402
from mlaplan.reference import decode as decode_reference  # noqa: E402
from mlaplan.reference import merge as merge_reference  # noqa: E402
from mlaplan.reference import plan as plan_reference  # noqa: E402
from mlaplan.reference import slots as slots_reference  # noqa: E402

BAND = 1 << 16  # bytes on each side; a multiple of 256, so that the buffer is aligned as a whole allocation is
_CANARY = 0xA5
FP8 = torch.float8_e4m3fn
EXTREMES = np.array([-(1 << 31), -(1 << 30), -5, -1, 0, 1, 7, 1 << 16, 1 << 30, (1 << 31) - 1])

# Weights are rounded to the type of q before the second product, and the output to its own.
_OUT_ERROR = {torch.float16: 4e-4, torch.bfloat16: 3e-3}
_LSE_ERROR = 2e-5


class Guards:
    """Buffers that each lie inside a larger one; the bands around them hold one value."""

    def __init__(self, device: str, band: int = BAND) -> None:
        """With a `band` of 0 a buffer is an allocation, and `poison` leaves it as it came: never written."""
        self._device, self._band = device, band
        self._taken: list[tuple[str, Any, int]] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns a tensor of this shape; nothing else lies within `band` bytes of it."""
        size = int(np.prod(shape)) * dtype.itemsize
        if self._band == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        whole = torch.full((size + 2 * self._band,), _CANARY, dtype=torch.uint8, device=self._device)
        self._taken.append((name, whole, size))
        return whole[self._band : self._band + size].view(dtype).view(shape)

    def poison(self, array: Any, value: float) -> None:
        """Gives what a launch has to write an old value, so that what it leaves out shows."""
        if self._band:
            array.fill_(value)

    def damage(self) -> list[str]:
        """Names the buffers around which something was written, with the distance in bytes from buffer's start."""
        found = []
        for name, whole, size in self._taken:
            changed = whole != _CANARY
            changed[self._band : self._band + size] = False
            if bool(changed.any()):
                at = int(changed.nonzero()[0, 0]) - self._band
                found.append(f"{name}: byte {at} of a buffer of {size} bytes was written")
        return found


class Rig:
    """The buffers of one op, its launch, and what is known of its result."""

    name = ""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._inputs: dict[str, Any] = {}
        self._held: dict[str, Any] = {}
        self._check: Callable[[], str] | None = None

    def _input(self, name: str, shape: tuple[int, ...], dtype: Any = torch.int32) -> Any:
        made = self._guards.take(f"{self.name} {name}", shape, dtype)
        self._inputs[name] = made
        return made

    def _put(self, **values: Any) -> None:
        for name, value in values.items():
            held = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            self._held[name] = held.to(self._inputs[name].device, self._inputs[name].dtype)
            self._inputs[name].copy_(self._held[name].view(self._inputs[name].shape))

    def fill(self, rng: np.random.Generator, *, wild: bool) -> None:
        """Draws new inputs."""
        raise NotImplementedError

    def launch(self) -> None:
        """Queues the op."""
        raise NotImplementedError

    def damage(self) -> list[str]:
        """Says what is wrong after the last launch; empty if nothing."""
        found = self._guards.damage()
        for name, held in self._held.items():
            now = self._inputs[name]
            if not torch.equal(now.view(torch.uint8), held.contiguous().view(now.shape).view(torch.uint8)):
                found.append(f"{self.name} {name}: an input was written")
        wrong = self._check() if self._check is not None else ""
        return [*found, wrong] if wrong else found


def _wild(rng: np.random.Generator, values: Any, share: float | None = None) -> Any:
    """The values with some or all replaced by the extremes of the type and numbers near the edges."""
    values = np.array(values, np.int64)
    where = rng.random(values.shape) < (rng.choice([0.05, 0.5, 1.0]) if share is None else share)
    values[where] = rng.choice(EXTREMES, int(where.sum()))
    return values.astype(np.int32)


class PlanRig(Rig):
    """`plan`; its result is defined for any input, so it is always compared."""

    name = "plan"

    def __init__(self, guards: Guards, num_rows: int, num_requests: int, params: PlanParams) -> None:
        """Arrays of one class, each between its own bands."""
        super().__init__(guards)
        self._num_rows, self._num_requests, self._params = num_rows, num_requests, params
        self._starts = self._input("query_start_loc", (num_requests + 1,))
        self._lens = self._input("seq_lens", (num_requests,))
        layout = Layout.of(num_rows, num_cus=params.num_cus, fold=params.fold, pieces=params.pieces)
        self._arrays = PlanArrays(
            *(
                guards.take(f"plan {name}", shape, torch.int32)
                for name, shape in zip(PlanArrays._fields, layout.shapes, strict=True)
            )
        )

    def fill(self, rng: np.random.Generator, *, wild: bool) -> None:
        """See `Rig.fill`."""
        make = wild_case if wild else random_case
        case = make(rng, max_rows=self._num_rows)
        starts = np.full(self._num_requests + 1, case.query_start_loc[-1], np.int32)
        lens = np.zeros(self._num_requests, np.int32)
        count = min(self._num_requests, case.seq_lens.size)
        starts[: count + 1], lens[:count] = case.query_start_loc[: count + 1], case.seq_lens[:count]
        starts[count:] = starts[count]
        if wild:
            starts, lens = _wild(rng, starts), _wild(rng, lens)
        self._put(query_start_loc=starts, seq_lens=lens)
        for array in self._arrays:
            self._guards.poison(array, -0x5EED)
        wanted = PlanArrays(*(np.full(array.shape, -0x5EED, np.int32) for array in self._arrays))
        plan_reference.plan(starts, lens, wanted, self._params)

        def check() -> str:
            for name, want, got in zip(PlanArrays._fields, wanted, self._arrays, strict=True):
                if not np.array_equal(got.cpu().numpy(), want):
                    return f"plan {name} is not the reference's; {self._params}"
            return ""

        self._check = check

    def launch(self) -> None:
        """See `Rig.launch`."""
        plan(self._starts, self._lens, self._arrays, self._params)


class SlotsRig(Rig):
    """`slots` for rows of up to `topk` entries of requests with tables of `width` blocks."""

    name = "slots"

    def __init__(self, guards: Guards, num_rows: int, topk: int, *, width: int = 11, block_size: int = 16) -> None:
        """Half as many requests as rows."""
        super().__init__(guards)
        self._rows, self._topk, self._width, self._block_size = num_rows, topk, width, block_size
        self._requests = max(1, num_rows // 2)
        self._input("topk_indices", (num_rows, topk))
        self._input("block_table", (self._requests, width))
        self._input("request_ids", (num_rows,))
        self._input("kv_indptr", (num_rows + 1,))
        self._out = guards.take("slots kv_indices", (num_rows * topk,), torch.int32)

    def fill(self, rng: np.random.Generator, *, wild: bool) -> None:
        """See `Rig.fill`."""
        lengths = rng.integers(0, self._topk + 1, self._rows)
        values = {
            "topk_indices": rng.integers(-2, self._width * self._block_size + 3, (self._rows, self._topk)),
            "block_table": rng.integers(-2, 1000, (self._requests, self._width)),
            "request_ids": rng.integers(0, self._requests, self._rows),
            "kv_indptr": np.concatenate(([0], np.cumsum(lengths))),
        }
        values = {name: _wild(rng, value) if wild else value.astype(np.int32) for name, value in values.items()}
        self._put(**values)
        self._guards.poison(self._out, -0x5EED)
        self._check = None if wild else lambda: self._compare(values)

    def _compare(self, values: dict[str, Any]) -> str:
        wanted = np.full(self._out.shape, -0x5EED, np.int32)
        slots_reference.slots(**values, kv_indices=wanted, block_size=self._block_size, num_rows=self._rows)
        return "" if np.array_equal(self._out.cpu().numpy(), wanted) else "slots kv_indices is not the reference's"

    def launch(self) -> None:
        """See `Rig.launch`."""
        slots(**self._inputs, kv_indices=self._out, block_size=self._block_size, num_rows=self._rows)


class DecodeRig(Rig):
    """`decode` and `merge` of one planned batch; `op` says which of the two is launched."""

    def __init__(
        self,
        guards: Guards,
        op: str,
        lengths: list[int],
        *,
        heads: int,
        fold: int,
        num_cus: int,
        dtype: Any,
        kv_dtype: Any = None,
    ) -> None:
        """The batch fixes the shapes; wild inputs replace the words of its plan. KV has q's type if none is given."""
        self.name = op
        super().__init__(guards)
        rng = np.random.default_rng(7)
        self._batch = batch = make_batch(rng, lengths, heads=heads, fold=fold, num_cus=num_cus)
        self._arrays = PlanArrays(
            *(self._input(name, array.shape) for name, array in zip(PlanArrays._fields, batch.arrays, strict=True))
        )
        self._input("kv_indices", batch.kv_indices.shape)
        for name, array in zip(("reduce_partial_map", "reduce_final_map"), batch.maps, strict=True):
            self._input(name, array.shape)
        self._input("q", (batch.num_rows, heads, DEPTH), dtype)
        self._input("kv_cache", (batch.pool, DEPTH), kv_dtype or dtype)
        partial = (batch.num_partials, batch.group)
        take = self._input if op == "merge" else lambda name, *rest: guards.take(f"{op} {name}", *rest)
        self._partial_out = take("partial_out", (*partial, V_DIM), torch.float32)
        self._partial_lse = take("partial_lse", partial, torch.float32)
        self._out = guards.take(f"{op} out", (batch.num_rows, heads, V_DIM), dtype)
        self._lse = guards.take(f"{op} lse", (batch.num_rows, heads), torch.float32)

    def _outputs(self) -> dict[str, Any]:
        made = {"out": self._out, "lse": self._lse}
        return (
            made
            if self.name == "merge"
            else made | {"partial_out": self._partial_out, "partial_lse": self._partial_lse}
        )

    def fill(self, rng: np.random.Generator, *, wild: bool) -> None:
        """See `Rig.fill`."""
        batch, values = self._batch, {}
        words = {
            **batch.arrays._asdict(),
            "kv_indices": batch.kv_indices,
            **dict(zip(("reduce_partial_map", "reduce_final_map"), batch.maps, strict=True)),
        }
        for name, array in words.items():
            # Some arrays stay right, so that wild words in the others lead further than a first check.
            values[name] = _wild(rng, array) if wild and rng.random() < 0.7 else array
        drawn = ("q", "kv_cache") if self.name == "decode" else ("q", "kv_cache", "partial_out", "partial_lse")
        for name in drawn:
            values[name] = torch.from_numpy(rng.standard_normal(self._inputs[name].shape, np.float32))
        self._put(**values)
        for array in self._outputs().values():
            self._guards.poison(array, 7.0)
        self._check = None if wild else self._compare

    def _compare(self) -> str:
        batch, params = self._batch, self._batch.params
        wanted = {name: np.full(tuple(array.shape), 7.0) for name, array in self._outputs().items()}
        given = {name: self._inputs[name].double().cpu().numpy() for name in ("q", "kv_cache")}
        if self.name == "decode":
            decode_reference.decode(
                given["q"], given["kv_cache"], batch.kv_indices, batch.arrays,
                fold=params.fold, scale=SCALE, v_dim=V_DIM, **wanted,
            )  # fmt: skip
        else:
            merge_reference.merge(
                self._partial_out.double().cpu().numpy(), self._partial_lse.double().cpu().numpy(), batch.arrays,
                reduce_partial_map=batch.maps[0], reduce_final_map=batch.maps[1], fold=params.fold, **wanted,
            )  # fmt: skip
        for name, array in self._outputs().items():
            got = array.double().cpu().numpy()
            if name.endswith("lse"):
                if lse_error(got, wanted[name]) > _LSE_ERROR:
                    return f"{self.name} {name} is {lse_error(got, wanted[name]):.1e} off"
            elif relative_error(got, wanted[name]) > _OUT_ERROR[self._inputs["q"].dtype]:
                return f"{self.name} {name} is {relative_error(got, wanted[name]):.1e} off"
        return ""

    def launch(self) -> None:
        """See `Rig.launch`."""
        maps = {name: self._inputs[name] for name in ("reduce_partial_map", "reduce_final_map")}
        partials = {"partial_out": self._partial_out, "partial_lse": self._partial_lse}
        written = {"out": self._out, "lse": self._lse}
        fold = self._batch.params.fold
        if self.name == "decode":
            decode(
                self._inputs["q"], self._inputs["kv_cache"], self._inputs["kv_indices"], self._arrays,
                fold=fold, scale=SCALE, v_dim=V_DIM, **written, **partials,
            )  # fmt: skip
        else:
            merge(**partials, arrays=self._arrays, **maps, **written, fold=fold)


def makers(device: str, band: int, *, small: bool, dtype: Any = torch.bfloat16) -> list[Callable[[], Rig]]:
    """What makes the rigs: one or more of each op, few and small ones where every access is watched."""
    full = PlanParams(topk=2048, num_cus=304)
    plans = [(64, 40, full), (1500, 900, full)]
    plans += [(64, 40, replace(full, policy=policy, cost_table=DEFAULT)) for policy in ("balanced", "invariant")]
    entries = [(5, 70)]
    # 128 heads are a program of their own, and so is KV of another type than the queries.
    decodes = [([300, 0, 17, 129], 16, 1, 20, None), ([70, 0, 5], 128, 1, 6, None), ([300, 0, 17], 16, 1, 20, FP8)]
    if not small:
        plans += [
            (100, 100, replace(full, num_cus=80, fold=4, split_budget=-1)),
            (512, 512, replace(full, num_cus=256, empty_rows="aiter", variant="serial")),
            (64, 64, replace(full, empty_rows="aiter")),
            (512, 300, replace(full, num_cus=132, policy="balanced", cost_table=DEFAULT)),
            (100, 60, replace(full, policy="invariant", cost_table=DEFAULT, fold=4)),
        ]
        entries += [(60, 2048)]
        decodes += [
            ([2048, 1, 700, 0, 90], 128, 1, 132, None),
            ([500, 64, 65], 64, 4, 30, None),
            ([2048] * 9, 8, 1, 300, None),
        ]
    made: list[Callable[[], Rig]] = []
    made += [partial(PlanRig, Guards(device, band), *shape) for shape in plans]
    made += [partial(SlotsRig, Guards(device, band), *shape) for shape in entries]
    for op in ("decode", "merge"):
        for lengths, heads, fold, num_cus, kv_dtype in decodes:
            if op == "merge" and kv_dtype is not None:
                continue  # KV is not merge's
            shape = {"heads": heads, "fold": fold, "num_cus": num_cus, "dtype": dtype, "kv_dtype": kv_dtype}
            made.append(partial(DecodeRig, Guards(device, band), op, lengths, **shape))
    return made


def first_launches(rigs: list[Rig]) -> None:
    """Launches every rig once over sane inputs, side by side, because most of that is compiling.

    Raises:
        SystemExit: A result is wrong.
    """

    def launch(rig: Rig) -> None:
        rig.fill(np.random.default_rng(1), wild=False)
        rig.launch()

    # Triton's interpreter, for which there is no GPU, knows one launch at a time.
    with ThreadPoolExecutor(len(rigs) if torch.cuda.is_available() else 1) as pool:
        list(pool.map(launch, rigs))
    for rig in rigs:
        if rig.damage():
            raise SystemExit(f"first launch: {rig.damage()}")
