"""The documentation site: `make docs`. Every warning is an error there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import mlaplan

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "mlaplan"
author = "the mlaplan authors"
release = version = mlaplan.__version__
extensions = ["autoapi.extension", "myst_parser", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"
add_module_names = False  # all is imported from mlaplan itself

html_theme = "furo"
html_title = "mlaplan"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Read from the source and the stub: what users read about compiled functions stands in `_core.pyi`.
autoapi_dirs = ["../python/mlaplan"]
autoapi_file_patterns = ["*.pyi", "*.py"]
autoapi_generate_api_docs = False
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_python_class_content = "class"
autoapi_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are described once, in their class

# Links to other sites are followed by `make docs-links`, where there is a network.
linkcheck_anchors = False
suppress_warnings = ["autoapi.python_import_resolution"]

_PICTURES = {
    "full": ["2048x12", "--num-cus", "24", "--budget", "16"],
    "mixed": ["2048x4", "1200", "700", "300", "40", "--num-cus", "24"],
    "short": ["64x40", "--num-cus", "24"],
    "one": ["2048", "--num-cus", "24"],
    "balanced": ["2048x12", "--num-cus", "24", "--budget", "16", "--policy", "balanced"],
}
_COMMANDS = ("run", "explain", "record", "replay", "compare", "tune", "doctor")


def _generate(app: Sphinx) -> None:
    """Makes pictures and help texts with the commands that the pages tell of."""
    out = Path(app.srcdir) / "_generated"
    out.mkdir(exist_ok=True)
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, "-m", "mlaplan"]
    for name, arguments in _PICTURES.items():
        # Two cost units apart they would not compare: all in those of a real kernel.
        line = [*command, "explain", *arguments, "--costs", "bf16 16", "--output", str(out / f"{name}.svg")]
        subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
    for name in _COMMANDS:
        text = subprocess.run(  # noqa: S603 - our own command
            [*command, name, "--help"], check=True, env=environment, capture_output=True, text=True
        ).stdout
        (out / f"{name}.txt").write_text(text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _generate)
