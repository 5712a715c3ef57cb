"""The installed package: what importing it pulls in, where its version comes from, what it registers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlaplan
from mlaplan import _core

ROOT = Path(__file__).parents[2]
OPTIONAL = {"aiter", "bokeh", "matplotlib", "rich", "torch", "triton", "vllm"}


def python(code: str) -> str:
    """What a fresh interpreter prints for `code`."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout


def imported_roots(code: str) -> set[str]:
    return set(
        json.loads(python(f"{code}\nimport json, sys; print(json.dumps([m.split('.')[0] for m in sys.modules]))"))
    )


def test_import_needs_numpy_alone() -> None:
    assert importlib.util.find_spec("torch")  # else its absence below would say nothing
    assert importlib.util.find_spec("rich")
    roots = imported_roots("import mlaplan")
    assert "mlaplan" in roots
    assert not roots & OPTIONAL


def test_import_works_where_no_extra_is_installed() -> None:
    block = "\n".join(f"sys.modules[{name!r}] = None" for name in sorted(OPTIONAL))
    assert python(f"import sys\n{block}\nimport mlaplan; print(mlaplan.__version__)").strip()


def test_version_is_written_once() -> None:
    manifest = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    written = re.findall(r'^version = "([^"]+)"', manifest, re.MULTILINE)
    assert len(written) == 1
    assert [_core.__version__] == written
    assert mlaplan.__version__ == _core.__version__
    assert importlib.metadata.version("mlaplan") == _core.__version__
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not re.search(r"^version\b", project, re.MULTILINE)


def test_command_line_says_the_version() -> None:
    command = shutil.which("mlaplan", path=str(Path(sys.executable).parent))
    assert command
    done = subprocess.run([command, "--version"], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["mlaplan", mlaplan.__version__]


@pytest.mark.parametrize("group", ["console_scripts", "vllm.general_plugins"])
def test_entry_points_load(group: str) -> None:
    (entry,) = importlib.metadata.distribution("mlaplan").entry_points.select(group=group)
    assert entry.name == "mlaplan"
    assert callable(entry.load())


def test_package_is_marked_as_typed() -> None:
    package = Path(mlaplan.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_core.pyi").is_file()


def test_all_names_exist() -> None:
    missing = [name for name in mlaplan.__all__ if not hasattr(mlaplan, name)]
    assert not missing
    assert sorted(mlaplan.__all__) == sorted(set(mlaplan.__all__))
