"""Replicas in processes that are started and ended here, and a child process of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aioinfer.errors import EngineError
from aioinfer.forks import drop_file
from aioinfer.loop.belonging import end_in_children
from aioinfer.loop.waiting import finish
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import ReplicaState
from aioinfer.system.sockets import directory_for_sockets

if TYPE_CHECKING:
    from aioinfer.execution.device import Progress

__all__ = ["Child", "HostUnavailable", "LaunchedReplica"]


#: seconds for what an ended process has sent
_LAST_WORDS = 1.0


class HostUnavailable(EngineError):
    """There is no place where a replica could be started, at the moment."""


class Child:
    """A child process that ends with its standard input, so also when this process is killed, and a directory
    that only this user can enter."""

    def __init__(
        self, process: asyncio.subprocess.Process, stdin: asyncio.WriteTransport, directory: Path
    ) -> None:
        self.process = process
        #: its standard input
        self.stdin = stdin
        self.directory = directory
        end_in_children(self)

    @classmethod
    async def start(cls, command: Callable[[Path], Sequence[str]], **options: Any) -> Self:
        """``command``: of the directory. Raises OSError."""
        # Not on a thread: a caller that is cancelled meanwhile would leave it behind.
        directory = directory_for_sockets("aioinfer-")
        try:
            read, write = (os.fdopen(end, mode, 0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
            # Not asyncio's own pipe: uvloop does not tell the file of that, see forked().
            with read:
                stdin, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, write)
                try:
                    process = await asyncio.create_subprocess_exec(
                        *command(directory),
                        stdin=read,
                        start_new_session=True,  # signals of a terminal are for this process
                        **options,
                    )
                except BaseException:
                    stdin.close()
                    raise
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return cls(process, stdin, directory)

    async def end(self, seconds: float) -> bool:
        """Close its input, and kill it after some seconds. Whether it has ended by itself."""
        self.stdin.close()
        try:
            async with asyncio.timeout(seconds):
                await self.process.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
            await self.process.wait()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def leave(self) -> None:
        """End it after its loop was closed."""
        self.stdin.get_extra_info("pipe").close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def forked(self) -> None:
        """In a child of a fork, which would hold its input open when it is closed in this process."""
        drop_file(self.stdin.get_extra_info("pipe"))


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
            await finish(self._end(kill=True))
            raise

    async def aclose(self) -> None:
        lost, link = self.state is ReplicaState.LOST, self._link
        if link is not None:
            link.closing = True  # its end is no loss
        try:
            await self._end(kill=lost)
            if link is not None and not lost:  # its last statistics are on their way
                await asyncio.wait([link.connection.gone], timeout=_LAST_WORDS)
        finally:
            await super().aclose()

    @abstractmethod
    async def _spawn(self) -> None:
        """Start a process. Raises EngineError."""

    @abstractmethod
    async def _connect_to_it(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        """Wait until it listens, and connect. Raises EngineError: it has ended."""

    @abstractmethod
    async def _end(self, *, kill: bool) -> None:
        """End it and forget it, at once or in its own time; nothing where there is none. Idempotent."""
