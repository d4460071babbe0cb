"""Replicas behind sockets of memory: all code of the wire, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from aioinfer.engine import Engine
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.agent import Agent
from aioinfer.parallel.connection import Connection
from aioinfer.parallel.remote import SocketReplica
from tests.parallel.toys import lose_engine


class MemorySocket(asyncio.Transport):
    """One end of a pair. What is written arrives later, in order, in pieces of random sizes."""

    def __init__(self, own: Any, dice: random.Random) -> None:
        super().__init__()
        self._own = own
        self._dice = dice
        self._loop = asyncio.get_running_loop()
        self._delay = dice.choice([0.0, 0.0005, 0.005])
        # Never so slow that it takes longer than the beats of a connection come.
        self._most = dice.choice([1000 if self._delay else 7, 1000, 1 << 20, 1 << 20])
        self._room = dice.choice([100, 5000, 1 << 20, 1 << 20])
        self._queue = bytearray()
        self._due = self._full = self._closing = self._ended = False
        self.peer: MemorySocket
        #: nothing moves, as between processes of which one is stopped
        self.held = False
        self.counts: Counter[str] = Counter()

    @classmethod
    def pair(cls, one: Any, other: Any, dice: random.Random) -> tuple[MemorySocket, MemorySocket]:
        left, right = cls(one, dice), cls(other, dice)
        left.peer, right.peer = right, left
        right._own.connection_made(right)
        left._own.connection_made(left)
        return left, right

    def write(self, data: Any) -> None:
        if not self._ended:
            self._queue += data
            self._soon()
            if len(self._queue) > self._room and not self._full:
                self._full = True
                self.counts["full"] += 1
                self._own.pause_writing()

    def hurry(self) -> None:
        """What is on its way arrives at once, as behind the end of a process."""
        self._most, self._delay = 1 << 20, 0.0

    def release(self) -> None:
        self.held = False
        self._soon()

    def _soon(self) -> None:
        if not self._due and not self.held:
            self._due = True
            self._loop.call_later(self._dice.uniform(0, self._delay), self._deliver)

    def _deliver(self) -> None:
        self._due = False
        if self._ended or self.held:
            return
        piece, self._queue = bytes(self._queue[: self._most]), self._queue[self._most :]
        if piece and not self.peer._ended and not self.peer._closing:
            self.peer._own.data_received(piece)
        if self._queue:
            self._soon()
        elif self._closing:
            self._end()
        if self._full and len(self._queue) <= self._room // 4 and not self._ended:
            self._full = False
            self._own.resume_writing()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._soon()

    def abort(self) -> None:
        self._closing = True
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        for end in (self, self.peer):
            if not end._ended:
                end._ended = end._closing = True
                self._loop.call_soon(end._own.connection_lost, None)


class FramedReplica(SocketReplica):
    """An engine and its agent on the same loop, which a real one has in another process."""

    def __init__(self, engine: Engine, name: str, dice: random.Random) -> None:
        super().__init__(self._open, name, token="a token")
        self.engine = engine
        self.agent: Agent | None = None
        self._dice = dice
        self.sockets: tuple[MemorySocket, MemorySocket]

    async def _open(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        assert self.agent is not None
        await asyncio.sleep(self._dice.uniform(0, 0.001))
        served: Connection = self.agent.connect()
        self.sockets = MemorySocket.pair(protocol(), served, self._dice)

    async def launch(self, progress: Any = None) -> None:
        if self.engine.closed:
            await self.engine.start()
            self.agent = Agent(self.engine, token="a token")
        await super().launch(progress)

    async def aclose(self) -> None:
        await super().aclose()
        await self.engine.aclose()

    def die(self) -> None:
        """Of what it had on the wire, all arrives or nothing."""
        for end in self.sockets:
            end.held = True
        if self._dice.random() < 0.5:
            served = self.sockets[1]
            served.held = False
            served.hurry()
            served.close()
        else:
            self.sockets[1].abort()
        lose_engine(self.engine)

    def hang(self, seconds: float) -> None:
        """Nothing of it arrives for so long."""
        sockets = self.sockets
        for end in sockets:
            end.held = True
        for end in sockets:
            asyncio.get_running_loop().call_later(seconds, end.release)


class FramedDispatcher(Dispatcher):
    """A dispatcher whose replicas are behind sockets."""

    def __init__(self, *arguments: Any, dice: random.Random, **options: Any) -> None:
        self._dice = dice
        super().__init__(*arguments, **options)

    async def start(self, progress: Any = None) -> None:
        await super().start(progress)
        self._started().when_lost = None  # worlds restart replicas themselves

    def _replica_of(self, engine: Engine, name: str) -> Any:
        return FramedReplica(engine, name, self._dice)


def local(engines: Sequence[Engine], policy: Any = "round_robin", **options: Any) -> Dispatcher:
    return Dispatcher(engines, policy=policy, **options)


def framed(engines: Sequence[Engine], policy: Any = "round_robin", **options: Any) -> Dispatcher:
    return FramedDispatcher(engines, policy=policy, dice=random.Random(3), **options)


Kind = Callable[..., Dispatcher]
#: replicas on the loop of the dispatcher, and behind sockets
both = pytest.mark.parametrize("kind", [local, framed])
