"""Launchers: carry a step from the loop to the device and its result back to the loop.

    loop                       launch thread                completion thread (asynchronous devices)
    ────                       ─────────────                ─────────────────
    launch(step) ──inbox────►  device.launch(prepared) ───► flight.wait()   (GIL released)
         │                          │ synchronous device         │
     StepHandle  ◄── one call_soon_threadsafe per step ──────────┘

Every torch call of an engine happens on its launch thread: a second thread that enters an OpenMP region
slows each step of the first, and grad mode and streams are per thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from aioinfer.execution.device import Device, DeviceInfo, DeviceLost, Flight, Progress, StepResult
from aioinfer.execution.opening import Opening
from aioinfer.observe.timeline import Lane, Timeline, now
from aioinfer.scheduling.step import Step

__all__ = ["InlineLauncher", "Launcher", "StepHandle", "ThreadLauncher"]

_log = logging.getLogger("aioinfer")

_T = TypeVar("_T")


class StepHandle:
    """A step in flight, as the loop sees it: the step, and its result once the device has answered.

    Unlike a future it calls back at once and not one turn of the loop later: while a device computes, the
    loop's thread and the device's thread contend for the interpreter lock at every turn.
    """

    __slots__ = ("_landed", "delay", "done", "error", "launched", "launched_at", "result", "step")

    def __init__(self, step: Step, landed: Callable[[], None]) -> None:
        self._landed = landed
        self.step = step
        #: False for a step that only keeps its place in the order: it could not be packed
        self.launched = True
        #: on the loop's clock, in seconds; set by the driver
        self.launched_at = 0.0
        self.done = False
        self.result: StepResult | None = None
        self.error: BaseException | None = None
        #: seconds between the end of the step on the device and :meth:`settle`
        self.delay = 0.0

    def settle(
        self, result: StepResult | None, error: BaseException | None = None, *, delay: float | None = None
    ) -> None:
        """Store what the step ended with, and call back. On the loop's thread.

        ``delay`` (seconds) replaces the measured one where the loop's clock is not the device's.
        """
        self.done, self.result, self.error = True, result, error
        if result is not None:
            self.delay = now() - result.done_at if delay is None else delay
        self._landed()


class Launcher(Protocol):
    """Runs a device for one event loop."""

    #: of launch thread and device; the driver adds the loop's lane
    timeline: Timeline
    #: for its methods that any thread may call
    device: Device

    @property
    def blocking(self) -> bool:
        """``launch`` returns when the step is done."""

    @property
    def asynchronous(self) -> bool:
        """The device computes while Python does something else; known once the device is open."""

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        """Open the device. Raises what opening raised."""

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        """Put a step in flight after all earlier ones. When it has ended, ``landed`` is called on the loop,
        perhaps before this returns; by then the handle holds the step's result, or the device's exception:
        ``DeviceLost`` if no later step can succeed. Raises what packing the step raised; the step is not in
        flight then."""

    def watch(self, lost: Callable[[BaseException], None]) -> None:
        """Have ``lost``, a bound method, called on the loop when a thread ends that was not asked to, or soon
        if that has happened. Holds no reference to its object."""

    async def call(self, work: Callable[[Device], _T]) -> _T:
        """Result of ``work(device)``, called on the launch thread between two steps, after all that are
        launched by now; on an asynchronous device these may still compute. Later steps wait for it: it must
        be short. Cancelled, it happens or not. Raises what it raises, and DeviceLost if the thread ends."""

    async def aclose(self, timeout: float = 10.0) -> bool:
        """Close the device; False if it is still busy after ``timeout`` seconds. One that is still being
        opened is told to stop."""


class _Watch:
    """Reports a thread that ended unasked, once. The thread itself calls it on its way out: nothing polls."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lost: weakref.WeakMethod[Callable[[BaseException], None]] | None = None
        self._error: BaseException | None = None

    def tell(self, lost: Callable[[BaseException], None]) -> None:
        """Report to ``lost`` from now on. On the loop."""
        self._lost = weakref.WeakMethod(lost)
        if self._error is not None:
            self._loop.call_soon(self.report, self._error)

    def report(self, error: BaseException) -> None:
        """A thread has ended with ``error``. On the loop."""
        self._error = error
        lost = None if self._lost is None else self._lost()
        if lost is not None:
            lost(error)


