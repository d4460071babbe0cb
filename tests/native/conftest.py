"""All tests here need native kernels, except those of the build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.harness import require
from tests.native.compilers import compiler, unsettled

__all__ = ["compiler", "unsettled"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A signal does not interrupt a kernel that hangs: a timeout ends the process with a traceback."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(120, method="thread"))


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compiled for the first test that needs them, not at collection."""
    if not request.path.stem.startswith("test_build"):
        require("native")
