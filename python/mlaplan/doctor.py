"""What is installed, what of it is recognised, and whether planning works here: text for an issue.

What may be broken is looked at from a child process: a library that does not load, aborts or hangs is an answer there
and not the end of this one. Nothing here imports torch, aiter or vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlaplan import _core
from mlaplan.report import Row, Section

PROBE_SECONDS = 180.0
SELF_TEST_SECONDS = 2.0
# aiter's distribution has another name than its module, and so does torch's Triton for ROCm.
_DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "aiter": ("amd-aiter", "aiter"),
    "vllm": ("vllm",),
    "rich": ("rich",),
    "matplotlib": ("matplotlib",),
    "bokeh": ("bokeh",),
}
# aiter's and ours, and those that decide whether vLLM takes the plugin or aiter at all.
_SWITCH_PREFIXES = ("AITER_", "MLAPLAN_", "VLLM_ROCM_USE_AITER")
_SWITCHES = ("CU_NUM", "GPU_ARCHS", "VLLM_PLUGINS", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SWITCHES_CUDA = ("CUDA_VISIBLE_DEVICES",)
_ROCM_FILE = Path("/opt/rocm/.info/version")
_GROUP = "vllm.general_plugins"


class Probe(NamedTuple):
    """Answer of a child process.

    Attributes:
        found: What it found; empty where it failed.
        error: What went wrong, None where nothing did.
    """

    found: dict[str, Any]
    error: str | None


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Outcome of the self-test.

    Attributes:
        steps: Plans compared with one made from nothing.
        seconds: How long it took.
        error: The first difference or exception, None where all agreed.
    """

    steps: int
    seconds: float
    error: str | None

    @property
    def passed(self) -> bool:
        """Whether there were steps and all agreed."""
        return self.error is None and self.steps > 0


def examine(*, probe: bool = True, seconds: float = SELF_TEST_SECONDS) -> tuple[list[Section], bool]:
    """Looks at everything.

    Args:
        probe: Load torch, aiter and vLLM in child processes, which takes a while; else only their versions are read.
        seconds: How long the self-test runs.

    Returns:
        The sections of the report, and whether the self-test passed.
    """
    skipped = Probe({}, "not looked at")
    versions = {name: _version(names) for name, names in _DISTRIBUTIONS.items()}
    gpu = (run_probe("gpu") if probe else skipped) if _is_there("torch") else Probe({}, "torch is not installed")
    aiter = (run_probe("aiter") if probe else skipped) if _is_there("aiter") else Probe({}, "not installed")
    vllm = (run_probe("vllm") if probe else skipped) if _is_there("vllm") else Probe({}, "not installed")
    test = self_test(seconds)
    sections = [
        Section("versions", "Versions", _version_rows(versions)),
        Section("gpu", "GPU", _gpu_rows(gpu)),
        Section("aiter", "aiter", _aiter_rows(aiter)),
        Section("vllm", "vLLM plugin", _vllm_rows(vllm, gpu)),
        Section("environment", "Environment switches", _environment_rows()),
        Section("self_test", "Self-test on the host", _test_rows(test)),
    ]
    return sections, test.passed


def run_probe(name: str, timeout: float = PROBE_SECONDS) -> Probe:
    """Asks a child process. Whatever the child does, this returns.

    Args:
        name: Probe of `mlaplan.probes` to run.
        timeout: Seconds after which the child is ended.
    """
    code = f"import mlaplan.probes as p; p.answer({name!r})"
    try:
        status, out, errors = _output_of([sys.executable, "-c", code], timeout)
    except subprocess.TimeoutExpired:
        return Probe({}, f"no answer in {timeout:.0f} s")
    except OSError as error:
        return Probe({}, f"no child process: {error}")
    for line in reversed(out.splitlines()):
        if line.startswith("mlaplan-probe "):
            with suppress(ValueError, LookupError, TypeError):  # a line of somebody else's, or one cut short
                answer = json.loads(line.removeprefix("mlaplan-probe "))
                return Probe(dict(answer["found"]), answer["error"])
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "no word")
    return Probe({}, f"ended with status {status}: {_short(last)}")