class _Poster:
    """Schedules calls on one loop from any thread, with one ``call_soon_threadsafe`` each."""

    def __init__(self, device: Device, loop: asyncio.AbstractEventLoop) -> None:
        self.device = device
        self.loop = loop
        self.watch = _Watch(loop)

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            _log.debug("a result arrived after its loop was closed")

    def died(self, thread: str, error: BaseException) -> DeviceLost:
        """A thread ends with an error that escaped it: report it, as the DeviceLost that is returned."""
        _empty_frames(error)
        lost = DeviceLost(f"the {thread} thread ended: {error!r}")
        lost.__cause__ = error
        self.post(self.watch.report, lost)
        return lost

    def land(self, flight: Flight, handle: StepHandle) -> None:
        """Wait for a flight and post its result or its error."""
        try:
            result = flight.wait()
        except BaseException as error:
            self.post(handle.settle, None, _diagnose(self.device, error))
        else:
            self.post(handle.settle, result)


class _CompletionThread:
    """Waits for the flights of an asynchronous device, in order, so that the launch thread never waits.

    ``rested`` is called on the loop when the thread has ended.
    """

    def __init__(self, poster: _Poster, rested: Callable[[], None] | None = None) -> None:
        self._poster = poster
        self._rested = rested
        self._flights: SimpleQueue[tuple[Flight, StepHandle] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aioinfer-completion", daemon=True)
        self._thread.start()

    def submit(self, flight: Flight, handle: StepHandle) -> None:
        self._flights.put((flight, handle))

    def end(self) -> None:
        """Accept no more flights; the thread ends after the last one."""
        self._flights.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._flights.get()) is not None:
                self._poster.land(*item)
                del item
        except BaseException as error:
            self._poster.died("completion", error)
        if self._rested is not None:
            self._poster.post(self._rested)


