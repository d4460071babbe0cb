"""Processes: replicas in child processes of this one, which are started, restarted and ended with it.

A child is ``aioinfer replica`` on a Unix socket in a directory that only this user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from aioinfer.config import EngineConfig, ReplicaConfig, ServerConfig
from aioinfer.errors import ConfigError, EngineError, shown
from aioinfer.parallel.launched import Child, LaunchedReplica
from aioinfer.system.cores import usable_cores

__all__ = ["ProcessReplica", "child_config"]

_log = logging.getLogger("aioinfer")

#: what the dispatcher logs and traces for all children together
_DISPATCHERS = ("stats_interval", "tracing")
#: seconds between attempts to connect to a child that loads its model
_POLL = 0.05
#: seconds in which a child that is asked to end has done so
_FAREWELL = 5.0
_CONFIG, _SOCKET = "settings.yaml", "socket"


def child_config(config: EngineConfig) -> dict[str, Any]:
    """The settings of an engine in another process, as in a file of settings: all but defaults. Raises
    ConfigError: one cannot be written into a file."""
    found = {
        item.name: value
        for item in dataclasses.fields(config)
        if (value := getattr(config, item.name)) != item.default and item.name not in _DISPATCHERS
    }
    for name, value in found.items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise ConfigError(f"{name} must be a name for replicas in other processes, got {shown(value)}")
    found["download"] = bool(config.download)  # which the command line would do by itself
    return found


def _environment(config: EngineConfig, number: int) -> dict[str, str]:
    """That of this process, without settings, which are in the file; of several GPUs, each child sees one,
    unless the device has a number."""
    settings = {
        f"AIOINFER_{item.name.upper()}"
        for kind in (EngineConfig, ServerConfig, ReplicaConfig)
        for item in dataclasses.fields(kind)
    }
    found = {name: value for name, value in os.environ.items() if name not in settings}
    given = found.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        # Numbered from 0 on, also where a container has devices with other names.
        devices = [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    else:
        devices = [each.strip() for each in given.split(",") if each.strip()]
    if len(devices) > 1 and config.device in ("auto", "cuda"):
        found["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    return found


class ProcessReplica(LaunchedReplica):
    """An engine in a child process."""

    def __init__(self, config: EngineConfig, name: str, *, number: int = 0, children: int = 1) -> None:
        """``number``: among the ``children``, from 0 on, which share the cores. Raises ConfigError."""
        super().__init__(name)
        self._settings = child_config(config)
        if config.threads is None and not config.device.startswith("cuda"):
            self._settings["threads"] = max(1, usable_cores() // children)
        self._environ = _environment(config, number)
        self._child: Child | None = None
        #: the command before its options; tests have another one
        self.command = [sys.executable, "-m", "aioinfer"]

    same_host = True

    @property
    def pid(self) -> int | None:
        """Process id of the child, while there is one."""
        return None if self._child is None else self._child.process.pid

    @property
    def ended(self) -> bool:
        return self._child is not None and self._child.process.returncode is not None

    def give_up(self) -> None:
        if self._child is not None:
            self._child.kill()

    def outlive_loop(self) -> None:
        super().outlive_loop()
        child, self._child = self._child, None
        if child is not None:
            child.leave()

    async def _spawn(self) -> None:
        try:
            self._child = await Child.start(
                self._command, stdout=asyncio.subprocess.DEVNULL, env=self._environ
            )
        except OSError as error:
            raise EngineError(f"the replica {self.name} cannot be started: {error}") from error

    def _command(self, directory: Path) -> Sequence[str]:
        settings = self._settings | {"socket": str(directory / _SOCKET)}
        (directory / _CONFIG).write_text(yaml.safe_dump(settings), "utf-8")
        return [*self.command, "replica", "--with-parent", "--config", str(directory / _CONFIG)]

    async def _connect_to_it(self, protocol: Callable[[], asyncio.Protocol]) -> Any:
        assert self._child is not None
        process, path = self._child.process, str(self._child.directory / _SOCKET)
        loop, ended = asyncio.get_running_loop(), asyncio.ensure_future(process.wait())
        try:
            while not ended.done():
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                    return await loop.create_unix_connection(protocol, path)
                await asyncio.wait([ended], timeout=_POLL)
        finally:
            ended.cancel()
        raise EngineError(f"the replica {self.name} has ended with status {process.returncode}")

    async def _end(self, *, kill: bool) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if kill:
            child.kill()
        if not (await child.end(_FAREWELL) or kill):
            _log.warning("the replica %s does not end, and is killed", self.name)
