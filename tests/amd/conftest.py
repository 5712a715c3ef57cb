"""Skips, and says why, where AMD machine code cannot be run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import emulator


@pytest.fixture(autouse=True)
def _connect() -> None:
    if emulator.missing():
        pytest.skip(emulator.missing())
    pytest.importorskip("triton")
    emulator.connect()
