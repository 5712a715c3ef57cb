"""Plans and decodes of a run, compared with what the definition says.

Nothing here asks the planner what is right: plans are made from nothing by the reference op, and attention is
dense, over slots that are looked up directly.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlaplan.layout import PlanArrays
from mlaplan.reference.attention import attention
from mlaplan.reference.plan import plan as reference_plan

if TYPE_CHECKING:
    from mlaplan._types import Int32Array
    from mlaplan.plan import Plan
    from mlaplan.planner import Planner
    from mlaplan.workload import Step

_CACHE_BLOCKS = 251  # blocks of the simulated cache; prime, so that strided block ids spread over it
_SAMPLED_ROWS = 16  # rows of a step that dense attention is computed for
_DECODED_TOKENS = 512 * 2048  # KV entries of the largest step that is decoded
_UNTOUCHED = -7  # what a fresh array holds: no plan has it

# Larger than every length, so coprime to it: j -> (p * j + b) mod n visits n positions in n steps.
_PRIMES = np.array([2_147_483_647, 2_147_483_629, 2_147_483_587, 2_147_483_579], dtype=np.int64)

# Largest error of an output, relative to the largest value of its row, and of an LSE, by the type of the output.
# bf16 has 8 bits, and both the weights and the result are rounded to it; fp16 likewise has 11.
_TOLERANCES = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "float16": (4e-3, 2e-3),
    "bfloat16": (2e-2, 2e-3),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it should be.

    Attributes:
        step: Number of the step.
        array: Which array or figure.
        index: Position in it.
        row: Row that the position belongs to, None where it belongs to none.
        actual: The value found.
        expected: The value from the definition.
        request: Position of the row's request in the log, None where there is none.
    """

    step: int
    array: str
    index: tuple[int, ...]
    row: int | None
    actual: float
    expected: float
    request: int | None = None

    def __str__(self) -> str:
        position = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        row = "" if self.row is None else f", row {self.row}"
        request = "" if self.request is None else f", request {self.request}"
        return (
            f"step {self.step}{row}{request}: {self.array}{position} is {self.actual:.10g}, "
            f"should be {self.expected:.10g}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the difference for JSON; a value that JSON lacks is text."""
        values = asdict(self)
        for name in ("actual", "expected"):
            if not math.isfinite(values[name]):
                values[name] = str(values[name])
        return values


def check_plan(planner: Planner, plan: Plan, step: Step) -> Difference | None:
    """Compares the whole state of a plan with one made from nothing.

    Args:
        planner: Who made the plan.
        plan: The plan, which must be the latest.
        step: The step that it is for.

    Returns:
        The first difference, None where all is equal.
    """
    params = planner.params
    for name, actual, expected in (
        ("rows", plan.rows, step.rows),
        ("padded_rows", plan.padded_rows, step.padded_rows),
    ):
        if actual is not None and actual != expected:
            return Difference(step.index, name, (), None, actual, expected)

    found = PlanArrays(*(planner.device.to_host(array) for array in plan.arrays))
    wanted = PlanArrays(*(np.full(array.shape, _UNTOUCHED, np.int32) for array in found))
    reference_plan(step.query_start_loc, step.seq_lens, wanted, params)
    num_works = int(wanted.work_indptr[-1])
    if plan.num_works is not None and plan.num_works != num_works:
        return Difference(step.index, "num_works", (), None, plan.num_works, num_works)
    different = first_difference(found, wanted, params.fold)
    if different is None:
        return None
    name, index, row = different
    have, want = getattr(found, name), getattr(wanted, name)
    return Difference(step.index, name, index, row, int(have[index]), int(want[index]), _request_of(step, row))


def first_difference(
    found: PlanArrays, wanted: PlanArrays, fold: int
) -> tuple[str, tuple[int, ...], int | None] | None:
    """Compares a plan's arrays with those of another, entry by entry.

    Args:
        found: Arrays on the host.
        wanted: Arrays that are right. Works behind their last one are not compared: nobody reads them.
        fold: Planner rows per row.

    Returns:
        The array and the index of the first entry that differs, and the row that it is about, None where it is about
        none; None where all is equal.
    """
    num_works = int(wanted.work_indptr[-1])
    for name in PlanArrays._fields:
        have, want = getattr(found, name), getattr(wanted, name)
        if name == "work_info":
            have, want = have[:num_works], want[:num_works]
        if np.array_equal(have, want):
            continue
        if have.shape != want.shape:
            # Works that are missing; of the other arrays a plan always has all.
            index = (have.shape[0],) + (0,) * (want.ndim - 1)
            return name, index, _row_of(name, index, wanted, fold)
        index = tuple(int(axis[0]) for axis in np.nonzero(have != want))
        return name, index, _row_of(name, index, wanted, fold)
    return None


def _row_of(name: str, index: tuple[int, ...], wanted: PlanArrays, fold: int) -> int | None:
    """Returns the row that an entry of a plan array is about."""
    position = index[0]
    if name == "request_ids":
        return position
    if name == "kv_indptr":
        return max(position - 1, 0)
    if name == "reduce_indptr":
        return max(position - 1, 0) // fold
    if name == "work_info":
        return int(wanted.work_info[position, 2]) // fold
    num_works = int(wanted.work_indptr[-1])
    first = int(wanted.work_indptr[position])
    return int(wanted.work_info[first, 2]) // fold if first < num_works else None


def _request_of(step: Step, row: int | None) -> int | None:
    if row is None or row >= step.rows:
        return None
    return int(step.keys[np.searchsorted(step.query_start_loc, row, side="right") - 1])


class DecodeValues(NamedTuple):
    """What a step decodes, on the host, for P padded rows of R requests.

    Attributes:
        q: Queries. Shape (P, heads, head_dim), float32 that bf16 holds exactly.
        topk_indices: Token positions of each row, -1 behind them. Shape (P, topk), int32.
        block_table: Blocks of each request in the cache. Shape (R, width), int32.
        requests: Request of each live row. Shape (rows,), int64.
        positions: Position of each live row's token in its request. Shape (rows,), int64.
    """

    q: npt.NDArray[np.float32]
    topk_indices: Int32Array
    block_table: Int32Array
    requests: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


class DecodeChecker:
    """Decodes a step from its plan and compares it with dense attention over the same KV slots.

    The simulated cache is smaller than the scheduler's pool: blocks are folded onto it. A wrong block still
    reads other values, but for one in 251 per token.
    """

    def __init__(self, planner: Planner, block_size: int, seed: int) -> None:
        """Makes the cache, once."""
        self._planner = planner
        self._config = planner.config
        self._block_size = block_size
        self._rng = np.random.default_rng(seed)
        self._cache = self._random((_CACHE_BLOCKS * block_size, self._config.head_dim))
        self._device_cache: Any = None

    def fits(self, step: Step) -> bool:
        """Whether a step is small enough to be decoded on the host in a moment."""
        return step.rows * self._config.topk <= _DECODED_TOKENS

    def inputs(self, step: Step) -> DecodeValues:
        """Draws what a step decodes: queries, token positions and a block table over the cache.

        Args:
            step: The step, which must be the scheduler's latest.
        """
        requests, positions = _rows_of(step)
        return DecodeValues(
            q=self._random((step.padded_rows, self._config.heads, self._config.head_dim)),
            topk_indices=self._topk_indices(positions, step.padded_rows),
            block_table=np.ascontiguousarray(step.block_table % _CACHE_BLOCKS),
            requests=requests,
            positions=positions,
        )

    def check(self, plan: Plan, step: Step) -> tuple[Difference | None, int]:
        """Decodes a step, compares sampled rows, and looks at its padding.

        Args:
            plan: The step's plan, which must be the latest.
            step: The step, which must be the scheduler's latest.

        Returns:
            The first difference, None where there is none; and how many rows were compared.
        """
        device = self._planner.device
        values = self.inputs(step)
        out, lse = self._planner.decode(
            plan,
            self._to_device(values.q, self._config.q_dtype),
            self.cache,
            device.array(values.topk_indices),
            device.array(values.block_table),
            block_size=self._block_size,
        )
        return self.compare(step, values, out, lse)

    def compare(self, step: Step, values: DecodeValues, out: Any, lse: Any) -> tuple[Difference | None, int]:
        """Compares what a step decoded with dense attention; as `check`.

        Args:
            step: The step.
            values: What was decoded.
            out: Output on the device. Shape (padded_rows, heads, v_head_dim).
            lse: LSE on the device. Shape (padded_rows, heads).
        """
        config = self._config
        sampled = self._sample(step.rows)
        lengths = np.minimum(values.positions[sampled] + 1, config.topk)
        indptr = np.zeros(len(sampled) + 1, np.int32)
        np.cumsum(lengths, out=indptr[1:])
        inside = np.arange(values.topk_indices.shape[1]) < lengths[:, None]
        tokens = values.topk_indices[sampled][inside]
        request = np.repeat(values.requests[sampled], lengths)
        block, offset = np.divmod(tokens, self._block_size)
        slots = (values.block_table[request, block] * self._block_size + offset).astype(np.int32)
        scale = config.head_dim**-0.5
        want_out, want_lse = attention(values.q[sampled], self._cache, slots, indptr, scale, config.v_head_dim)
        have_out, have_lse = self._to_host(out), self._to_host(lse)
        tolerance, lse_tolerance = _TOLERANCES[str(out.dtype).rsplit(".", maxsplit=1)[-1]]
        largest = np.abs(want_out).max(axis=(1, 2), keepdims=True)
        difference = (
            _compare(step, "decode out", have_out[sampled], want_out, sampled, tolerance * largest)
            or _compare(step, "decode lse", have_lse[sampled], want_lse, sampled, lse_tolerance)
            or self._check_padding(step, have_out, have_lse)
        )
        return difference, len(sampled)

    @property
    def cache(self) -> Any:
        """The KV cache on the device. Shape (num_slots, head_dim)."""
        if self._device_cache is None:
            self._device_cache = self._to_device(self._cache, self._config.kv_dtype)
        return self._device_cache

    def _check_padding(
        self, step: Step, out: npt.NDArray[np.float64], lse: npt.NDArray[np.float64]
    ) -> Difference | None:
        """Padding rows give zeros and an LSE of minus infinity."""
        padding = np.arange(step.rows, step.padded_rows)
        for name, have, value in (("decode out", out, 0.0), ("decode lse", lse, -np.inf)):
            if have.shape[0] < step.padded_rows:
                return Difference(step.index, f"rows of {name}", (), None, have.shape[0], step.padded_rows)
            rows = have[padding]
            difference = _compare(step, name, rows, np.full(rows.shape, value), padding, 0.0)
            if difference is not None:
                return difference
        return None

    def _random(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Random numbers that bf16 holds exactly, so that every device computes with the same ones."""
        values = self._rng.standard_normal(shape, dtype=np.float32)
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def _topk_indices(self, positions: npt.NDArray[np.int64], padded_rows: int) -> Int32Array:
        """Distinct token positions of each row in mixed order, and -1 behind them as indexers leave it."""
        topk = self._config.topk
        # A row sees the tokens up to its own, so there are as many of them as its position and one more.
        seen = positions[:, None] + 1
        factor = self._rng.choice(_PRIMES, (len(positions), 1))
        start = self._rng.integers(0, seen)
        column = np.arange(topk, dtype=np.int64)
        indices = np.full((padded_rows, topk), -1, np.int32)
        indices[: len(positions)] = np.where(column < seen, (column * factor + start) % seen, -1)
        return indices

    def _sample(self, rows: int) -> npt.NDArray[np.int64]:
        if rows <= _SAMPLED_ROWS:
            return np.arange(rows)
        inner = self._rng.choice(rows - 2, _SAMPLED_ROWS - 2, replace=False) + 1
        return np.concatenate(([0], np.sort(inner), [rows - 1]))

    def _to_device(self, values: npt.NDArray[np.float32], dtype: str) -> Any:
        # bf16 stands in for fp8, whose scales are the backend's matter and not the plan's.
        device = self._planner.device
        array = device.empty(values.shape, "bf16" if dtype == "fp8" else dtype)
        device.store(array, values)
        return array

    def _to_host(self, values: Any) -> npt.NDArray[np.float64]:
        return np.asarray(self._planner.device.to_host(values), dtype=np.float64)


def _rows_of(step: Step) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the request of each row in the batch, and the position of its token in the request."""
    queries = np.diff(step.query_start_loc).astype(np.int64)
    requests = np.repeat(np.arange(step.num_requests), queries)
    within = np.arange(step.rows) - step.query_start_loc[:-1].astype(np.int64)[requests]
    return requests, (step.seq_lens - queries)[requests] + within


def _compare(
    step: Step,
    name: str,
    have: npt.NDArray[np.float64],
    want: npt.NDArray[np.float64],
    rows: npt.NDArray[np.int64],
    limit: npt.NDArray[np.float64] | float,
) -> Difference | None:
    # Two infinities of one sign are equal, but their difference is not a number.
    with np.errstate(invalid="ignore"):
        wrong = ~((have == want) | (np.abs(have - want) <= limit))
    if not wrong.any():
        return None
    index = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    row = int(rows[index[0]])
    return Difference(
        step.index,
        name,
        (row, *index[1:]),
        row,
        float(have[index]),
        float(want[index]),
        _request_of(step, row),
    )
