"""Cost tables that `mlaplan tune` measured: one JSON file per device and shape, and what is looked up in them.

A file lies in `mlaplan/costs` under `XDG_CONFIG_HOME`, or `~/.config`. It is written whole or not at all, and nothing
is written over that was not written here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlaplan import _core
from mlaplan.costs import DEFAULT, CostTable, portable_default

if TYPE_CHECKING:
    from mlaplan.config import PlannerConfig
    from mlaplan.device.base import Device

_LOG = logging.getLogger("mlaplan")
_SAID: set[str] = set()
_FORMAT = "mlaplan cost table"
_VERSION = 2
_MOST_BYTES = 1 << 16  # a file has less than 1 KiB
_DTYPES = ("bf16", "fp16", "fp8")


class CalibrationError(ValueError):
    """A stored calibration that cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a calibration holds for.

    Attributes:
        device: The GPU's name.
        capability: What the driver calls its instruction set, "9.0" or "gfx942" for instance.
        heads: Query heads per planner row.
        q_dtype: "bf16", "fp16" or "fp8".
        kv_dtype: "bf16", "fp16" or "fp8".
        head_dim: Values of a KV row that a query is compared with.
        v_head_dim: Leading values of a KV row that are summed up.
    """

    device: str
    capability: str
    heads: int
    q_dtype: str
    kv_dtype: str
    head_dim: int = 576
    v_head_dim: int = 512

    @property
    def file_name(self) -> str:
        """Name of the file, the same for the same shape."""
        parts = (self.device, self.capability, f"{self.heads}x{self.head_dim}x{self.v_head_dim}", self.q_dtype)
        return "-".join(_slug(part) for part in (*parts, self.kv_dtype)) + ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A measured cost table, in nanoseconds, and what it was measured with.

    Attributes:
        shape: What it holds for.
        table: The costs.
        residual: Root of the mean squared relative difference between the times measured and those of the table.
        num_cus: Slots that it was measured with.
        heads_per_tile: Query heads that one program of the kernel handles.
        mlaplan: Version of mlaplan.
        triton: Version of Triton.
    """

    shape: Shape
    table: CostTable
    residual: float
    num_cus: int
    heads_per_tile: int
    mlaplan: str
    triton: str


def folder() -> Path:
    """Folder that calibrations are stored in; it need not exist.

    Raises:
        FileNotFoundError: Nothing says where the user's home is.
    """
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    # The specification has relative paths ignored.
    if Path(configured).is_absolute():
        return Path(configured) / "mlaplan" / "costs"
    try:
        return Path.home() / ".config" / "mlaplan" / "costs"
    except RuntimeError as error:  # a user of a container's own, with neither HOME nor an entry in passwd
        raise FileNotFoundError("there is no home folder for cost tables: set XDG_CONFIG_HOME") from error


def path_of(shape: Shape) -> Path:
    """File that a shape's calibration is stored in."""
    return folder() / shape.file_name


def save(calibration: Calibration, path: Path) -> None:
    """Writes a calibration whole or not at all.

    Args:
        calibration: What was measured.
        path: File to write; folders above it are made.

    Raises:
        FileExistsError: Something lies there that is no calibration, so it is not written over.
        OSError: It cannot be written.
    """
    refuse_foreign(path)
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        **asdict(calibration.shape),
        "unit": "ns",
        "table": asdict(calibration.table),
        "residual": calibration.residual,
        "num_cus": calibration.num_cus,
        "heads_per_tile": calibration.heads_per_tile,
        "mlaplan": calibration.mlaplan,
        "triton": calibration.triton,
    }
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: Path) -> Calibration | None:
    """Reads a calibration.

    Args:
        path: File to read.

    Returns:
        The calibration, None where there is no file. A file of version 1 has no `cut`: it is 0, and the log says so
        once.

    Raises:
        CalibrationError: The file is not what `save` writes.
    """
    try:
        document = _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        found = _calibration(document)
    except (TypeError, ValueError, OverflowError) as error:
        raise CalibrationError(f"{path} is damaged: {error}; remove it or run 'mlaplan tune' again") from error
    if document["version"] == 1:
        # Still the kernel's costs, so a service goes on as it did before the upgrade.
        _say_once(f"{path} is from before the cost 'cut' was measured, so it is taken as 0; 'mlaplan tune' measures it")
    return found


def stored(shape: Shape) -> Calibration | None:
    """Reads the stored calibration of a shape, None where there is none.

    Raises:
        CalibrationError: The file is damaged, or holds for something else than its name says.
    """
    try:
        path = path_of(shape)
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        # No file; or no home, or somebody else's, as a service in a container may have: nothing was stored for us.
        return None
    calibration = load(path)
    if calibration is not None and calibration.shape != shape:
        wanted, found = asdict(shape), asdict(calibration.shape)
        name = next(key for key in wanted if wanted[key] != found[key])
        raise CalibrationError(
            f"{path} has {name} {found[name]!r} where {wanted[name]!r} is looked for: remove it or run 'mlaplan tune' "
            "again"
        )
    return calibration


