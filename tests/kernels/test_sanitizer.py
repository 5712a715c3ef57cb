"""What the sanitizer script makes of a report: a hazard counts for the Hopper decode only where it lies there."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from offline import HOPPER, compile_for

from mlaplan.kernels.launch import Launch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benches" / "gpu"))
check_sanitizer = pytest.importorskip("check_sanitizer", reason="needs torch and Triton")

HAZARD = """========= Error: Race reported between {} access at {}
=========     and Write access at _decode_kernel+0x18b0 in decode_hopper.py:63 [19 hazards]
=========
"""
IN_HOPPER = ("Read", "_decode_kernel+0x130 in decode_hopper_warps.py:63")


def report(hazards: list[tuple[str, str]], *, counted: int | None = None) -> str:
    text = "".join(HAZARD.format(*hazard) for hazard in hazards)
    return text + f"RACECHECK SUMMARY: {len(hazards) if counted is None else counted} hazards displayed (1 error)\n"


@pytest.mark.parametrize(
    ("hazards", "wanted"),
    [
        ([], (0, 0)),
        ([IN_HOPPER] * 2, (0, 2)),
        ([("Write", "_decode_kernel+0x130 in decode.py:63")], (1, 0)),
        ([("Read", "plan_kernel+0x130"), IN_HOPPER], (1, 1)),
        ([("Read", "pass_words+0x130 in check_sanitizer.py:90")], (0, 1)),
        ([("Read", "race+0x90")], (1, 0)),
    ],
)
def test_hazards_of_the_hopper_decode_are_counted_by_themselves(
    hazards: list[tuple[str, str]], wanted: tuple[int, int]
) -> None:
    assert check_sanitizer.count("racecheck", report(hazards)) == wanted


def test_hazards_that_are_not_named_are_refused() -> None:
    with pytest.raises(SystemExit, match="counted 5 hazards and named 1"):
        check_sanitizer.count("racecheck", report([IN_HOPPER], counted=5))
    with pytest.raises(SystemExit, match="no summary"):
        check_sanitizer.count("racecheck", "killed")


def test_errors_of_the_other_tools_are_all_ours() -> None:
    assert check_sanitizer.count("memcheck", "========= ERROR SUMMARY: 34 errors\n") == (34, 0)


def test_the_kernel_that_passes_words_on_compiles() -> None:
    launch = Launch(check_sanitizer.pass_words, (4,), (np.zeros(512, np.int32), 20), {}, {"num_warps": 4})
    ptx = compile_for(launch, HOPPER).asm["ptx"]
    assert ptx.count("mbarrier.arrive") >= 2
    assert "mbarrier.try_wait" in ptx
