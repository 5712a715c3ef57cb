"""The stock metadata, and with it the plan that its arrays hold."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse import ROCMAiterMLASparseMetadata

from mlaplan.plan import Plan


@dataclass(kw_only=True)
class PlannedMetadata(ROCMAiterMLASparseMetadata):
    """Metadata whose rows and schedule are made by a planner.

    A class of its own, so that the plan survives `dataclasses.replace` and `copy`: metadata without its plan would be
    read before anybody wrote it.

    Attributes:
        plan: The plan of the sparse rows. None where the stock builder made everything, or where there are no rows.
        made_by_consumer: Whether the first layer that uses the metadata makes the plan.
    """

    plan: Plan | None = field(default=None, repr=False, compare=False)
    made_by_consumer: bool = field(default=False, repr=False, compare=False)


_generated_init = PlannedMetadata.__init__
_DEFAULTS = {entry.name: entry.default for entry in fields(PlannedMetadata) if entry.default is not MISSING}
_REQUIRED = {entry.name for entry in fields(PlannedMetadata)} - _DEFAULTS.keys()
_COUNT = len(fields(PlannedMetadata))
_has_post_init = hasattr(PlannedMetadata, "__post_init__")


def _init(self: Any, *positional: Any, **given: Any) -> None:
    """Does what the generated `__init__` does, in a third of its time: three dozen fields at once.

    Whatever is not the names alone that every field without a default needs is left to the generated one, which also
    says what is wrong.
    """
    values = _DEFAULTS | given
    if positional or len(values) != _COUNT or not given.keys() >= _REQUIRED:
        _generated_init(self, *positional, **given)
        return
    self.__dict__ = values
    if _has_post_init:
        self.__post_init__()


if all(entry.init and entry.default_factory is MISSING for entry in fields(PlannedMetadata)):
    PlannedMetadata.__init__ = _init  # type: ignore[method-assign]
