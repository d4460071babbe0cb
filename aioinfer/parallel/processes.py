"""Processes: replicas in child processes of this one, which are started, restarted and ended with it.

A child is ``aioinfer replica`` on a Unix socket in a directory that only this user can enter. It ends when
the pipe does that it has for standard input, so also when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from aioinfer.config import EngineConfig, ReplicaConfig, ServerConfig
from aioinfer.errors import ConfigError, EngineError, shown
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import Replica, ReplicaState

if TYPE_CHECKING:
    from aioinfer.execution.device import Progress

__all__ = ["ProcessReplica", "Supervisor", "child_config", "remote_replicas"]

_log = logging.getLogger("aioinfer")

#: children of one dispatcher
_MOST = 256
#: what is logged and traced of all children together, by their dispatcher
_DISPATCHERS = ("stats_interval", "tracing")
#: seconds between attempts to connect to a child that loads its model
_POLL = 0.05
#: seconds in which a child that is asked to end has done so
_FAREWELL = 5.0
#: seconds before the first restart; each further one waits twice as long, up to so many
_BACKOFF, _LONGEST = 0.25, 8.0
#: after so many failures in so many seconds, with no request brought to an end, a replica stays down
_MOST_FAILURES, _WINDOW = 3, 60.0
_CONFIG, _SOCKET = "settings.yaml", "socket"


def child_config(config: EngineConfig, children: int) -> dict[str, Any]:
    """The settings of a child, as in a file of settings: all but defaults. On a CPU, children share the
    cores. Raises ConfigError: one cannot be written into a file."""
    found = {
        item.name: value
        for item in dataclasses.fields(config)
        if (value := getattr(config, item.name)) != item.default and item.name not in _DISPATCHERS
    }
    for name, value in found.items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise ConfigError(f"{name} must be a name for replicas in other processes, got {shown(value)}")
    found["download"] = bool(config.download)  # which the command line would do by itself
    if config.threads is None and config.device != "cuda":
        found["threads"] = max(1, _cores() // children)
    return found


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(config: EngineConfig, number: int) -> dict[str, str]:
    """That of this process, without settings, which are in the file; of several GPUs, each child sees one."""
    settings = {
        f"AIOINFER_{item.name.upper()}"
        for kind in (EngineConfig, ServerConfig, ReplicaConfig)
        for item in dataclasses.fields(kind)
    }
    found = {name: value for name, value in os.environ.items() if name not in settings}
    given = found.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        # Numbered from 0 on, whatever the files of those that a container has are called.
        devices = [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    else:
        devices = [each.strip() for each in given.split(",") if each.strip()]
    if len(devices) > 1 and config.device != "cpu":
        found["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    return found


class ProcessReplica(SocketReplica):
    """An engine in a child process, which :meth:`launch` starts and :meth:`aclose` ends."""

    def __init__(self, config: EngineConfig, name: str, *, number: int = 0, children: int = 1) -> None:
        """``number``: of so many ``children``, from 0 on. Raises ConfigError."""
        super().__init__(self._connect_to_child, name)
        self._settings = child_config(config, children)
        self._environ = _environment(config, number)
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None
        #: the command before its options; tests have another one
        self.command = [sys.executable, "-m", "aioinfer"]

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return None if self._process is None else self._process.pid

    async def launch(self, progress: Progress | None = None) -> None:
        """Start a child, wait until it has loaded its model, and connect. Raises as SocketReplica, and
        EngineError: the child has ended."""
        await self._end_child(kill=True)
        try:
            await self._spawn()
            await super().launch(progress)
        except BaseException:
            await asyncio.shield(self._end_child(kill=True))
            raise

    async def aclose(self) -> None:
        lost = self.state is ReplicaState.LOST
        await super().aclose()
        await self._end_child(kill=lost)

    async def _spawn(self) -> None:
        try:
            # Not on a thread: whoever is cancelled meanwhile would leave it behind.
            directory = self._directory = Path(tempfile.mkdtemp(prefix="aioinfer-"))
            settings = self._settings | {"socket": str(directory / _SOCKET)}
            (directory / _CONFIG).write_text(yaml.safe_dump(settings), "utf-8")
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                "replica",
                "--with-parent",
                "--config",
                str(directory / _CONFIG),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                env=self._environ,
                start_new_session=True,  # signals of a terminal are for this process
            )
        except OSError as error:
            raise EngineError(f"the replica {self.name} cannot be started: {error}") from error

    async def _connect_to_child(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        """Raises EngineError: the child has ended."""
        assert self._process is not None
        assert self._directory is not None
        loop, path = asyncio.get_running_loop(), str(self._directory / _SOCKET)
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while not ended.done():
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                    return await loop.create_unix_connection(protocol, path)
                await asyncio.wait([ended], timeout=_POLL)
        finally:
            ended.cancel()
        raise EngineError(f"the replica {self.name} has ended with status {self._process.returncode}")

    async def _end_child(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        directory, self._directory = self._directory, None
        try:
            if process is not None:
                assert process.stdin is not None
                process.stdin.close()
                await self._wait_for(process, kill=kill)
        finally:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)  # of two files

    async def _wait_for(self, process: asyncio.subprocess.Process, *, kill: bool) -> None:
        try:
            if not kill:
                async with asyncio.timeout(_FAREWELL):
                    await process.wait()
        except TimeoutError:
            _log.warning("the replica %s does not end, and is killed", self.name)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def remote_replicas(
    engines: Sequence[object],
    config: EngineConfig | None,
    processes: int,
    addresses: Sequence[str],
    token: str,
) -> list[SocketReplica]:
    """So many child processes, or a replica at each address; none where there are ``engines``. Raises
    ConfigError."""
    if type(processes) is not int or not 0 <= processes <= _MOST:
        raise ConfigError(f"processes must be in [0, {_MOST}], got {shown(processes)}")
    if isinstance(addresses, str) or not all(isinstance(each, str) for each in addresses):
        raise ConfigError(f"addresses must be a list of texts, got {shown(addresses)}")
    if bool(engines) + bool(processes) + bool(addresses) > 1:
        raise ConfigError("processes: one of engines, processes and addresses can be given")
    if config is not None and engines:
        raise ConfigError("config: that of an engine belongs to the engine")
    config = config or EngineConfig()
    children: list[SocketReplica] = [
        ProcessReplica(config, f"process-{number}", number=number, children=processes)
        for number in range(processes)
    ]
    return children or [
        SocketReplica(address, f"remote-{number}", token=token) for number, address in enumerate(addresses)
    ]


class Supervisor:
    """Starts replicas again that were lost, or connects to them. Those that do no work in between are tried
    later each time, and child processes not for ever."""

    def __init__(self, restart: Callable[[str], Awaitable[None]]) -> None:
        """``restart``: that of the dispatcher; it reports another failure as another loss."""
        self._restart = restart
        self._loop = asyncio.get_running_loop()
        self._failures: dict[str, deque[float]] = defaultdict(deque)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def lost(self, replica: Replica) -> None:
        """A replica is lost, and not since it was closed."""
        if self._closed or not isinstance(replica, SocketReplica):
            return
        now, failures = self._loop.time(), self._failures[replica.name]
        if replica.completed:
            failures.clear()
        failures.append(now)
        while failures[0] < now - _WINDOW:
            failures.popleft()
        if len(failures) >= _MOST_FAILURES and isinstance(replica, ProcessReplica):
            _log.error("the replica %s was lost %d times: it stays down", replica.name, len(failures))
            self._run(replica.aclose())
            return
        delay = min(_LONGEST, _BACKOFF * 2 ** (len(failures) - 1))
        self._forget(replica.name)  # of a loss before somebody has tried to restart it
        self._timers[replica.name] = self._loop.call_later(delay, self._again, replica)

    def _forget(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _again(self, replica: Replica) -> None:
        del self._timers[replica.name]
        if replica.state is ReplicaState.LOST:  # nobody else has restarted it
            self._run(self._restarted(replica.name))

    async def _restarted(self, name: str) -> None:
        try:
            await self._restart(name)
        except Exception as error:
            _log.debug("the replica %s cannot be started: %r", name, error)  # which is logged as a loss

    def _run(self, work: Any) -> None:
        task = self._loop.create_task(work, name="aioinfer-replica")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Start nothing any more, and wait until what was begun is given up."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
