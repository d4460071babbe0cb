"""RayCluster: where a dispatcher's replicas are placed, as the dispatcher sees it."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from aioinfer.errors import AioInferError, ConfigError, EngineError, shown
from aioinfer.parallel.launched import Child, HostUnavailable
from aioinfer.parallel.sent_errors import SentError

__all__ = ["Answer", "Command", "RayCluster"]

_log = logging.getLogger("aioinfer")

#: seconds in which the keeper has imported Ray, and after that is connected to the cluster
_IMPORTING, _CONNECTING = 60.0, 8.0
#: seconds in which the keeper has ended an actor, at once or in its own time, and itself
_AT_ONCE, _FAREWELL = 3.0, 8.0
#: bytes of an answer
_LIMIT = 1 << 20


class Command(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A line to the keeper: place an actor, or end one. Every command has an answer of its number."""

    number: int
    actor: int
    #: what to place, and a Unix socket that passes bytes on to it; None: end it
    settings: dict[str, Any] | None = None
    token: str = ""
    path: str = ""
    #: how many will be placed
    replicas: int = 1
    #: end it at once
    kill: bool = False


class Answer(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A line of the keeper. Its first ones, without a number: Ray is imported, and it is connected."""

    number: int = -1
    #: where a placed actor listens, and its process id there
    host: str = ""
    port: int = 0
    pid: int = 0
    #: there is no room for it yet: another answer follows
    waits: bool = False
    #: why it could not be done; and the engine's error, if that is the reason
    why: str = ""
    error: SentError | None = None


_answers = msgspec.json.Decoder(Answer)


def check_address(address: object) -> str:
    """Raises ConfigError."""
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        known = host and "/" not in host and port.isascii() and port.isdigit() and int(port) < 1 << 16
        if address == "auto" or known:
            return address
    raise ConfigError(f"ray must be auto or HOST:PORT, of a cluster that runs, got {shown(address)}")


def has_ray() -> bool:
    """Ray is installed, which is not imported here."""
    found = importlib.util.find_spec("ray")
    return found is not None and found.origin is not None  # and no directory of this name


class RayCluster:
    """It has a keeper while replicas are placed there or wait for that."""

    def __init__(self, address: str, replicas: int) -> None:
        """``address``: "auto" or HOST:PORT; ``replicas``: that will be placed. Raises ConfigError."""
        self._address = check_address(address)
        if not has_ray():
            raise ConfigError("ray is not installed: pip install 'aioinfer[ray]'")
        self._replicas = replicas
        self._numbers = itertools.count()
        #: actors that were not ended, and their keepers once these know them
        self._actors: dict[int, _Keeper | None] = {}
        #: starts the keeper, for all that wait for it
        self._starting: asyncio.Task[_Keeper] | None = None
        #: the keeper's command before the address; tests have another one
        self.command = [sys.executable, "-m", "aioinfer.parallel.on_ray"]

    def actor(self) -> int:
        """The number of a new actor, which :meth:`place` places, and which must be ended in any case."""
        number = next(self._numbers)
        self._actors[number] = None
        return number

    async def place(self, actor: int, settings: dict[str, Any], token: str) -> Answer:
        """Start a replica somewhere in the cluster, and wait until it has loaded its model. Raises
        HostUnavailable: there is no cluster, or its node is lost; and as Engine.start."""
        starting = self._starting
        if starting is None or (starting.done() and not _is_alive(starting)):
            work = _Keeper.start(self.command, self._address)
            starting = self._starting = asyncio.get_running_loop().create_task(work, name="aioinfer-ray")
        keeper = await asyncio.shield(starting)
        self._actors[actor] = keeper
        path = self.path(actor)
        return await keeper.do(
            Command(next(self._numbers), actor, settings, token, path, replicas=self._replicas)
        )

    def path(self, actor: int) -> str:
        """The Unix socket that reaches a placed actor through Ray."""
        keeper = self._actors[actor]
        assert keeper is not None
        return str(keeper.child.directory / str(actor))

    async def end(self, actor: int, *, kill: bool) -> None:
        """End an actor, at once or in its own time; with the last one the connection to the cluster ends.
        Idempotent."""
        if actor not in self._actors:
            return
        keeper, seconds = self._actors.pop(actor), _FAREWELL
        try:
            if keeper is not None:
                async with asyncio.timeout(_AT_ONCE if kill else _FAREWELL):
                    await keeper.do(Command(next(self._numbers), actor, kill=kill))
        except HostUnavailable:
            pass  # it has ended with its keeper
        except TimeoutError:
            _log.warning("a replica on Ray does not end")
            seconds = 0.0
        finally:
            if not self._actors and (starting := self._starting) is not None:
                self._starting = None
                starting.cancel()
                await asyncio.wait([starting])
                if not (starting.cancelled() or starting.exception()):
                    await starting.result().end(seconds)

    def outlive_loop(self) -> None:
        """The loop was closed before the replicas were ended: the keeper ends them. Idempotent."""
        for keeper in {each for each in self._actors.values() if each is not None}:
            keeper.child.leave()
        self._starting = None
        self._actors.clear()


def _is_alive(starting: asyncio.Task[_Keeper]) -> bool:
    return not (starting.cancelled() or starting.exception()) and starting.result().alive


class _Keeper:
    """The child that is Ray's driver."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._reading = asyncio.get_running_loop().create_task(self._read(), name="aioinfer-ray")

    @classmethod
    async def start(cls, command: Sequence[str], address: str) -> _Keeper:
        """One that is connected. Raises HostUnavailable: there is no cluster; EngineError."""
        try:
            child = await Child.start(
                lambda _: [*command, address], stdout=asyncio.subprocess.PIPE, limit=_LIMIT
            )
        except OSError as error:
            raise EngineError(f"the keeper of replicas on Ray cannot be started: {error}") from error
        try:
            for seconds in (_IMPORTING, _CONNECTING):
                async with asyncio.timeout(seconds):
                    answer = await _answer(child)
                if answer.why:
                    raise HostUnavailable(f"there is no Ray cluster at {address}: {answer.why}")
        except TimeoutError:
            await child.end(0.0)
            raise HostUnavailable(f"there is no answer of a Ray cluster at {address}") from None
        except BaseException:
            await child.end(0.0)
            raise
        return cls(child)

    @property
    def alive(self) -> bool:
        """It hears and is heard."""
        return not self._reading.done()

    async def do(self, command: Command) -> Answer:
        """Have something done. Raises HostUnavailable, and the engine's error."""
        if not self.alive:
            raise HostUnavailable("the keeper of replicas on Ray has ended")
        asked: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[command.number] = asked
        self.child.stdin.write(msgspec.json.encode(command) + b"\n")
        answer = await asked
        if answer.error is not None:
            raise answer.error.error()  # another start would meet it, too
        if answer.why:
            raise HostUnavailable(f"its actor has died: {answer.why}")
        return answer

    async def _read(self) -> None:
        """Pass on its answers, until it ends, or says something else and is killed."""
        error: AioInferError = HostUnavailable("the keeper of replicas on Ray was ended")
        try:
            while True:
                answer = await _answer(self.child)
                if answer.waits:
                    _log.warning("a replica waits for a place in the Ray cluster")
                elif (asked := self._asked.pop(answer.number, None)) is not None and not asked.done():
                    asked.set_result(answer)
        except HostUnavailable as ended:
            error = ended
        finally:
            await self.child.end(0.0)
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(error)
                    asked.exception()  # the caller may have left

    async def end(self, seconds: float) -> None:
        """Wait this long until it has ended, and then kill it."""
        if not await self.child.end(seconds) and seconds:
            _log.warning("the keeper of replicas on Ray does not end, and is killed")
        await asyncio.wait([self._reading])


async def _answer(child: Child) -> Answer:
    """Raises HostUnavailable: it has ended, or says something else."""
    assert child.process.stdout is not None
    line = b""
    try:
        if line := await child.process.stdout.readline():
            return _answers.decode(line)
    except (ValueError, msgspec.MsgspecError) as error:
        raise HostUnavailable(f"the keeper of replicas on Ray says {line[:200]!r}: {error}") from None
    raise HostUnavailable("the keeper of replicas on Ray has ended")
