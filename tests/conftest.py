"""Fixtures and hypothesis profiles of every Python test."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

_REPOSITORY = Path(__file__).resolve().parents[1]

# No deadline: the machines that run these are shared, and a slow example is not a wrong one.
for _name, _examples in (("fast", 40), ("slow", 1000)):
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile(os.environ.get("MLAPLAN_HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` of reference data, in the repository or a folder above it."""
    for folder in (_REPOSITORY, *_REPOSITORY.parents):
        if (folder / "shared" / "golden").is_dir():
            return folder / "shared"
    pytest.skip("no folder shared/golden in the repository or above it: the reference vectors were not checked")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
