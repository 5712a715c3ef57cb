"""The aiter that is installed: its release, its signatures, and how its planner and decode want to be called.

aiter changes signatures between releases, and builds from its main branch carry version numbers that say
little. So arguments are chosen by the signatures themselves.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlaplan.backends.base import BackendUnavailableError

# Switches of aiter that change what it plans or runs.
ENVIRONMENT = (
    "AITER_MLA_META_USE_PARALLEL",
    "AITER_ENABLE_EXPERIMENTAL",
    "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH",
    "AITER_MLA_USE_OPUS",
    "AITER_MLA_REDUCE_FLYDSL",
    "CU_NUM",
    "GPU_ARCHS",
)

_DEFAULT_PERSISTENT_ROWS = 32
_BUFFERS = 6
# Releases before v0.1.8 give the second and third buffer each other's name, so only the ends count.
_FIRST_BUFFER, _LAST_BUFFER = "work_metadata_ptrs", "reduce_partial_map"
_DTYPE_FORMS = (
    ("dtype_q", "dtype_kv"),
    ("dtype_q_nope", "dtype_q_rope", "dtype_kv_nope", "dtype_kv_rope"),
)


@dataclass(frozen=True, slots=True)
class AiterRelease:
    """What is installed, read once.

    Attributes:
        version: Version of the distribution, "unknown" where there is none.
        release: Release whose head rules are taken to hold, None for the newest known.
        arch: What aiter takes the GPU for, None where it does not say.
        environment: Switches that are set, as they were when this was read.
        persistent_rows: Rows from which `mla_decode_fwd` leaves the metadata of some shapes aside; None if never.
        sizing: `get_mla_metadata_info_v1`.
        planner: `get_mla_metadata_v1`.
        decode: `mla_decode_fwd`.
        takes_last_page_lens: Whether the planner wants `kv_last_page_lens` third, and `page_size`.
        dtype_names: Keywords that the planner takes dtypes by.
        decode_parameters: Parameters of `mla_decode_fwd`.
        fp8: The fp8 dtype that aiter uses.
    """

    version: str
    release: str | None
    arch: str | None
    environment: Mapping[str, str]
    persistent_rows: int | None
    sizing: Callable[..., Any] = field(repr=False)
    planner: Callable[..., Any] = field(repr=False)
    decode: Callable[..., Any] = field(repr=False)
    takes_last_page_lens: bool
    dtype_names: tuple[str, ...]
    decode_parameters: frozenset[str]
    fp8: Any

    def dtype_arguments(self, q_dtype: Any, kv_dtype: Any) -> dict[str, Any]:
        """The planner's dtype keywords: an omitted dtype means bf16, and then another fold is planned."""
        return {name: q_dtype if name.startswith("dtype_q") else kv_dtype for name in self.dtype_names}


def read_release(aiter_version: str | None = None) -> AiterRelease:
    """Reads what is installed.

    Args:
        aiter_version: Release whose head rules hold; None to take it from what is installed.

    Raises:
        BackendUnavailableError: aiter is not there, does not load, or has signatures that are not known.
    """
    try:
        package = importlib.import_module("aiter")
        mla = importlib.import_module("aiter.mla")
        sizing, planner = package.get_mla_metadata_info_v1, package.get_mla_metadata_v1
        decode, fp8 = mla.mla_decode_fwd, package.dtypes.fp8
    except Exception as error:
        raise BackendUnavailableError(
            f"backend 'aiter' needs ROCm's aiter with MLA metadata; loading it failed: {type(error).__name__}: {error}"
        ) from error
    planner_names = _parameters("get_mla_metadata_v1", planner)
    decode_names = frozenset(_parameters("mla_decode_fwd", decode))
    sizing_names = _parameters("get_mla_metadata_info_v1", sizing)
    takes_last_page_lens = _check_planner(planner_names)
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    version = _installed_version(package)
    features = {*decode_names, *planner_names, *(f"sizing:{name}" for name in sizing_names)}
    return AiterRelease(
        version=version,
        release=aiter_version or effective_release(version, features),
        arch=_arch(),
        environment=environment,
        persistent_rows=_persistent_rows(mla, environment),
        sizing=sizing,
        planner=planner,
        decode=decode,
        takes_last_page_lens=takes_last_page_lens,
        dtype_names=next(form for form in _DTYPE_FORMS if set(form) <= set(planner_names)),
        decode_parameters=decode_names,
        fp8=fp8,
    )


