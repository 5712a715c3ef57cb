"""Every kernel under NVIDIA's compute-sanitizer: memcheck, initcheck, racecheck and synccheck, eager and replayed.

    python benches/gpu/check_sanitizer.py

Each tool watches a process that runs every op over sane and wild inputs, and a whole planned decode, once by launches
and once from a captured graph. Each buffer is an allocation of its own and holds nothing that was not put there. A
second process runs a kernel that does what the tool looks for; where that is not found the tool saw nothing.

racecheck sees shared memory only. What is passed through global memory is looked at by `tests/kernels/test_order.py`.
The Hopper decode has a column of its own: its groups of warps pass shared memory on by barriers that count arrivals,
and racecheck reports what was passed on rightly. Two groups that do nothing but pass words on show that in the same
run; that each arrival of ours lies behind a barrier of its group is what `tests/kernels/test_decode_hopper.py` reads
in the code.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from common import parser, publish, table
from guarded import BAND, first_launches, makers
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import mlaplan

# A launch that never ends is a finding too.
_MOST_SECONDS = 120

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")

# Two warps; a lane writes its word of shared memory and reads one that a lane of the other warp wrote.
_RACE = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry race(.param .u64 out)
{
    .reg .b32 %r<6>;
    .reg .b64 %a<4>;
    .shared .align 4 .b8 words[256];
    ld.param.u64 %a0, [out];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, words;
    shl.b32 %r2, %r0, 2;
    add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], %r0;
    BARRIER
    xor.b32 %r4, %r2, 128;
    add.u32 %r4, %r1, %r4;
    ld.shared.u32 %r5, [%r4];
    mul.wide.u32 %a1, %r0, 4;
    add.u64 %a2, %a0, %a1;
    st.global.u32 [%a2], %r5;
    ret;
}
"""
# One lane of each warp waits at a barrier that the others never reach.
_STRAY = "setp.ne.u32 %p0, %r0, 0; @%p0 bra END; bar.sync 0; END:"


def run_ptx(barrier: str) -> None:
    """Runs the kernel above with something or nothing where its barrier belongs."""
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    text = _RACE.replace("BARRIER", barrier).replace(".reg .b64", ".reg .pred %p<1>;\n    .reg .b64").encode()
    address = ctypes.c_uint64(out.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(address), ctypes.c_void_p))
    for status in (
        cuda.cuModuleLoadData(ctypes.byref(module), text),
        cuda.cuModuleGetFunction(ctypes.byref(function), module, b"race"),
        cuda.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, None, parameters, None),
    ):
        if status:
            raise SystemExit(f"the companion kernel did not run: CUDA error {status}")
    torch.cuda.synchronize()


@gluon.jit
def _send(words, sent, taken, rounds) -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    phase = 1
    for number in range(rounds):
        mbarrier.wait(taken, phase)
        words.store(gl.arange(0, 128, layout=layout) + number)
        mbarrier.arrive(sent, count=1)
        phase ^= 1


@gluon.jit
def _receive(words, sent, taken, out_ptr, rounds) -> None:
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 128, layout=layout)
    total = at * 0
    phase = 0
    for _ in range(rounds):
        mbarrier.wait(sent, phase)
        total += words.load(layout)
        mbarrier.arrive(taken, count=1)
        phase ^= 1
    gl.store(out_ptr + gl.program_id(0) * 128 + at, total)


@gluon.jit
def pass_words(out_ptr, rounds) -> None:
    """Two groups of warps, of which one sends words to the other, each when the last ones were taken."""
    words = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    sent, taken = barriers.index(0), barriers.index(1)
    mbarrier.init(sent, count=1)
    mbarrier.init(taken, count=1)
    gl.warp_specialize(
        [(_send, (words, sent, taken, rounds)), (_receive, (words, sent, taken, out_ptr, rounds))], [4], [24]
    )


@triton.jit
def _copy(source_ptr, target_ptr, WORDS: tl.constexpr) -> None:  # noqa: N803  (a compile-time constant)
    at = tl.arange(0, WORDS)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


