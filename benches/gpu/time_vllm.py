"""What a step's metadata costs under vLLM: its own builder and ours in one run, idle and behind a busy device.

    python benches/gpu/time_vllm.py --slice FOLDER

"Graph" is `build()` alone, for a batch that a captured graph replays: the graph makes the plan. "Eager" is `build()`
and the first layer's request for the plan. "Base class alone" is the part of vLLM that both builders run, a floor. The
stock builder does all its work in `build()`; aiter's planner is one small launch there, so its own time on an AMD GPU
comes on top. "Changed" has one request below topk that grows, so rows differ from one step to the next; "unchanged"
has every request above topk. Before anything is timed, both engines' buffers and outputs are compared for the batch.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import parser, publish, refuse_debug, table
from vllm_slice import AITER, CPU, DEVICE, load

GPU_BATCHES = ((1, 1, 5000), (64, 1, 5000), (256, 1, 5000), (128, 4, 5000), (512, 2, 9000))
BATCHES = ((2, 1, 300), (2, 2, 300)) if CPU else GPU_BATCHES
# Plan nodes in the graph that is timed.
NODES = 20
NODE_ROWS = (1, 8, 64, 256, 512, 1024)
# Microseconds of device time by rows.
NODE_TARGETS = {64: 6.0, 256: 10.0, 1024: 25.0}
# Rounds over all sides, and calls of a side in each: the host's speed drifts, and a round is short. Calls that warm up.
ROUNDS, CALLS, WARM = (1, 2, 1) if CPU else (5, 40, 6)
BUSY_ROUNDS, BUSY_CALLS, BUSY_WARM = (1, 2, 1) if CPU else (3, 5, 2)
BASE = "base class alone"


class Side:
    """One way to make a step's metadata.

    Attributes:
        engine: Whose builder it is.
        call: Makes it for a batch.
        changing: Whether the rows of the batch change from step to step.
    """

    def __init__(self, engine: Any, call: Callable[[Any], object], *, changing: bool) -> None:
        self.engine, self.call, self.changing = engine, call, changing


class Bench:
    """Both engines for one batch."""

    def __init__(self, backend: Any, requests: int, tokens: int, context: int) -> None:
        import engines
        import vllm_engines

        self.tools = vllm_engines
        self.requests, self.tokens, self.context = requests, tokens, context
        big = {"max_rows": 8192, "max_reqs": 1024, "topk": 2048, "max_len": 131072}
        small = {"max_rows": 8, "max_reqs": 4, "topk": 128, "max_len": 512}
        self.sizes = engines.Sizes(**(small if CPU else big), drafts=tokens - 1, capture_sizes=())
        self.ours, self.theirs, self.inputs = vllm_engines.pair(backend, self.sizes, 0)
        ours, theirs = self.ours.builder, self.theirs.builder
        # What the stock builder builds upon, without the launch of its own that ours leaves out: a floor of ours.
        base = type(theirs).__mro__[1].build

        def eager(common: Any) -> None:
            plan = ours.build(0, common).plan
            plan.planner.refresh(plan)

        self.sides = {
            "stock, changed": Side(self.theirs, lambda common: theirs.build(0, common), changing=True),
            "stock, unchanged": Side(self.theirs, lambda common: theirs.build(0, common), changing=False),
            "ours for a graph, changed": Side(self.ours, lambda common: ours.build(0, common), changing=True),
            "ours for a graph, unchanged": Side(self.ours, lambda common: ours.build(0, common), changing=False),
            BASE: Side(self.ours, lambda common: base(ours, 0, common), changing=True),
            "ours eager, changed": Side(self.ours, eager, changing=True),
            "ours eager, unchanged": Side(self.ours, eager, changing=False),
        }

    @property
    def name(self) -> str:
        return f"{self.requests} x {self.tokens}, {self.context}"

    def step(self, number: int, *, changing: bool) -> Any:
        """A decode batch of the case."""
        lengths = [self.context + number % 16] * self.requests
        if changing:
            lengths[0] = self.tokens + number % (self.sizes.topk - self.tokens)
        return self.tools.engines.Step(query_lens=[self.tokens] * self.requests, seq_lens=lengths)

    def common(self, number: int, *, changing: bool) -> Any:
        """Writes a step into the device's arrays, and returns the batch object that a builder gets."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        given = self.inputs.write(self.step(number, changing=changing))
        return CommonAttentionMetadata(
            query_start_loc=given["query_start_loc_gpu"],
            query_start_loc_cpu=given["query_start_loc_cpu"],
            seq_lens=given["seq_lens"][: self.requests],
            num_reqs=self.requests,
            num_actual_tokens=given["num_tokens"],
            max_query_len=self.tokens,
            max_seq_len=given["max_seq_len"],
            block_table_tensor=given["block_tables"][0],
            slot_mapping=given["slot_mappings"][0],
            seq_lens_cpu_upper_bound=given["seq_lens_cpu_upper_bound"],
            positions=given["positions"],
            is_prefilling=given["is_prefilling"],
        )

    def check(self) -> None:
        """Compares both engines' buffers and outputs before anything is timed."""
        AITER.planning = "schedule"
        differences = self.tools.Differences(self.ours, self.theirs)
        for number, changing in enumerate((True, False, True)):
            given = self.inputs.write(self.step(3 * number, changing=changing))
            found = self.ours.build(given)
            rows = given["num_tokens"]
            out = self.tools.forward(self.ours, found, rows)
            wanted = self.theirs.build(given)
            expected = self.tools.forward(self.theirs, wanted, rows)
            differences.compare(found.plan, scheduled=True)
            differences.compare_outputs(out, expected)
        counts, _ = differences.read()
        assert not any(counts.values()), f"ours and stock differ, not timed: {counts}"
        AITER.planning = "launch"
        # What lies in the stock builder's buffers is no longer made, so it must not believe that its key is held.
        self.theirs.builder._prev_metadata_key = None  # noqa: SLF001

    def host_us(self, *, busy: Callable[[], None] | None = None) -> dict[str, float]:
        """Median wall time of each side's call in microseconds."""
        times: dict[str, list[float]] = {name: [] for name in self.sides}
        rounds, calls, warm = (ROUNDS, CALLS, WARM) if busy is None else (BUSY_ROUNDS, BUSY_CALLS, BUSY_WARM)
        for _ in range(rounds):
            for name, side in self.sides.items():
                taken = [self._call_us(side, number, busy) for number in range(warm + calls)]
                times[name] += taken[warm:]
        return {name: statistics.median(taken) for name, taken in times.items()}

    def _call_us(self, side: Side, number: int, busy: Callable[[], None] | None) -> float:
        common = self.common(number, changing=side.changing)
        _synchronize()
        if busy is not None:
            busy()
        begin = time.perf_counter()
        side.call(common)
        taken = 1e6 * (time.perf_counter() - begin)
        _synchronize()
        return taken

    def counts(self, side: Side, calls: int = 8) -> list[str]:
        """Device operations, copies back and waits of one call, as the profiler and torch's sync check see them."""
        commons = [self.common(0, changing=side.changing) for _ in range(2 * calls + 1)]
        side.call(commons.pop())
        _synchronize()

        def all_calls() -> None:
            for _ in range(calls):
                if side.changing and side.engine is self.theirs:
                    side.engine.builder._prev_metadata_key = None  # noqa: SLF001
                side.call(commons.pop())

        return [*_profiled(all_calls, calls), _waits(all_calls, calls)]


