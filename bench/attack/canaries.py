"""Canaries: ordinary clients, and how long the slowest of them waited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

import aiohttp

__all__ = ["KINDS", "Canaries"]

#: the kinds of canaries, as :class:`Canaries` measures them
KINDS = ("health", "gap", "short")
#: seconds between two of ``GET /health``
_PAUSE = 0.02
#: most seconds until a server holds what it held
_SETTLING = 30.0
#: seconds after which a canary that waits has failed
_PATIENCE = aiohttp.ClientTimeout(total=30.0)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=_PATIENCE)


class Canaries:
    """Clients of one server, and of its probe. ``failures`` has what any of them saw that was not as
    expected."""

    def __init__(self, url: str, probe: str) -> None:
        self.failures: list[str] = []
        #: what the awaitable of the last :meth:`watch` returned
        self.result: Any = None
        self._url = url
        self._probe = probe
        self._slowest = dict.fromkeys(KINDS, 0.0)

    async def __aenter__(self) -> Self:
        self._probing = _session()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._probing.close()

    async def watch(self, until: Awaitable[Any]) -> dict[str, float]:
        """Run until ``until`` is done; the longest wait of each kind, in milliseconds."""
        self._slowest = dict.fromkeys(KINDS, 0.0)
        async with self._probing.post(f"{self._probe}/probe"):
            pass
        done = asyncio.ensure_future(until)
        # How many connections are kept open is up to chance, and the server holds a task and a file for each.
        async with _session() as self._session, asyncio.TaskGroup() as group:
            for canary in (self._health, self._stream, self._short):
                group.create_task(self._repeat(canary, done))
        self.result = done.result()
        return {kind: 1e3 * seconds for kind, seconds in self._slowest.items()}

    async def probe(self) -> dict[str, Any]:
        """What the server says of itself since :meth:`watch` began."""
        async with self._probing.get(f"{self._probe}/probe") as response:
            found: dict[str, Any] = await response.json()
            return found

    async def settled(self, like: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the server holds when it has no request left and no more than ``like``, or after some
        patience."""
        end = time.perf_counter() + _SETTLING
        while True:
            found = await self.probe()
            more = like is not None and any(found[name] > like[name] for name in ("fds", "threads", "tasks"))
            if not (found["running"] or found["waiting"] or more) or time.perf_counter() > end:
                return found
            await asyncio.sleep(0.2)

    async def _repeat(self, canary: Any, done: asyncio.Future[Any]) -> None:
        while not done.done():
            try:
                await canary()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.failures.append(repr(error))
                await asyncio.sleep(_PAUSE)

    def _waited(self, kind: str, seconds: float) -> None:
        self._slowest[kind] = max(self._slowest[kind], seconds)

    async def _health(self) -> None:
        start = time.perf_counter()
        async with self._session.get(f"{self._url}/health") as response:
            if response.status != 200:
                raise ValueError(f"health: {response.status}")
            await response.read()
        self._waited("health", time.perf_counter() - start)
        await asyncio.sleep(_PAUSE)

    async def _stream(self) -> None:
        body = {"prompt": [7, 8, 9], "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"stream: {response.status}: {await response.text()}")
            last = None
            async for _ in response.content:
                now = time.perf_counter()
                if last is not None:
                    self._waited("gap", now - last)
                last = now

    async def _short(self) -> None:
        start = time.perf_counter()
        body = {"prompt": "What is 17 + 25?", "max_tokens": 4, "temperature": 0}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise ValueError(f"short: {response.status}: {await response.text()}")
            await response.read()
        self._waited("short", time.perf_counter() - start)
