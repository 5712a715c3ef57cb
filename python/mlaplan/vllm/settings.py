"""The operator's switches, from the environment."""

from __future__ import annotations

import enum
import logging
import math
import os
from dataclasses import dataclass, field

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
class Watch:
    """The switches of what looks on; see `mlaplan.vllm.watching`.

    Attributes:
        record: Folder to record every planner's steps into, or None.
        record_bytes: Largest trace.
        record_lengths: Also read the device's lengths back in each step, which waits for the device.
        check_every: Steps from one self-check to the next; 0 for none.
        dump: Folder for the dump of a difference that a self-check finds, or None.
        log_stats_s: Seconds between two lines of statistics in the log; 0 for none.
        metrics: Whether counters are exported through `prometheus_client` where it is installed.
    """

    record: str | None = None
    record_bytes: int = 64 << 20
    record_lengths: bool = False
    check_every: int = 0
    dump: str | None = None
    log_stats_s: float = 10.0
    metrics: bool = True

    @classmethod
    def from_environment(cls) -> Watch:
        """Reads the switches.

        Raises:
            ValueError: A switch has a value that is not known.
        """
        return cls(
            record=os.environ.get("MLAPLAN_RECORD", "").strip() or None,
            record_bytes=int(_number("MLAPLAN_RECORD_BYTES", str(64 << 20), 1 << 16, whole=True)),
            record_lengths=_switch("MLAPLAN_RECORD_LENGTHS"),
            check_every=int(_number("MLAPLAN_CHECK_EVERY", "0", 0, whole=True)),
            dump=os.environ.get("MLAPLAN_DUMP", "").strip() or None,
            log_stats_s=_number("MLAPLAN_LOG_STATS", _interval_of_vllm(), 0),
            metrics=os.environ.get("MLAPLAN_METRICS", "").strip().lower() not in ("0", "false", "no", "off"),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """The switches of one process.

    Attributes:
        disabled: Leave vLLM alone.
        mode: Where and when a plan is made.
        always_rebuild: Take no plan over from an earlier step.
        arch: Architecture to plan for where torch does not name it, or None.
        watch: What is recorded, checked and reported.
    """

    disabled: bool = False
    mode: Mode = Mode.GRAPH
    always_rebuild: bool = False
    arch: str | None = None
    watch: Watch = field(default_factory=Watch)

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
            watch=Watch.from_environment(),
        )


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in _OFF:
        return False
    if value in _ON:
        return True
    raise ValueError(f"{name} is {value!r}, known are 0 and 1")


def _interval_of_vllm() -> str:
    """The interval of vLLM's own statistics, which takes 10 for what is not above 0."""
    text = os.environ.get("VLLM_LOG_STATS_INTERVAL", "").strip()
    try:
        return text if 0 < float(text) < 2**53 else "10"
    except ValueError:
        return "10"


def _number(name: str, standard: str, least: int, *, whole: bool = False) -> float:
    text = os.environ.get(name, "").strip() or standard
    try:
        value = float(int(text) if whole else text)
    except ValueError:
        value = math.nan
    if not least <= value < 2**53:
        raise ValueError(f"{name} is {text!r}, must be a {'whole ' * whole}number of at least {least}")
    return value
