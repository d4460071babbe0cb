"""LaunchedReplica: an engine in another process that is started and ended here."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioinfer.errors import EngineError
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import ReplicaState

if TYPE_CHECKING:
    from aioinfer.execution.device import Progress

__all__ = ["HostUnavailable", "LaunchedReplica", "leave"]


class HostUnavailable(EngineError):
    """There is no place where a replica could be started, at the moment."""


class LaunchedReplica(SocketReplica):
    """:meth:`launch` starts its process, wherever that is, and :meth:`aclose` ends it."""

    def __init__(self, name: str, *, token: str = "") -> None:
        """Raises ConfigError."""
        super().__init__(self._connect_to_it, name, token=token)

    async def launch(self, progress: Progress | None = None) -> None:
        """Start a process, wait until it has loaded its model, and connect. Raises as SocketReplica, and
        EngineError: the process has ended."""
        self.begin_launch()
        await self._end(kill=True)
        try:
            await self._spawn()
            await super().launch(progress)
        except BaseException:
            ending = asyncio.ensure_future(self._end(kill=True))
            while not ending.done():  # whoever cancels again waits, too
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ending])
            raise

    async def aclose(self) -> None:
        lost = self.state is ReplicaState.LOST
        try:
            await super().aclose()
        finally:
            await self._end(kill=lost)

    @abstractmethod
    async def _spawn(self) -> None:
        """Start a process. Raises EngineError."""

    @abstractmethod
    async def _connect_to_it(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        """Wait until it listens, and connect. Raises EngineError: it has ended."""

    @abstractmethod
    async def _end(self, *, kill: bool) -> None:
        """End it and forget it, at once or as it likes to; nothing where there is none. Idempotent."""


def leave(process: asyncio.subprocess.Process | None) -> None:
    """End a child of a loop that is closed, which ends with its standard input."""
    if process is not None and process.stdin is not None:
        pipe = process.stdin.transport.get_extra_info("pipe")
        if pipe is not None:  # uvloop has closed it with the loop
            pipe.close()
