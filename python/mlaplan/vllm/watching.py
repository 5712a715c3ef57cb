"""Recorder, self-check, statistics in the log and Prometheus, for the planners of a vLLM worker.

Each is set up when a builder makes its planner. What cannot be set up is said in the log, and the planner serves
without. A self-check looks at the buffers when the next step is built: then the step's eager work or its graph's replay
is behind, on the same stream.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from mlaplan.metrics import Reporter, export
from mlaplan.planner import Planner
from mlaplan.recorder import Recorder
from mlaplan.selfcheck import SelfCheck
from mlaplan.vllm.settings import LOG, Watch

_NUMBERS = itertools.count()
_REPORTERS: dict[float, Reporter] = {}


def watch(planner: Planner, settings: Watch) -> Reporter | None:
    """Sets up what the switches ask for.

    Args:
        planner: A planner that has just been made.
        settings: The switches.

    Returns:
        Who is to be told of every step, or None.
    """
    number = next(_NUMBERS)
    if settings.record is not None:
        _guarded("recorder", _record, planner, settings, number)
    if settings.check_every:
        _guarded("self-check", _check, planner, settings, number)
    if settings.metrics:
        _guarded("metrics", _export, planner)
    # Ranks do the same steps at the same time: one of them says so.
    if not settings.log_stats_s or _rank() != 0:
        return None
    reporter = _REPORTERS.setdefault(settings.log_stats_s, Reporter(settings.log_stats_s, LOG))
    reporter.add(planner)
    return reporter


def _record(planner: Planner, settings: Watch, number: int) -> None:
    path = _inside(settings.record or "", f"steps-{_place(number)}.trace")
    recorder = Recorder(
        planner,
        path,
        max_bytes=settings.record_bytes,
        read_lengths=settings.record_lengths,
        log=LOG,
        reading=gpu_sync_allowed,
    )
    LOG.info("mlaplan records to %s", recorder.path)


def _check(planner: Planner, settings: Watch, number: int) -> None:
    dump = None if settings.dump is None else _inside(settings.dump, f"difference-{_place(number)}.trace")
    SelfCheck(planner, settings.check_every, dump=dump, log=LOG, reading=gpu_sync_allowed)
    LOG.info("mlaplan checks the buffers every %s steps, which waits for the device", settings.check_every)


def _export(planner: Planner) -> None:
    export(planner, labels={"rank": str(_rank())})


def _inside(folder: str, name: str) -> Path:
    path = Path(folder)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder that is there")
    return path / name


def _place(number: int) -> str:
    # The time too: a container that is started again has the same process numbers, and a file is never replaced.
    return f"rank{_rank()}-process{os.getpid()}-{int(time.time())}-{number}"


def _rank() -> int:
    """This worker's rank; 0 where nothing is distributed."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return 0


def _guarded(what: str, action: Any, *arguments: Any) -> None:
    try:
        action(*arguments)
    except Exception as error:  # noqa: BLE001  (the planner serves without)
        LOG.warning("mlaplan: no %s: %s: %s", what, type(error).__name__, error)
