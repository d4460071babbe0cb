"""Adapters of random engines: somebody loads, replaces and unloads them while requests have them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import tempfile
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aioinfer import errors
from aioinfer.engine import Engine
from tests.toys.adapters import ToyAdapter, write_toy_adapter

__all__ = ["Adapting", "adapter_directory", "key_of"]

_NAMES = ("a", "b", "c")
_CONTENTS = 5
#: what may happen, and how often
_WHAT = {"load": 6, "unload": 4, "cancel": 3, "twice": 1, "bad": 1, "unknown": 1}


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="toy-adapters-")


@functools.cache
def adapter_directory(content: str) -> Path:
    """A directory that toys can load, for the life of this process."""
    return write_toy_adapter(Path(_root().name) / content, content)


@functools.cache
def key_of(path: str) -> int:
    """What :func:`~tests.toys.toy_generate` wants to know of an adapter."""
    return ToyAdapter.read(Path(path)).key


@dataclass
class Adapting:
    """What is done to the adapters of one engine, and what came of it."""

    dice: random.Random
    most: int
    counts: Counter[str] = field(default_factory=Counter)
    #: seconds, in the mean
    pause: float = 0.003
    #: loads and unloads that go on
    _open: set[asyncio.Future[None]] = field(default_factory=set)

    @classmethod
    def of(cls, dice: random.Random) -> Self | None:
        """Half of the engines have adapters."""
        return (
            cls(dice, dice.choice([1, 1, 2, 3]), pause=dice.choice([0.003, 0.02, 0.05]))
            if dice.random() < 0.5
            else None
        )

    def choose(self, engine: Engine) -> tuple[str | None, int]:
        """The adapter of a request that arrives now, and its key."""
        loaded = engine.adapters()
        if not loaded or self.dice.random() < 0.2:
            return None, 0
        # Most have the same, so that prefixes are shared.
        info = self.dice.choice([loaded[0], *loaded[:1], *loaded])
        return info.name, key_of(info.path)

    async def operate(self, engine: Engine) -> None:
        """Until it is cancelled."""
        dice = self.dice
        while len(engine.adapters()) < self.most and not engine.closed:
            self._begin(self._load(engine, dice.choice(_NAMES)))
            await asyncio.sleep(0.001)
        while True:
            await asyncio.sleep(dice.expovariate(1 / self.pause))
            self.pause *= 1.05  # requests come at the beginning
            (what,) = dice.choices([*_WHAT], [*_WHAT.values()])
            name = dice.choice(_NAMES)
            if what == "unload":
                self._begin(self._unload(engine, name))
            elif what == "bad":
                self._begin(self._load_nothing(engine, name))
            elif what == "unknown":
                with contextlib.suppress(errors.EngineFailed):
                    self._refuses(engine)
            else:
                for _ in range(1 + (what == "twice")):
                    self._begin(self._load(engine, name), cancelled=what == "cancel")

    def _begin(self, work: Coroutine[Any, Any, None], *, cancelled: bool = False) -> None:
        task = asyncio.ensure_future(work)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        if cancelled:
            asyncio.get_running_loop().call_later(self.dice.choice([0, 0.001, 0.004, 0.02]), task.cancel)

    async def _load(self, engine: Engine, name: str) -> None:
        path = adapter_directory(str(self.dice.randrange(_CONTENTS)))
        before = {info.name for info in engine.adapters()}
        try:
            info = await engine.load_adapter(name, path)
        except asyncio.CancelledError:
            self.counts["cancelled loads"] += 1
            raise
        except errors.ConfigError as error:
            assert "max_adapters" in str(error)
            self.counts["refused loads"] += 1
        except (errors.EngineFailed, errors.EngineClosed):
            self.counts["lost loads"] += 1
        else:
            assert (info.name, info.path) == (name, str(path))
            self.counts["replaced" if name in before else "loaded"] += 1

    async def _load_nothing(self, engine: Engine, name: str) -> None:
        with contextlib.suppress(errors.ConfigError, errors.EngineFailed, errors.EngineClosed):
            await engine.load_adapter(name, adapter_directory("0").parent / "nothing")
            raise AssertionError("there is no adapter")
        self.counts["failed loads"] += 1

    async def _unload(self, engine: Engine, name: str) -> None:
        try:
            await engine.unload_adapter(name)
        except errors.InvalidRequest as error:
            assert error.code == "adapter_not_found"
        except (errors.EngineFailed, errors.EngineClosed):
            self.counts["lost loads"] += 1
        else:
            self.counts["unloaded"] += 1

    def _refuses(self, engine: Engine) -> None:
        try:
            engine.generate([1], adapter="unknown")
        except errors.InvalidRequest as error:
            assert error.field == "adapter"
        else:
            raise AssertionError("an adapter that is not loaded was found")

    async def settle(self, engine: Engine, device: Any) -> None:
        """Behind the last request: every slot comes back."""
        while self._open:
            await asyncio.wait(self._open)
        registry = engine._core.adapters
        self.counts["drained"] += registry.draining
        for info in engine.adapters():
            await engine.unload_adapter(info.name)
        for _ in range(1000):
            if not (registry.draining or registry._reserved):  # a load that was cancelled has one
                break
            await asyncio.sleep(0.001)
        registry.audit()
        assert registry.free == registry.slots, "a slot of an adapter is lost"
        assert not device.adapters.installed
