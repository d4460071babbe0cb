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
    """Lives on the loop of an asynchronous actor. The keeper alone calls these."""

    def __init__(self, settings: dict[str, Any], token: str) -> None:
        """``settings``: of the EngineConfig; ``token``: what the dispatcher will show."""
        self._settings = settings
        self._token = token
        self._engine: Engine | None = None
        self._agent: Agent | None = None
        self._server: asyncio.Server | None = None
        self._address = ("", 0)
        self._writer: asyncio.StreamWriter | None = None
        self._frozen: object | None = None

    async def host(self) -> str:
        """The address of its node in the cluster."""
        import ray

        return str(ray.util.get_node_ip_address())

    async def start(self, host: str) -> tuple[int, int]:
        """Load the model, and listen on a port of this address of the node. Returns the port, and the number
        of this process. Raises as Engine.start, and OSError."""
        from aioinfer.config import EngineConfig
        from aioinfer.engine import Engine
        from aioinfer.loop.tuning import FROZEN
        from aioinfer.parallel.agent import Agent

        self._engine = Engine(EngineConfig(**self._settings))
        await self._engine.start()
        self._agent = Agent(self._engine, token=self._token)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._agent.connect, host, 0)
        self._address = self._server.sockets[0].getsockname()[:2]
        self._frozen = FROZEN.hold(True)
        return self._address[1], os.getpid()

    async def lost(self) -> str:
        """Waits until the engine is lost, and says why."""
        assert self._agent is not None
        return str(await asyncio.shield(self._agent.lost))

    async def close(self) -> None:
        """End what was started."""
        from aioinfer.loop.tuning import FROZEN

        FROZEN.release(self._frozen)
        if self._server is not None:
            self._server.close()
        if self._agent is not None:
            await self._agent.aclose()
        if self._engine is not None:
            await self._engine.aclose()

    # -- where only Ray's own ports can be reached --------------------------------------------------

    async def answers(self) -> AsyncIterator[bytes]:
        """Connects the dispatcher; what the agent sends it, until one of them closes the connection."""
        reader, self._writer = await asyncio.open_connection(*self._address)
        try:
            yield b""  # it is connected
            while data := await reader.read(_MOST):
                yield data
        finally:
            self._writer.close()

    async def feed(self, data: bytes) -> None:
        """What the dispatcher sends; nothing: it has closed the connection."""
        assert self._writer is not None
        if data:
            self._writer.write(data)
            await self._writer.drain()
        else:
            self._writer.close()
