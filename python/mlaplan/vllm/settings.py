"""The operator's switches, from the environment."""

from __future__ import annotations

import enum
import logging
import os
from dataclasses import dataclass

# Below vLLM's own logger, so that its handlers and its level hold for us as well.
LOG = logging.getLogger("vllm.mlaplan")

_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


class Mode(enum.Enum):
    """Where and when a plan is made.

    Attributes:
        GRAPH: By the first layer that uses the metadata, from the device's own lengths: a node of the captured graph,
            or one launch in an eager step. The host reads nothing back and never waits.
        BUILD: In `build()`, by the same launch; then the host waits for the stream, as vLLM's own builder does.
        CLASSIC: In `build()`: lengths are read back, a fingerprint is compared, and where it changed rows are uploaded,
            aiter's planner is launched and the host waits.
    """

    GRAPH = "graph"
    BUILD = "build"
    CLASSIC = "classic"


@dataclass(frozen=True, slots=True)
class Settings:
    """The switches of one process.

    Attributes:
        disabled: Leave vLLM alone.
        mode: Where and when a plan is made.
        always_rebuild: Take no plan over from an earlier step.
        arch: Architecture to plan for where torch does not name it, or None.
    """

    disabled: bool = False
    mode: Mode = Mode.GRAPH
    always_rebuild: bool = False
    arch: str | None = None

    @classmethod
    def from_environment(cls) -> Settings:
        """Reads the switches.

        Raises:
            ValueError: A switch has a value that is not known. `MLAPLAN_DISABLE` is looked at first, so a process that
                has it set never gets there.
        """
        if _switch("MLAPLAN_DISABLE"):
            return cls(disabled=True)
        mode = os.environ.get("MLAPLAN_MODE", "").strip().lower() or Mode.GRAPH.value
        known = [member.value for member in Mode]
        if mode not in known:
            raise ValueError(f"MLAPLAN_MODE is {mode!r}, known are {', '.join(known)}")
        return cls(
            mode=Mode(mode),
            always_rebuild=_switch("MLAPLAN_ALWAYS_REBUILD"),
            arch=os.environ.get("MLAPLAN_ARCH", "").strip().lower() or None,
        )


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in _OFF:
        return False
    if value in _ON:
        return True
    raise ValueError(f"{name} is {value!r}, known are 0 and 1")
