"""What the compiler makes of the decode's Hopper form, read without a GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

import offline_launches as launches
from decode_cases import V_DIM
from offline import HOPPER, compile_for, cuda_instructions, cuda_usage
from offline_launches import BF16_TYPES

_HEADS, _SUM_THREADS = 64, 256


@pytest.mark.parametrize("heads", [40, 48, 96])
def test_blocks_of_heads_that_are_not_full_do_not_spill(heads: int) -> None:
    """Masks take registers where a block of 64 heads leads out of the group."""
    assert cuda_usage(compile_for(launches.decode(8, heads, backend="hopper"), HOPPER, BF16_TYPES)).stack_bytes == 0


def test_whole_rows_of_many_heads_are_stored_in_pieces_of_16_bytes() -> None:
    """Narrower stores of them took 7 us; what is left of those are the sums of pieces and LSE."""
    ptx = compile_for(launches.decode(8, 128, backend="hopper"), HOPPER, BF16_TYPES).asm["ptx"]
    widths = re.findall(r"st\.global\.(v\d\.)?b(\d+)", ptx)
    bits = [int(vector[1:-1] or 1 if vector else 1) * int(width) for vector, width in widths]
    assert bits.count(128) * 128 == _HEADS * V_DIM * 16 // _SUM_THREADS
    assert bits.count(64) * 64 == _HEADS * V_DIM * 32 // _SUM_THREADS
    assert bits.count(32) + bits.count(128) + bits.count(64) == len(bits)
    assert bits.count(32) <= 4


_GROUP_BARRIER = re.compile(r"\bBAR\.SYNC\S* 0x\w+, 0x\w+")


def _machine_code(heads: int) -> list[str]:
    return cuda_instructions(compile_for(launches.decode(8, heads, backend="hopper"), HOPPER, BF16_TYPES))


def _unguarded(code: list[str]) -> list[str]:
    """Arrivals of single threads before which a thread of their group may still be at shared memory.

    Nothing that reads or writes it may lie between an arrival and the group's barrier before it, in a straight line.
    """
    found, is_guarded = [], False
    for instruction in code:
        if _GROUP_BARRIER.search(instruction):
            is_guarded = True
        elif "SYNCS.ARRIVE" in instruction:
            if not is_guarded:
                found.append(instruction)
        elif re.search(r"\b(BRA|BRX|EXIT|RET)\b", instruction) or (
            re.search(r"\b(LDS|STS|LDSM|STSM|ATOMS|HGMMA)\b", instruction) and "!PT" not in instruction
        ):
            is_guarded = False
    return found


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_every_arrival_is_behind_a_barrier_of_its_group(heads: int) -> None:
    """One thread arrives for its group: what another of the group reads or writes must be through by then.

    racecheck does not follow barriers that count arrivals, so that this is read off the machine code.
    """
    code = _machine_code(heads)
    arrivals = [instruction for instruction in code if "SYNCS.ARRIVE" in instruction]
    assert len(arrivals) >= (6 if heads >= 64 else 2)
    assert not _unguarded(code)
    # Every thread waits by itself.
    waits = [instruction for instruction in code if "SYNCS.PHASECHK" in instruction]
    assert waits
    assert not [instruction for instruction in waits if instruction.startswith("@")]


def test_an_arrival_without_its_barrier_would_be_seen() -> None:
    code = _machine_code(128)
    barriers = [at for at, instruction in enumerate(code) if _GROUP_BARRIER.search(instruction)]
    bare = [instruction for at, instruction in enumerate(code) if at not in barriers]
    assert len(_unguarded(bare)) == sum("SYNCS.ARRIVE" in instruction for instruction in code)
    assert any(len(_unguarded(code[:at] + code[at + 1 :])) == 1 for at in barriers)
