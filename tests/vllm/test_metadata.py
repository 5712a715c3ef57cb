"""The metadata class: made in another way than dataclasses make theirs, and otherwise one of them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from mlaplan.vllm import metadata as module
from mlaplan.vllm.metadata import PlannedMetadata

FIELDS = dataclasses.fields(PlannedMetadata)
REQUIRED = [entry.name for entry in FIELDS if entry.default is dataclasses.MISSING]


def values(names: list[str]) -> dict[str, Any]:
    """Some value for each name, of no kind that anybody could take for a default."""
    return {name: f"value of {name}" for name in names}


def generated(**given: Any) -> PlannedMetadata:
    made: PlannedMetadata = PlannedMetadata.__new__(PlannedMetadata)
    module._generated_init(made, **given)
    return made


@pytest.mark.parametrize("more", [0, 1, 5, len(FIELDS)])
def test_it_holds_what_a_dataclass_would_hold(more: int) -> None:
    given = values(REQUIRED) | values([entry.name for entry in FIELDS if entry.name != "head_dim"][:more])
    made, wanted = PlannedMetadata(**given), generated(**given)
    assert vars(made) == vars(wanted)
    assert list(vars(made)) != []
    assert made == wanted
    assert repr(made) == repr(wanted)


def test_the_fast_way_is_the_one_taken() -> None:
    assert PlannedMetadata.__init__ is module._init
    assert all(entry.default_factory is dataclasses.MISSING for entry in FIELDS)


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_field_that_is_wanting_is_named(missing: str) -> None:
    given = values([name for name in REQUIRED if name != missing])
    with pytest.raises(TypeError, match=f"'{missing}'"):
        PlannedMetadata(**given)
    # As many names as there should be, and one of them wrong.
    with pytest.raises(TypeError, match="no_such_field"):
        PlannedMetadata(**given, no_such_field=1)


def test_a_field_that_is_unknown_is_named() -> None:
    with pytest.raises(TypeError, match="no_such_field"):
        PlannedMetadata(**values(REQUIRED), no_such_field=1)
    with pytest.raises(TypeError, match="argument"):
        PlannedMetadata(1, **values(REQUIRED))


def test_copies_keep_the_plan_and_are_their_own() -> None:
    made = PlannedMetadata(**values(REQUIRED), plan="a plan", made_by_consumer=True)  # type: ignore[arg-type]
    for other in (copy.copy(made), dataclasses.replace(made), copy.deepcopy(made)):
        assert type(other) is PlannedMetadata
        assert (other.plan, other.made_by_consumer) == ("a plan", True)
        other.num_prefills = 7
        other.plan = None
    assert made.num_prefills != 7
    assert made.plan == "a plan"
    assert PlannedMetadata(**values(REQUIRED)).plan is None, "defaults are not shared"


def test_checks_behind_the_fields_are_run() -> None:
    if not hasattr(PlannedMetadata, "__post_init__"):
        pytest.skip("this vLLM checks nothing there")
    names = {entry.name for entry in FIELDS}
    if "head_dim" not in names:
        pytest.skip("this vLLM's metadata has no head_dim")
    with pytest.raises(ValueError, match="7"):
        PlannedMetadata(**values([name for name in REQUIRED if name != "head_dim"]), head_dim=7)
