"""The plugin for vLLM: makes the backend `ROCM_AITER_MLA_SPARSE` plan with mlaplan.

vLLM calls `register` in every process (entry point `vllm.general_plugins`). Importing this package imports neither
vLLM nor torch, and `register` imports no attention backend: builder and impl are imported when vLLM asks the backend
for them, which the front end and the processes that only look at a model never do.

Environment variables, read when they matter and never afterwards:

* `MLAPLAN_DISABLE=1`: vLLM runs as if mlaplan were not installed.
* `MLAPLAN_MODE`: `graph` (default), `build` or `classic`, see `mlaplan.vllm.settings.Mode`.
* `MLAPLAN_ALWAYS_REBUILD=1`: no plan is taken over from the step before, whatever the keys say.
* `MLAPLAN_ARCH`: `gfx942` or `gfx950`, where torch does not name the device's architecture.
* `MLAPLAN_LOG_STATS`: seconds between two lines of statistics in the log, 0 for none; vLLM's own interval by default.
* `MLAPLAN_METRICS=0`: no counters for Prometheus.
* `MLAPLAN_RECORD`, `MLAPLAN_CHECK_EVERY`, `MLAPLAN_DUMP` and their like: see `docs/traces.md`.
"""

from __future__ import annotations

from mlaplan.vllm.settings import LOG, Settings

__all__ = ["invalidate", "register"]


def register() -> None:
    """Arranges that vLLM's backend `ROCM_AITER_MLA_SPARSE` uses our builder and impl. Safe to call more than once.

    Nothing leaves this function but a line in the log: whatever is wrong here, vLLM runs with its own builder.
    """
    try:
        settings = Settings.from_environment()
        if settings.disabled:
            LOG.info("mlaplan is not active: MLAPLAN_DISABLE is set")
            return
        from mlaplan.vllm import activation

        activation.activate()
    except Exception as error:  # noqa: BLE001  (a plugin that raises takes the whole server down)
        LOG.warning("mlaplan is not active: %s: %s", type(error).__name__, error)


def invalidate() -> int:
    """Tells every live planner that device memory may have lost its content, after a sleep or a reload for instance.

    Returns:
        Planners told.
    """
    from mlaplan.vllm import live

    return live.invalidate()
