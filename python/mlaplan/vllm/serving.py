"""Whether a builder's batches can be planned by us, and the planner that does it."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlaplan.backends.aiter_release import AiterRelease, read_release
from mlaplan.config import PlannerConfig
from mlaplan.device import make_device
from mlaplan.metrics import Reporter
from mlaplan.planner import Planner
from mlaplan.vllm import live
from mlaplan.vllm.impl import PlannedImpl
from mlaplan.vllm.settings import LOG, Mode, Settings
from mlaplan.vllm.watching import watch


class NotServedError(Exception):
    """The stock builder stays in charge; the message says why."""


class Serving(NamedTuple):
    """How one builder plans.

    Attributes:
        planner: Its planner: one for each builder, so one for each micro-batch and each draft model.
        release: The installed aiter.
        mode: Where and when plans are made.
        deferred: Whether plans are left to the first layer that uses them.
        reporter: Who says in the log what was done, told of every step; None for nobody.
    """

    planner: Planner
    release: AiterRelease
    mode: Mode
    deferred: bool
    reporter: Reporter | None = None


def serve(builder: Any) -> Serving | None:
    """Makes the planner of a stock builder that has just been made.

    Args:
        builder: A `ROCMAiterMLASparseMetadataBuilder` after its own `__init__`.

    Returns:
        How it plans, or None where the stock builder stays in charge; the log has the reason in either case.
    """
    try:
        settings = Settings.from_environment()
        serving = _serve(builder, settings)
    except NotServedError as reason:
        _say("mlaplan is not active, vLLM's own builder is used: %s", reason)
        return None
    except Exception as error:  # noqa: BLE001  (the stock builder is there and works)
        LOG.warning("mlaplan is not active, vLLM's own builder is used: %s: %s", type(error).__name__, error)
        return None
    live.add(serving.planner)
    serving = serving._replace(reporter=watch(serving.planner, settings.watch))
    config = serving.planner.config
    _say(
        "mlaplan is active: %s, %s with %s compute units, %s heads (fold %s), plans made %s",
        "mode " + serving.mode.value,
        config.arch,
        config.num_cus,
        config.heads,
        config.fold,
        "by the first layer of a step" if serving.deferred else "in build(), with a wait",
    )
    return serving


def _serve(builder: Any, settings: Settings) -> Serving:
    if settings.disabled:
        raise NotServedError("MLAPLAN_DISABLE is set")
    _check_path(builder)
    release = read_release()
    config = _config(builder, settings, release)
    support = config.support()
    if not support.persistent:
        raise NotServedError(f"aiter {release.version} decodes no schedule of this shape: {support.reason}")
    planner = Planner(config, device=make_device(builder.device))
    if builder._mla_work_indptr.numel() != planner.params.num_cus + 1:  # noqa: SLF001  (no public name says it)
        raise NotServedError(
            f"aiter sizes its schedule for {builder._mla_work_indptr.numel() - 1} slots, "  # noqa: SLF001
            f"vLLM counts {planner.params.num_cus} compute units"
        )
    return Serving(planner, release, settings.mode, settings.mode is Mode.GRAPH and _impls_are_ours(builder))


def _check_path(builder: Any) -> None:
    """Raises where the decode kernel reads no schedule, or rows are not what they are elsewhere."""
    config = builder.vllm_config
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        raise NotServedError("HiSparse is on, which reads request ids before the first layer")
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise NotServedError("context parallelism is on, where ranks hold parts of a row")
    if not builder._use_persistent_metadata:  # noqa: SLF001
        raise NotServedError("attention sinks or aiter's Triton sparse kernel are in use, which read no schedule")
    if not str(builder.kv_cache_dtype).startswith("fp8") and builder.mla_dims.qk_rope_head_dim == 0:
        raise NotServedError("keys without a rotary part go to vLLM's Triton kernel, which reads no schedule")


def _config(builder: Any, settings: Settings, release: AiterRelease) -> PlannerConfig:
    config = builder.vllm_config
    scheduler = config.scheduler_config
    max_rows = scheduler.max_num_batched_tokens
    sizes = getattr(config.compilation_config, "cudagraph_capture_sizes", None) or ()
    kv_dtype = "fp8" if str(builder.kv_cache_dtype).startswith("fp8") else "bf16"
    num_cus = builder._num_compute_units  # noqa: SLF001
    return PlannerConfig(
        max_rows=max_rows,
        # A graph for single tokens may be captured for as many requests as rows; nothing is sized by the number.
        max_requests=max(scheduler.max_num_seqs, max_rows),
        topk=builder.topk_tokens,
        heads=builder._num_attention_heads,  # noqa: SLF001
        arch=settings.arch or _arch(builder.device, num_cus),
        num_cus=num_cus,
        # What the decode call gets: fp8 queries go with an fp8 cache.
        q_dtype=kv_dtype,
        kv_dtype=kv_dtype,
        capture_sizes=tuple(sorted({int(size) for size in sizes if 0 < size <= max_rows})),
        aiter_version=release.release,
        backend="none",
        # Plans are made on the device, or in the mode classic copied and waited for: there is never more than one copy.
        staging_slots=2,
        always_rebuild=settings.always_rebuild,
    )


def _impls_are_ours(builder: Any) -> bool:
    layers = builder.vllm_config.compilation_config.static_forward_context
    return all(isinstance(getattr(layers[name], "impl", None), PlannedImpl) for name in builder.layer_names)


def _arch(device: Any, num_cus: int) -> str:
    """The device's architecture; away from ROCm, the one whose full chip has that many compute units."""
    import torch

    if device.type == "cuda" and torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":", maxsplit=1)[0]
    return "gfx950" if num_cus == 256 else "gfx942"


_SAID: set[str] = set()


def _say(message: str, *arguments: object) -> None:
    """Logs a line once per process: micro-batches and draft models make builders of the same kind."""
    text = message % arguments
    if text not in _SAID:
        _SAID.add(text)
        LOG.info(text)