def run_groups() -> None:
    """Runs the kernel whose groups of warps pass words on."""
    programs, rounds = 4, 20
    out = torch.zeros(programs, 128, dtype=torch.int32, device="cuda")
    pass_words[(programs,)](out, rounds, num_warps=4)
    wanted = rounds * torch.arange(128, dtype=torch.int32) + rounds * (rounds - 1) // 2
    if not torch.equal(out.cpu(), wanted.expand(programs, -1)):
        raise SystemExit("the groups of warps did not pass their words on")


def companion(tool: str, *, broken: bool) -> None:
    """Does what the tool looks for, or the same without the fault."""
    size = 96 if broken and tool == "memcheck" else 128
    source, target = (torch.empty(size, dtype=torch.int32, device="cuda") for _ in range(2))
    if not (broken and tool == "initcheck"):
        source.copy_(torch.arange(size, dtype=torch.int32))
    if tool in ("memcheck", "initcheck"):
        _copy[(1,)](source, target, 128)
    elif tool == "racecheck":
        run_ptx("" if broken else "bar.sync 0;")
    else:
        run_ptx(_STRAY if broken else "bar.sync 0;")
    torch.cuda.synchronize()


def drive_ops() -> None:
    """Every op over sane and wild inputs, launched and replayed, each in buffers of its own."""
    for number, make in enumerate(makers("cuda", 0, small=True)):
        for wild in (False, True):
            rig, rng = make(), np.random.default_rng(number)
            rig.fill(rng, wild=wild)
            rig.launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                rig.launch()
            rig.fill(rng, wild=wild)
            graph.replay()
            torch.cuda.synchronize()
            print(f"{rig.name}, {'wild' if wild else 'sane'}", flush=True)


def drive_planner() -> None:
    """Plan, slots, decode and merge of one batch, by launches and as one graph."""
    rows, topk, block_size = 5, 300, 16
    config = mlaplan.PlannerConfig(
        max_rows=8, max_requests=8, arch=None, num_cus=20, topk=topk, heads=16, q_dtype="bf16", kv_dtype="bf16"
    )
    planner = mlaplan.Planner(config, "cuda")
    rng = np.random.default_rng(3)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).cuda()

    boundaries = np.arange(rows + 1, dtype=np.int32)
    seq_lens = np.array([900, 20, 300, 1, 299], np.int32)
    batch = mlaplan.Batch(
        boundaries,
        mlaplan.Exact(seq_lens),
        8,
        device_query_start_loc=on_device(boundaries),
        device_seq_lens=on_device(seq_lens),
    )
    q = on_device(rng.standard_normal((8, 16, 576), np.float32)).bfloat16()
    pool = on_device(rng.standard_normal((1024, 576), np.float32)).bfloat16()
    positions = on_device(rng.integers(0, 900, (8, topk), np.int32))
    blocks = on_device(rng.permutation(64).astype(np.int32)).expand(rows, -1).contiguous()
    out = torch.empty(8, 16, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(8, 16, device="cuda")

    def step() -> None:
        plan = planner.plan(batch, deferred=True)
        planner.refresh(plan)
        planner.decode(plan, q, pool, positions, blocks, block_size=block_size, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    if not bool(out.isfinite().all()):
        raise SystemExit("the planned decode gave numbers that are not finite")
    print("planned decode", flush=True)


def count(tool: str, report: str) -> tuple[int, int]:
    """Errors and hazards in the report of a tool: of kernels without groups of warps, and of those with.

    Raises:
        SystemExit: The tool did not get as far as its summary, or left hazards out.
    """
    pattern = r"RACECHECK SUMMARY: (\d+) hazard" if tool == "racecheck" else r"ERROR SUMMARY: (\d+) error"
    found = re.search(pattern, report)
    if found is None:
        raise SystemExit(f"{tool} gave no summary:\n{report[-3000:]}")
    total = int(found[1])
    if tool != "racecheck":
        return total, 0
    hazards = re.findall(r"Race reported between \w+ access at (\S+)(.*)", report)
    if len(hazards) != total:
        raise SystemExit(f"racecheck counted {total} hazards and named {len(hazards)}:\n{report[-3000:]}")
    in_groups = sum("decode_hopper" in where or kernel.startswith("pass_words+") for kernel, where in hazards)
    return total - in_groups, in_groups


def watched(program: str, tool: str, mode: str) -> tuple[tuple[int, int], str]:
    """Runs this file under a tool; returns what it counted, and its report."""
    script = [sys.executable, __file__, "--mode", mode, "--tool", tool]
    command = [program, "--tool", tool, "--print-limit", "1000", *script]
    # Without its cache torch makes an allocation for each tensor, whose bounds and content the tool then knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(  # noqa: S603  (this file, under the tool)
            command, env=environment, capture_output=True, text=True, check=False, timeout=_MOST_SECONDS
        )
    except subprocess.TimeoutExpired as expired:
        seen = (expired.stdout or b"").decode(errors="replace")
        raise SystemExit(f"{tool}, {mode}: not through after {_MOST_SECONDS} s:\n{seen[-1000:]}") from expired
    report = done.stdout + done.stderr
    wanted = {"ops": "planned decode", "groups": "groups passed"}.get(mode, f"companion {mode}")
    if wanted not in report:
        raise SystemExit(f"{tool}, {mode}: the program did not get to its end:\n{report[-3000:]}")
    return count(tool, report), report


def find_sanitizer() -> str:
    """The program, from PATH or from where CUDA lies."""
    found = shutil.which("compute-sanitizer") or next(
        (str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))), None
    )
    if found is None:
        raise SystemExit("compute-sanitizer is not on PATH and not under /usr/local/cuda*")
    return found


