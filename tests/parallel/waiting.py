"""Waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["until"]


async def until(condition: Callable[[], Any]) -> None:
    """Look every millisecond. Raises TimeoutError after a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
