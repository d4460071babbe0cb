"""Fixtures of tests of kernels."""

from __future__ import annotations

import pytest

from tests.model.kernels import DEVICES, kernels_or_skip


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """A device that this process can run kernels on."""
    kernels_or_skip(request.param)
    name: str = request.param
    return name
