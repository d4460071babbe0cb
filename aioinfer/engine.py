"""Engine: the façade an application holds: its life, its requests, and what becomes of their streams.

What happens to a request once it is queued is the business of :mod:`aioinfer.loop.driver`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aioinfer.config import EngineConfig
from aioinfer.errors import (
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    RequestError,
    TimedOut,
    WrongLoop,
)
from aioinfer.execution.device import DeviceInfo, Progress
from aioinfer.loop import factory
from aioinfer.loop.driver import Driver
from aioinfer.loop.intake import Intake
from aioinfer.loop.pacing import Pace
from aioinfer.loop.tuning import Tuning
from aioinfer.observe.stats import EngineStats
from aioinfer.observe.timeline import Timeline
from aioinfer.params import SamplingParams
from aioinfer.scheduling.request import Request
from aioinfer.stream import Stream, StreamCell

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.core import Core
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Engine", "EngineState", "Prompt"]

_log = logging.getLogger("aioinfer")

#: text, token ids, or chat messages (mappings with "role" and "content")
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class EngineState(Enum):
    """``NEW -> STARTING -> RUNNING -> DRAINING -> CLOSED``; FAILED from RUNNING when all is lost."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


class Engine:
    """A language model inside this event loop.

    ::

        async with Engine(EngineConfig(model="/models/Qwen3-0.6B")) as engine:
            async for chunk in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(chunk.text, end="")

    It belongs to the loop that started it. It starts no task; in thread mode a thread for the device (two on
    CUDA), and a few for tokenizing and for grammars when there is such work. It touches no signal, no loop
    policy, no logging root and no environment variable; :mod:`aioinfer.loop.tuning` says what it changes in
    the process, on CUDA only, and how not to. A closed engine can be started again, also under a new loop.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        launcher: Callable[[EngineConfig], Launcher] = factory.make_launcher,
        tokenizer: Callable[[EngineConfig], Tokenizer | None] = factory.load_tokenizer,
    ) -> None:
        """``launcher`` and ``tokenizer`` replace the real ones in tests and simulations; ``tokenizer``
        is called on a worker thread."""
        self.config = config if config is not None else EngineConfig()
        self._make_launcher = launcher
        self._load_tokenizer = tokenizer
        self._reset(EngineState.NEW)

    def _reset(self, state: EngineState) -> None:
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._intake: Intake | None = None
        self._launcher: Launcher | None = None
        self._core: Core | None = None
        self._driver: Driver | None = None
        self._tuning: Tuning | None = None
        self._closing: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        #: of the requests that the scheduler has, in the order in which it got them
        self._open: dict[StreamCell, None] = {}
        self.default_params = SamplingParams()

    # -- life -----------------------------------------------------------------------------------

    async def start(self, progress: Progress | None = None) -> None:
        """Load the model and begin to serve on the running loop. Raises ConfigError, OutOfMemory.

        ``progress(stage, done, total)`` is called from the launch thread while the model loads.
        """
        if self._loop is not None and self._loop.is_closed():
            self._reset(EngineState.CLOSED)
        if self._state not in (EngineState.NEW, EngineState.CLOSED):
            raise EngineError(f"the engine cannot be started: it is {self._state.value}")
        from aioinfer.loop.core import Core  # brings numpy, which an engine that never starts does not need

        self._reset(EngineState.STARTING)
        self._loop = loop = asyncio.get_running_loop()
        self._intake = intake = Intake(loop, self._submit, self._ended)
        self._launcher = self._make_launcher(self.config)
        try:
            info = await self._launcher.start(progress)
            tokenizer = await intake.run(self._load_tokenizer, self.config)
            defaults = await intake.run(factory.default_params, self.config, info)
            info = factory.with_end_tokens(info, tokenizer)
        except BaseException:
            await self._launcher.aclose()
            intake.close()
            self._reset(EngineState.CLOSED)
            raise
        self.default_params = defaults
        config = factory.decide(self.config, info.block_size, asynchronous=self._launcher.asynchronous)
        self._core = Core(config, info, tokenizer, loop.time)
        self._tuning = Tuning.of(
            self.config.switch_interval,
            self.config.gc,
            asynchronous=self._launcher.asynchronous,
            thread=self.config.launch_mode == "thread",
        )
        self._driver = Driver(
            self._core,
            self._launcher,
            config.overlap_steps or 0,
            admitted=self._admitted,
            moved=self._moved,
            lost=self._lost,
            timeline=self._launcher.timeline,
            garbage=self._tuning.garbage,
            pace=Pace() if config.plan_late else None,
        )
        self._state = EngineState.RUNNING

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop serving. Idempotent; when cancelled, closing goes on in the background.

        With ``drain``, requests under way may finish first, for at most ``timeout`` seconds (default
        ``config.drain_timeout``). What is left then ends with :class:`~aioinfer.EngineClosed`. A second
        call without ``drain`` cuts the waiting short.
        """
        if self._loop is None or self._loop.is_closed():
            self._reset(EngineState.CLOSED)
            return
        self.check_loop()
        if self._core is None:
            raise EngineError("the engine is still starting")
        if self._state is EngineState.RUNNING:
            self._state = EngineState.DRAINING
        if self._closing is None:
            seconds = self.config.drain_timeout if timeout is None else timeout
            closing = self._close(seconds if drain else 0.0)
            self._closing = self._loop.create_task(closing, name="aioinfer-closing")
        elif not drain:
            self._set_drained()
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=kind is None)

    async def _close(self, drain_seconds: float) -> None:
        assert self._loop is not None
        assert self._launcher is not None
        assert self._driver is not None
        assert self._intake is not None
        if drain_seconds > 0 and self._busy and self._failure is None:
            self._drained = self._loop.create_future()
            timer = self._loop.call_later(drain_seconds, self._set_drained)
            await self._drained
            timer.cancel()
        self._end_all(lambda: EngineClosed("the engine was closed"))
        self._driver.stop()
        if self._tuning is not None:
            self._tuning.undo()
        await self._launcher.aclose()
        self._intake.close()
        self._state = EngineState.CLOSED
        self._loop = None

    # -- requests -------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        waiting_timeout: float | None = None,
        running_timeout: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        routing_key: str | None = None,
        max_lag: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Queue a generation and return its :class:`~aioinfer.Stream` at once.

        Args:
            prompt: text, a list of token ids, or a list of chat messages for the chat template.
            params: by default what the model's ``generation_config.json`` says.
            waiting_timeout: seconds it may wait for its first step; default from the config.
            running_timeout: seconds it may take from its first step on; default from the config.
            priority: larger goes first, with the policy ``priority``.
            cache_salt: prefixes are shared only between requests with the same salt.
            routing_key: what the policy ``routing-key`` groups by.
            max_lag: when the consumer has left more than this many tokens unread, nothing more is
                computed until it reads (a few that are in flight still come); default from the config.
            chat_template_kwargs: handed to the chat template, e.g. ``{"enable_thinking": False}``.

        Raises:
            InvalidRequest: an argument is bad. What only tokenizing can tell is raised by the stream.
            Rejected: the queue is full.
            EngineClosed, EngineFailed, WrongLoop: there is no engine to serve it here and now.
        """
        core = self._serving_core()
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("params", f"must be SamplingParams, got {type(params).__name__}")
        waiting = factory.timeout("waiting_timeout", waiting_timeout, self.config.waiting_timeout)
        running = factory.timeout("running_timeout", running_timeout, self.config.running_timeout)
        encode = factory.encoder(core.tokenizer, prompt, chat_template_kwargs)
        core.check_queue(len(self._arriving))
        lag = factory.max_lag(self.config.max_lag if max_lag is None else max_lag)
        make = functools.partial(
            core.new_request,
            params=params,
            arrival=core.now(),
            priority=factory.priority(priority),
            cache_salt=factory.label("cache_salt", cache_salt) or "",
            routing_key=factory.label("routing_key", routing_key),
        )
        cell = StreamCell(running, lag)
        assert self._intake is not None
        self._intake.take(cell, core, params, prompt, encode, make)
        if waiting is not None:
            assert self._loop is not None
            cell.timer = self._loop.call_later(waiting, self._expire, cell, "waiting", waiting)
        return Stream(self, cell)

    def _submit(self, cell: StreamCell, request: Request) -> None:
        assert self._core is not None
        assert self._driver is not None
        self._driver.work_arrives()
        self._core.submit(request)
        cell.request = request
        request.consumer = cell
        self._open[cell] = None
        cell.notify()
        self._driver.wake()

    # -- the driver's word ----------------------------------------------------------------------

    def _admitted(self, request: Request) -> None:
        """The request is in a step: its waiting deadline is met, its running one begins."""
        cell = _cell(request)
        cell.cancel_timer()
        seconds = cell.running_timeout
        if seconds is not None:
            assert self._loop is not None
            cell.timer = self._loop.call_later(seconds, self._expire, cell, "running", seconds)

    def _moved(self, request: Request) -> None:
        """The request has another token, or has ended."""
        cell = _cell(request)
        if request.finished:
            self._ended(cell)
            return
        cell.notify()
        if cell.max_lag is not None and cell.lags:
            self._started_core().scheduler.park(request)

    def caught_up(self, cell: StreamCell) -> None:
        """The consumer of a parked request has read enough: its request goes on."""
        if self._driver is not None and cell.request is not None:
            self._driver.work_arrives()
            self._started_core().scheduler.unpark(cell.request)
            self._driver.wake()

    def _lost(self, cause: BaseException) -> None:
        """The device or the driver is lost: every open stream ends now, with the reason."""
        _log.error("the engine is lost", exc_info=cause)
        self._failure = cause
        self._state = EngineState.FAILED
        self._end_all(self._failed_error)
        if self._driver is not None:
            self._driver.stop()

    # -- endings --------------------------------------------------------------------------------

    def _end_all(self, make_error: Callable[[], EngineError]) -> None:
        assert self._core is not None
        for cell in list(self._arriving):
            self._arriving.discard(cell)
            cell.error = make_error()
            self._ended(cell)
        for cell in list(self._open):
            assert cell.request is not None
            try:
                self._core.abort(cell.request, make_error())
            except Exception:
                _log.exception("%s could not be ended in good order", cell.request)
            if not cell.request.finished:
                cell.error = make_error()
            self._ended(cell)
        self._set_drained()

    def _expire(self, cell: StreamCell, phase: str, seconds: float) -> None:
        cell.timer = None
        self._end(cell, TimedOut(phase, seconds))

    def _end(self, cell: StreamCell, error: RequestError | None) -> None:
        """End a stream's request from outside, whatever its state."""
        assert self._core is not None
        if cell.request is not None:
            self._core.abort(cell.request, error)
        else:
            self._arriving.discard(cell)
            cell.error = cell.error or error
        self._ended(cell)
        if self._driver is not None:
            self._driver.wake()

    def _ended(self, cell: StreamCell) -> None:
        self._open.pop(cell, None)
        cell.cancel_timer()
        cell.notify()
        if self._drained is not None and not self._busy:
            self._set_drained()

    def _set_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    @property
    def _arriving(self) -> set[StreamCell]:
        """Streams whose prompts are being worked on."""
        return set() if self._intake is None else self._intake.arriving

    @property
    def _busy(self) -> bool:
        return bool(self._arriving) or (self._core is not None and self._core.scheduler.has_unfinished)

    def abandon(self, cell: StreamCell) -> None:
        """The consumer closed its stream."""
        if not cell.finished and self._core is not None:
            self._end(cell, None)

    def abandon_threadsafe(self, cell: StreamCell) -> None:
        """The stream was garbage-collected, on whatever thread."""
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self.abandon, cell)
            except RuntimeError:
                pass  # the loop is closed, and the engine's memory is nobody's any more

    # -- pausing --------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Launch no more steps; returns when those in flight have resolved.

        Requests are still accepted and wait; running ones keep their pages, and deadlines run on.
        Raises EngineClosed, EngineFailed, WrongLoop.
        """
        self._serving_core()
        assert self._driver is not None
        await self._driver.pause()
        self._serving_core()

    def resume(self) -> None:
        """Go on after :meth:`pause`. Idempotent."""
        self.check_loop()
        if self._driver is not None:
            self._driver.resume()

    def flush_cache(self) -> int:
        """Forget all cached prefixes; returns how many pages that freed at once.

        Pages that running requests read follow when those end, and nobody new finds them.
        Raises EngineClosed, EngineFailed, WrongLoop.
        """
        freed = self._serving_core().scheduler.memory.flush()
        assert self._driver is not None
        self._driver.wake()
        return freed

    # -- what there is to know ------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def ready(self) -> bool:
        """Requests are accepted."""
        return self._state is EngineState.RUNNING

    @property
    def info(self) -> DeviceInfo:
        """The model's and the device's limits. Raises EngineClosed before the engine was started."""
        return self._started_core().info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._started_core().tokenizer

    def stats(self) -> EngineStats:
        """A snapshot, cheap enough to take every second. Raises EngineClosed before the start."""
        scheduler = self._started_core().scheduler
        driver = self._driver
        assert driver is not None
        return EngineStats.of(
            scheduler,
            output_tokens=self._started_core().output_tokens,
            state=self._state.value,
            paused=driver.paused,
            arriving=len(self._arriving),
            steps_in_flight=driver.steps_in_flight,
            failed_checks=driver.failed_checks,
            stalled=driver.stalled if self._loop is not None else 0.0,
            timeline=self.timeline,
        )

    @property
    def timeline(self) -> Timeline:
        """What loop, launch thread and device did lately. Raises EngineClosed before the start."""
        self._started_core()
        assert self._launcher is not None
        return self._launcher.timeline

    def _started_core(self) -> Core:
        if self._core is None:
            raise EngineClosed(f"the engine is {self._state.value}")
        return self._core

    def _serving_core(self) -> Core:
        self.check_loop()
        if self._state is EngineState.FAILED:
            raise self._failed_error()
        if self._state is not EngineState.RUNNING:
            raise EngineClosed(f"the engine is {self._state.value}")
        return self._started_core()

    def _failed_error(self) -> EngineFailed:
        error = EngineFailed(f"the engine is lost: {self._failure}")
        error.__cause__ = self._failure
        return error

    def check_loop(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if self._loop is not None and running is not self._loop:
            raise WrongLoop("the engine belongs to the event loop that started it, and this is not it")


def _cell(request: Request) -> StreamCell:
    """The stream's end of a request; every request of an engine has one."""
    assert isinstance(request.consumer, StreamCell)
    return request.consumer
