"""Fixtures of dispatchers and replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.parallel.served import Served, toy


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    replica = Served(toy(0.001), "it", tmp_path / "it")
    await replica.launch()
    await replica._disconnect()
    yield replica
    await replica.aclose()
