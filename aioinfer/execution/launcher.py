"""Launchers: the way of a step from the loop to the device and of its result back.

    loop                       launch thread                completion thread (asynchronous devices)
    ────                       ─────────────                ─────────────────
    launch(step) ──inbox────►  device.launch(prepared) ───► flight.wait()   (GIL released)
         │                          │ synchronous device         │
     StepHandle  ◄── one call_soon_threadsafe per step ─────────────┘

Every torch call of an engine happens on its launch thread: a second thread that enters an OpenMP region
slows each step of the first, and grad mode and streams are per thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from aioinfer.execution.device import Device, DeviceInfo, DeviceLost, Flight, Progress, StepResult
from aioinfer.observe.timeline import Lane, Timeline, now
from aioinfer.scheduling.step import Step

__all__ = ["InlineLauncher", "Launcher", "StepHandle", "ThreadLauncher"]

_log = logging.getLogger("aioinfer")


class StepHandle:
    """Where the result of a step arrives on the loop.

    Unlike a future it tells of it at once and not one turn of the loop later: while a device computes, each
    turn costs the loop's thread a fight for the interpreter, and the device's thread the other side of it.
    """

    __slots__ = ("_tell", "delay", "done", "error", "result")

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self.done = False
        self.result: StepResult | None = None
        self.error: BaseException | None = None
        #: seconds that the loop was late to hear of a result
        self.delay = 0.0

    def settle(
        self, result: StepResult | None, error: BaseException | None = None, *, delay: float | None = None
    ) -> None:
        """The step has ended. On the loop's thread. ``delay`` is for loops whose time is not the device's."""
        self.done, self.result, self.error = True, result, error
        if result is not None:
            self.delay = now() - result.done_at if delay is None else delay
        self._tell()


class Launcher(Protocol):
    """Runs a device for one event loop."""

    #: when what was done; the engine adds what the loop does
    timeline: Timeline

    @property
    def blocking(self) -> bool:
        """``launch`` returns when the step is done."""

    @property
    def asynchronous(self) -> bool:
        """The device computes while Python does something else; known when it is open."""

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        """Open the device. Raises what opening raised."""

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        """Put a step in flight behind all earlier ones. When it has ended, ``landed`` is called on the loop,
        perhaps before this returns; the landing has the step's result then, or the device's exception:
        ``DeviceLost`` if no later step can succeed."""

    async def aclose(self, timeout: float = 10.0) -> bool:
        """Close the device; False if it did not come to rest within ``timeout`` seconds."""


class _Poster:
    """Has things done on one loop from any thread, with one ``call_soon_threadsafe`` each."""

    def __init__(self, device: Device, loop: asyncio.AbstractEventLoop) -> None:
        self.device = device
        self.loop = loop

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            _log.debug("a result came in after its loop was closed")

    def land(self, flight: Flight, landing: StepHandle) -> None:
        """Wait for a flight and post what came of it."""
        try:
            result = flight.wait()
        except BaseException as error:
            self.post(landing.settle, None, _diagnose(self.device, error))
        else:
            self.post(landing.settle, result)


class _CompletionThread:
    """Waits for the flights of an asynchronous device, in order, so that launching never does.

    ``rested`` is called on the loop when it has come to its end.
    """

    def __init__(self, poster: _Poster, rested: Callable[[], None] | None = None) -> None:
        self._poster = poster
        self._rested = rested
        self._flights: SimpleQueue[tuple[Flight, StepHandle] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aioinfer-completion", daemon=True)
        self._thread.start()

    def submit(self, flight: Flight, landing: StepHandle) -> None:
        self._flights.put((flight, landing))

    def end(self) -> None:
        """Submit no more; the thread ends when every flight has."""
        self._flights.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (item := self._flights.get()) is not None:
            self._poster.land(*item)
            del item
        if self._rested is not None:
            self._poster.post(self._rested)


class ThreadLauncher:
    """Launches on one dedicated thread, so that the loop never waits for a forward."""

    #: as in Launcher
    blocking = False

    def __init__(self, device: Device) -> None:
        self.timeline = Timeline()
        self._device = device
        self._inbox: _Inbox = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rested: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def asynchronous(self) -> bool:
        """As in Launcher."""
        return not self._device.synchronous

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        self._loop = loop = asyncio.get_running_loop()
        self._device.lane = self.timeline.device
        opened: asyncio.Future[DeviceInfo] = loop.create_future()
        self._rested = loop.create_future()
        # A daemon: a device that hangs must not keep the interpreter from exiting. aclose() joins it.
        self._thread = threading.Thread(
            target=_launch_thread,
            args=(
                self._inbox,
                _Poster(self._device, loop),
                opened,
                self._rested,
                progress,
                self.timeline.launch,
            ),
            name="aioinfer-launch",
            daemon=True,
        )
        self._thread.start()
        return await opened

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        landing = StepHandle(landed)
        self._inbox.put((step.id, self._device.prepare(step), landing))
        return landing

    async def aclose(self, timeout: float = 10.0) -> bool:
        if self._rested is None or self._thread is None:
            return True
        self._inbox.put(None)
        if not await _in_time(self._rested, timeout):
            return False
        self._thread.join()
        self._rested = None
        return True

    def __del__(self) -> None:
        # Dropped without being closed, say because its loop died: let the thread end.
        self._inbox.put(None)


def _launch_thread(
    inbox: _Inbox,
    poster: _Poster,
    opened: asyncio.Future[DeviceInfo],
    rested: asyncio.Future[None],
    progress: Progress | None,
    lane: Lane,
) -> None:
    """The launch thread, from opening the device to closing it. Knows nothing of its launcher."""
    device = poster.device
    try:
        poster.post(_settle, opened, device.open(progress))
    except BaseException as error:
        _empty_frames(error)
        poster.post(_settle, opened, None, error)
    completion = None if device.synchronous else _CompletionThread(poster)
    while (item := inbox.get()) is not None:
        step, prepared, landing = item
        start = now()
        try:
            flight = device.launch(prepared)
            lane.add("launch", step, start, now())
        except BaseException as error:
            poster.post(landing.settle, None, _diagnose(device, error))
        else:
            if completion is None:
                poster.land(flight, landing)
            else:
                completion.submit(flight, landing)
            del flight
        del item, prepared, landing
    if completion is not None:
        completion.end()
        completion.join()
    _close(device)
    poster.post(_settle, rested, None)


#: step id, what the device prepared, and whom to tell
_Inbox = SimpleQueue[tuple[int, Any, StepHandle] | None]


class InlineLauncher:
    """Launches on the loop's own thread: for study, for comparison, and for tiny models.

    The loop stands still while a synchronous device computes. Asynchronous devices get a completion
    thread, as above: no step is waited for on the loop, but by the step behind it that has grammars.
    """

    def __init__(self, device: Device) -> None:
        self.timeline = Timeline()
        self._device = device
        self._completion: _CompletionThread | None = None
        #: set when the completion thread has ended and the device is closed
        self._rested: asyncio.Future[None] | None = None

    @property
    def blocking(self) -> bool:
        """As in Launcher."""
        return self._completion is None

    @property
    def asynchronous(self) -> bool:
        """As in Launcher."""
        return not self._device.synchronous

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        self._device.lane = self.timeline.device
        try:
            info = self._device.open(progress)
        except BaseException as error:
            _empty_frames(error)
            raise
        if not self._device.synchronous:
            loop = asyncio.get_running_loop()
            self._rested = rested = loop.create_future()
            # Knows nothing of its launcher.
            close = partial(_close_at_rest, self._device, rested)
            self._completion = _CompletionThread(_Poster(self._device, loop), close)
        return info

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        landing = StepHandle(landed)
        prepared = self._device.prepare(step)
        start = now()
        try:
            flight = self._device.launch(prepared)
            self.timeline.launch.add("launch", step.id, start, now())
            if self._completion is not None:
                self._completion.submit(flight, landing)
                return landing
            result = flight.wait()
        except Exception as error:
            landing.settle(None, _diagnose(self._device, error))
        else:
            landing.settle(result)
        return landing

    async def aclose(self, timeout: float = 10.0) -> bool:
        if self._completion is None or self._rested is None:
            _close(self._device)
            return True
        self._completion.end()
        if not await _in_time(self._rested, timeout):
            return False
        self._completion.join()
        self._completion = None
        return True

    def __del__(self) -> None:
        # As in ThreadLauncher.
        if self._completion is not None:
            self._completion.end()


async def _in_time(rested: asyncio.Future[None], timeout: float) -> bool:
    """Whether the device came to rest within so many seconds. What it does after is its own affair."""
    try:
        async with asyncio.timeout(timeout):
            await asyncio.shield(rested)
    except TimeoutError:
        _log.error("the device did not come to rest within %g s; its thread is left behind", timeout)
        return False
    return True


def _close_at_rest(device: Device, rested: asyncio.Future[None]) -> None:
    _close(device)
    _settle(rested, None)


def _close(device: Device) -> None:
    try:
        device.close()
    except Exception:
        _log.exception("closing the device failed")


def _diagnose(device: Device, error: BaseException) -> BaseException:
    """The step's own error if the device can go on, DeviceLost from it if not."""
    _empty_frames(error)
    if isinstance(error, DeviceLost):
        return error
    if not isinstance(error, Exception):
        return DeviceLost(f"the device raised {error!r}")
    try:
        device.check()
    except BaseException as lost:
        wrapped = lost if isinstance(lost, DeviceLost) else DeviceLost(str(lost))
        wrapped.__cause__ = error
        return wrapped
    return error


def _empty_frames(error: BaseException | None) -> None:
    """Free what an error holds through the frames that it passed: tensors of a step, or all of a model.

    Whoever handles it may want that memory, and may keep the error for as long as they like.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
        return
    if isinstance(error, (StopIteration, asyncio.CancelledError, KeyboardInterrupt, SystemExit)):
        # A future cannot carry these, or the loop would take them as meant for itself.
        error = DeviceLost(f"the device raised {error!r}")
    future.set_exception(error)
