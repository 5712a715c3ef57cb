"""What the scheduler hands over: one step's batch, and how far the host's copies can be trusted."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mlaplan._types import Int32Array

_MOST = 1 << 24  # requests or rows of any planner


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


@dataclass(frozen=True, slots=True, init=False)
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

    def __init__(
        self,
        query_start_loc: Int32Array,
        lengths: Exact | UpperBound | None = None,
        padded_rows: int | None = None,
        boundaries_exact: bool = True,  # noqa: FBT001, FBT002  (as a dataclass would have it)
        device_query_start_loc: Any = None,
        device_seq_lens: Any = None,
    ) -> None:
        """Keeps the fields; see `Batch`."""
        # Each step makes a batch, and what a frozen dataclass generates looks every field up by name: twice the time.
        _set_query_start_loc(self, query_start_loc)
        _set_lengths(self, lengths)
        _set_padded_rows(self, padded_rows)
        _set_boundaries_exact(self, boundaries_exact)
        _set_device_query_start_loc(self, device_query_start_loc)
        _set_device_seq_lens(self, device_seq_lens)

    @property
    def on_device(self) -> bool:
        """Whether the batch comes with the device's own arrays."""
        return self.device_query_start_loc is not None and self.device_seq_lens is not None


# Taken when the class is complete: `slots` makes it anew.
(
    _set_query_start_loc,
    _set_lengths,
    _set_padded_rows,
    _set_boundaries_exact,
    _set_device_query_start_loc,
    _set_device_seq_lens,
) = (vars(Batch)[field.name].__set__ for field in fields(Batch))


def host_lengths(batch: Batch) -> tuple[Int32Array | None, int | None]:
    """Returns what the host knows of a batch's lengths, and how many tokens of it may be too many; None for nothing.

    Raises:
        TypeError: The lengths are of another kind.
    """
    lengths = batch.lengths
    if lengths is None:
        return None, None
    # None inside would be taken for lengths that are not known, or a bound for an exact length.
    if isinstance(lengths, Exact):
        if lengths.seq_lens is None:
            raise TypeError("seq_lens must be a one-dimensional int32 NumPy array, not NoneType")
        return lengths.seq_lens, None
    if isinstance(lengths, UpperBound):
        if lengths.bound is None:
            raise TypeError("seq_lens_bound must be a one-dimensional int32 NumPy array, not NoneType")
        if lengths.max_rejects is None:
            raise TypeError("max_rejects must be a whole number, not NoneType")
        return lengths.bound, lengths.max_rejects
    raise TypeError(f"lengths must be Exact, UpperBound or None, not {type(lengths).__name__}")


def sized_batch(num_requests: int, rows: int, padded_rows: int, query_start_loc: Any, seq_lens: Any) -> Batch:
    """Returns a batch of which the host knows the sizes alone.

    Args:
        num_requests: Requests, R.
        rows: Rows that belong to a request.
        padded_rows: Rows that the consumer sees.
        query_start_loc: The device's `query_start_loc`.
        seq_lens: The device's `seq_lens`.

    Raises:
        TypeError: A size is no whole number.
        ValueError: A size is out of any planner's range.
    """
    sizes = {"num_requests": num_requests, "rows": rows, "padded_rows": padded_rows}
    for name, value in sizes.items():
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
        if not 0 <= operator.index(value) <= _MOST:
            raise ValueError(f"{name} is {value}, must be 0 to {_MOST}")
    if rows and not num_requests:
        raise ValueError(f"rows is {rows}, but num_requests is 0")
    boundaries = np.full(num_requests + 1, rows, np.int32)
    boundaries[0] = 0
    return Batch(boundaries, None, padded_rows, False, query_start_loc, seq_lens)  # noqa: FBT003
