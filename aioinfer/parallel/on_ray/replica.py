"""RayReplica: an engine in an actor of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.errors import EngineFailed
from aioinfer.parallel.launched import LaunchedReplica
from aioinfer.parallel.on_ray.cluster import Placed, RayCluster
from aioinfer.parallel.processes import child_config

__all__ = ["RayReplica"]

_log = logging.getLogger("aioinfer")

#: settings that can be paths
_PATHS = frozenset({"model", "speculation", "chat_template"})
#: seconds in which its port must take a connection; else Ray passes the bytes on
_PATIENCE = 3.0


class RayReplica(LaunchedReplica):
    """The cluster says where it runs, and that it has died; tokens come on a socket of its own."""

    def __init__(self, cluster: RayCluster, config: EngineConfig, name: str, *, number: int) -> None:
        """``number``: in this cluster. Raises ConfigError."""
        super().__init__(name, token=secrets.token_urlsafe(32))
        self._cluster = cluster
        self._number = number
        self._settings = child_config(config)
        for name in _PATHS & self._settings.keys():
            self._settings[name] = _absolute(self._settings[name])
        self._placed: Placed | None = None
        #: tests forbid the direct way
        self.direct = True

    @property
    def pid(self) -> int | None:
        """Of the actor, on its node, while there is one."""
        return None if self._placed is None else self._placed.pid

    def outlive_loop(self) -> None:
        super().outlive_loop()
        self._placed = None
        self._cluster.outlive_loop()

    async def _spawn(self) -> None:
        self._placed = await self._cluster.place(self._number, self._settings, self._token, self._died)

    def _died(self, why: str) -> None:
        self.disconnect(EngineFailed(f"its actor has died: {why}"))

    async def _connect_to_it(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        assert self._placed is not None
        loop, (host, port, _, path) = asyncio.get_running_loop(), self._placed
        if self.direct:
            try:
                return await loop.create_connection(protocol, sock=await _reached(host, port))
            except (OSError, TimeoutError) as error:
                _log.warning(
                    "the replica %s is reached through Ray, at the cost of a millisecond per step, because "
                    "%s:%d cannot be: %r", self.name, host, port, error,
                )  # fmt: skip
        return await loop.create_unix_connection(protocol, path)

    def give_up(self) -> None:
        self._cluster.give_up(self._number)

    async def _end(self, *, kill: bool) -> None:
        self._placed = None
        await self._cluster.end(self._number, kill=kill)


async def _reached(host: str, port: int) -> socket.socket:
    """Raises OSError, TimeoutError."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        async with asyncio.timeout(_PATIENCE):
            await asyncio.get_running_loop().sock_connect(found, (host, port))
    except BaseException:
        found.close()
        raise
    return found


def _absolute(value: Any) -> Any:
    """Paths are those of this process; actors have another working directory."""
    return str(Path(value).resolve()) if isinstance(value, str) and value and Path(value).exists() else value
