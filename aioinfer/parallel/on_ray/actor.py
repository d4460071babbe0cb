"""ReplicaActor: an engine in a process that Ray has placed on one of its nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioinfer.engine import Engine
    from aioinfer.parallel.agent import Agent

__all__ = ["ReplicaActor"]

#: bytes of one item of Ray's stream
_MOST = 1 << 18


class ReplicaActor:
    """Lives on the loop of an asynchronous actor. Only the keeper calls these."""

    _engine: Engine
    _agent: Agent
    _server: asyncio.Server
    _writer: asyncio.StreamWriter
    _frozen: object | None

    def __init__(self, settings: dict[str, Any], token: str) -> None:
        """``settings``: of the EngineConfig; ``token``: what the dispatcher will show."""
        self._settings = settings
        self._token = token

    async def start(self) -> tuple[str, int, int]:
        """Load the model, and listen on a port of the node's address in the cluster. Returns address, port,
        and the number of this process. Raises as Engine.start, and OSError."""
        import ray

        from aioinfer.config import EngineConfig
        from aioinfer.engine import Engine
        from aioinfer.loop.tuning import FROZEN
        from aioinfer.parallel.agent import Agent

        self._engine = Engine(EngineConfig(**self._settings))
        await self._engine.start()
        self._agent = Agent(self._engine, token=self._token)
        host, loop = str(ray.util.get_node_ip_address()), asyncio.get_running_loop()
        self._server = await loop.create_server(self._agent.connect, host, 0)
        self._frozen = FROZEN.hold(True)
        return host, self._server.sockets[0].getsockname()[1], os.getpid()

    async def close(self) -> None:
        """End what :meth:`start` has started."""
        from aioinfer.loop.tuning import FROZEN

        FROZEN.release(self._frozen)
        self._server.close()
        await self._agent.aclose()
        await self._engine.aclose()

    # -- where only Ray's own ports can be reached --------------------------------------------------

    async def answers(self) -> AsyncIterator[bytes]:
        """Connect the dispatcher, and yield the agent's bytes until one of them closes the connection."""
        address = self._server.sockets[0].getsockname()[:2]
        reader, self._writer = await asyncio.open_connection(*address)
        try:
            yield b""  # it is connected
            while data := await reader.read(_MOST):
                yield data
        finally:
            self._writer.close()

    async def feed(self, data: bytes) -> None:
        """Pass on bytes of the dispatcher; none: it has closed the connection."""
        if data:
            self._writer.write(data)
            await self._writer.drain()
        else:
            self._writer.close()
