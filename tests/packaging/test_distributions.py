"""The wheel and the sdist in target/package, as `make package` made them: what is in them, and that they install.

Each install goes into an empty environment and makes a small plan there. A CPython that is not installed is a skip. The
sdist is built once: the wheel that comes of it is for CPython 3.10 and later, and uv takes it for the others.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = Path(os.environ.get("MLAPLAN_DIST", ROOT / "target" / "package"))
UV = os.environ.get("MLAPLAN_UV") or shutil.which("uv") or str(ROOT / ".venv-uv" / "bin" / "uv")
AUDITWHEEL = os.environ.get("MLAPLAN_AUDITWHEEL") or shutil.which("auditwheel")

# Runs in the new environment; prints where the package lies.
PLAN = """
import importlib.metadata, sys
import numpy as np
import mlaplan
from mlaplan import _core
assert not {"torch", "triton", "vllm", "rich"} & set(sys.modules)
assert importlib.metadata.version("mlaplan") == mlaplan.__version__ == _core.__version__
assert _core.build_profile == "release", _core.build_profile
planner = mlaplan.Planner(mlaplan.PlannerConfig(max_rows=64, max_requests=64), device="cpu")
batch = mlaplan.Batch(np.array([0, 1, 3], np.int32), mlaplan.Exact(np.array([5, 9000], np.int32)))
plan = planner.plan(batch)
assert plan.decision.action == "copy" and planner.plan(batch).decision.action == "nothing"
assert plan.kv_indptr.tolist() == [0, 5, 2053, 4101], plan.kv_indptr
assert plan.request_ids.tolist() == [0, 1, 1]
print(mlaplan.__file__)
"""


def only(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    assert len(found) == 1, f"{pattern} in {DIST}: {found}; `make package` makes them"
    return found[0]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return only("mlaplan-*.whl")


@pytest.fixture(scope="module")
def sdist() -> Path:
    return only("mlaplan-*.tar.gz")


def sources() -> set[str]:
    """What a user needs of `python/`, compiled parts left out."""
    folder = ROOT / "python"
    kept = {".py", ".pyi", ".typed"}
    files = (path for path in folder.rglob("*") if path.suffix in kept or path.name == "py.typed")
    return {path.relative_to(folder).as_posix() for path in files}


def sections(binary: bytes) -> set[str]:
    """Names of the sections of a 64-bit little-endian ELF file."""
    assert binary.startswith(b"\x7fELF\x02\x01")
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names_at = struct.unpack_from("<3H", binary, 0x3A)
    headers = [struct.unpack_from("<2I4Q", binary, table + size * at) for at in range(count)]
    names = binary[headers[names_at][4] :]
    return {names[header[0] : names.index(b"\0", header[0])].decode() for header in headers}


def interpreter(version: str) -> str:
    """CPython of that version: pyenv's, or the one on PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))]
    candidates += [path for path in (shutil.which(f"python{version}"), sys.executable) if path]
    question = "import sys; print('%d.%d' % sys.version_info[:2], sys.implementation.name)"
    for candidate in candidates:
        done = subprocess.run([candidate, "-c", question], capture_output=True, check=False, text=True)
        if done.stdout.split() == [version, "cpython"]:
            return candidate
    pytest.skip(f"no CPython {version} here: nothing was installed into it")


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
    of_project = {name for name in names if not name.startswith(f"{info}/")}
    assert of_project == sources() | {"mlaplan/_core.abi3.so"}
    assert {"mlaplan/py.typed", "mlaplan/_core.pyi"} <= of_project
    wanted = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert wanted <= {name.removeprefix(f"{info}/") for name in names}


def test_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA")).rsplit("/", 1)[0]
        metadata, tags, licence = (
            archive.read(f"{info}/{name}").decode() for name in ("METADATA", "WHEEL", "licenses/LICENSE")
        )
    assert "License-Expression: Apache-2.0" in metadata
    assert "License-File: LICENSE" in metadata
    assert "Requires-Python: >=3.10" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == ["Requires-Dist: numpy>=1.26"]
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    (tag,) = (line.split()[1] for line in tags.splitlines() if line.startswith("Tag: "))
    assert tag == wheel.stem.split("-", 2)[2]
    assert tag.startswith("cp310-abi3-manylinux_")


def test_extension_is_no_debug_build(wheel: Path) -> None:
    """An optimised build without debug sections; its own word is asked for where it is installed."""
    with zipfile.ZipFile(wheel) as archive:
        binary = archive.read("mlaplan/_core.abi3.so")
    names = sections(binary)
    assert ".text" in names
    assert not [name for name in names if name.startswith(".debug")]


def test_manylinux_tag_is_what_auditwheel_finds(wheel: Path) -> None:
    if AUDITWHEEL is None:
        pytest.skip("no auditwheel: the manylinux tag was not checked")
    done = subprocess.run([AUDITWHEEL, "show", str(wheel)], capture_output=True, check=True, text=True)
    said = " ".join(done.stdout.split())
    platform = wheel.stem.rsplit("-", 1)[1]
    assert f'consistent with the following platform tag: "{platform}"' in said, said


def test_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        assert all(member.isfile() or member.isdir() for member in archive.getmembers())
    wanted = {"PKG-INFO", "Cargo.toml", "Cargo.lock", "pyproject.toml", "LICENSE", "README.md"}
    rust = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.rs")}
    assert wanted | rust | {f"python/{name}" for name in sources()} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert "tests/fuzz_seeds.rs" not in names  # its targets and seeds are not there either


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_installs_into_an_empty_environment_and_plans(
    version: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    distribution = request.getfixturevalue(kind)
    environment = tmp_path / "env"
    python = environment / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", interpreter(version), str(environment)], check=True)
    constraints = ["--constraints", str(ROOT / "requirements" / "run.txt")]
    subprocess.run(
        [UV, "pip", "install", "--quiet", "--python", str(python), *constraints, str(distribution)], check=True
    )
    done = subprocess.run([python, "-I", "-c", PLAN], capture_output=True, check=False, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(environment)
    listed = subprocess.run(
        [UV, "pip", "list", "--quiet", "--python", str(python), "--format", "freeze"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert {line.split("==")[0].split(" ")[0] for line in listed.stdout.split("\n") if line} == {"mlaplan", "numpy"}


@pytest.mark.timeout(600)
def test_command_line_of_the_sdist_runs(sdist: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "env")], check=True)
    constraints = ["--constraints", str(ROOT / "requirements" / "run.txt")]
    wanted = f"mlaplan[cli] @ {sdist.as_uri()}"
    subprocess.run([UV, "pip", "install", "--quiet", "--python", str(python), *constraints, wanted], check=True)
    subprocess.run([python.with_name("mlaplan"), "run", "--steps", "50"], check=True, cwd=tmp_path)
