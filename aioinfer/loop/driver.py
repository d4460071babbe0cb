"""Driver: plans, launches and resolves the steps of a running engine, and never blocks.

Read :meth:`Driver._turn` first. It launches while fewer than ``overlap_steps`` + 1 steps are in flight and
there is something to compute; otherwise it resolves the oldest flight once that has landed. It runs as a
callback of the loop: when a flight lands, and one turn of the loop after :meth:`Driver.wake`. The last of
these steps is launched only when the oldest flight is about to land: see :mod:`aioinfer.loop.pacing`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from aioinfer.errors import StepFailed
from aioinfer.execution.device import DeviceLost, StepOutOfMemory
from aioinfer.loop.pacing import Pace
from aioinfer.observe.observers import Observers
from aioinfer.observe.timeline import now
from aioinfer.scheduling.audit import check_idle
from aioinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher, StepHandle
    from aioinfer.loop.core import Core
    from aioinfer.loop.tuning import Garbage
    from aioinfer.scheduling.step import Step

__all__ = ["Driver", "DriverEvents"]

_log = logging.getLogger("aioinfer")

#: seconds of searching for stop patterns in a turn of the loop; one search may exceed it
_SEARCHING = 0.002
#: turns of the loop between two steps that are computed on its thread: what the first brings about, such as
#: an answer and the next question, takes some turns to arrive, each of which would wait for a step
_TURNS = 3


class DriverEvents(Protocol):
    """Events that a driver reports to its engine, on the loop's thread."""

    def admitted(self, sequence: Sequence) -> None:
        """The request has a row in a launched step for the first time."""

    def updated(self, sequence: Sequence) -> None:
        """A resolved step gave the request tokens, a draft or its end."""

    def asked(self, sequences: list[Sequence]) -> None:
        """The logits processors of these requests are to decide how they go on."""

    def moved(self, sequences: list[Sequence]) -> list[Sequence]:
        """The same for the requests of a step, as far as they go on and no task waits for their tokens;
        returns the others."""

    def lost(self, cause: BaseException) -> None:
        """No step can succeed any more: DeviceLost, or an error of the driver itself."""

    def audit(self) -> None:
        """Assert that every open request is where it should be. O(pages and requests)."""


