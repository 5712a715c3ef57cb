"""The bits of a row under the policy `invariant`: decoded by the kernels, they do not depend on the other rows."""

from __future__ import annotations

import numpy as np
import pytest
from decode_cases import DEPTH, SCALE, V_DIM

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from mlaplan.costs import CostTable
from mlaplan.kernels.decode import decode
from mlaplan.kernels.merge import merge
from mlaplan.layout import Layout, PlanArrays, PlanParams
from mlaplan.reference.plan import plan

COSTS = CostTable(block_tokens=16, block=3, piece=7, whole=9, slot=2, merge=1)
HEADS = 16


class Row:
    """One row's query and KV, which every batch holds somewhere."""

    def __init__(self, rng: np.random.Generator, tokens: int, device: str, dtype: str) -> None:
        self.tokens, self.device, self.dtype = tokens, device, getattr(torch, dtype)
        self.q = rng.standard_normal((HEADS, DEPTH))
        self.pool = torch.from_numpy(rng.standard_normal((2 * tokens + 300, DEPTH))).to(device).to(self.dtype)
        self.slots = rng.permutation(len(self.pool))[:tokens].astype(np.int32)

    def bits(self, before: list[int], behind: list[int], params: PlanParams, rng: np.random.Generator) -> bytes:
        """Output and LSE of the row between others of these lengths."""
        lengths = [*before, self.tokens, *behind]
        rows, place = len(lengths) + 1, len(before)
        layout = Layout.of(rows, num_cus=params.num_cus, fold=1, pieces=params.pieces)
        host = PlanArrays(*(np.zeros(shape, np.int32) for shape in layout.shapes))
        plan(np.arange(len(lengths) + 1, dtype=np.int32), np.array(lengths, np.int32), host, params)
        q = rng.standard_normal((rows, HEADS, DEPTH))
        q[place] = self.q
        indices = rng.integers(0, len(self.pool), sum(lengths)).astype(np.int32)
        indices[sum(before) : sum(before) + self.tokens] = self.slots
        partials = max(1, int(host.reduce_indptr[-1]))
        tiles = np.arange(rows, dtype=np.int32)
        to = self.device
        arrays = PlanArrays(*(torch.from_numpy(array).to(to) for array in host))
        outputs = {
            "out": torch.zeros((rows, HEADS, V_DIM), dtype=self.dtype, device=to),
            "lse": torch.zeros((rows, HEADS), device=to),
        }
        partial = torch.zeros((partials, HEADS, V_DIM), device=to), torch.zeros((partials, HEADS), device=to)
        decode(
            torch.from_numpy(q).to(to).to(self.dtype), self.pool, torch.from_numpy(indices).to(to), arrays,
            fold=1, scale=SCALE, partial_out=partial[0], partial_lse=partial[1], **outputs,
        )  # fmt: skip
        merge(
            *partial, arrays, reduce_partial_map=torch.arange(partials, dtype=torch.int32, device=to),
            reduce_final_map=torch.from_numpy(np.stack((tiles, tiles + 1), axis=1)).to(to), fold=1,
            one_cut=params.policy == "invariant", **outputs,
        )  # fmt: skip
        row = outputs["out"][place].view(torch.int16).cpu().numpy(), outputs["lse"][place].cpu().numpy()
        bits: bytes = row[0].tobytes() + row[1].tobytes()
        return bits


def _seen(rng: np.random.Generator, row: Row, params: PlanParams, batches: int, longest: int) -> set[bytes]:
    seen = set()
    for _ in range(batches):
        before, behind = (rng.integers(1, longest, int(rng.integers(0, 5))).tolist() for _ in range(2))
        seen.add(row.bits(before, behind, params, rng))
    return seen


def _invariant(num_cus: int, piece_tokens: int) -> PlanParams:
    return PlanParams(
        topk=2048, num_cus=num_cus, policy="invariant", cost_table=COSTS, piece_tokens=piece_tokens
    )  # fmt: skip


@pytest.mark.interpret
def test_an_invariant_row_keeps_its_bits_interpreted(device: str, rng: np.random.Generator) -> None:
    row = Row(rng, 150, device, "float16")
    for piece_tokens in (64, 40, 2048):
        assert len(_seen(rng, row, _invariant(5, piece_tokens), 5, 120)) == 1


@pytest.mark.interpret
def test_an_invariant_row_keeps_its_bits_in_a_large_batch_interpreted(device: str, rng: np.random.Generator) -> None:
    """The merge cuts its own work by the number of rows, from 64 rows of 16 heads on in another way."""
    row = Row(rng, 150, device, "float16")
    params = _invariant(5, 16)
    assert row.bits([], [], params, rng) == row.bits([1] * 30, [1] * 40, params, rng)


@pytest.mark.interpret
def test_a_row_does_not_keep_its_bits_under_the_policy_aiter_interpreted(device: str, rng: np.random.Generator) -> None:
    row = Row(rng, 150, device, "float16")
    assert len(_seen(rng, row, PlanParams(topk=2048, num_cus=5, split_budget=-1), 5, 120)) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2048, 2000, 300])
def test_an_invariant_row_keeps_its_bits(device: str, rng: np.random.Generator, tokens: int) -> None:
    row = Row(rng, tokens, device, "bfloat16")
    params = _invariant(132, 256)
    seen = _seen(rng, row, params, 20, 2048)
    seen |= {row.bits([700] * before, [2048] * behind, params, rng) for before, behind in ((0, 0), (70, 100), (3, 400))}
    assert len(seen) == 1
    assert len(_seen(rng, row, PlanParams(topk=2048, num_cus=132, split_budget=-1), 20, 2048)) > 1
