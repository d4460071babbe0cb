"""RayReplica: an engine in an actor of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.errors import EngineClosed
from aioinfer.parallel.launched import LaunchedReplica
from aioinfer.parallel.on_ray.cluster import Answer, RayCluster
from aioinfer.parallel.processes import child_config

__all__ = ["RayReplica"]

_log = logging.getLogger("aioinfer")

#: settings that can be paths
_PATHS = frozenset({"model", "speculation", "chat_template"})
#: seconds in which its port must take a connection; else Ray passes the bytes on
_PATIENCE = 3.0


class RayReplica(LaunchedReplica):
    """The cluster says where it runs; tokens come on a socket of its own."""

    def __init__(self, cluster: RayCluster, config: EngineConfig, name: str) -> None:
        """Raises ConfigError."""
        super().__init__(name, token=secrets.token_urlsafe(32))
        self._cluster = cluster
        self._settings = child_config(config)
        for name in _PATHS & self._settings.keys():
            self._settings[name] = _absolute(self._settings[name])
        #: its number in the cluster, what places it, and where that is
        self._actor: int | None = None
        self._placing: asyncio.Task[Answer] | None = None
        self._placed: Answer | None = None
        #: tests forbid the direct way
        self.direct = True

    @property
    def pid(self) -> int | None:
        """Process id of the actor, on its node, while there is one."""
        return None if self._placed is None else self._placed.pid

    def give_up(self) -> None:
        if self._placing is not None:
            self._placing.cancel()

    def outlive_loop(self) -> None:
        super().outlive_loop()
        self._actor = self._placed = None
        self._cluster.outlive_loop()

    async def _spawn(self) -> None:
        self._actor = self._cluster.actor()
        work = self._cluster.place(self._actor, self._settings, self._token)
        placing = self._placing = asyncio.ensure_future(work)
        try:
            await asyncio.wait([placing])
        finally:
            placing.cancel()
        if placing.cancelled():
            raise EngineClosed("the dispatcher was closed")
        self._placed = placing.result()

    async def _connect_to_it(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        assert self._placed is not None
        assert self._actor is not None
        loop, placed = asyncio.get_running_loop(), self._placed
        if self.direct:
            try:
                async with asyncio.timeout(_PATIENCE):
                    return await loop.create_connection(protocol, placed.host, placed.port)
            except OSError as error:
                _log.warning(
                    "the replica %s is reached through Ray, at the cost of a millisecond per step, because "
                    "%s:%d cannot be: %r", self.name, placed.host, placed.port, error,
                )  # fmt: skip
        return await loop.create_unix_connection(protocol, self._cluster.path(self._actor))

    async def _end(self, *, kill: bool) -> None:
        actor, self._actor, self._placed = self._actor, None, None
        if actor is not None:
            await self._cluster.end(actor, kill=kill)


def _absolute(value: Any) -> Any:
    """Paths are those of this process; actors have another working directory."""
    return str(Path(value).resolve()) if isinstance(value, str) and value and Path(value).exists() else value
