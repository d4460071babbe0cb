"""Driver: what goes on behind an engine. Plan, launch, resolve, and wait for nothing.

Read :meth:`Driver._turn` first. It is the whole life of the engine: launch while the in-flight window has
room and there is something to compute; if not, resolve the oldest flight, when it has landed. It is a
callback of the loop, called when a flight lands and, a turn of the loop later, when :meth:`Driver.wake` was.
The window's last place is kept free until the oldest flight is about to land: see
:mod:`aioinfer.loop.pacing`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from aioinfer.execution.device import DeviceLost, StepOutOfMemory
from aioinfer.loop.pacing import Pace
from aioinfer.observe.timeline import Timeline, now
from aioinfer.scheduling.audit import check_idle
from aioinfer.scheduling.request import Request

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher, StepHandle
    from aioinfer.loop.core import Core
    from aioinfer.loop.tuning import Garbage
    from aioinfer.scheduling.step import Step

__all__ = ["Driver"]

_log = logging.getLogger("aioinfer")


class Driver:
    """Keeps up to ``window`` steps in flight ahead of the one being read.

    ``admitted`` hears of requests that got their first row, ``moved`` of those that a resolved step gave a
    token or an end, ``lost`` of the error after which nothing can go on: DeviceLost, or whatever else.
    ``garbage`` is told when to collect, and when not. ``pace`` says how late a step may be planned; None is
    as early as the window allows.
    """

    __slots__ = (
        "_admitted",
        "_context",
        "_core",
        "_due",
        "_flights",
        "_garbage",
        "_last_progress",
        "_launcher",
        "_loop",
        "_lost",
        "_moved",
        "_pace",
        "_quiet",
        "_stopping",
        "_timeline",
        "_timer",
        "_turning",
        "_window",
        "failed_checks",
        "paused",
    )

    def __init__(
        self,
        core: Core,
        launcher: Launcher,
        window: int,
        *,
        admitted: Callable[[Request], None],
        moved: Callable[[Request], None],
        lost: Callable[[BaseException], None],
        timeline: Timeline,
        garbage: Garbage | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._garbage = garbage
        self._pace = pace
        self._timeline = timeline
        self._core = core
        self._launcher = launcher
        self._window = window
        self._admitted = admitted
        self._moved = moved
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        #: whoever wakes the driver, what it does is not done in their context
        self._context = contextvars.copy_context()
        #: steps, where their results arrive, and when they were launched
        self._flights: deque[tuple[Step, StepHandle, float]] = deque()
        #: when the next step is planned, unless something else happens before
        self._timer: asyncio.TimerHandle | None = None
        #: a turn will come; one is going on
        self._due = False
        self._turning = False
        self._stopping = False
        self.paused = False
        #: set while pause() waits for the steps in flight
        self._quiet: asyncio.Future[None] | None = None
        #: times the idle engine held what it should not
        self.failed_checks = 0
        #: when a step last resolved, or work began to be there
        self._last_progress = self._loop.time()

    def wake(self) -> None:
        """Something changed that may allow a plan. On the loop's thread only."""
        self._interrupt()
        self._again()

    def _interrupt(self) -> None:
        """Steps in flight compute no more rounds than the one they are in."""
        for step, _, _ in self._flights:
            if step.multi_step is not None:
                step.multi_step.interrupted = True

    def _again(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._woken, context=self._context)

    def work_arrives(self) -> None:
        """Call before a request is submitted, and :meth:`wake` after."""
        if not (self._flights or self._core.scheduler.queues.has_work):
            self._last_progress = self._loop.time()

    def stop(self) -> None:
        """Launch and resolve no more."""
        self._stopping = True
        if self._garbage is not None:
            self._garbage.rest()
        self._cancel_timer()
        self._set_quiet()
        self.wake()

    async def pause(self) -> None:
        """Launch no more steps; returns when those in flight have resolved, or after :meth:`stop`."""
        self.paused = True
        self._interrupt()
        while self.paused and self._flights and not self._stopping:
            if self._quiet is None or self._quiet.done():
                self._quiet = self._loop.create_future()
            await asyncio.shield(self._quiet)

    def resume(self) -> None:
        """Go on after :meth:`pause`. Idempotent."""
        self.paused = False
        self._last_progress = self._loop.time()
        self._set_quiet()
        self.wake()

    @property
    def steps_in_flight(self) -> int:
        return len(self._flights)

    @property
    def stalled(self) -> float:
        """Seconds since a step last resolved; 0 while there is nothing to compute."""
        working = self._flights or (self._core.scheduler.queues.has_work and not self.paused)
        return self._loop.time() - self._last_progress if working else 0.0

    # -- inside ---------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Launch what may be launched, and resolve one step if it has landed."""
        flights, resolved = self._flights, False
        while not self._stopping:
            if resolved and self._launcher.blocking:
                # Consumers first: launching would compute the next step.
                self._again()
                return
            if self._may_launch and not self._put_off() and (step := self._plan()) is not None:
                self._launch(step)
            elif not flights:
                self._rest()
                return
            elif not flights[0][1].done:
                return
            elif resolved:
                # Consumers get a turn after every step, also when the device is always ahead.
                self._again()
                return
            else:
                self._resolve(*flights.popleft())
                resolved = True

    def _woken(self) -> None:
        self._due = False
        self._landed()

    def _landed(self) -> None:
        """A flight has landed, perhaps within a turn, or there may be more to launch."""
        if self._turning:
            return
        self._turning = True
        try:
            self._turn()
        except BaseException as error:
            self._lost(error)
            if not isinstance(error, Exception):
                raise  # an interrupt, say: it is meant for the loop, too
        finally:
            self._turning = False

    @property
    def _may_launch(self) -> bool:
        return len(self._flights) <= self._window and not self.paused

    def _put_off(self) -> bool:
        """Whether the step that fills the window is planned later; a timer is set for that, then."""
        if self._pace is None or not self._flights or len(self._flights) < self._window:
            return False
        step, landing, launched = self._flights[0]
        spare = 0.0 if landing.done else self._pace.spare(step, launched, self._loop.time())
        if spare > 0.0 and self._timer is None:
            self._timer = self._loop.call_later(spare, self._put_off_no_longer, context=self._context)
        return spare > 0.0

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _put_off_no_longer(self) -> None:
        self._timer = None
        self._landed()

    def _plan(self) -> Step | None:
        start = now()
        step = self._core.plan(self._flights[-1][0] if self._flights else None)
        if step is not None:
            self._timeline.loop.add("plan", step.id, start, now())
        return step

    def _launch(self, step: Step) -> None:
        start = now()
        landing = self._launcher.launch(step, self._landed)
        self._timeline.loop.add("pack", step.id, start, now())
        self._flights.append((step, landing, self._loop.time()))
        if self._garbage is not None:
            self._garbage.launched()
        for request in self._core.admitted:
            self._admitted(request)

    def _resolve(self, step: Step, landing: StepHandle, launched: float) -> None:
        """Commit a landed flight and tell of it."""
        self._last_progress = self._loop.time()
        self._cancel_timer()
        start = now()
        error, result, what = landing.error, landing.result, "resolve"
        if isinstance(error, DeviceLost):
            raise error
        if error is None:
            assert result is not None
            self._timeline.noticed(landing.delay)
            if self._pace is not None:
                self._pace.landed(step, launched, self._last_progress, landing.delay)
            moved = self._core.resolve(step, result)
        else:
            if isinstance(error, StepOutOfMemory):
                what = "run out"
                _log.warning("step %d of %d tokens ran out of memory: %s", step.id, step.num_tokens, error)
            else:
                _log.error("step %d failed: %r", step.id, error)
            moved = self._core.fail(step, error)
        resolved = now()
        for request in moved:
            self._moved(request)
        self._timeline.loop.add(what, step.id, start, resolved)
        self._timeline.loop.add("deliver", step.id, resolved, now())

    def _rest(self) -> None:
        """Nothing is in flight and nothing can be: a moment to look whether everything was given back."""
        self._set_quiet()
        self._timeline.device.rest()
        if self._garbage is not None:
            self._garbage.rest()
        if self._core.scheduler.queues.has_unfinished:
            return
        try:
            check_idle(self._core.scheduler)
        except AssertionError as error:
            if not self.failed_checks:
                _log.error("the idle engine holds what it should not: %s", error)
            self.failed_checks += 1

    def _set_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)