def cost_table_for(config: PlannerConfig, backend: str, device: Device) -> CostTable:
    """The cost table of the kernel that decodes.

    For the portable kernel that which `mlaplan tune` stored for this device, else that of an H200; for aiter's the one
    that was counted for these heads and dtypes, else `mlaplan.costs.DEFAULT`. The log says once what was not known.

    Args:
        config: Resolved settings.
        backend: Name of the backend that decodes.
        device: Where it does.

    Raises:
        CalibrationError: The stored calibration is damaged, or was made for another block of the kernel.
    """
    heads = config.heads // (config.fold or 1)
    if backend == "portable":
        from mlaplan.backends.portable import tile_of

        tokens = tile_of(config).tokens
        measured = _measured(config, device, tokens)
        if measured is not None:
            return measured
        taken, whose = portable_default(heads, tokens), "an H200"
        advice = f"'mlaplan tune --heads {heads} --q-dtype {config.q_dtype} --kv-dtype {config.kv_dtype}' measures it"
    else:
        counted = None
        if config.arch is not None:
            counted = _core.cost_table(config.arch, -(-heads // 16) * 16, config.q_dtype, config.kv_dtype)
        if counted is not None:
            return CostTable.of(counted)
        taken, whose, advice = DEFAULT, "aiter's bf16 kernel of 16 heads", "cost_table gives it"
    message = (
        f"policy {config.policy!r}: what works of {heads} heads, q {config.q_dtype}, kv {config.kv_dtype} cost on "
        f"backend {backend!r} is not known here, so the table of {whose} is taken; {advice}"
    )
    _say_once(message)
    return taken


def _say_once(message: str) -> None:
    if message not in _SAID:
        _SAID.add(message)
        _LOG.warning(message)


def _measured(config: PlannerConfig, device: Any, tokens: int) -> CostTable | None:
    if getattr(getattr(device, "device", None), "type", None) != "cuda":
        return None
    from mlaplan.tuning_gpu import shape_of

    shape = shape_of(device, config)
    calibration = stored(shape)
    if calibration is None:
        return None
    if calibration.table.block_tokens != tokens:
        raise CalibrationError(
            f"{path_of(shape)} is for blocks of {calibration.table.block_tokens} tokens, but the kernel of this "
            f"release takes {tokens}: run 'mlaplan tune' again"
        )
    return calibration.table


def refuse_foreign(path: Path) -> None:
    """Raises where `save` would not write.

    Raises:
        FileExistsError: Something lies there that is no calibration.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISREG(mode):
        try:
            document = _read(path)
            if isinstance(document, dict) and document.get("format") == _FORMAT:
                return
        except (OSError, ValueError):
            pass
    raise FileExistsError(f"{path} exists and was not written by 'mlaplan tune': remove it, or name another file")


def _read(path: Path) -> Any:
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
        raise CalibrationError(f"{path} is no file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise CalibrationError(f"{path} has more than {_MOST_BYTES} bytes, so it is no calibration")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{path} is damaged: it is no JSON text ({error}); remove it or run 'mlaplan tune' again"
        ) from error


def _calibration(document: Any) -> Calibration:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f'"format" is not "{_FORMAT}"')
    version = document.get("version")
    if type(version) is not int or version not in (1, _VERSION):
        raise ValueError(f'"version" is {_shown(version)}, this release reads 1 and {_VERSION}')
    if document.get("unit") != "ns":
        raise ValueError(f'"unit" is {_shown(document.get("unit"))}, must be "ns"')
    numbers = document.get("table")
    names = ("block_tokens", "block", "piece", "whole", "slot", "merge", *(("cut",) if version > 1 else ()))
    if not isinstance(numbers, dict) or set(numbers) != set(names):
        raise ValueError(f'"table" must hold {", ".join(names)} and nothing else')
    residual = document.get("residual")
    if isinstance(residual, bool) or not isinstance(residual, (int, float)) or not 0 <= residual < math.inf:
        raise ValueError(f'"residual" is {_shown(residual)}, must be a number that is not negative')
    return Calibration(
        shape=Shape(
            device=_text(document, "device"),
            capability=_text(document, "capability"),
            heads=_count(document, "heads"),
            q_dtype=_dtype(document, "q_dtype"),
            kv_dtype=_dtype(document, "kv_dtype"),
            head_dim=_count(document, "head_dim"),
            v_head_dim=_count(document, "v_head_dim"),
        ),
        table=CostTable(**numbers),
        residual=float(residual),
        num_cus=_count(document, "num_cus"),
        heads_per_tile=_count(document, "heads_per_tile"),
        mlaplan=_text(document, "mlaplan"),
        triton=_text(document, "triton"),
    )


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f'"{name}" is {_shown(value)}, must be a text')
    return value


def _dtype(document: dict[str, Any], name: str) -> str:
    value = _text(document, name)
    if value not in _DTYPES:
        raise ValueError(f'"{name}" is {_shown(value)}, known are {", ".join(_DTYPES)}')
    return value


def _count(document: dict[str, Any], name: str) -> int:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise ValueError(f'"{name}" is {_shown(value)}, must be a whole number from 1 to {1 << 24}')
    return value


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unknown"
