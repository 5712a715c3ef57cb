"""One step's plan, as the planner hands it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mlaplan.batch import sized_batch

if TYPE_CHECKING:
    from mlaplan._core import Decision
    from mlaplan.batch import Batch
    from mlaplan.layout import PlanArrays
    from mlaplan.planner import Planner
    from mlaplan.quality import Quality


class Constants(NamedTuple):
    """Arrays that are the same for every plan of a class of P rows; written once when the planner is made.

    Attributes:
        qo_indptr: 0, 1, 2, ... Shape (max_rows * fold + 1,), int32: one query per row.
        kv_last_page_lens: Ones. Shape (max_rows * fold,), int32.
        reduce_final_map: Query range of each tile, (t, t + 1). Shape (max_rows * fold, 2), int32.
        reduce_partial_map: 0, 1, 2, ... Partial locations are handed out in order. int32.
        work_metadata_ptrs: Device addresses of `work_indptr` and `work_info` of the class. Shape (2,), uint64.
    """

    qo_indptr: Any
    kv_last_page_lens: Any
    reduce_final_map: Any
    reduce_partial_map: Any
    work_metadata_ptrs: Any


class Plan:
    """One step's plan. Its arrays are the planner's, so they hold it until the next plan is made.

    Attributes:
        planner: Whose it is.
        decision: What was done and why: `action` is "nothing", "copy", "launch" or "deferred".
        device_query_start_loc: The device's `query_start_loc` that it is made from, None where the batch had none.
        device_seq_lens: The device's `seq_lens`, or None.
        num_works: Works of the schedule, where the host made it; None where the device did.
        split_budget: Slots per row that were budgeted for, where the host made it; None where the device did.
        generation: Number of the write that left it in the buffers, -1 where none is known.
        captured: The capture that has it as a node, or None.
        by_device: Whether the device made it, be it anew, of lengths that the host need not know.
    """

    __slots__ = (
        "_batch",
        "by_device",
        "captured",
        "decision",
        "device_query_start_loc",
        "device_seq_lens",
        "generation",
        "num_works",
        "planner",
        "split_budget",
    )

    def __init__(
        self,
        planner: Planner,
        decision: Decision,
        batch: Batch | None,
        device_query_start_loc: Any,
        device_seq_lens: Any,
        generation: int = -1,
    ) -> None:
        """Keeps what `Planner` hands over; `batch` is None where it follows from the rest."""
        self.planner = planner
        self.decision = decision
        self._batch = batch
        self.device_query_start_loc = device_query_start_loc
        self.device_seq_lens = device_seq_lens
        self.generation = generation
        self.captured: object | None = None
        self.num_works: int | None = None
        self.split_budget: int | None = None
        self.by_device = False

    def __repr__(self) -> str:
        return f"Plan({self.decision!r})"

    @property
    def batch(self) -> Batch:
        """What it was made for. After `Planner.defer` its boundaries have the true total alone."""
        if self._batch is None:
            boundaries, lengths = self.device_query_start_loc, self.device_seq_lens
            self._batch = sized_batch(lengths.shape[0], self.decision.rows, self.padded_rows, boundaries, lengths)
        return self._batch

    @property
    def arrays(self) -> PlanArrays:
        """The arrays of the plan's class on the device; see `mlaplan.layout.PlanArrays`."""
        return self.planner.arrays_of(self.decision.row_class)

    @property
    def constants(self) -> Constants:
        """The arrays that never change."""
        return self.planner.constants_of(self.decision.row_class)

    @property
    def rows(self) -> int | None:
        """Rows that belong to a request; None for a deferred plan, whose replays may have others."""
        return None if self.decision.action == "deferred" else self.decision.rows

    @property
    def lengths_known(self) -> bool:
        """Whether the host knows every row that the buffers hold: then each live one has a token at least."""
        return not self.by_device and self.decision.action in ("copy", "nothing")

    @property
    def kind(self) -> str:
        """Says whether the decode consumes the schedule, "persistent", or runs without one, "none"."""
        return "persistent" if self.planner.backend.needs_schedule(self.padded_rows) else "none"

    @property
    def padded_rows(self) -> int:
        """Rows that the consumer sees."""
        return self.decision.padded_rows

    @property
    def request_ids(self) -> Any:
        """Request of each row, 0 for padding. Shape (padded_rows,), int32, on the device."""
        return self.arrays.request_ids[: self.padded_rows]

    @property
    def kv_indptr(self) -> Any:
        """Running sum of row lengths. Shape (padded_rows + 1,), int32, on the device."""
        return self.arrays.kv_indptr[: self.padded_rows + 1]

    def quality(self) -> Quality:
        """Finish time and lower bound of this plan.

        Reads the arrays back from the device, so it is for reports and not for a serving loop.
        """
        return self.planner.quality(self)

    @property
    def rows_without_work(self) -> range:
        """Padding rows as the host counts them: no work writes their output, so the decode sets zeros and LSE -inf."""
        return range(self.decision.rows, self.padded_rows)