class Driver:
    """Keeps up to ``overlap_steps`` steps in flight ahead of the one whose result is read next.

    ``garbage`` collects between steps. ``pace`` delays planning towards the end of the step in flight; None
    plans as early as possible.
    """

    __slots__ = (
        "_by_steps",
        "_catching_up",
        "_clock",
        "_context",
        "_core",
        "_due",
        "_events",
        "_flights",
        "_garbage",
        "_holds",
        "_last_progress",
        "_launcher",
        "_loop",
        "_observers",
        "_overlap_steps",
        "_pace",
        "_quiet",
        "_stepped",
        "_stopping",
        "_timeline",
        "_timer",
        "_turning",
        "_turns",
        "failed_checks",
        "paused",
    )

    def __init__(
        self,
        core: Core,
        launcher: Launcher,
        overlap_steps: int,
        events: DriverEvents,
        *,
        garbage: Garbage | None = None,
        pace: Pace | None = None,
        observers: Observers | None = None,
    ) -> None:
        self._core = core
        self._clock = core.clock
        self._launcher = launcher
        self._overlap_steps = overlap_steps
        self._events = events
        self._observers = Observers() if observers is None else observers
        self._garbage = garbage
        self._pace = pace
        self._timeline = launcher.timeline
        self._loop = asyncio.get_running_loop()
        #: turns run in this context, not in that of the task that calls wake()
        self._context = contextvars.copy_context()
        self._flights: deque[StepHandle] = deque()
        #: when the next step is planned, unless something else happens before
        self._timer: asyncio.TimerHandle | None = None
        #: the search for stop patterns goes on soon
        self._catching_up = False
        #: a turn is scheduled
        self._due = False
        #: a turn is running
        self._turning = False
        #: turns of the loop that are left before the next turn of this driver
        self._turns = 0
        self._stopping = False
        self.paused = False
        #: it goes on by :meth:`step` only, until :meth:`pause` or :meth:`resume`; set while that waits
        self._by_steps = False
        self._stepped: asyncio.Future[None] | None = None
        #: updates of the weights that nothing is launched beside
        self._holds = 0
        #: set while pause() waits for the steps in flight
        self._quiet: asyncio.Future[None] | None = None
        #: idle checks that found pages or slots still held
        self.failed_checks = 0
        #: when a step last resolved, or when work arrived at an idle engine
        self._last_progress = self._clock()

    def wake(self) -> None:
        """Schedule a turn, since a plan may be possible now. On the loop's thread only."""
        self._interrupt()
        self.nudge()

    def _interrupt(self) -> None:
        """Make steps in flight return after the round that they are computing."""
        for flight in self._flights:
            if flight.step.multi_step is not None:
                flight.step.multi_step.interrupted = True

    def nudge(self) -> None:
        """As :meth:`wake`, and let steps of several rounds go on."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._woken, context=self._context)

    def work_arrives(self) -> None:
        """Call before a request is submitted, and :meth:`wake` after."""
        if not (self._flights or self._core.scheduler.queues.has_work):
            self._last_progress = self._clock()

    def stop(self) -> None:
        """Launch and resolve nothing more."""
        self._stopping = True
        if self._garbage is not None:
            self._garbage.rest()
        self._cancel_timer()
        self._set_quiet()
        self._set_stepped()
        self.wake()

    async def pause(self) -> None:
        """Launch no more steps; returns when those in flight have resolved, or after :meth:`stop`."""
        self.paused, self._by_steps = True, False
        self._interrupt()
        self.wake()
        while self.paused and self._flights and not self._stopping:
            self._by_steps = False  # a step that waited with this may have begun since
            await self._until_quiet()

    async def step(self) -> None:
        """Launch what may be launched and wait until a step has resolved, if need be after its pages have
        arrived; returns at once if there is nothing to compute. While paused, go no further; several calls at
        a time wait for the same step."""
        while self._quiet is not None and not self._quiet.done():
            await asyncio.shield(self._quiet)  # else the pause would wait for the next step; or one after it
        if self._stepped is None or self._stepped.done():
            self._stepped = self._loop.create_future()
        stepped = self._stepped
        self._by_steps = self.paused
        self._landed()
        if self._stopping or not (self._flights or self._core.scheduler.queues.arriving):
            self._set_stepped()
        await asyncio.shield(stepped)

    async def hold(self) -> None:
        """As :meth:`pause`, until :meth:`release`, which has to follow whatever happens. It neither
        depends on whether the engine is paused nor changes it."""
        self._holds += 1
        self._interrupt()
        while self._flights and not self._stopping:
            await self._until_quiet()

    async def _until_quiet(self) -> None:
        """Wait until no step is in flight, or for :meth:`resume`."""
        if self._quiet is None or self._quiet.done():
            self._quiet = self._loop.create_future()
        self.wake()
        await asyncio.shield(self._quiet)

    def release(self) -> None:
        """Go on after :meth:`hold`."""
        self._holds -= 1
        self._last_progress = self._clock()
        self.wake()

    def resume(self) -> None:
        """Go on after :meth:`pause`. Idempotent."""
        self.paused = self._by_steps = False
        self._last_progress = self._clock()
        self._set_quiet()
        self.wake()

    @property
    def steps_in_flight(self) -> int:
        return len(self._flights)

    @property
    def stalled(self) -> float:
        """Seconds since a step last resolved; 0 while there is nothing to compute."""
        may_plan = not (self.paused or self._holds)
        working = self._flights or (self._core.scheduler.queues.has_work and may_plan)
        return self._clock() - self._last_progress if working else 0.0

    # -- inside ---------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Launch what may be launched, and resolve one step if it has landed."""
        flights, resolved = self._flights, False
        if not self._stopping:
            self._report_ended()  # an update of the weights has ended them: perhaps nothing is planned now
            if self._core.texts.behind:
                self._catch_up_soon()  # of tokens that no step has brought: logits processors wrote them
        while not (self._stopping or self._waits_for_step):
            if resolved and self._launcher.blocking:
                # Launching would compute the next step: first what this one brought about.
                self._turns = _TURNS
                self.nudge()
                return
            if self._may_launch and not self._put_off() and (step := self._plan()) is not None:
                self._launch(step)
            elif not flights:
                self._rest()
                return
            elif not flights[0].done:
                return
            elif resolved:
                # Consumers run after every step, also when the device is always ahead.
                self.nudge()
                return
            else:
                self._resolve(flights.popleft())
                resolved = True

    def _woken(self) -> None:
        self._due = False
        if self._turns:
            self._turns -= 1
            self.nudge()
        else:
            self._landed()

    def _landed(self) -> None:
        """A flight has landed, perhaps during a turn, or there may be more to launch."""
        if self._turning:
            return
        self._turning = True
        try:
            self._turn()
        except BaseException as error:
            self._events.lost(error)
            if not isinstance(error, Exception):
                raise  # KeyboardInterrupt, for example, is meant for the loop, too
        finally:
            self._turning = False

    @property
    def _waits_for_step(self) -> bool:
        return self._by_steps and (self._stepped is None or self._stepped.done())

    @property
    def _may_launch(self) -> bool:
        may_run = not self.paused or self._by_steps
        return len(self._flights) <= self._overlap_steps and may_run and not self._holds

    def _put_off(self) -> bool:
        """Whether the last of the overlapped steps is planned later; if so, a timer is set for it."""
        if self._pace is None or not self._flights or len(self._flights) < self._overlap_steps:
            return False
        oldest = self._flights[0]
        spare = 0.0
        if not oldest.done:
            spare = self._pace.spare(oldest.step, oldest.launched_at, self._clock())
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
        step = self._core.plan(self._flights[-1].step if self._flights else None)
        if step is not None:
            self._timeline.loop.add("plan", step.id, start, now())
        if self._report_ended():
            self.nudge()
        return step

    def _report_ended(self) -> bool:
        """Report the requests that ended because something raised for them; whether there were any."""
        ended = bool(self._core.ended)
        if ended:
            self._recovered(self._core.take_ended())
        return ended

    def _launch(self, step: Step) -> None:
        start = now()
        try:
            flight = self._launcher.launch(step, self._landed)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            flight = self._unlaunched(step, error)
        self._timeline.loop.add("pack", step.id, start, now())
        flight.launched_at = self._clock()
        if not self._flights:
            self._last_progress = flight.launched_at  # before, pages may have arrived
        self._flights.append(flight)
        if self._garbage is not None:
            self._garbage.launched()
        for sequence in self._core.admitted:
            if not sequence.finished:
                self._tell(self._events.admitted, [sequence])

    def _unlaunched(self, step: Step, error: BaseException) -> StepHandle:
        """A step could not be packed: its requests end at once, before a row that follows is planned.

        It keeps its place among the steps in flight: what its requests held becomes free in their order.
        """
        from aioinfer.execution.launcher import StepHandle  # imports numpy

        _log.error("step %d could not be packed", step.id, exc_info=error)
        self._recovered(self._core.give_up(step, error, launched=False))
        flight = StepHandle(step, self._landed)
        flight.done, flight.error, flight.launched = True, error, False
        return flight

    def _recovered(self, ended: list[Sequence]) -> None:
        """Something raised and ended these requests: report them, and check that the others can go on."""
        for sequence in ended:
            self._events.updated(sequence)
        cause = self._core.texts.raised or (ended[0].output.error if ended else None)
        self._core.texts.raised = None
        try:
            self._events.audit()
        except AssertionError as wrong:
            raise RuntimeError(f"the scheduler's state is not what it should be: {wrong!r}") from cause

    def _tell(self, event: Callable[[Sequence], None], sequences: Iterable[Sequence]) -> None:
        """Report requests. What that raises for one ends it."""
        for sequence in sequences:
            try:
                event(sequence)
            except Exception as error:
                self._untold(sequence, error)

    def _untold(self, sequence: Sequence, error: Exception) -> None:
        _log.error("%s could not be reported", sequence, exc_info=error)
        failed = StepFailed(f"the request could not be reported: {error}")
        failed.__cause__ = error
        self._core.abort(sequence, failed)
        self._recovered([sequence])

    def _resolve(self, flight: StepHandle) -> None:
        """Commit a flight that has landed and report the requests that it updated."""
        before, self._last_progress = self._last_progress, self._clock()
        self._cancel_timer()
        start = now()
        step, error, result, what = flight.step, flight.error, flight.result, "resolve"
        if isinstance(error, DeviceLost):
            raise error
        if error is None:
            assert result is not None
            what = "verify" if step.generating.drafts else what
            self._timeline.noticed(flight.delay)
            if self._observers:
                self._observers.stepped(step, flight.delay)
            if self._pace is not None:
                self._pace.landed(step, flight.launched_at, self._last_progress, flight.delay)
            self._core.timed(step, self._last_progress - max(before, flight.launched_at))
            try:
                updated = self._core.resolve(step, result, _SEARCHING)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as raised:
                _log.error("the result of step %d could not be committed", step.id, exc_info=raised)
                self._recovered(self._core.give_up(step, raised, launched=True))
                updated = []
        else:
            if not flight.launched:
                what = "drop"
            elif isinstance(error, StepOutOfMemory):
                what = "run out"
                _log.warning("step %d of %d tokens ran out of memory: %s", step.id, step.num_tokens, error)
            else:
                _log.error("step %d failed: %r", step.id, error)
            updated = self._core.fail(step, error)
        resolved = now()
        self._tell(self._events.updated, self._events.moved(updated))
        if self._core.scheduler.queues.asked:
            self._events.asked(self._core.scheduler.queues.take_asked())
        if self._core.texts.raised is not None:
            self._recovered([])
        self._timeline.loop.add(what, step.id, start, resolved)
        self._timeline.loop.add("deliver", step.id, resolved, now())
        self._set_stepped()
        if self._core.texts.behind:
            self._catch_up_soon()

    def _catch_up_soon(self) -> None:
        if not self._catching_up:
            self._catching_up = True
            self._loop.call_soon(self._catch_up, context=self._context)

    def _catch_up(self) -> None:
        """Search for stop patterns in text that is behind; other callbacks run before the next time."""
        self._catching_up = False
        try:
            self._tell(self._events.updated, self._core.catch_up(_SEARCHING))
            if self._core.texts.raised is not None:
                self._recovered([])
        except BaseException as error:
            self._events.lost(error)
            if not isinstance(error, Exception):
                raise
        if self._core.texts.behind and not self._stopping:
            self._catch_up_soon()
        self.nudge()  # requests that were parked until then can go on

    def _rest(self) -> None:
        """Nothing is in flight and nothing can be planned: check that everything was given back."""
        self._set_quiet()
        if not self._core.scheduler.queues.arriving:
            self._set_stepped()
        self._timeline.device.rest()
        if self._garbage is not None:
            self._garbage.rest()
        if self._core.scheduler.queues.has_unfinished:
            return
        try:
            check_idle(self._core.scheduler)
        except AssertionError as error:
            if not self.failed_checks:
                _log.error("the idle engine still holds memory: %s", error)
            self.failed_checks += 1

    def _set_stepped(self) -> None:
        if self._stepped is not None and not self._stepped.done():
            self._stepped.set_result(None)

    def _set_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)
