"""The stock metadata, and with it the plan that its arrays hold."""

from __future__ import annotations

from dataclasses import dataclass, field

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
