"""All tests here need native kernels, except those of the build."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from aioinfer.native import bindings
from aioinfer.native.bindings import Kernels
from aioinfer.native.build import build
from aioinfer.native.processor import MODELLED
from tests.model.harness import require
from tests.native.compilers import compiler, unsettled, unshipped

__all__ = ["compiler", "unsettled", "unshipped"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A signal does not interrupt a kernel that hangs: a timeout ends the process with a traceback."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(300, method="thread"))


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compiled for the first test that needs them, not at collection."""
    if not request.path.stem.startswith(("test_build", "test_processor")):
        require("native")


@pytest.fixture(scope="session")
def modelled_kernels() -> Kernels:
    """Those that compute bfloat16 by a model of tiles, beside the process's own."""
    return Kernels(str(build(tiles=MODELLED)), MODELLED)


@pytest.fixture
def modelled(modelled_kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Make them those of the process for one test."""
    monkeypatch.setattr(bindings, "_loaded", modelled_kernels)
    monkeypatch.setattr(bindings, "_pools", weakref.WeakValueDictionary())
    return modelled_kernels
