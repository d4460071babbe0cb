"""A store whose reads and writes wait for a test, and requests to engines that have it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.tiers.store import Views
from tests.engine.simulation import Eager
from tests.engine.stores import FlakyStore

__all__ = ["PARAMS", "PROMPT", "Gated", "ask", "attach", "began", "written"]

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
PROMPT = [3 + number % 50 for number in range(42)]


class Gated(FlakyStore):
    """Reads and writes when it may."""

    def __init__(self) -> None:
        super().__init__(random.Random(1), 1000, 0.0)
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()

    def _pass(self) -> None:
        self.begun.set()
        assert self.open.wait(60), "nobody opened it"

    def put(self, name: bytes, page: Views, state: Views | None = None) -> bool:
        self._pass()
        return super().put(name, page, state)

    def read(
        self, names: Sequence[bytes], pages: Sequence[Views], states: Sequence[Views | None] = ()
    ) -> int:
        self._pass()
        return super().read(names, pages, states)


async def written(engine: Engine) -> None:
    """Wait until everything that was committed is in the stores."""
    runtime = engine._started()
    while runtime.transfers._fresh or runtime.transfers._working or runtime.transfers._due:
        await asyncio.sleep(0)


async def began(store: Gated) -> None:
    await asyncio.to_thread(store.begun.wait, 60)


async def ask(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> Result:
    result = await engine.generate(list(prompt), PARAMS, **options)
    await written(engine)
    return result


def attach(engine: Engine, store: FlakyStore) -> None:
    """Whatever the store has is read: computing is often faster with a toy."""
    engine._core.rates = Eager(engine._core.scheduler.times)
    engine._started().transfers.attach(store, behind=True)
