"""Fixtures for pytest: ``pytest_plugins = ["aioinfer.testing.fixtures"]`` in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioinfer.engine import EngineState
from aioinfer.testing.fake import FakeEngine

__all__ = ["fake_engine"]


@pytest.fixture
def fake_engine() -> Iterator[FakeEngine]:
    """An engine with scripted answers, not started. The test sets ``answers``, and starts and closes it, or
    what it tests does; one that is left running fails the test."""
    engine = FakeEngine()
    yield engine
    if engine.state not in (EngineState.NEW, EngineState.CLOSED):
        pytest.fail(f"the engine was left {engine.state.value}: close it, or use it in ``async with``")
