"""What the scheduler hands over: one step's batch, and how far the host's copies can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlaplan._types import Int32Array


@dataclass(frozen=True, slots=True)
class Exact:
    """KV lengths that are the device's.

    Attributes:
        seq_lens: KV tokens of each request, this step's included. Shape (R,), int32, at least the request's query
            tokens.
    """

    seq_lens: Int32Array


@dataclass(frozen=True, slots=True)
class UpperBound:
    """KV lengths that may be too large: drafts that the host counts as accepted may have been rejected.

    A type of its own, so that a bound is never corrected twice nor taken for a length.

    Attributes:
        bound: Largest possible KV tokens of each request, this step's included. Shape (R,), int32.
        max_rejects: Tokens of a bound that may turn out rejected, for every request. The true length lies in
            `bound - max_rejects .. bound`.
    """

    bound: Int32Array
    max_rejects: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's batch of R requests.

    The device arrays are what a plan is made from whenever the host does not know every row, and by every deferred
    plan. They must hold this step's values when the work that `plan` or `refresh` queues runs; for a captured graph
    they are views of persistent buffers, as long as the graph's number of requests, idle ones last.

    Attributes:
        query_start_loc: Where the query tokens of each request start in the packed batch, and the number of rows.
            Shape (R + 1,), int32, non-decreasing, starts at 0, contiguous, on the host.
        lengths: `Exact`, `UpperBound`, or None where the host knows nothing.
        padded_rows: Rows that the consumer sees, the size of a captured graph for instance. None for no padding.
        boundaries_exact: False where the device moved the boundaries between requests (drafts trimmed there): then
            only the total of `query_start_loc` is true.
        device_query_start_loc: The device's `query_start_loc`. Shape (R + 1,), int32, contiguous.
        device_seq_lens: The device's `seq_lens`. Shape (R,), int32, contiguous.
    """

    query_start_loc: Int32Array
    lengths: Exact | UpperBound | None = None
    padded_rows: int | None = None
    boundaries_exact: bool = True
    device_query_start_loc: Any = None
    device_seq_lens: Any = None

    @property
    def on_device(self) -> bool:
        """Whether the batch comes with the device's own arrays."""
        return self.device_query_start_loc is not None and self.device_seq_lens is not None
