"""Where a step's microseconds go on the host: what torch, Triton and the runtime take for each thing asked of them.

Expressions are timed in a warm loop, copies and launches on an idle device. What a step asks for is the sum of a few of
these lines; in a server's step everything is slower, for the caches hold other things.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from common import host_us, machine, parser, publish, refuse_debug, table

import mlaplan
from mlaplan import _core
from mlaplan.device import make_device
from mlaplan.kernels.launch import CompiledLaunch
from mlaplan.kernels.plan import plan_launch

ROWS = 256
COPY_BYTES = (1024, 4096, 16384, 65536, 131072)


def loop_ns(call: Callable[[], object], *, calls: int = 1000, rounds: int = 7) -> float:
    """Nanoseconds of a call in the fastest of a few loops."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter_ns() - begin) / calls)
    return best


def example() -> tuple[mlaplan.Planner, mlaplan.Batch, mlaplan.Batch]:
    """A planner, a batch with known lengths and the same one without."""
    boundaries, lengths = np.arange(ROWS + 1, dtype=np.int32), np.full(ROWS, 5000, np.int32)
    arrays: dict[str, Any] = {
        "device_query_start_loc": torch.from_numpy(boundaries).cuda(),
        "device_seq_lens": torch.from_numpy(lengths).cuda(),
    }
    config = mlaplan.PlannerConfig(max_rows=8192, max_requests=1024, arch=None, num_cus=304)
    known = mlaplan.Batch(boundaries, mlaplan.Exact(lengths), **arrays)
    return mlaplan.Planner(config, "cuda"), known, mlaplan.Batch(boundaries, **arrays)


def expressions() -> list[list[object]]:
    """Nanoseconds of what a step asks for."""
    planner, known, unknown = example()
    device, step = planner.device, planner._step  # noqa: SLF001
    tensor, lengths, boundaries = known.device_query_start_loc, known.device_seq_lens, known.query_start_loc
    host, stream = torch.from_numpy(boundaries), torch.cuda.current_stream()
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    planner.plan(known)
    plan = planner.plan(unknown, deferred=True)
    planner.refresh(plan)
    assert isinstance(known.lengths, mlaplan.Exact)
    decide = boundaries, known.lengths.seq_lens, None, None, True, True
    area = np.zeros(1 << 18, np.int32)
    asked: dict[str, Callable[[], object]] = {
        "tensor.dtype": lambda: tensor.dtype,
        "tensor.shape[0]": lambda: tensor.shape[0],
        "tensor.numel()": tensor.numel,
        "tensor.is_contiguous()": tensor.is_contiguous,
        "tensor.device": lambda: tensor.device,
        "tensor.data_ptr()": tensor.data_ptr,
        "tensor[:n]": lambda: tensor[:100],
        "host tensor, .numpy()": host.numpy,
        "host tensor, [n].item()": lambda: host[ROWS].item(),  # noqa: PLW0108
        "torch.cuda.current_stream()": torch.cuda.current_stream,
        "raw stream": lambda: torch._C._cuda_getCurrentRawStream(0),  # noqa: SLF001
        "is_current_stream_capturing()": torch.cuda.is_current_stream_capturing,
        "event.query()": event.query,
        "event.record(stream)": lambda: event.record(stream),
        "Batch(...)": lambda: mlaplan.Batch(boundaries, None, ROWS, False, tensor, lengths),  # noqa: FBT003
        "device.check, one array": lambda: device.check("query_start_loc", tensor, ROWS + 1),
        "core: decide, nothing changed": lambda: step.decide(*decide, False, 0, area),  # noqa: FBT003
        "core: decide and write 256 rows": lambda: step.decide(*decide, True, 0, area),  # noqa: FBT003
        "core: defer": lambda: step.defer(boundaries, None, None, ROWS, False),  # noqa: FBT003
        "core: made_on_device": step.made_on_device,
        "plan(deferred=True)": lambda: planner.plan(unknown, deferred=True),
        "defer(...)": lambda: planner.defer(ROWS, ROWS, ROWS, tensor, lengths),
        "refresh, plan made already": lambda: planner.refresh(plan),
    }
    lines: list[list[object]] = []
    base = loop_ns(lambda: None)
    for name, call in asked.items():
        if name == "refresh, plan made already":
            planner.remake(plan)
        elif name == "core: decide, nothing changed":
            for _ in range(2):  # the second says that the first arrived
                assert planner.plan(known).decision.action in ("copy", "nothing")
        lines.append([name, f"{loop_ns(call) - base:.0f}"])
        torch.cuda.synchronize()
    planner.plan(known)
    lines.append(["plan(), nothing to do", f"{loop_ns(lambda: planner.plan(known)) - base:.0f}"])
    return lines


