"""Updating: a running engine is given other weights, between two steps.

::

    read and check         finish what runs         nothing in flight     retract, install      go on
    (a worker thread)  ─►  (mode "wait" only)  ─►   (the driver holds) ─► (the launch thread) ─►
    steps go on            steps go on              steps end             no step

Nothing is changed before everything was checked; from the retraction on, an update is completed, whichever
task is cancelled, or the engine has failed. Whatever happens, who asked for it is not told before nothing
is read any more of what it gave.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aioinfer.errors import Cancelled, ConfigError, EngineClosed, EngineError, EngineFailed, shown
from aioinfer.execution.device import Device, UpdatableDevice
from aioinfer.loop.waiting import finish
from aioinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.core import Core
    from aioinfer.loop.driver import Driver
    from aioinfer.loop.intake import Intake

__all__ = [
    *("ABORTED", "Updatable", "UpdateMode", "Updates", "WeightSource"),
    *("check_mode", "check_version", "frozen", "updatable"),
]

#: what becomes of requests that have begun
UpdateMode = Literal["keep", "wait", "abort"]
#: a checkpoint, or its tensors by name, as ``state_dict()`` and ``named_parameters()`` of torch have them
WeightSource = str | PathLike[str] | Mapping[str, Any] | Iterable[tuple[Any, Any]]

_MODES = ("keep", "wait", "abort")
#: said to requests that end for an update
ABORTED = 'the weights of the model were replaced (update_weights with mode "abort")'


class Updatable(Protocol):
    """An engine, as far as it can be given other weights."""

    async def update_weights(self, source: WeightSource, *, mode: UpdateMode, version: int | None) -> int: ...


def frozen(source: WeightSource) -> Path | list[tuple[object, object]]:
    """A copy of what was given, so that the caller may go on with its dict or generator; the tensors are
    the caller's. Raises ConfigError."""
    if isinstance(source, (str, PathLike)):
        return Path(source)
    if isinstance(source, Mapping):
        return [*source.items()]
    if not isinstance(source, Iterable):
        raise ConfigError(f"weights: must be a path, or names and tensors, got {shown(source)}")
    return [*source]


def check_mode(mode: object) -> None:
    """Raise ConfigError for a mode that there is not."""
    if not isinstance(mode, str) or mode not in _MODES:
        raise ConfigError(f"mode: must be one of {', '.join(_MODES)}, got {shown(mode)}")


def check_version(version: int | None, present: int) -> int:
    """The version that follows on the ``present`` one, as far as it is given. Raises ConfigError."""
    if version is None:
        return present + 1
    if type(version) is not int or not present < version < 1 << 63:
        raise ConfigError(f"version: must be an integer greater than {present}, got {shown(version)}")
    return version


def updatable(device: Device) -> UpdatableDevice:
    """The device, if its model can be given other weights. Raises ConfigError."""
    if not isinstance(device, UpdatableDevice):
        raise ConfigError(f"weights: a {type(device).__name__} has none that can be replaced")
    return device


class Updates:
    """Updates of one engine's weights, in the order in which they are asked for. On its loop."""

    def __init__(
        self,
        core: Core,
        launcher: Launcher,
        intake: Intake,
        driver: Driver,
        *,
        end: Callable[[Sequence, Cancelled], None],
        lost: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        """``end`` ends a request; ``lost`` the engine; ``check`` raises unless that serves."""
        self._core = core
        self._launcher = launcher
        self._intake = intake
        self._driver = driver
        self._end = end
        self._lost = lost
        self._check = check
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[int]] = set()
        #: of these, the one that has begun to change something
        self._installing: asyncio.Task[int] | None = None
        self._closed = False
        #: set when a request has ended, while an update waits for those that have begun
        self._ended: asyncio.Future[None] | None = None

    async def update(self, source: WeightSource, mode: UpdateMode, version: int | None) -> int:
        """See :meth:`aioinfer.Engine.update_weights`."""
        check_mode(mode)
        check_version(version, self._core.weight_version)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._update(frozen(source), mode, version), name="aioinfer-updating")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await finish(task, lambda: task is self._installing or task.cancel())
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise EngineClosed("the engine was closed during an update of its weights") from None
            raise

    async def _update(self, given: Any, mode: UpdateMode, version: int | None) -> int:
        async with self._turn:
            prepared = await self._prepared(given)
            try:
                if mode == "wait":
                    self._core.hold_back()
                    await self._until_ended()
                return await self._installed(prepared, mode, version)
            finally:
                if self._core.holding_back:
                    self._core.let_in()
                    self._driver.wake()

    async def _prepared(self, given: Any) -> Any:
        """Weights that were read and checked, on a worker thread. When this is cancelled, the thread stops
        before it raises. Raises ConfigError."""
        prepare = await self._launcher.call(lambda device: updatable(device).prepare_weights)
        stopped = threading.Event()
        reading = self._intake.read_weights(prepare, given, partial(_go_on, stopped))
        return await finish(reading, stopped.set)

    async def _until_ended(self) -> None:
        """Until no request is left that has begun."""
        while self._core.begun:
            self._check()
            self._ended = asyncio.get_running_loop().create_future()
            await self._ended

    def request_ended(self) -> None:
        """A request has ended, or the engine goes no further."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _installed(self, prepared: Any, mode: UpdateMode, version: int | None) -> int:
        core, driver = self._core, self._driver
        try:
            await driver.hold()
            while core.texts.behind:
                self._check()
                await asyncio.sleep(0)  # its search goes on in between
            self._check()
            version = check_version(version, core.weight_version)
            self._installing = asyncio.current_task()
            if mode == "abort":
                for sequence in core.begun:
                    self._end(sequence, Cancelled(ABORTED))
            try:
                ended = core.replace_weights(version)
                await self._launcher.call(lambda device: updatable(device).install_weights(prepared))
            except BaseException as error:
                # Some weights may be the new ones.
                failed = EngineFailed(f"the weights could not be replaced: {error}")
                failed.__cause__ = error
                self._lost(failed)
                raise failed from error
            core.ended += ended
            return version
        finally:
            self._installing = None
            driver.release()

    def close(self) -> None:
        """End those that have not begun to change anything; :meth:`aclose` follows."""
        self._closed = True
        for task in self._tasks:
            if task is not self._installing:
                task.cancel()

    async def aclose(self) -> None:
        """Wait for the others; the launch thread has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


def _go_on(stopped: threading.Event) -> None:
    if stopped.is_set():
        raise EngineError("the update was cancelled")
