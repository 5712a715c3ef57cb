"""What the GPU scripts share: the machine's description, timers, and the results file."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
import triton

import mlaplan
from mlaplan import _core


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that every script has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, help="folder for the results file")
    made.add_argument("--seed", type=int, default=0)
    return made


def refuse_debug() -> None:
    """Stops where the extension was built for debugging: its times say nothing."""
    if _core.build_profile != "release":
        sys.exit(f"mlaplan._core is a {_core.build_profile} build: build a release wheel before timing")


def plugin(path: str | None) -> ModuleType | None:
    """Loads a peer from a file, so that what it is need not be in this repository."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def machine() -> str:
    """Says what runs this: GPU, driver-side runtime, versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{gpu}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"Python {platform.python_version()}, mlaplan {mlaplan.__version__}"
    )


def _by_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Every name once a round, each round in another order."""
    order = list(names)
    turns = random.Random(0)  # noqa: S311  (no secret)
    for _ in range(rounds):
        turns.shuffle(order)
        yield from order


def host_side_by_side_us(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 12, repeats: int = 25, warm: int = 5
) -> dict[str, float]:
    """Median wall time of each call in microseconds, with an idle device each time.

    Calls take turns by `repeats` of each, every round in another order, so that what else a host does in a second is
    the same for all of them. The first `warm` calls of a turn are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in _by_turns(calls, rounds):
        for _ in range(warm):
            calls[name]()
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return {name: 1e6 * statistics.median(taken) for name, taken in times.items()}


def host_us(call: Callable[[], object]) -> float:
    """The same for one call."""
    return host_side_by_side_us({"call": call}, rounds=1, repeats=300, warm=30)["call"]


def _captured(call: Callable[[], object], nodes: int, scratch: torch.Tensor | None) -> torch.cuda.CUDAGraph:
    """A graph of so many calls, each behind a write over the scratch where there is one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            if scratch is not None:
                scratch.zero_()
            call()
    return graph


def side_by_side_us(
    calls: Mapping[str, Callable[[], object]], *, nodes: int = 20, repeats: int = 30, flush: bool = False
) -> dict[str, float]:
    """Median device time of each call in microseconds, as one of several nodes of a replayed graph.

    The graphs are replayed by turns, each round in another order, so that what a GPU's clock does under load is the
    same for all of them.

    Args:
        calls: What to capture; none may have an effect that the next one could not repeat.
        nodes: How often a graph holds its call.
        repeats: Rounds.
        flush: Write over the L2 cache before each call, and take the time of that off again.
    """
    scratch = torch.empty(96 << 20, dtype=torch.uint8, device="cuda") if flush else None
    graphs = {name: _captured(call, nodes, scratch) for name, call in calls.items()}
    if scratch is not None:
        graphs[""] = _captured(lambda: None, nodes, scratch)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for name in _by_turns(graphs, repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graphs[name].replay()
        end.record()
        torch.cuda.synchronize()
        times[name].append(1e3 * begin.elapsed_time(end) / nodes)
    medians = {name: statistics.median(taken[3:]) for name, taken in times.items()}
    flushed = medians.pop("") if scratch is not None else 0.0
    return {name: taken - flushed for name, taken in medians.items()}


def graph_us(call: Callable[[], object], *, nodes: int = 20, repeats: int = 30) -> float:
    """The same for one call, the cache as it is."""
    return side_by_side_us({"call": call}, nodes=nodes, repeats=repeats)["call"]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def publish(name: str, text: str, out: Path | None) -> None:
    """Prints results and writes them into a dated file that says how they came about."""
    day = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    arguments = list(sys.argv[1:])
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    command = " ".join(["python", f"benches/gpu/{Path(sys.argv[0]).name}", *arguments])
    document = f"# {name}, {day}\n\n{machine()}. Made by `{command}`.\n\n{text}\n"
    print(document)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{day}-{Path(sys.argv[0]).stem.replace('_', '-')}.md").write_text(document)