def copies() -> list[list[object]]:
    """Microseconds of a pinned copy by torch and by the runtime that torch has loaded."""
    words = max(COPY_BYTES) // 4
    target = torch.zeros(words, dtype=torch.int32, device="cuda")
    source = torch.zeros(words, dtype=torch.int32, pin_memory=True)
    device: Any = make_device("cuda")
    queue = device._copy  # noqa: SLF001
    stream = torch.cuda.current_stream().cuda_stream
    lines: list[list[object]] = []
    for size in COPY_BYTES:
        to, of = target[: size // 4], source[: size // 4]
        addresses = to.data_ptr(), of.data_ptr()
        assert queue(*addresses, size, stream), "the runtime's copy is not to be had"
        by_torch = host_us(partial(to.copy_, of, non_blocking=True))
        by_runtime = host_us(partial(queue, *addresses, size, stream))
        lines.append([size, f"{by_torch:.1f}", f"{by_runtime:.1f}"])
    return lines


def launches() -> list[list[object]]:
    """Microseconds of launching the plan kernel in each way."""
    planner, _, batch = example()
    plan = planner.plan(batch)
    inputs = batch.device_query_start_loc, batch.device_seq_lens
    launch = plan_launch(*inputs, plan.arrays, planner.params)
    kept = CompiledLaunch.prepare(launch, 2)
    assert kept is not None, "this Triton's launcher is not known"
    stream, addresses = torch.cuda.current_stream().cuda_stream, [array.data_ptr() for array in inputs]
    lines: list[list[object]] = [
        ["`kernel[grid](...)`", f"{host_us(launch.run):.1f}"],
        ["kept launch", f"{host_us(lambda: kept.run(stream, *addresses)):.1f}"],
    ]
    kept._hooks = None  # noqa: SLF001  (as where the release is not known)
    lines.append(["kept launch, public call", f"{host_us(lambda: kept.run(stream, *addresses)):.1f}"])
    driver = _driver_launch(launch)
    if driver is not None:
        lines.append(["cuLaunchKernel by ctypes", f"{host_us(lambda: driver(stream)):.1f}"])
    return lines


def _driver_launch(launch: Any) -> Callable[[int], object] | None:
    """The launch past Triton altogether, for comparison; None on a GPU that is not NVIDIA's."""
    if torch.version.hip is not None:
        return None
    compiled = launch.kernel[launch.grid](*launch.args, **launch.constants, **launch.options)
    values = [
        ctypes.c_uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else ctypes.c_int32(value)
        for value in launch.args
    ]
    values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # scratch memory, of which there is none
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared

    def run(stream: int) -> object:
        return function(compiled.function, 1, 1, 1, threads, 1, 1, shared, stream, pointers, None), values

    return run


def main() -> None:
    arguments = parser(__doc__).parse_args()
    refuse_debug()
    print(machine(), _core.__version__, flush=True)
    text = "\n\n".join(
        [
            f"Nanoseconds of an expression in a warm loop, {ROWS} requests:",
            table(["what", "ns"], expressions()),
            "Microseconds of a copy from pinned memory, idle device:",
            table(["bytes", "torch `copy_`", "the runtime's"], copies()),
            f"Microseconds of launching the plan kernel, {ROWS} rows, idle device:",
            table(["way", "us"], launches()),
        ]
    )
    publish("Where a step's host time goes", text, arguments.out)


if __name__ == "__main__":
    main()
