"""All tests here need native kernels, but those of how they come to be."""

from __future__ import annotations

import pytest

from tests.model.harness import require


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compiled for the first test that needs them, and not when tests are collected."""
    if request.path.stem != "test_build":
        require("native")