def _synchronize() -> None:
    if not CPU:
        torch.cuda.synchronize()


def _profiled(work: Callable[[], None], calls: int) -> list[str]:
    """Operations on the device for each call, and copies back among them."""
    from torch.profiler import ProfilerActivity, profile

    if CPU:
        work()
        return ["", ""]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        work()
        torch.cuda.synchronize()
    device = [event.name for event in recorded.events() if str(event.device_type).endswith("CUDA")]
    backs = sum("DtoH" in name for name in device)
    return [f"{len(device) / calls:g}", f"{backs / calls:g}"]


def _waits(work: Callable[[], None], calls: int) -> str:
    """Times that a call made the host wait for the device."""
    if CPU:
        work()
        return ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return f"{sum('called a synchronizing' in str(warning.message) for warning in seen) / calls:g}"


def plan_node(backend: Any, cus: int, rows: int, lengths: list[int]) -> float:
    """Device time of the plan node: a layer's work in a graph, with the plan and without it."""
    import engines
    import vllm_engines

    AITER.num_cus, AITER.decoding = cus, "none"
    sizes = engines.Sizes(max_rows=rows, max_reqs=rows, topk=2048, max_len=16384, capture_sizes=())
    ours, _, inputs = vllm_engines.pair(backend, sizes, 0)
    given = inputs.write(engines.Step(query_lens=[1] * rows, seq_lens=lengths))
    held = ours.build(given)
    vllm_engines.forward(ours, held, rows)
    bare = dataclasses.replace(held, plan=None)

    def layers(*, planned: bool) -> None:
        for _ in range(NODES):
            vllm_engines.forward(ours, ours.build(given) if planned else bare, rows)

    before = ours.planner.stats.launches
    graphs = [vllm_engines.Captured(lambda planned=planned: layers(planned=planned)) for planned in (True, False)]
    assert ours.planner.stats.launches - before == NODES, "a plan node for each of the metadata"
    times: list[list[float]] = [[], []]
    for _ in range(40):
        for graph, taken in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(1e3 * begin.elapsed_time(end) / NODES)
    return statistics.median(times[0][5:]) - statistics.median(times[1][5:])


