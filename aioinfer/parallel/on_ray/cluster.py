"""RayCluster: where a dispatcher's replicas are placed, as the dispatcher sees it."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from aioinfer.errors import ConfigError, EngineClosed, shown
from aioinfer.parallel.on_ray.keeper_process import KeeperProcess, Placing

__all__ = ["Placed", "RayCluster", "check_address"]

_log = logging.getLogger("aioinfer")

#: seconds in which the keeper has ended an actor, at once or as it likes to, and itself
_AT_ONCE, _FAREWELL = 3.0, 8.0


class Placed(NamedTuple):
    """Where a replica listens, and the Unix socket that reaches it through Ray."""

    host: str
    port: int
    #: of its process, on its node
    pid: int
    path: str


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
        #: starts the keeper, for all that wait for it
        self._starting: asyncio.Task[KeeperProcess] | None = None
        #: by replica, its number for the keeper, which no other one has had
        self._numbers = itertools.count()
        self._placed: dict[int, tuple[int, Placing]] = {}
        #: the keeper's command before the address; tests have another one
        self.command = [sys.executable, "-m", "aioinfer.parallel.on_ray.keeper"]

    async def place(
        self, replica: int, settings: dict[str, Any], token: str, died: Callable[[str], None]
    ) -> Placed:
        """Start a replica somewhere in the cluster, and wait until it has loaded its model. ``died``: is
        told why it has ended, later. It must be ended in any case. Raises HostUnavailable: there is no
        cluster, or its node is lost; as Engine.start; EngineClosed: it was given up."""
        number, placing = next(self._numbers), Placing(died)
        self._placed[replica] = number, placing
        starting = self._start()
        either: list[asyncio.Future[Any]] = [starting, placing.placed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not placing.placed.done():
            keeper = starting.result()
            path = keeper.path(number)
            keeper.place(number, placing, settings=settings, token=token, replicas=self._replicas)
            return Placed(*await placing.placed, path)
        raise placing.placed.exception() or EngineClosed("the replica was ended")

    def _start(self) -> asyncio.Task[KeeperProcess]:
        """Of several that wait, the first one starts the keeper, and all have its error. One that has ended
        was killed, or has nothing left to end."""
        starting = self._starting
        if starting is None or (starting.done() and not _alive(starting)):
            if (keeper := _keeper(starting)) is not None:
                keeper.leave()
            work = KeeperProcess.start(self.command, self._address)
            starting = asyncio.get_running_loop().create_task(work, name="aioinfer-ray")
            self._starting = starting
        return starting

    def give_up(self, replica: int) -> None:
        """Whoever waits for its place need not."""
        if replica in self._placed:
            self._placed[replica][1].give_up(EngineClosed("the dispatcher was closed"))

    async def end(self, replica: int, *, kill: bool) -> None:
        """End a replica, at once or as it likes to; with the last one the connection to the cluster ends.
        Idempotent."""
        if replica not in self._placed:
            return
        number, placing = self._placed.pop(replica)
        placing.give_up(EngineClosed("the replica was ended"))
        keeper, seconds = _keeper(self._starting), _FAREWELL
        try:
            if keeper is not None and keeper.has(number):
                keeper.forget(number, kill=kill)
                done, _ = await asyncio.wait([placing.ended], timeout=_AT_ONCE if kill else _FAREWELL)
                if not done:
                    _log.warning("a replica on Ray does not end")
                    seconds = 0.0
        finally:
            if not self._placed and self._starting is not None:
                await self._end_keeper(self._starting, seconds)

    async def _end_keeper(self, starting: asyncio.Task[KeeperProcess], seconds: float) -> None:
        if self._starting is starting:
            self._starting = None
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        keeper = _keeper(starting)
        if keeper is not None:
            await keeper.end(seconds)

    def outlive_loop(self) -> None:
        """The loop was closed before the replicas were ended: the keeper ends them. Idempotent."""
        keeper = _keeper(self._starting)
        if keeper is not None:
            keeper.leave()
        self._starting = None
        self._placed.clear()


def _keeper(starting: asyncio.Task[KeeperProcess] | None) -> KeeperProcess | None:
    """What was started."""
    if starting is None or not starting.done() or starting.cancelled() or starting.exception() is not None:
        return None
    return starting.result()


def _alive(starting: asyncio.Task[KeeperProcess]) -> bool:
    keeper = _keeper(starting)
    return keeper is not None and keeper.alive
