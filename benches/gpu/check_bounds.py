"""Do the kernels stay inside their buffers, whatever the device arrays hold?

    python benches/gpu/check_bounds.py --seconds 60

Every buffer lies between two bands of 64 KiB. Each op runs eagerly and as the node of a replayed graph, over inputs
that an engine makes and over wild ones: boundaries that fall, negative and huge lengths, counts beyond the capacity,
block tables, indices, works and maps of random words. After each launch no byte of a band and none of an input may
have changed; for sane inputs the result is the reference's, and for `plan` it is for wild ones too.

A kernel that writes one element before and one behind its buffer must be caught in the same run.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import triton
import triton.language as tl
from common import parser, publish, table
from guarded import BAND, Guards, Rig, first_launches, makers


@triton.jit
def _write_outside(ptr, size) -> None:
    tl.store(ptr - 1, 1)
    tl.store(ptr + size, 1)


def companion(device: str) -> str:
    """Runs the kernel that is wrong on purpose; returns what was found."""
    guards = Guards(device)
    array = guards.take("companion", (100,), torch.int32)
    _write_outside[(1,)](array, array.shape[0])
    found = guards.damage()
    if not found:
        raise SystemExit("the bands did not show a write outside: this check means nothing")
    return found[0]


def record(rig: Rig) -> torch.cuda.CUDAGraph:
    """Captures the launch of a rig that has run once."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.launch()
    return graph


def check(rig: Rig, rng: np.random.Generator, *, wild: bool, graph: torch.cuda.CUDAGraph | None) -> None:
    rig.fill(rng, wild=wild)
    if graph is None:
        rig.launch()
    else:
        graph.replay()
    found = rig.damage()
    if found:
        raise SystemExit(f"{'wild' if wild else 'sane'} inputs, {'replayed' if graph else 'eager'}: {found}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60.0)
    arguments = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    caught = companion(device)
    rng = np.random.default_rng(arguments.seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    made = [make() for make in makers(device, BAND, small=False, dtype=dtype)]
    first_launches(made)
    print("first launches are right", flush=True)
    counts = [[0, 0, 0, 0] for _ in made]
    graphs = [record(rig) if device == "cuda" else None for rig in made]
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        for rig, graph, count in zip(made, graphs, counts, strict=True):
            for column, (wild, replayed) in enumerate(((False, False), (True, False), (False, True), (True, True))):
                check(rig, rng, wild=wild, graph=graph if replayed else None)
                count[column] += 1
    lines = []
    for name in ("plan", "slots", "decode", "merge"):
        of_op = [count for rig, count in zip(made, counts, strict=True) if rig.name == name]
        lines.append([name, len(of_op), *np.sum(of_op, axis=0).tolist()])
    text = table(["op", "shapes", "sane, eager", "wild, eager", "sane, replayed", "wild, replayed"], lines)
    text += f"""

Launches; bands of {BAND} bytes on each side of each buffer. No byte outside a buffer and none of an input changed, and
no sane result is wrong. The companion, which writes outside on purpose, was caught: "{caught}".

Bands show writes; reads outside are `check_sanitizer.py`'s."""
    publish("Kernels stay inside their buffers", text, arguments.out)


if __name__ == "__main__":
    main()