def plan_nodes(backend: Any, cus: int, report: Report) -> None:
    """Device times of the plan node, and how they stand to the targets."""
    try:
        for rows in NODE_ROWS:
            full = plan_node(backend, cus, rows, [5000] * rows)
            mixed = plan_node(backend, cus, rows, [1 + 997 * row % 4096 for row in range(rows)])
            report.nodes.append([rows, cus, f"{full:.2f}", f"{mixed:.2f}"])
            if rows in NODE_TARGETS:
                target, worse = NODE_TARGETS[rows], max(full, mixed)
                what = f"plan node, {rows} rows, {cus} CUs, us"
                report.targets.append([what, f"<= {target:g}", f"{worse:.1f}", _met(worse <= target)])
    finally:
        AITER.num_cus, AITER.decoding = 304, "portable"


def _met(good: bool) -> str:  # noqa: FBT001
    return "met" if good else "missed"


def compare_targets(name: str, idle: dict[str, float], busy: dict[str, float], ops: dict[str, list[str]]) -> list[Any]:
    """How a batch's numbers stand to the targets."""
    graph, eager = "ours for a graph, changed", "ours eager, changed"
    checks = (
        ("for a graph, us", "<= 20", idle[graph], idle[graph] <= 20),
        ("for a graph, stock / ours", ">= 20", idle["stock, changed"] / idle[graph],
         idle["stock, changed"] >= 20 * idle[graph]),
        ("for a graph behind a busy device, stock / ours", ">= 300", busy["stock, changed"] / busy[graph],
         busy["stock, changed"] >= 300 * busy[graph]),
        ("eager, us", "<= 45", idle[eager], idle[eager] <= 45),
        ("eager, stock / ours", ">= 10", idle["stock, changed"] / idle[eager],
         idle["stock, changed"] >= 10 * idle[eager]),
    )  # fmt: skip
    lines = [[f"{name}: {what}", target, f"{value:.1f}", _met(good)] for what, target, value, good in checks]
    if graph in ops:
        lines.append([f"{name}: for a graph, device operations", "0", ops[graph][0], _met(ops[graph][0] == "0")])
        found = "operations {}, copies back {}, waits {}".format(*ops[eager])
        lines.append([f"{name}: eager", "1, 0, 0", found, _met(ops[eager] == ["1", "0", "0"])])
    return lines


def _busy_work() -> Callable[[], None]:
    if CPU:
        return lambda: None
    square = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(5):
            square @ square

    return work


