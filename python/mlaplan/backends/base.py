"""What a planner asks of a backend."""

from __future__ import annotations

from typing import Any, Protocol

from mlaplan.config import PlannerConfig
from mlaplan.device.base import Device
from mlaplan.plan import Plan


class UnsupportedError(ValueError):
    """A shape, dtype or size that the backend cannot run. The message gives the reason."""


class BackendUnavailableError(RuntimeError):
    """What the backend runs on is not installed, or is a release that it does not know."""


def partial_capacity(tiles: int, num_slots: int, *, multiple: int = 1, pieces: int | None = None) -> int:
    """Partial locations that a schedule may use.

    Where cuts are shared by the batch, each of the at most `num_slots - 1` cuts adds a piece, and a cut tile has two
    pieces or more, which bounds their number. Never 0, because an empty buffer has no address.

    Args:
        tiles: Planner rows, the fold included.
        num_slots: Slots that the schedule may fill.
        multiple: What the result must be a multiple of.
        pieces: Most pieces of a tile where every row is cut by itself, see `PlanParams.pieces`; None elsewhere.
    """
    if pieces is not None:
        bound = tiles * pieces if pieces > 1 else 0
    else:
        bound = min(tiles + num_slots - 1, 2 * (num_slots - 1))
    return max(1, -(-bound // multiple)) * multiple


def known_rows(plan: Plan, device: Device) -> int | None:
    """Live rows of a plan, where the host knows them and that each has a token; None otherwise.

    What is captured now is replayed for other batches, so under capture nothing is known.
    """
    return plan.rows if plan.lengths_known and device.capture() is None else None


class Backend(Protocol):
    """Metadata and decode of one kernel library.

    Attributes:
        name: As in `PlannerConfig.backend`.
        makes_schedule: Whether `make_schedule` is to make the schedule of a plan whose rows the host made.
    """

    name: str
    makes_schedule: bool

    def prepare(self, config: PlannerConfig, device: Device) -> PlannerConfig:
        """Checks that everything `config` allows can run, and allocates what the backend owns.

        Called once, before the planner lays out its arrays.

        Args:
            config: Resolved settings.
            device: Where the arrays live.

        Returns:
            The settings to size, plan and decode with: those given, with the backend's fold and release.

        Raises:
            UnsupportedError: A shape that cannot run; the message gives the reason.
            BackendUnavailableError: What the backend runs on is missing.
        """

    def needs_schedule(self, padded_rows: int) -> bool:
        """Whether `decode` of so many rows, padding included, reads a schedule."""

    def make_schedule(self, plan: Plan) -> None:
        """Makes the schedule of a plan whose rows are on the device, in place. Only if `makes_schedule`."""

    def decode(
        self,
        plan: Plan,
        q: Any,
        kv_cache: Any,
        kv_indices: Any,
        *,
        scale: float,
        out: Any = None,
        lse: Any = None,
        fp8_scales: tuple[Any, Any] = (None, None),
    ) -> tuple[Any, Any]:
        """Attends every row to its KV slots. Rows without slots, padding or not, get zeros.

        Args:
            plan: Rows and schedule of the batch, current on the device.
            q: Shape (rows, heads, head_dim), contiguous; `plan.padded_rows` rows, live ones first.
            kv_cache: Shape (num_slots, head_dim) or any with as many values, contiguous.
            kv_indices: Shape (>= tokens,), int32. KV slot of each position.
            scale: Factor of the scores.
            out: Shape (rows, heads, v_head_dim), written in place; None for a new array.
            lse: Shape (rows, heads), float32, written in place; natural log, -inf for a row without slots. None
                for a new array, or for no LSE where few kernels write one.
            fp8_scales: Factors of queries and KV; None for one that is not fp8. aiter takes tensors of one
                float32, the portable kernel numbers.

        Returns:
            Output and LSE.

        Raises:
            UnsupportedError: The call cannot run; the message gives the reason. Nothing was launched.
        """

    def describe(self) -> dict[str, Any]:
        """What runs: releases, arch, switches and sizes, as read once by `prepare`."""
