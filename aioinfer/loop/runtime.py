"""Runtime: a started engine, from the open device to its closing."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from aioinfer.config import EngineConfig
from aioinfer.errors import (
    AioInferError,
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    Rejected,
    RequestError,
    StepFailed,
    TimedOut,
)
from aioinfer.loop.driver import Driver
from aioinfer.loop.loop_bound import EngineState, LoopBound
from aioinfer.loop.options import Prepared, Prompt, PromptForm, PromptSource, RequestOptions
from aioinfer.loop.pacing import Pace
from aioinfer.loop.resumption import check, take
from aioinfer.loop.tuning import Tuning
from aioinfer.loop.updating import Updates
from aioinfer.observe.observers import Observers
from aioinfer.observe.stats import EngineStats
from aioinfer.params import SamplingParams
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.request import Request, RequestState
from aioinfer.stream import Stream, StreamCell, tell_lanes

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.adapters import AdapterLoads
    from aioinfer.loop.core import Core
    from aioinfer.loop.intake import Intake, Preparation

__all__ = ["Runtime"]

_log = logging.getLogger("aioinfer")


class Runtime(LoopBound):
    """The parts of a started engine and its open requests: accepts requests, and ends their streams.

    It belongs to the loop on which it is made, and all methods but :meth:`abandon` and
    :meth:`abandon_later` are called there. Driver and streams know it, as DriverEvents and StreamOwner.
    """

    def __init__(
        self, config: EngineConfig, core: Core, launcher: Launcher, intake: Intake, adapters: AdapterLoads
    ) -> None:
        """``config`` leaves nothing open: see :func:`aioinfer.loop.factory.decide`."""
        super().__init__()
        self.config = config
        self.core = core
        #: also when the core is gone
        self.info = core.info
        self.launcher = launcher
        #: why it is FAILED
        self.failure: BaseException | None = None
        #: requests from generate() to their end, in order
        self._open: dict[Request, None] = {}
        #: the work on those of them that are PREPARING
        self._preparing: dict[Request, Preparation] = {}
        #: at least so many tokens have their prompts
        self._preparing_tokens = 0
        self._intake = intake
        self.adapters = adapters
        adapters.check_serving = self.check_serving
        #: what follows the requests and steps; empty unless asked for
        self.observers = Observers()
        self.tuning = Tuning.of(
            config.switch_interval,
            config.gc,
            asynchronous=launcher.asynchronous,
            thread=config.launch_mode == "thread",
        )
        self.driver = Driver(
            core,
            launcher,
            config.overlap_steps or 0,
            self,
            garbage=self.tuning.garbage,
            pace=Pace() if config.plan_late else None,
            observers=self.observers,
        )
        self.updates = Updates(
            *(core, launcher, intake, self.driver),
            end=self.end,
            lost=self.lost,
            check=self.check_serving,
        )
        launcher.watch(self.lost)
        self._closing: asyncio.Task[None] | None = None
        #: set while closing waits for the open requests
        self._drained: asyncio.Future[None] | None = None

    # -- requests -------------------------------------------------------------------------------

    def source(
        self,
        prompt: Prompt,
        template_kwargs: Mapping[str, Any] | None = None,
        form: PromptForm | None = None,
    ) -> PromptSource:
        """A prompt, checked and copied; one that was made here already is returned unchanged. On any thread.
        Raises InvalidRequest."""
        return self.core.source(prompt, template_kwargs, form)

    def generate(
        self,
        prompt: PromptSource,
        params: SamplingParams,
        options: RequestOptions,
        checkpoint: StreamCheckpoint | None = None,
    ) -> Stream:
        """Queue a request, at once or when its prompt is prepared, with the output that a checkpoint has.
        Raises InvalidRequest, Rejected."""
        least = prompt.least_tokens
        self.core.check(params, options.pooling, least)
        if checkpoint is not None:
            check(checkpoint, self.core.info, self.core.stop_ids(params))
            least += len(checkpoint.token_ids)
        adapter = self.core.adapter(options, checkpoint)
        try:
            self.core.check_queue(len(self._preparing), least, self._preparing_tokens)
        except Rejected:
            self.observers.rejected()
            raise
        request = self.core.new_request(params, options, adapter)
        cell = StreamCell(request, options.running_timeout, options.max_lag)
        if prompt.ids is not None and not params.worked_out and checkpoint is None:
            try:
                self._submit(request, self.core.complete(prompt.ids, params))
            except BaseException:
                self.core.adapters.leave(request)
                raise
        else:
            prepared = functools.partial(self._prepared, request)
            preparation = self._intake.prepare(self.core, prompt, params, prepared, checkpoint)
            self._preparing[request] = preparation
            self._preparing_tokens += preparation.least_tokens
        self._open[request] = None
        if self.observers:
            self.observers.opened(request, chat=prompt.chat)
        if options.waiting_timeout is not None:
            self._set_timer(request, "waiting", options.waiting_timeout)
        if self.tuning.garbage is not None:
            self.tuning.garbage.arrived()
        return Stream(self, cell)

    async def encode(self, prompt: PromptSource) -> Sequence[int]:
        """The token ids of a prompt. Raises InvalidRequest, EngineClosed."""
        return await self._intake.encode(prompt)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises InvalidRequest."""
        core = self.core
        return await self._intake.decode(
            core.tokenizer, ids, core.info.vocab_size, skip_special_tokens=skip_special_tokens
        )

    def _prepared(self, request: Request, prepared: Prepared | None, error: BaseException | None) -> None:
        self._leave_preparing(request)
        if prepared is not None:
            try:
                self._submit(request, prepared)
                return
            except Exception as refused:
                error = refused
        assert error is not None
        if not isinstance(error, (RequestError, EngineError)):
            # Anything that a worker thread can raise, panics of Rust libraries included.
            cause, error = error, InvalidRequest("prompt", f"could not be tokenized: {error!r}")
            error.__cause__ = cause
        request.refuse(error)
        self._ended(request)

    def _leave_preparing(self, request: Request) -> None:
        preparation = self._preparing.pop(request, None)
        if preparation is not None:
            preparation.cancel()
            self._preparing_tokens -= preparation.least_tokens

    def _submit(self, request: Request, prepared: Prepared) -> None:
        self.driver.work_arrives()
        try:
            self.core.submit(request, prepared, _cell(request))
        except (RequestError, EngineError):
            raise
        except Exception as cause:
            _log.error("%s could not be queued", request, exc_info=cause)
            raise StepFailed(f"the request could not be queued: {cause}") from cause
        _cell(request).notify()
        self.driver.wake()

    # -- as DriverEvents ------------------------------------------------------------------------

    def admitted(self, request: Request) -> None:
        """Replace the request's waiting deadline by its running deadline, and tell its outlet."""
        cell = _cell(request)
        cell.cancel_timer()
        if cell.outlet is not None:
            cell.outlet.lane.moved((cell.outlet,))
        if cell.running_timeout is not None:
            self._set_timer(request, "running", cell.running_timeout)

    def updated(self, request: Request) -> None:
        """Wake the consumer, or end its stream; park the request if the consumer lags."""
        cell = request.consumer
        assert isinstance(cell, StreamCell)
        if request.state is RequestState.FINISHED and request.ended:
            self._ended(request)
            return
        cell.notify()
        if cell.max_lag is not None and cell.lags:
            self.core.scheduler.queues.park(request)

    def moved(self, requests: list[Request]) -> list[Request]:
        """As in DriverEvents: the streams with an outlet, lane by lane."""
        return tell_lanes(requests)

    def audit(self) -> None:
        """As in DriverEvents."""
        queues = self.core.scheduler.queues
        audit(self.core.scheduler)
        if queues.waiting:
            assert sorted(each.key for each in queues.waiting.order()) == [
                each.key for each in queues.waiting
            ]
        known = set(queues.unfinished())
        opened = {request for request in self._open if not request.finished} - self._preparing.keys()
        assert known == opened, f"{opened ^ known} are lost"
        self.core.adapters.audit()

    def lost(self, cause: BaseException) -> None:
        """End every open stream with EngineFailed, caused by ``cause``."""
        if self.state in (EngineState.FAILED, EngineState.CLOSED):
            return
        _log.error("the engine is lost", exc_info=cause)
        self.failure = cause
        self.state = EngineState.FAILED
        self.adapters.close()
        self._end_all(self._failed_error)
        self.updates.request_ended()
        self.driver.stop()
        self.observers.failed(cause)

    def _failed_error(self) -> EngineFailed:
        error = EngineFailed(f"the engine is lost: {self.failure}")
        error.__cause__ = self.failure
        return error

    # -- as StreamOwner -------------------------------------------------------------------------

    def _abandoned(self, request: Request) -> None:
        self.end(request, None)

    def checkpoint(self, request: Request) -> StreamCheckpoint:
        """How far a request has come. Raises RuntimeError."""
        return take(request, _cell(request), self.info)

    def caught_up(self, request: Request) -> None:
        """The consumer of a request that is parked for it has read enough: the request goes on."""
        if request.ended:
            return
        self.driver.work_arrives()
        try:
            self.core.scheduler.queues.unpark(request)
        except Exception as cause:
            error = StepFailed(f"the request could not go on: {cause}")
            error.__cause__ = cause
            self.end(request, error)
        self.driver.wake()

    # -- endings --------------------------------------------------------------------------------

    def _set_timer(self, request: Request, phase: str, seconds: float) -> None:
        _cell(request).timer = self.loop.call_later(seconds, self._expire, request, phase, seconds)

    def _expire(self, request: Request, phase: str, seconds: float) -> None:
        _cell(request).timer = None
        self.end(request, TimedOut(phase, seconds))

    def end(self, request: Request, error: RequestError | EngineError | None) -> None:
        """End a request, whatever its state."""
        self.core.abort(request, error)
        self._ended(request)
        self.driver.wake()

    def _end_all(self, make_error: Callable[[], EngineError]) -> None:
        for request in list(self._open):
            try:
                self.core.abort(request, make_error())
            except Exception:
                _log.exception("%s could not be aborted cleanly", request)
            if not request.ended:
                request.refuse(make_error())
            if request.error is not None and not isinstance(request.error, AioInferError):
                request.error = make_error()  # it ended with what was raised, and was not reported
            self._ended(request)
        self._set_drained()

    def _ended(self, request: Request) -> None:
        if request in self._open:
            del self._open[request]
            if self.observers:
                self.observers.ended(request)
        self._leave_preparing(request)
        self.core.adapters.leave(request)
        cell = _cell(request)
        cell.cancel_timer()
        cell.notify()
        self.updates.request_ended()
        if self._drained is not None and not self._busy:
            self._set_drained()

    # -- closing --------------------------------------------------------------------------------

    async def aclose(self, drain: float | None) -> None:
        """As :meth:`aioinfer.Engine.aclose`; ``drain`` is in seconds, None to end requests at once."""
        if self.state is EngineState.RUNNING:
            self.state = EngineState.DRAINING
        if self._closing is None:
            self._closing = self.loop.create_task(self._close(drain or 0.0), name="aioinfer-closing")
        elif drain is None:
            self._set_drained()
        await asyncio.shield(self._closing)

    async def _close(self, drain: float) -> None:
        """Cancelled at any point, twice too, it leaves nothing behind that does not end by itself. What one
        step raises is raised when all are done."""
        async with AsyncExitStack() as steps:  # the last one goes first
            steps.callback(self._closed)
            steps.push_async_callback(self.adapters.aclose)
            steps.push_async_callback(self.updates.aclose)
            steps.push_async_callback(self.launcher.aclose)
            steps.callback(self._intake.close)
            steps.callback(self.tuning.undo)
            steps.callback(self.driver.stop)
            steps.callback(self.updates.close)
            steps.callback(self._end_all, lambda: EngineClosed("the engine was closed"))
            steps.callback(self.adapters.close)
            if drain > 0 and self._busy and self.failure is None:
                await self._drain(drain)

    def _closed(self) -> None:
        self.state = EngineState.CLOSED
        self.observers.closed()

    async def _drain(self, seconds: float) -> None:
        """Wait for the open requests."""
        count = len(self._open)
        _log.info("closing waits up to %g s for %d request%s", seconds, count, "s" * (count > 1))
        self._drained = self.loop.create_future()
        timer = self.loop.call_later(seconds, self._set_drained)
        try:
            await self._drained
        finally:
            timer.cancel()

    def outlive_loop(self) -> None:
        """The loop was closed before the engine: end what is left. A stream that is kept does not keep the
        device, and with it the model."""
        self.state = EngineState.CLOSED
        self.tuning.undo()
        self._intake.close()
        for request in self._open:
            request.refuse(EngineClosed("the event loop of the engine was closed"))
        self._open, self._preparing = {}, {}
        self.observers.closed()
        del self.core, self.driver, self.launcher, self.adapters, self.updates

    @property
    def _busy(self) -> bool:
        core = self.core
        return bool(self._preparing or core.texts.behind) or core.scheduler.queues.has_unfinished

    def _set_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # -- observing ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; O(1)."""
        driver = self.driver
        return EngineStats.of(
            self.core.scheduler,
            output_tokens=self.core.texts.output_tokens,
            state=self.state.value,
            paused=driver.paused,
            arriving=len(self._preparing),
            steps_in_flight=driver.steps_in_flight,
            failed_checks=driver.failed_checks,
            stalled=0.0 if self.state is EngineState.CLOSED else driver.stalled,
            timeline=self.launcher.timeline,
            adapters_loaded=len(self.core.adapters.loaded),
            adapters_draining=self.core.adapters.draining,
        )

    def measured(self) -> tuple[EngineStats, int]:
        """The same, and the tokens that the readers of open streams have not taken; O(open streams)."""
        return self.stats(), sum(_cell(request).unread for request in list(self._open))


def _cell(request: Request) -> StreamCell:
    """The stream's end of a request; every request of an engine has one."""
    assert isinstance(request.consumer, StreamCell)
    return request.consumer
