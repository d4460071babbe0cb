"""What the keeper does, which is Ray's driver: see :mod:`aioinfer.parallel.on_ray.keeper`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Coroutine
from typing import Any, TextIO

import msgspec
import ray

from aioinfer.parallel.on_ray.actor import ReplicaActor
from aioinfer.parallel.on_ray.resources import Node, share
from aioinfer.parallel.sent_errors import SentError

__all__ = ["keep"]

#: seconds in which the cluster must take a connection
_PATIENCE = 3.0
#: seconds without a place for an actor after which that is said
_WAIT = 10.0
#: seconds in which an actor that is asked to end has done so
_FAREWELL = 5.0
#: bytes that are passed on at once; items of Ray's stream that may wait to be read
_MOST, _MOST_ITEMS = 1 << 18, 4
#: characters of a reason
_MOST_SAID = 500


def keep(address: str, events: TextIO) -> int:
    """Keep replicas until standard input ends. Returns the exit status."""

    def say(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")

    say("imported")
    try:
        if address != "auto":
            asyncio.run(_reach(address))
        ray.init(address, configure_logging=False, log_to_driver=False, namespace="aioinfer")
    except Exception as error:
        say("unreachable", why=_said(error))
        return 1
    say("connected")
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        # Ray prints what the dispatcher logs: who has died.
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(BrokenPipeError),  # the dispatcher is gone
    ):
        asyncio.run(_Keeper(say).run())
        ray.shutdown()
    return 0


async def _reach(address: str) -> None:
    """Raises OSError, TimeoutError. Ray itself would try for longer."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_PATIENCE):
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MOST_SAID] or type(error).__name__


def _nodes() -> list[Node]:
    resources = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    return [Node(each.get("CPU", 0), each.get("GPU", 0)) for each in resources]


class _Keeper:
    def __init__(self, say: Any) -> None:
        self._say = say
        self._kept: dict[int, _Kept] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until standard input ends."""
        reader = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        try:
            while line := await reader.readline():
                self._do(json.loads(line))
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _do(self, command: dict[str, Any]) -> None:
        number = command["number"]
        match command["do"]:
            case "place":
                kept = self._kept[number] = _Kept(self._say, number)
                kept.life = self._run(kept.live(command))
            case "end":
                self._run(self._kept.pop(number).end(kill=command["kill"]))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Kept:
    """An actor, from its placement to its end."""

    def __init__(self, say: Any, number: int) -> None:
        self._say = say
        self._number = number
        self._actor: Any = None
        self._relay: asyncio.Server | None = None
        self._placed = self._relaying = False
        #: what places it and then waits for its death
        self.life: asyncio.Task[None] | None = None

    async def live(self, command: dict[str, Any]) -> None:
        """Place it, and say when it has died. Raises nothing."""
        waiting = asyncio.get_running_loop().call_later(_WAIT, self._tell, "waiting")
        died: dict[str, Any] = {}
        try:
            nodes = await asyncio.to_thread(_nodes)
            cpus, gpus, settings = share(command["settings"], nodes, command["replicas"])
            placing = ray.remote(ReplicaActor).options(
                num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
            )
            self._actor = placing.remote(settings, command["token"])
            host = await self._actor.host.remote()
            waiting.cancel()
            port, pid = await self._actor.start.remote(host)
            with contextlib.suppress(OSError):  # a path that is too long: then there is the direct way only
                self._relay = await asyncio.start_unix_server(self._pass_on, command["path"], limit=_MOST)
            self._placed = True
            self._tell("placed", host=host, port=port, pid=pid)
            died["why"] = await self._actor.lost.remote()
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            died = {"why": _said(cause), "error": msgspec.to_builtins(SentError.of(cause))}
        except Exception as error:
            died = {"why": _said(error)}
        finally:
            waiting.cancel()
        self._tell("died", **died)

    async def end(self, *, kill: bool) -> None:
        """End it, at once or as it likes to."""
        if self.life is not None:
            self.life.cancel()
        if self._actor is not None:
            with contextlib.suppress(Exception):  # the cluster is gone, perhaps
                if self._placed and not kill:
                    async with asyncio.timeout(_FAREWELL):
                        await self._actor.close.remote()
            with contextlib.suppress(Exception):
                await asyncio.to_thread(ray.kill, self._actor)
        if self._relay is not None:
            self._relay.close()
        self._tell("ended")

    def _tell(self, event: str, **fields: Any) -> None:
        self._say(event, number=self._number, **fields)

    # -- the socket that passes bytes on ------------------------------------------------------------

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From and to the dispatcher, one connection at a time."""
        actor = self._actor
        if actor is None or self._relaying:
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
