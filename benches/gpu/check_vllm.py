"""Steps as vLLM runs them: our builder and captured layers, each compared on the device with a fresh stock build.

    python benches/gpu/check_vllm.py --slice FOLDER --steps 20000

A step is vLLM's own `build_attn_metadata` with the builder that the plugin put in place, and then either the replay of
a captured graph of two layers' `forward_mqa` (vLLM's index conversion, the portable decode in aiter's place) or the
same eagerly. Batches are those of the CPU tests: decodes, drafts of one and of mixed lengths, dummies of capture time,
prefills, rows on both sides of topk; some steps are built and never run. Then vLLM's own builder and layers run for the
same batch on buffers of their own, and every entry that a kernel may read is compared, outputs bit for bit. aiter's
planner is the host core's schedule there, with the split budget that vLLM asks for.

Then the draft loop: several draft steps in one graph, the plan made again between them, over lengths that cross topk.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import parser, publish, table
from vllm_slice import AITER, CPU, load

from mlaplan.layout import PlanArrays


class Check:
    """Random steps of one configuration."""

    KINDS = ("decode", "spec", "ragged spec", "mixed", "prefill", "chunk", "capture", "single")

    def __init__(self, backend: Any, sizes: Any, seed: int) -> None:
        import vllm_engines

        self.tools = vllm_engines
        self.sizes = sizes
        self.rng = np.random.default_rng(seed)
        self.ours, self.theirs, self.inputs = vllm_engines.pair(backend, sizes, seed)
        self.differences = vllm_engines.Differences(self.ours, self.theirs, padding=not sizes.dense_prefill)
        self.ways: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.last: Any = None
        width = 1 + sizes.drafts
        reqs = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size * width <= sizes.max_rows]
        self.graphs = {
            (size, size * width): vllm_engines.capture_forward(self.ours, size, size * width)
            for size in reqs
            if size <= sizes.max_reqs
        }

    def step(self) -> None:
        """One step, compared on the device. The comparison itself waits for nothing."""
        import batches

        self.inputs.shuffle()
        if self.last is not None and self.rng.random() < 0.4:
            step = batches.next_step(self.rng, self.sizes, self.last)
        else:
            step = batches.random_step(self.rng, self.sizes, str(self.rng.choice(self.KINDS)))
        decodes = step.prefilling is None
        self.last = step if decodes and not step.capture else None
        self.kinds[step.kind] += 1
        size = self._size(step) if decodes else None
        if self.rng.random() < 0.03:
            self.ours.build(self.inputs.write(step))
            self.ways["dropped"] += 1
            return
        if size is not None and self.rng.random() < 0.75:
            step.padded_reqs, step.padded_rows = size
            self._run("replayed", step, size)
        else:
            self._run("eager", step, None)

    def _size(self, step: Any) -> tuple[int, int] | None:
        """A captured size that holds the batch; mostly the smallest, as vLLM takes it."""
        fitting = [s for s in self.graphs if s[0] >= len(step.query_lens) and s[1] >= step.rows]
        if not fitting:
            return None
        return fitting[0] if self.rng.random() < 0.8 else fitting[int(self.rng.integers(len(fitting)))]

    def _run(self, way: str, step: Any, size: tuple[int, int] | None) -> None:
        ours, theirs = self.ours, self.theirs
        given = self.inputs.write(step)
        # Our host's bound may be loose, as under drafting: the device's lengths decide. The stock budget comes from it.
        loose = self.rng.random() < 0.5
        metadata = ours.build({**given, "max_seq_len": self.sizes.max_len} if loose else given)
        rows = self._engines.sparse_rows(metadata, step.visible_rows)
        out = None
        if size is not None:
            out = self.graphs[size].replay()
        elif rows:
            out = self.tools.forward(ours, metadata, rows)
        self.ways[way] += 1
        dense = metadata.prefill is not None and metadata.prefill.use_dense_mha
        if dense:
            # Stock takes its budget from the longest request of all, also where that is a dense prefill, which has no
            # part in the schedule. Ours is that of the rows that are: compared on the same budget.
            given = {**given, "max_seq_len": max(step.seq_lens[: metadata.num_decodes], default=1)}
        wanted = theirs.build(given)
        if not rows:
            assert metadata.plan is None
            assert wanted.req_id_per_token.shape[0] == 0
            return
        live = self._engines.sparse_rows(wanted, step.rows)
        expected = self.tools.forward(theirs, wanted, live)
        scheduled = wanted.work_indptr is not None
        assert (metadata.work_indptr is not None) == scheduled
        if not (loose or dense) and sum(self.ways.values()) % 16 == 0:
            self._engines.assert_same_fields(wanted, metadata)
        self.differences.compare(metadata.plan, scheduled=scheduled)
        self.differences.compare_ids(metadata, wanted)
        self.differences.compare_outputs(out, expected)
        self.differences.next_step()

    @property
    def _engines(self) -> Any:
        return self.tools.engines


class DraftLoop:
    """Draft steps captured in one graph, and what the buffers held in each of them."""

    def __init__(self, backend: Any, sizes: Any, seed: int, reqs: int) -> None:
        import vllm_engines

        self.tools, self.sizes, self.reqs = vllm_engines, sizes, reqs
        self.rng = np.random.default_rng(seed)
        self.ours, self.theirs, self.inputs = vllm_engines.pair(backend, sizes, seed)
        self.differences = vllm_engines.Differences(self.ours, self.theirs)
        assert self.ours.group.supports_draft_decode_metadata_update
        step = vllm_engines.dummy(self.ours, reqs, reqs)
        self.metadata = self.ours.build(self.inputs.write(step))
        self._loop(keep=None)  # compiles
        self.metadata = self.ours.build(self.inputs.write(step))
        plan = self.metadata.plan
        held = (*plan.arrays, self.ours.builder.paged_kv_indices[: reqs * sizes.topk])
        self.kept = [[torch.zeros_like(array) for array in held] for _ in range(sizes.drafts)]
        before = self.ours.planner.stats.launches
        self.graph = vllm_engines.Captured(lambda: self._loop(keep=held))
        if not CPU:
            assert self.ours.planner.stats.launches - before == sizes.drafts, "one plan node for each draft step"

    def _loop(self, keep: Any) -> list[Any]:
        outs = []
        for draft in range(self.sizes.drafts):
            self.ours.group.update_draft_decode_metadata(dict.fromkeys(self.ours.layers, self.metadata))
            outs.append(self.tools.forward(self.ours, self.metadata, self.reqs).clone())
            for index, array in enumerate(keep or ()):
                self.kept[draft][index].copy_(array)
            self.inputs.seq_lens[: self.reqs] += 1
        return outs

    def run(self, replays: int, until: float) -> int:
        """Replays the loop over growing lengths; returns how many draft steps were compared."""
        topk, longest = self.sizes.topk, self.sizes.max_len - self.sizes.drafts - 1
        lengths = np.array([5, topk - 2, topk - 1, topk, *self.rng.integers(1, topk + 40, self.reqs - 4)])
        done = 0
        for _ in range(replays):
            if time.monotonic() > until:
                break
            live = int(self.rng.integers(1, self.reqs + 1))
            self.inputs.shuffle()
            self.inputs.write(self._step(lengths[:live]))
            outs = self.graph.replay()
            for draft in range(self.sizes.drafts):
                self._compare(lengths[:live] + draft, draft, outs[draft])
                done += 1
            lengths += self.rng.integers(1, self.sizes.drafts + 2, self.reqs)
            lengths = np.where(lengths > longest, np.maximum(1, lengths - longest), lengths)
            if self.rng.random() < 0.2:
                lengths[int(self.rng.integers(self.reqs))] = topk - int(self.rng.integers(0, 4))
        return done

    def _step(self, lengths: Any) -> Any:
        return self.tools.engines.Step(
            query_lens=[1] * len(lengths), seq_lens=lengths.tolist(), padded_reqs=self.reqs, padded_rows=self.reqs
        )

    def _compare(self, lengths: Any, draft: int, out: Any) -> None:
        wanted = self.theirs.build(self.inputs.write(self._step(lengths)))
        expected = self.tools.forward(self.theirs, wanted, len(lengths))
        *arrays, indices = self.kept[draft]
        plan = self.metadata.plan
        self.differences.add(self.differences.found(PlanArrays(*arrays), plan.constants, indices, scheduled=True))
        self.differences.compare_outputs(out, expected)
        self.differences.next_step()


def configurations(*, quick: bool) -> dict[str, Any]:
    """What is checked, by name."""
    from engines import Sizes

    if quick:  # without a GPU, where a step takes seconds
        few = {"max_rows": 12, "max_reqs": 4, "topk": 128, "max_len": 512, "layers": 2}
        return {
            "1 token": Sizes(**few, capture_sizes=()),
            "1 + 2 drafts": Sizes(**few, drafts=2, capture_sizes=(3, 6, 12)),
            "1 + 1 drafts, dense prefills": Sizes(**few, drafts=1, dense_prefill=True, capture_sizes=()),
        }
    full = {"max_rows": 256, "max_reqs": 128, "topk": 2048, "max_len": 16384, "layers": 2}
    return {
        "1 token": Sizes(**full, capture_sizes=()),
        # Classes that are no powers of two.
        "1 + 2 drafts": Sizes(**full, drafts=2, capture_sizes=tuple(3 << power for power in range(7))),
        "1 + 1 drafts, dense prefills": Sizes(**full, drafts=1, dense_prefill=True, capture_sizes=()),
    }


def guarded(name: str, work: Callable[[], list[object]], lines: list[list[object]]) -> bool:
    """Runs a part and notes its line; what it raises is printed, and the next part runs all the same."""
    try:
        line = work()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        lines.append([name, "", f"failed: {type(error).__name__}: {error}".splitlines()[0], "", "", "", "", "", ""])
        return False
    lines.append([name, *line])
    return bool(line[0]) and not any(line[2:6])  # nothing compared is nothing shown


def check_steps(backend: Any, sizes: Any, steps: int, seconds: float, seed: int, kinds: Counter[str]) -> list[object]:
    """Random steps; adds up what kinds they were, and returns a line of the table."""
    begin = time.monotonic()
    check = Check(backend, sizes, seed)
    ready = time.monotonic()
    done = 0
    while done < steps and time.monotonic() < ready + seconds:
        check.step()
        done += 1
        if done % 2000 == 0:
            print(f"  {done} steps, {time.monotonic() - ready:.0f} s", flush=True)
    counts, first = check.differences.read()
    kinds.update(check.kinds)
    if first is not None:
        print(f"  first difference in compared step {first}", flush=True)
    how = ", ".join(f"{way} {times}" for way, times in sorted(check.ways.items()))
    return [done, how, *counts.values(), f"{ready - begin:.0f}", f"{time.monotonic() - ready:.0f}"]


def check_drafts(backend: Any, sizes: Any, replays: int, seconds: float, seed: int) -> list[object]:
    """Replays of the draft loop; returns a line of the table."""
    begin = time.monotonic()
    loop = DraftLoop(backend, sizes, seed, reqs=4 if CPU else 16)
    ready = time.monotonic()
    done = loop.run(replays, ready + seconds)
    counts, first = loop.differences.read()
    if first is not None:
        print(f"  first difference in draft step {first}", flush=True)
    took = [f"{ready - begin:.0f}", f"{time.monotonic() - ready:.0f}"]
    return [done, f"{sizes.drafts} draft steps a replay", *counts.values(), *took]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--slice", type=Path, required=True, help="folder with the Python files of vLLM 0.32.0")
    options.add_argument("--steps", type=int, default=20_000)
    options.add_argument("--drafts", type=int, default=300, help="replays of the draft loop")
    options.add_argument("--seconds", type=float, default=100.0, help="time for all steps; fewer are done if it is up")
    arguments = options.parse_args()
    backend = load(arguments.slice.resolve())
    cases = configurations(quick=CPU)
    lines: list[list[object]] = []
    kinds: Counter[str] = Counter()
    good = True
    for number, (name, sizes) in enumerate(cases.items()):
        print(name, flush=True)
        share = SimpleNamespace(steps=-(-arguments.steps // len(cases)), seconds=arguments.seconds / len(cases))
        good &= guarded(
            name,
            lambda: check_steps(backend, sizes, share.steps, share.seconds, arguments.seed + number, kinds),
            lines,
        )
    name, sizes = next(iter((n, s) for n, s in cases.items() if s.drafts > 1))
    print("draft loop", flush=True)
    good &= guarded(
        f"draft loop, {name}",
        lambda: check_drafts(backend, sizes, arguments.drafts, arguments.seconds / 4, arguments.seed + 99),
        lines,
    )
    header = [
        "batches",
        "steps",
        "how",
        *(f"{what} that differ" for what in ("rows", "schedule", "indices", "outputs")),
    ]
    text = "\n\n".join(
        [
            table([*header, "set-up, s", "steps, s"], lines),
            "Batches: " + ", ".join(f"{kind} {times}" for kind, times in sorted(kinds.items())) + ".",
            f"Calls of the stock builder's planner: {AITER.calls}.",
        ]
    )
    if CPU:
        print("CPU tensors, Triton's interpreter: this checks the script, not a GPU.\n\n" + text)
    else:
        publish("vLLM steps against fresh stock builds", text, arguments.out)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