class ThreadLauncher:
    """Launches on one dedicated thread, so that the loop never waits for a forward."""

    blocking = False

    def __init__(self, device: Device) -> None:
        self.timeline = Timeline()
        self.device = device
        self._inbox: _Inbox = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rested: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._opening: Opening | None = None
        self._poster: _Poster | None = None
        #: of calls that have not returned
        self._calls: set[asyncio.Future[Any]] = set()

    @property
    def asynchronous(self) -> bool:
        return not self.device.synchronous

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        self._loop = loop = asyncio.get_running_loop()
        self._opening = Opening(progress)
        self.device.lane = self.timeline.device
        opened: asyncio.Future[DeviceInfo] = loop.create_future()
        rested: asyncio.Future[None] = loop.create_future()
        self._poster = _Poster(self.device, loop)
        # A daemon: a device that hangs must not keep the interpreter from exiting. aclose() joins it.
        thread = threading.Thread(
            target=_launch_thread,
            args=(self._inbox, self._poster, opened, rested, self._opening, self.timeline.launch),
            name="aioinfer-launch",
            daemon=True,
        )
        thread.start()
        # Only now: nothing waits for a thread that could not be started.
        self._thread, self._rested = thread, rested
        return await opened

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        handle = StepHandle(step, landed)
        self._inbox.put((self.device.prepare(step), handle))
        return handle

    def watch(self, lost: Callable[[BaseException], None]) -> None:
        assert self._poster is not None, "not started"
        self._poster.watch.tell(lost)

    async def call(self, work: Callable[[Device], _T]) -> _T:
        assert self._loop is not None, "not started"
        rested, done = self._rested, self._loop.create_future()
        if rested is None or rested.done():
            raise DeviceLost("the device is closed")
        self._calls.add(done)
        self._inbox.put(_Call(work, done))
        try:
            await asyncio.wait((done, rested), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise DeviceLost("the launch thread ended")
            result: _T = done.result()
            return result
        finally:
            self._calls.discard(done)

    async def aclose(self, timeout: float = 10.0) -> bool:
        if self._rested is None or self._thread is None:
            return True
        if self._opening is not None:
            self._opening.cancel()
        self._inbox.put(None)
        if not await _in_time(self._rested, timeout):
            for call in self._calls:
                _settle(call, None, DeviceLost("the launch thread is left behind"))
            return False
        self._thread.join()
        self._rested = None
        return True

    def __del__(self) -> None:
        # Dropped without being closed, for example because its loop died: let the thread end.
        self._inbox.put(None)


def _launch_thread(
    inbox: _Inbox,
    poster: _Poster,
    opened: asyncio.Future[DeviceInfo],
    rested: asyncio.Future[None],
    opening: Opening,
    lane: Lane,
) -> None:
    """The launch thread, from opening the device to closing it. Holds no reference to its launcher, so that a
    dropped launcher is collected."""
    device, completion = poster.device, None
    try:
        info = device.open(opening)
        if not device.synchronous:
            completion = _CompletionThread(poster)
        poster.post(_settle, opened, info)
    except BaseException as error:
        _empty_frames(error)
        poster.post(_settle, opened, None, error)
    try:
        _serve(inbox, poster, completion, lane)
    except BaseException as error:
        poster.died("launch", error)
    if completion is not None:
        completion.end()
        completion.join()
    _close(device)
    poster.post(_settle, rested, None)


def _serve(inbox: _Inbox, poster: _Poster, completion: _CompletionThread | None, lane: Lane) -> None:
    """Launch what comes, until the end is asked for."""
    device = poster.device
    while (item := inbox.get()) is not None:
        if isinstance(item, _Call):
            item.make(poster)
            del item
            continue
        prepared, handle = item
        start = now()
        try:
            flight = device.launch(prepared)
            lane.add("launch", handle.step.id, start, now())
        except BaseException as error:
            poster.post(handle.settle, None, _diagnose(device, error))
        else:
            if completion is None:
                poster.land(flight, handle)
            else:
                completion.submit(flight, handle)
            del flight
        del item, prepared, handle


class _Call:
    """A call between two steps; its future belongs to the loop."""

    __slots__ = ("_done", "_work")

    def __init__(self, work: Callable[[Device], Any], done: asyncio.Future[Any]) -> None:
        self._work = work
        self._done = done

    def make(self, poster: _Poster) -> None:
        """Make the call, on the launch thread."""
        try:
            result = self._work(poster.device)
        except BaseException as error:
            _empty_frames(error)
            poster.post(_settle, self._done, None, error)
        else:
            poster.post(_settle, self._done, result)


#: what the device prepared for a step, and the step's handle, or a call; None ends the launch thread
_Inbox = SimpleQueue["tuple[Any, StepHandle] | _Call | None"]


class InlineLauncher:
    """Launches on the loop's own thread: for study, for comparison, and for tiny models.

    The loop is blocked while a synchronous device computes. Asynchronous devices get a completion thread, as
    above: the loop waits for a step only where the next one has grammars.
    """

    def __init__(self, device: Device) -> None:
        self.timeline = Timeline()
        self.device = device
        self._completion: _CompletionThread | None = None
        self._poster: _Poster | None = None
        #: set when the completion thread has ended and the device is closed
        self._rested: asyncio.Future[None] | None = None

    @property
    def blocking(self) -> bool:
        return self._completion is None

    @property
    def asynchronous(self) -> bool:
        return not self.device.synchronous

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        self.device.lane = self.timeline.device
        try:
            info = self.device.open(Opening(progress))
        except BaseException as error:
            _empty_frames(error)
            raise
        if not self.device.synchronous:
            loop = asyncio.get_running_loop()
            self._rested = rested = loop.create_future()
            # Without a reference to the launcher, as above.
            close = partial(_close_at_rest, self.device, rested)
            self._poster = _Poster(self.device, loop)
            self._completion = _CompletionThread(self._poster, close)
        return info

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        handle = StepHandle(step, landed)
        prepared = self.device.prepare(step)
        start = now()
        try:
            flight = self.device.launch(prepared)
            self.timeline.launch.add("launch", step.id, start, now())
            if self._completion is not None:
                self._completion.submit(flight, handle)
                return handle
            result = flight.wait()
        except (KeyboardInterrupt, SystemExit):
            raise  # meant for the loop, on whose thread this is
        except BaseException as error:
            handle.settle(None, _diagnose(self.device, error))
        else:
            handle.settle(result)
        return handle

    def watch(self, lost: Callable[[BaseException], None]) -> None:
        if self._poster is not None:
            self._poster.watch.tell(lost)

    async def call(self, work: Callable[[Device], _T]) -> _T:
        return work(self.device)

    async def aclose(self, timeout: float = 10.0) -> bool:
        if self._completion is None or self._rested is None:
            _close(self.device)
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
    """True if the device came to rest within ``timeout`` seconds."""
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
    """The step's own error if the device still works; if not, DeviceLost with that error as its cause."""
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
    """Free tensors, or a whole model, that an error keeps alive through its traceback."""
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
        # A future refuses StopIteration, and the loop would treat the others as its own.
        error = DeviceLost(f"the device raised {error!r}")
    future.set_exception(error)
