"""``aioinfer replica``: an engine for a dispatcher in another process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from aioinfer._version import __version__
from aioinfer.cli.flags import read_settings
from aioinfer.cli.streams import OutputLost, note, write
from aioinfer.cli.terminal import Progress, ending_signals, interrupted, started
from aioinfer.config import EngineConfig, ReplicaConfig
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    from aioinfer.parallel.agent import Agent

__all__ = ["run_replica"]


async def run_replica(options: argparse.Namespace) -> int:
    engine_config = read_settings(EngineConfig, options)
    config = read_settings(ReplicaConfig, options)
    async with _bound(config) as sockets:
        return await _Serving(engine_config, config, sockets).run(with_parent=options.with_parent)


@contextlib.asynccontextmanager
async def _bound(config: ReplicaConfig) -> AsyncIterator[list[socket.socket]]:
    """Listening sockets, bound before the model loads. Raises ConfigError."""
    from aioinfer.server.http.listening import bind
    from aioinfer.server.http.unix import UnixSocket

    if config.socket is not None:
        with contextlib.closing(UnixSocket(config.socket, 0o600)) as file:
            yield [file.socket]
        return
    sockets = await bind(*config.host_and_port)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


class _Serving:
    """A served engine, from its start to its end by signals, by the end of its parent, or when it is lost."""

    def __init__(
        self, engine_config: EngineConfig, config: ReplicaConfig, sockets: list[socket.socket]
    ) -> None:
        from aioinfer.engine import Engine

        self._config = config
        self._sockets = sockets
        self._engine = Engine(engine_config)
        self._received: list[int] = []
        #: end; and without waiting for streams
        self._stop, self._cut = asyncio.Event(), asyncio.Event()

    def _signalled(self, number: int) -> None:
        """The first signal sends the streams elsewhere, or finishes them; the second one aborts them."""
        self._received.append(number)
        (self._cut if self._stop.is_set() else self._stop).set()

    def _orphaned(self) -> None:
        self._stop.set()
        self._cut.set()

    async def run(self, *, with_parent: bool) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, self._signalled, number)
        if with_parent:
            mode = os.fstat(sys.stdin.fileno()).st_mode
            if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):  # uvloop's pipes are sockets
                raise ConfigError("--with-parent: standard input is no pipe")
            await loop.connect_read_pipe(lambda: _Parent(self._orphaned), sys.stdin)
        began = time.monotonic()
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            if not await started(self._engine.start(Progress()), stopped):
                return interrupted(self._received[0]) if self._received else 0
            return await self._serve(time.monotonic() - began, stopped)
        finally:
            stopped.cancel()
            await self._engine.aclose()

    async def _serve(self, seconds: float, stopped: asyncio.Future[Any]) -> int:
        from aioinfer.loop.tuning import FROZEN
        from aioinfer.parallel.agent import Agent

        loop = asyncio.get_running_loop()
        agent = Agent(self._engine, token=self._config.replica_token or "")
        servers: list[asyncio.Server] = []
        frozen = FROZEN.hold(True)
        try:
            for each in self._sockets:
                listen = loop.create_unix_server if self._config.socket is not None else loop.create_server
                servers.append(await listen(agent.connect, sock=each))
            with contextlib.suppress(OutputLost):
                self._announce(seconds)
            ends: list[asyncio.Future[Any]] = [stopped, agent.lost]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if agent.lost.done():
                note(f"aioinfer: the engine is lost: {agent.lost.result()}")
                return 1
            await self._drain(agent)
            return 0
        finally:
            FROZEN.release(frozen)
            for server in servers:
                server.close()
            await agent.aclose()

    async def _drain(self, agent: Agent) -> None:
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(agent.drain()),
            asyncio.ensure_future(self._cut.wait()),
        ]
        seconds = self._engine.config.drain_timeout
        await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
        await asyncio.wait(ends)

    def _announce(self, seconds: float) -> None:
        """Raises OutputLost."""
        name, description = self._engine.config.model_name, self._engine.info.description
        write(f"aioinfer {__version__}: {name} ({description}), loaded in {seconds:.1f} s")
        for each in self._sockets:
            address = each.getsockname()
            shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
            write(f"Replica on {shown}")


class _Parent(asyncio.Protocol):
    """Standard input, which ends with the process that holds its other end."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended()