# Newest first: what a build has at least if its signatures have this.
_SIGNS = (
    ("causal", "0.1.20"),
    ("dtype_q_nope", "0.1.18"),
    ("g_kv_indptr", "0.1.17"),
    ("sizing:max_split_per_batch", "0.1.16"),
    ("page_size", "0.1.10.post2"),
    ("return_lse", "0.1.9"),
    ("intra_batch_mode", "0.1.7.post5"),
)


def effective_release(version: str, features: set[str]) -> str | None:
    """Release whose head rules a build follows.

    A release is what it says. A build between releases is numbered after the last tag that its branch has seen,
    which may be far behind its code, so there the signatures have a say too: the newer of the two.

    Args:
        version: Version of the distribution, or "unknown".
        features: Parameters that the signatures have, those of the sizing function as "sizing:name".

    Returns:
        A release such as "0.1.18", or None where nothing is known.
    """
    numbers = re.match(r"v?(\d+(?:\.\d+)*(?:\.post\d+)?)", version)
    if numbers is not None and "dev" not in version:
        return numbers.group(1)
    by_signature = next((release for sign, release in _SIGNS if sign in features), None)
    if numbers is None:
        return by_signature
    if by_signature is not None and _release_key(by_signature) > _release_key(numbers.group(1)):
        return by_signature
    return version


def _release_key(release: str) -> tuple[int, ...]:
    head, _, post = release.partition(".post")
    numbers = [int(part) for part in head.split(".")]
    return (*numbers, *[0] * (4 - len(numbers)), int(post or 0))


def _parameters(name: str, function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise BackendUnavailableError(f"aiter's {name} has no signature to choose arguments by: {error}") from error
    return list(parameters)


def _check_planner(names: list[str]) -> bool:
    """Checks the planner's parameters, and returns whether `kv_last_page_lens` is the third."""
    takes_last_page_lens = "kv_last_page_lens" in names
    first = 6 if takes_last_page_lens else 5
    buffers = names[first : first + _BUFFERS]
    ends = (buffers[0], buffers[-1]) if len(buffers) == _BUFFERS else None
    if ends != (_FIRST_BUFFER, _LAST_BUFFER) or (takes_last_page_lens and names[2] != "kv_last_page_lens"):
        raise BackendUnavailableError(
            f"aiter's get_mla_metadata_v1 takes ({', '.join(names)}): not an order of arguments that is known"
        )
    if "max_split_per_batch" not in names or not any(set(form) <= set(names) for form in _DTYPE_FORMS):
        raise BackendUnavailableError(
            "aiter's get_mla_metadata_v1 takes no dtypes or no split budget: v0.1.7.post3 or newer is needed"
        )
    return takes_last_page_lens


def _installed_version(package: Any) -> str:
    try:
        return importlib.metadata.version("amd-aiter")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(package, "__version__", "unknown"))


def _arch() -> str | None:
    try:
        return str(importlib.import_module("aiter.jit.utils.chip_info").get_gfx())
    except Exception:  # noqa: BLE001 - a cross-check only; aiter itself says what is wrong when it is called
        return None


def _persistent_rows(mla: Any, environment: Mapping[str, str]) -> int | None:
    """Rows at which `mla_decode_fwd` turns away from its metadata, as it reads the switch itself."""
    if not hasattr(mla, "_use_persistent_mla_decode"):
        return None
    try:
        rows = int(environment.get("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", _DEFAULT_PERSISTENT_ROWS))
    except ValueError:
        rows = _DEFAULT_PERSISTENT_ROWS
    return rows if rows > 0 else None