def supervise(arguments: argparse.Namespace) -> None:
    """Runs everything under every tool and publishes what they counted."""
    program = find_sanitizer()
    # Compiles everything, unwatched and side by side, for all the processes to come. With bands, since what a launch
    # leaves out is only known where something was put there before.
    first_launches([make() for make in makers("cuda", BAND, small=True)])
    drive_planner()
    run_groups()
    runs = [(tool, mode) for tool in TOOLS for mode in ("ops", "groups", "broken", "mended")]
    with ThreadPoolExecutor(len(runs)) as pool:
        results = dict(zip(runs, pool.map(lambda run: watched(program, *run), runs), strict=True))
    lines, failed = [], []
    for tool in TOOLS:
        counts = {mode: results[tool, mode][0] for mode in ("ops", "groups", "broken", "mended")}
        ours, decode = counts["ops"]
        passed = sum(counts["groups"])
        lines.append([tool, ours, decode, passed, counts["broken"][0], counts["mended"][0]])
        # Reports of the decode say nothing only where a kernel that passes words on rightly has them too.
        if ours or sum(counts["mended"]) or not counts["broken"][0] or bool(decode) > bool(passed):
            failed.append(tool)
            for mode in ("ops", "groups", "mended", "broken"):
                print(f"{tool}, {mode}:\n{results[tool, mode][1][-3000:]}")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    found = re.search(r"Version (\S+)", told.stdout)
    version = found[1] if found else "of an unnamed version"
    header = ["tool", "our kernels but one", "the Hopper decode", "two groups that pass words on"]
    text = table([*header, "a kernel with the fault", "the same without it"], lines)
    text += f"""

Errors and hazards that compute-sanitizer {version} counted. Our kernels: `plan` for 64 and 1,500 rows and
under each policy, `slots`, `decode` of 16 and 128 heads and of fp8 KV, `merge`, each over sane and wild inputs,
launched and replayed; then a whole planned decode, launched and replayed.

The faults: 32 words beyond an allocation, words that nobody wrote, a missing barrier between two warps that exchange
words of shared memory, a barrier that one lane alone reaches. racecheck sees shared memory only. The Hopper decode's
groups of warps pass shared memory on by barriers that count arrivals; what racecheck says of that, it also says of two
groups that pass words on as they should and do nothing else."""
    publish("Kernels under compute-sanitizer", text, arguments.out)
    raise SystemExit(f"not as it must be: {', '.join(failed)}" if failed else 0)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mode", choices=("ops", "groups", "broken", "mended"), help="what a watched process does")
    options.add_argument("--tool", choices=TOOLS, default="memcheck")
    arguments = options.parse_args()
    if arguments.mode is None:
        supervise(arguments)
    elif arguments.mode == "ops":
        drive_ops()
        drive_planner()
    elif arguments.mode == "groups":
        run_groups()
        print("groups passed", flush=True)
    else:
        print(f"companion {arguments.mode}", flush=True)
        companion(arguments.tool, broken=arguments.mode == "broken")


if __name__ == "__main__":
    main()
