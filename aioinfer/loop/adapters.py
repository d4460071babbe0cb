"""Loads and unloads the adapters of an engine: reads files on a worker thread, and has the device take them
between two steps.

::

    caller          worker thread         launch thread                 event loop
    load(a) ──────► prepare ────────────► install, between two steps ─► publish: requests get the new version
                                                                        the old one drains
                                          remove ◄───────────────────── after the last step that read it

A load blocks only its caller and later loads of the same name. Which version a request has is
decided in :mod:`aioinfer.scheduling.adapters`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aioinfer.errors import (
    AioInferError,
    ConfigError,
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    shown,
)
from aioinfer.execution.device import Device, DeviceLost
from aioinfer.inputs import plain
from aioinfer.loop.waiting import NamedLocks
from aioinfer.outputs import AdapterInfo
from aioinfer.scheduling.adapters import AdapterRegistry, AdapterVersion, check_adapter_name

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.intake import Intake
    from aioinfer.model.adapters.base import PreparedAdapter

__all__ = ["AdapterLoads", "checked_path", "of_config", "read_adapter"]

_log = logging.getLogger("aioinfer")
_T = TypeVar("_T")

#: characters of a path, as Linux has it
_LONGEST_PATH = 4096


def checked_path(path: Any) -> str:
    """The path of an adapter as text. Raises InvalidRequest."""
    given = plain(os.fspath(path) if isinstance(path, os.PathLike) else path)
    if type(given) is not str or not given.strip() or "\0" in given or len(given) > _LONGEST_PATH:
        raise InvalidRequest("path", f"must be the path of a directory, got {shown(given)}")
    return given


def read_adapter(device: Device, path: str) -> PreparedAdapter:
    """Read and check an adapter. Blocks; on any thread but the launch thread. Raises ConfigError,
    OutOfMemory, and what else an engine may raise."""
    try:
        return device.prepare_adapter(Path(path).expanduser())
    except AioInferError:
        raise
    except MemoryError as error:
        raise OutOfMemory(f"there is no memory for the adapter {shown(path)}") from error
    except Exception as error:
        raise ConfigError(f"the adapter {shown(path)} cannot be read: {error!r}") from error


@contextmanager
def of_config(name: str) -> Iterator[None]:
    """Raise ConfigError for what is wrong with an adapter of the config."""
    try:
        yield
    except (ConfigError, InvalidRequest) as error:
        raise ConfigError(f"adapters: {shown(name)}: {error}") from error


class AdapterLoads:
    """The loads of one engine. Belongs to the loop on which it is made."""

    def __init__(self, registry: AdapterRegistry, launcher: Launcher, intake: Intake, model: str) -> None:
        """``model``: the name that no adapter may have."""
        self._registry = registry
        self._launcher = launcher
        self._intake = intake
        self._model = model
        self._loop = intake.loop
        #: raises unless the engine serves
        self.check_serving: Callable[[], None] = lambda: None
        #: one load or unload of a name at a time, in the order of the calls
        self._turns = NamedLocks()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        #: done when a slot has come back; None: nothing waits
        self._freed: asyncio.Future[None] | None = None
        #: what empties slots of the device
        self._emptying: set[asyncio.Task[None]] = set()
        registry.when_leaving = self._remove_soon

    async def load(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """As :meth:`aioinfer.Engine.load_adapter`."""
        name, where = plain(name), checked_path(path)
        check_adapter_name(name, self._model)
        self._registry.begin(name)
        try:
            async with self._turns[name]:
                self._check_open()
                prepared = await self._read(where)
                return (await self._install(name, where, prepared)).info
        finally:
            self._registry.end(name)

    async def load_all(self, paths: Mapping[str, str]) -> None:
        """Load the adapters of the config, by name, at the start. Raises ConfigError."""
        for name, path in paths.items():
            with of_config(name):
                await self.load(name, path)

    async def unload(self, name: str) -> None:
        """As :meth:`aioinfer.Engine.unload_adapter`."""
        name = plain(name)
        check_adapter_name(name, "")
        async with self._turns[name]:
            self._check_open()
            if name not in self._registry.loaded:
                raise self._registry.not_loaded(name)
            self._registry.retire(name)

    def _check_open(self) -> None:
        """Raise EngineClosed, EngineFailed."""
        self.check_serving()
        if self._closed.done():
            raise EngineClosed("the engine was closed")

    async def _read(self, path: str) -> PreparedAdapter:
        reading = self._intake.read(read_adapter, self._launcher.device, path)
        try:
            return await self._unless_closed(reading)
        except asyncio.CancelledError:
            reading.cancel()  # others wait for the thread, if it has not begun
            raise

    async def _unless_closed(self, future: asyncio.Future[_T]) -> _T:
        """The result of a future that must not be cancelled. Raises EngineClosed, EngineFailed."""
        await asyncio.wait((future, self._closed), return_when=asyncio.FIRST_COMPLETED)
        if self._closed.done():
            self._check_open()
        return future.result()

    async def _install(self, name: str, path: str, prepared: PreparedAdapter) -> AdapterVersion:
        slot = await self._slot()
        try:
            await self._launcher.call(lambda device: device.install_adapter(slot, prepared))
        except asyncio.CancelledError:
            # It happened or not, and what follows happens after it.
            self._start(self._empty(slot, partial(self._registry.give_back, slot)))
            raise
        except BaseException as error:
            self._registry.give_back(slot)
            self._wake()
            if isinstance(error, DeviceLost):
                self._check_open()
                raise EngineFailed(f"the device is lost: {error}") from error
            if isinstance(error, AioInferError) or not isinstance(error, Exception):
                raise
            raise EngineError(f"the adapter {shown(name)} could not be installed: {error!r}") from error
        return self._registry.publish(
            *(name, path, slot),
            rank=prepared.rank,
            num_bytes=prepared.num_bytes,
            fingerprint=prepared.fingerprint,
        )

    async def _slot(self) -> int:
        """A slot, when one that drains has come back if none is free."""
        while (slot := self._registry.reserve()) is None:
            if self._freed is None:
                self._freed = self._loop.create_future()
            await self._unless_closed(self._freed)
        return slot

    # -- slots that come back -------------------------------------------------------------------

    def _remove_soon(self, version: AdapterVersion) -> None:
        """No request has it, and no step in flight reads it."""
        self._start(self._empty(version.slot, partial(self._registry.freed, version)))

    def _start(self, emptying: Coroutine[Any, Any, None]) -> None:
        if self._closed.done():
            emptying.close()  # the device goes, with all that it has
            return
        task = self._loop.create_task(emptying, name="aioinfer-adapter")
        self._emptying.add(task)
        task.add_done_callback(self._emptying.discard)

    async def _empty(self, slot: int, freed: Callable[[], None]) -> None:
        try:
            await self._launcher.call(lambda device: device.remove_adapter(slot))
        except DeviceLost:
            return
        except Exception:
            _log.exception("the slot %d of an adapter could not be emptied and is not used again", slot)
            return
        freed()
        self._wake()

    def _wake(self) -> None:
        """A slot may be free."""
        freed, self._freed = self._freed, None
        if freed is not None and not freed.done():
            freed.set_result(None)

    # -- closing --------------------------------------------------------------------------------

    def close(self) -> None:
        """End what waits: it raises. Idempotent."""
        if not self._closed.done():
            self._closed.set_result(None)

    async def aclose(self) -> None:
        """The same; returns when nothing is left that calls the launcher, which is closed."""
        self.close()
        if self._emptying:
            await asyncio.wait(self._emptying)
