"""Streams without end, and the longest gap between two of their tokens while something else happens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aioinfer.engine import Engine
from aioinfer.params import SamplingParams

__all__ = ["Gaps", "streaming"]

_LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
_PROMPT = 32


class Gaps:
    """The longest time between two chunks of the same stream since :meth:`reset`."""

    def __init__(self, engine: Engine, streams: int) -> None:
        self._engine, self.streams = engine, streams
        self.worst, self.stop = 0.0, False
        self._chunks, self._wanted = 0, 0
        self._reached = asyncio.Event()

    def reset(self) -> None:
        self.worst = 0.0

    async def settled(self) -> None:
        """Wait until every stream has had several more chunks."""
        self._wanted = self._chunks + 4 * self.streams
        self._reached.clear()
        await self._reached.wait()

    async def read(self, row: int) -> None:
        """Keep one stream going, request after request."""
        rng = random.Random(row)
        while True:
            prompt, last = [rng.randint(1, 400) for _ in range(_PROMPT)], 0.0
            async with self._engine.generate(prompt, _LONG) as stream:
                async for _ in stream:
                    now = time.perf_counter()
                    if last:
                        self.worst = max(self.worst, now - last)
                    last = now
                    self._chunks += 1
                    if self._chunks >= self._wanted:
                        self._reached.set()
                    if self.stop:
                        return


@asynccontextmanager
async def streaming(engine: Engine, streams: int) -> AsyncIterator[Gaps]:
    """So many streams without end, all of them decoding; they end with the block."""
    gaps = Gaps(engine, streams)
    async with asyncio.TaskGroup() as group:
        for row in range(streams):
            group.create_task(gaps.read(row))
        await gaps.settled()
        yield gaps
        gaps.stop = True