def _output_of(command: list[str], timeout: float) -> tuple[int, str, str]:
    """Runs a command to its end or to the timeout, and ends whatever it has started by then."""
    # A session of its own: aiter starts compilers, which would keep the pipes open after a timeout.
    with subprocess.Popen(  # noqa: S603  (this interpreter, with a text of our own)
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            out, errors = child.communicate(timeout=timeout)
        except BaseException:
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return child.returncode, out, errors


def self_test(seconds: float = SELF_TEST_SECONDS) -> SelfTest:
    """Plans random steps on the host and compares each plan with one made from nothing.

    Args:
        seconds: When to stop; three steps of each kind are made at least.
    """
    begin = time.perf_counter()
    steps = 0
    try:
        for steps, difference in enumerate(_compared(begin + seconds), start=1):
            if difference is not None:
                return SelfTest(steps, time.perf_counter() - begin, str(difference))
    except Exception as error:  # noqa: BLE001  (a broken install is what this looks for)
        return SelfTest(steps, time.perf_counter() - begin, f"{type(error).__name__}: {error}")
    return SelfTest(steps, time.perf_counter() - begin, None)


def _compared(end: float) -> Any:
    """Yields the difference, or None, of one plan after the other."""
    import itertools

    from mlaplan.checks import check_plan
    from mlaplan.runner import RunOptions, batch_of, make_planner, requests_of
    from mlaplan.workload import Scheduler, SchedulerConfig

    kinds = itertools.product(("exact", "bound", "device"), (0, 3))
    loops = []
    for seed, (lengths, drafts) in enumerate(kinds):
        config = SchedulerConfig(lengths=lengths, num_speculative_tokens=drafts, seed=seed, load=2.0)
        options = RunOptions(device="cpu", scheduler=config)
        loops.append((make_planner(options), Scheduler(config, requests_of(options))))
    for count in itertools.count():
        for planner, scheduler in loops:
            step = next(scheduler, None)
            if step is None:
                continue
            deferred = count % 3 == 2
            plan = planner.plan(batch_of(step, planner), deferred=deferred)
            planner.refresh(plan)
            yield check_plan(planner, plan, step)
        if count >= 2 and time.perf_counter() >= end:
            return


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # a module without a spec, or a finder that fails
        return False


def _version(distributions: tuple[str, ...]) -> str | None:
    return next(filter(None, map(_version_of, distributions)), None)


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except Exception:  # noqa: BLE001  (not installed, or its metadata cannot be read)
        return None


def _version_rows(versions: dict[str, str | None]) -> tuple[Row, ...]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    debug = _core.build_profile == "debug"
    return (
        Row("mlaplan", "mlaplan", _core.__version__),
        Row("build", "build", _core.build_profile, note="too slow to serve with" if debug else ""),
        Row("python", "python", f"{platform.python_implementation()} {platform.python_version()}"),
        Row("system", "system", system),
        *(Row(name, name, found or "not installed") for name, found in versions.items()),
        Row("rocm", "ROCm", _rocm_file() or "not found", note=f"from {_ROCM_FILE}" if _rocm_file() else ""),
    )


def _rocm_file() -> str | None:
    try:
        return _short(_ROCM_FILE.read_text(encoding="utf-8", errors="replace").strip()) or None
    except OSError:
        return None


def _gpu_rows(gpu: Probe) -> tuple[Row, ...]:
    found = gpu.found
    rows = [Row("state", "GPU", gpu.error or found.get("state", "no answer"))]
    for key, label in (
        ("device", "device"),
        ("arch", "architecture"),
        ("num_cus", "compute units"),
        ("count", "devices visible"),
        ("hip", "HIP that torch was built for"),
        ("hip_runtime", "HIP runtime"),
        ("cuda", "CUDA that torch was built for"),
    ):
        if found.get(key) is not None:
            rows.append(Row(key, label, found[key]))
    return (*rows, Row("graph_replays", "graph replays", _replays(found)))


def _replays(found: dict[str, Any]) -> str:
    """What is known of graph replays on this runtime."""
    known = "some ROCm 7.2.0 to 7.2.3 runtimes on MI300X corrupt graph replays (ROCm/clr#279)"
    file, arch = _rocm_file(), str(found.get("arch", ""))
    versions = [str(text) for text in (file, found.get("hip"), found.get("hip_runtime")) if text]
    if not versions and not arch.startswith("gfx"):
        return f"no ROCm here; {known}"
    # HIP's third number counts builds, so only ROCm's own file tells 7.2.3 from 7.2.4.
    is_mended = file is not None and re.match(r"7\.2\.([4-9]|\d\d)", file) is not None
    is_other_chip = arch.startswith("gfx") and not arch.startswith("gfx942")
    if any(re.match(r"7\.2(\D|$)", text) for text in versions) and not is_mended and not is_other_chip:
        return f"CAUTION, this may be one of them: {known}"
    return f"ROCm {', '.join(versions) or 'of unknown version'}; {known}"


def _aiter_rows(aiter: Probe) -> tuple[Row, ...]:
    rows = [Row("state", "aiter", aiter.error or "recognised")]
    rows += [Row(key, key.replace("_", " "), value) for key, value in aiter.found.items()]
    return tuple(rows)


def _vllm_rows(vllm: Probe, gpu: Probe) -> tuple[Row, ...]:
    active, reason = _plugin_state(vllm, gpu)
    return (
        Row("builder", "vLLM's builder", vllm.error or vllm.found.get("builder", "no answer")),
        Row("entry_point", "entry point", _entry_point() or "missing"),
        Row("active", "plugin active", active),
        Row("reason", "because", reason),
    )


def _plugin_state(vllm: Probe, gpu: Probe) -> tuple[str, str]:
    """Whether the plugin would be active in a server started in this environment, and why."""
    from mlaplan.vllm.settings import Settings

    try:
        settings = Settings.from_environment()
    except ValueError as error:
        return "no", str(error)
    chosen = os.environ.get("VLLM_PLUGINS")
    builder = vllm.found.get("builder")
    why_not = (
        (settings.disabled, "MLAPLAN_DISABLE is set"),
        (_entry_point() is None, f"the entry point in {_GROUP} is missing: mlaplan is importable, but not installed"),
        (not _is_there("vllm"), "vLLM is not installed"),
        (
            chosen is not None and "mlaplan" not in chosen.split(","),
            f"VLLM_PLUGINS is {chosen!r}, which leaves mlaplan out",
        ),
        (vllm.error is None and builder != "recognised", str(builder)),
    )
    for applies, reason in why_not:
        if applies:
            return "no", reason
    if vllm.error is not None:
        return "unknown", f"vLLM's builder: {vllm.error}"
    if gpu.found.get("hip") is None:
        return "no", "recognised, but this is no ROCm: vLLM does not use ROCM_AITER_MLA_SPARSE"
    return "yes", f"mode {settings.mode.value}, where vLLM chooses ROCM_AITER_MLA_SPARSE"


def _entry_point() -> str | None:
    try:
        found = importlib.metadata.entry_points(group=_GROUP)
        return next((entry.value for entry in found if entry.name == "mlaplan"), None)
    except Exception:  # noqa: BLE001  (another distribution's broken metadata)
        return None


def _environment_rows() -> tuple[Row, ...]:
    single = (*_SWITCHES, *_SWITCHES_CUDA)
    names = sorted(name for name in os.environ if name.startswith(_SWITCH_PREFIXES) or name in single)
    return tuple(Row(name, name, _short(os.environ[name])) for name in names)


def _test_rows(test: SelfTest) -> tuple[Row, ...]:
    return (
        Row("passed", "passed", test.passed),
        Row("steps", "plans compared", test.steps),
        Row("seconds", "time", round(test.seconds, 2), "s"),
        Row("error", "error", test.error),
    )


def _short(text: str, most: int = 300) -> str:
    """One line of printable text, not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= most else line[: most - 3] + "..."
