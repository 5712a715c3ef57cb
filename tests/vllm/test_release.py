"""A vLLM that is not known is left alone, and a module is changed whenever it is imported."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as stock

from mlaplan.vllm import activation, hook, live, release

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])


def changed(**attributes: Any) -> Any:
    """The backend's module with other classes in it."""
    module = SimpleNamespace(**{name: value for name, value in vars(stock).items() if name.startswith("ROCM")})
    vars(module).update(attributes)
    return module


def test_this_vllm_is_known() -> None:
    assert release.unknown_release(stock, VERSION) is None


@pytest.mark.parametrize("version", [None, (0, 29), (0, 34), (1, 0)])
def test_other_releases_are_not(version: tuple[int, int] | None) -> None:
    assert release.unknown_release(stock, version) is not None


def test_missing_class_is_named() -> None:
    module = changed()
    del module.ROCMAiterMLASparseImpl
    reason = release.unknown_release(module, VERSION)
    assert reason is not None
    assert "ROCMAiterMLASparseImpl" in reason


def test_another_signature_is_refused() -> None:
    class Builder(stock.ROCMAiterMLASparseMetadataBuilder):  # type: ignore[misc]
        def build(self, common_attn_metadata: Any) -> Any: ...

    reason = release.unknown_release(changed(ROCMAiterMLASparseMetadataBuilder=Builder), VERSION)
    assert reason is not None
    assert "build of this vLLM's builder takes" in reason


def test_a_new_field_is_refused() -> None:
    kind = stock.ROCMAiterMLASparseMetadata
    fields = [(field.name, Any, None) for field in dataclasses.fields(kind)]
    bases = kind.__mro__[1:2] if stock.ROCMAiterMLASparseMetadata.__mro__[1] is not object else ()
    wider = dataclasses.make_dataclass("Metadata", [*fields, ("split_plan", Any, None)], bases=bases, kw_only=True)
    reason = release.unknown_release(changed(ROCMAiterMLASparseMetadata=wider), VERSION)
    assert reason is not None
    assert "split_plan" in reason


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "watched_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "watched_module"
    sys.modules.pop("watched_module", None)
    hook._HOOK.actions.pop("watched_module", None)


def test_action_runs_after_a_later_import(package: str) -> None:
    hook.after_import(package, lambda module: setattr(module, "VALUE", 2))
    assert package not in sys.modules
    module = importlib.import_module(package)
    assert module.VALUE == 2
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert importlib.reload(module).VALUE == 2


def test_action_runs_at_once_on_an_imported_module(package: str) -> None:
    module = importlib.import_module(package)
    hook.after_import(package, lambda module: setattr(module, "VALUE", 3))
    assert module.VALUE == 3


def test_failing_action_leaves_the_import_alone(package: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError(module.__name__)

    hook.after_import(package, fail)
    with caplog.at_level(logging.WARNING, logger="vllm.mlaplan"):
        assert importlib.import_module(package).VALUE == 1
    assert "mlaplan is not active: RuntimeError: watched_module" in caplog.text


def test_loader_that_takes_no_attribute_still_loads(package: str, caplog: pytest.LogCaptureFixture) -> None:
    class Loader:
        __slots__ = ()

        def create_module(self, _spec: Any) -> None:
            return None

        def exec_module(self, module: ModuleType) -> None:
            vars(module)["VALUE"] = 7

    class Finder:
        def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, Loader()) if name == package else None  # type: ignore[arg-type]

    finder: Any = Finder()
    hook.after_import(package, lambda module: setattr(module, "VALUE", 8))
    sys.meta_path[1:1] = [object(), finder]  # type: ignore[list-item]
    try:
        with caplog.at_level(logging.WARNING, logger="vllm.mlaplan"):
            assert importlib.import_module(package).VALUE == 7
    finally:
        del sys.meta_path[1:3]
    assert "modules loaded by Loader cannot be watched" in caplog.text


def test_failing_import_stays_a_failing_import(package: str, tmp_path: Path) -> None:
    (tmp_path / "watched_module.py").write_text("raise KeyError('of its own')\n")
    hook.after_import(package, lambda _module: None)
    with pytest.raises(KeyError, match="of its own"):
        importlib.import_module(package)


def test_waking_the_allocator_invalidates() -> None:
    class CuMemAllocator:
        def wake_up(self, tags: list[str] | None = None) -> list[str] | None:
            return tags

    class Planner:
        told = 0

        def invalidate(self) -> None:
            self.told += 1

    module, planner = ModuleType("cumem"), Planner()
    module.CuMemAllocator = CuMemAllocator  # type: ignore[attr-defined]
    live.add(planner)
    for _ in range(2):  # twice: the second time there is nothing to do
        activation._invalidate_on_wake_up(module)
    assert CuMemAllocator().wake_up(["weights"]) == ["weights"]
    assert planner.told == 1