class Report:
    """Tables that fill as parts get done; a part that fails is noted, and the next one runs all the same."""

    SIDES = (
        "stock, changed",
        "stock, unchanged",
        "ours for a graph, changed",
        "ours for a graph, unchanged",
        BASE,
        "ours eager, changed",
        "ours eager, unchanged",
    )

    def __init__(self, seconds: float) -> None:
        self.idle: list[list[object]] = []
        self.busy: list[list[object]] = []
        self.ops: list[list[object]] = []
        self.nodes: list[list[object]] = []
        self.targets: list[list[object]] = []
        self.failed: list[str] = []
        self._until = time.monotonic() + seconds

    def part(self, what: str, work: Callable[[], None]) -> None:
        """Runs a part."""
        if time.monotonic() > self._until:
            self.failed.append(f"{what}: no time left")
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001  (what is measured so far is printed all the same)
            traceback.print_exc()
            self.failed.append(f"{what}: {type(error).__name__}: {error}")

    def text(self) -> str:
        """Returns everything."""
        header = ["requests x tokens, context", *self.SIDES]
        parts = [
            "Host time in us of making a step's metadata, median, idle device:",
            table(header, self.idle),
            "The same behind five queued 8192^3 bf16 products:",
            table(header, self.busy),
            "Device operations / copies back / waits of one call:",
            table(header, self.ops),
            *self._node_parts(),
            "Targets:",
            table(["what", "target", "found", ""], self.targets),
        ]
        if self.failed:
            parts += ["Failed:", "\n".join(f"* {line}" for line in self.failed)]
        return "\n\n".join(parts)

    def _node_parts(self) -> list[str]:
        if not self.nodes:
            return []
        return [
            "Device time of the plan node in us, as the difference of graph replays with and without it:",
            table(["rows", "CUs", "full rows", "mixed rows"], self.nodes),
        ]


def measure(backend: Any, batch: tuple[int, int, int], busy_work: Callable[[], None], report: Report) -> None:
    """Checks and times one batch, and adds lines to the tables."""
    bench = Bench(backend, *batch)
    bench.check()
    before = bench.ours.planner.stats
    idle = bench.host_us()
    report.idle.append([bench.name, *(f"{value:.1f}" for value in idle.values())])
    busy = bench.host_us(busy=busy_work)
    report.busy.append([bench.name, *(f"{value:.1f}" for value in busy.values())])
    print(bench.name, report.idle[-1][1:], report.busy[-1][1:], flush=True)
    after = bench.ours.planner.stats
    assert (before.read_backs, before.waits, before.copies) == (after.read_backs, after.waits, after.copies)
    ops: dict[str, list[str]] = {}

    def count() -> None:
        ops.update({name: bench.counts(side) for name, side in bench.sides.items()})
        report.ops.append([bench.name, *(" / ".join(counted) for counted in ops.values())])

    report.part(f"{bench.name}, counting", count)
    report.targets += compare_targets(bench.name, idle, busy, ops)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--slice", type=Path, required=True, help="folder with the Python files of vLLM 0.32.0")
    options.add_argument("--seconds", type=float, default=240.0, help="no further part is begun after that")
    options.add_argument(
        "--no-nodes", action="store_true", help="leave the plan node out, which time_plan.py times too"
    )
    arguments = options.parse_args()
    if not CPU:
        refuse_debug()
    report = Report(arguments.seconds)
    backend = load(arguments.slice.resolve())
    busy_work = _busy_work()
    for batch in BATCHES:
        report.part(str(batch), lambda: measure(backend, batch, busy_work, report))
    if not CPU and not arguments.no_nodes:
        for cus in (304, 256):
            report.part(f"plan node, {cus} CUs", lambda: plan_nodes(backend, cus, report))
    if CPU:
        print("CPU tensors, Triton's interpreter: this checks the script, not a GPU.\n\n" + report.text())
    else:
        publish("Cost of a step's metadata under vLLM", report.text(), arguments.out)
    raise SystemExit(bool(report.failed))


if __name__ == "__main__":
    main()
