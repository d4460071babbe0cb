"""Waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

__all__ = ["STARTED_BY", "started_in", "until"]

#: a variable of the environment, which a test's processes inherit: the directory of the test
STARTED_BY = "TESTS_STARTED_BY"


async def until(condition: Callable[[], Any]) -> None:
    """Look every millisecond. Raises TimeoutError after two minutes."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)


def started_in(directory: Path) -> list[psutil.Process]:
    """Processes that the test with this directory has started and that run. Others come and go at any time:
    browsers, clusters and whatever else earlier tests have left to this process."""
    return [each for each in psutil.Process().children(recursive=True) if _mark(each) == str(directory)]


def _mark(process: psutil.Process) -> str | None:
    try:
        environment: dict[str, str] = process.environ()
        return environment.get(STARTED_BY)
    except psutil.Error:  # it has just ended, or is a zombie
        return None
