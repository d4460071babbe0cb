"""All tests here need native kernels, but those of how they come to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.harness import require


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No signal comes through to a thread that hangs in a kernel: let the process end, and say where."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(120, method="thread"))


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compiled for the first test that needs them, and not when tests are collected."""
    if request.path.stem != "test_build":
        require("native")
