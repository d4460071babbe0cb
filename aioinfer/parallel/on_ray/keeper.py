"""The keeper: Ray's driver for a dispatcher. It does what standard input says, and ends with that, as its
actors do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec
import ray

from aioinfer.parallel.on_ray.actor import ReplicaActor
from aioinfer.parallel.on_ray.cluster import Answer, Command
from aioinfer.parallel.on_ray.resources import Node, share
from aioinfer.parallel.sent_errors import SentError, sendable

__all__ = ["keep"]

#: seconds without a place for an actor after which that is said
_WAIT = 10.0
#: seconds in which an actor that is asked to end has done so
_FAREWELL = 5.0
#: bytes that are passed on at once; items of Ray's stream that may wait to be read
_MOST, _MOST_ITEMS = 1 << 18, 4


def keep(address: str, answers: BinaryIO) -> int:
    """Keep replicas until standard input ends. Returns the exit status."""

    def say(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    say(Answer())
    try:
        ray.init(address, configure_logging=False, log_to_driver=False, namespace="aioinfer")
    except Exception as error:
        say(Answer(why=_said(error)))
        return 1
    say(Answer())
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        # Ray prints what the dispatcher logs: who has died.
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(BrokenPipeError),  # the dispatcher is gone
    ):
        asyncio.run(_run(say))
        ray.shutdown()
    return 0


def _said(error: BaseException) -> str:
    return sendable(" ".join(str(error).split()), 500) or type(error).__name__


async def _run(say: Callable[[Answer], None]) -> None:
    reader, loop = asyncio.StreamReader(limit=1 << 20), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    kept: dict[int, _Kept] = {}
    tasks: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            command = msgspec.json.decode(line, type=Command)
            if command.settings is not None:
                kept[command.actor] = one = _Kept(say)
                task = one.placing = loop.create_task(one.place(command))
            else:
                task = loop.create_task(kept.pop(command.actor).end(command))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _nodes() -> list[Node]:
    resources = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    return [Node(each.get("CPU", 0), each.get("GPU", 0)) for each in resources]


class _Kept:
    """An actor, from its placement to its end."""

    def __init__(self, say: Callable[[Answer], None]) -> None:
        self._say = say
        self._actor: Any = None
        self._relay: asyncio.Server | None = None
        self._placed = self._relaying = False
        self.placing: asyncio.Task[None] | None = None

    async def place(self, command: Command) -> None:
        """Start an actor, and wait until its engine has started."""
        number = command.number
        waiting = asyncio.get_running_loop().call_later(_WAIT, self._say, Answer(number, waits=True))
        answer = Answer(number, why="it was ended")
        try:
            nodes = await asyncio.to_thread(_nodes)
            cpus, gpus, settings = share(command.settings or {}, nodes, command.replicas)
            placing = ray.remote(ReplicaActor).options(
                num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._actor = placing.remote(settings, command.token)
            await self._actor.__ray_ready__.remote()
            waiting.cancel()
            host, port, pid = await self._actor.start.remote()
            with contextlib.suppress(OSError):  # a path that is too long: then there is the direct way only
                self._relay = await asyncio.start_unix_server(self._pass_on, command.path, limit=_MOST)
            self._placed, answer = True, Answer(number, host, port, pid)
        except ray.exceptions.RayTaskError as error:
            answer = Answer(number, error=SentError.of(error.cause))
        except Exception as error:
            answer = Answer(number, why=_said(error))
        finally:
            waiting.cancel()
            self._say(answer)

    async def end(self, command: Command) -> None:
        """End it, at once or in its own time."""
        if self.placing is not None:
            self.placing.cancel()
        if self._actor is not None:
            with contextlib.suppress(Exception):  # the cluster is gone, perhaps
                if self._placed and not command.kill:
                    async with asyncio.timeout(_FAREWELL):
                        await self._actor.close.remote()
            with contextlib.suppress(Exception):
                await asyncio.to_thread(ray.kill, self._actor)
        if self._relay is not None:
            self._relay.close()
        self._say(Answer(command.number))

    # -- the socket that passes bytes on ------------------------------------------------------------

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From and to the dispatcher, one connection at a time."""
        actor = self._actor
        if self._relaying:
            writer.close()
            return
        self._relaying = True
        answers = actor.answers.options(
            num_returns="streaming", _generator_backpressure_num_objects=_MOST_ITEMS
        ).remote()
        feeding: asyncio.Task[None] | None = None
        try:
            async for item in answers:
                if feeding is None:  # there is a connection to feed
                    feeding = asyncio.ensure_future(self._feed(actor, reader))
                writer.write(await item)
                await writer.drain()
        except (ray.exceptions.RayError, ConnectionError):
            pass  # which the dispatcher sees as the end of its connection
        finally:
            writer.close()
            if feeding is not None:
                feeding.cancel()
                await asyncio.wait([feeding])
                with contextlib.suppress(ray.exceptions.RayError):
                    await actor.feed.remote(b"")
            self._relaying = False

    async def _feed(self, actor: Any, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            while data := await reader.read(_MOST):
                await actor.feed.remote(data)  # one after the other, so that they stay in order
            await actor.feed.remote(b"")
