"""Fixtures of dispatchers and replicas."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.parallel.served import Served, toy
from tests.parallel.waiting import STARTED_BY, started_in


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    replica = Served(toy(0.001), "it", tmp_path / "it")
    await replica.launch()
    await replica._disconnect()
    yield replica
    await replica.aclose()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose process gets no turn on a busy machine is not lost before two minutes."""
    monkeypatch.setattr("aioinfer.parallel.connection.LOST", 480)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where directories of child processes are, which are gone afterwards, as the processes are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(STARTED_BY, str(tmp_path))
    yield tmp_path
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("aioinfer-")]
    left = started_in(tmp_path)
    assert not left, left
