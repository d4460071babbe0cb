"""Service: accepts requests and ends their streams, whatever computes them.

An engine's :class:`~aioinfer.loop.runtime.Runtime` is one, and a dispatcher's ``Dispatching``. The way of a
request is :meth:`Service.generate`, then :meth:`Service._prepare`, top to bottom; what differs is in
the abstract methods.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from aioinfer.cells import Cut, StreamCell
from aioinfer.config import EngineConfig
from aioinfer.errors import (
    AioInferError,
    Cancelled,
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    Rejected,
    RequestError,
    TimedOut,
)
from aioinfer.forks import this_process
from aioinfer.loop.belonging import (
    end_in_children,
    fork_error,
    require_loop,
    require_process,
    running_loop,
)
from aioinfer.loop.holding import Keeping, Seats
from aioinfer.loop.intake import Intake
from aioinfer.loop.opened import OpenRequest
from aioinfer.loop.options import Images, Prepared, Prompt, PromptForm, PromptSource
from aioinfer.loop.resumption import check, take
from aioinfer.observe.observers import Observers
from aioinfer.params import SamplingParams
from aioinfer.request import Output, Request, RequestOptions
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo
    from aioinfer.loop.checks import Checks
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["EngineState", "Later", "Service", "not_started"]

_log = logging.getLogger("aioinfer")


class EngineState(Enum):
    """``NEW -> STARTING -> RUNNING -> DRAINING -> CLOSED``; from RUNNING to FAILED if the device is lost."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


def not_started(kind: str, state: EngineState) -> EngineClosed:
    """The error of what is used before its start."""
    way = "" if state is EngineState.STARTING else ": await its start(), or enter it with async with"
    return EngineClosed(f"the {kind} is {state.value}{way}")


_Opened = TypeVar("_Opened", bound=OpenRequest)
_T = TypeVar("_T")
#: works out on worker threads what a request begins with
Later = Callable[[], Awaitable[tuple[Prepared, "StreamCheckpoint | None"]]]


class Service(Keeping, ABC, Generic[_Opened]):
    """Belongs to the loop on which it is made: all methods but :meth:`source`, :meth:`abandon` and
    :meth:`abandon_later` are called there. Streams know it as their owner."""

    #: in messages
    kind: ClassVar[str] = "engine"
    #: the text of a checkpoint is made here, and not by what computes the request
    replays: ClassVar[bool] = True

    def __init__(
        self,
        config: EngineConfig,
        info: DeviceInfo,
        tokenizer: Tokenizer | None,
        checks: Checks,
        intake: Intake,
        clock: Callable[[], float],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.process = this_process()
        self.state = EngineState.RUNNING
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self.checks = checks
        self.clock = clock
        self._intake = intake
        #: empty unless asked for
        self.observers = Observers()
        #: in the order of their acceptance
        self.open: dict[StreamCell, _Opened] = {}
        #: of its sessions
        self.seats = Seats(config.max_sessions)
        #: requests whose prompts are not tokenized yet, and the tokens that these have at least
        self.arriving, self._arriving_tokens = 0, 0
        #: called once when the queue may have room, with their places in the line
        self._awaiting_room: dict[Callable[[], None], int] = {}
        self._places = itertools.count()
        #: set while closing waits for the open requests
        self._drained: asyncio.Future[None] | None = None
        end_in_children(self)

    # -- the way of a request -------------------------------------------------------------------

    def source(
        self,
        prompt: Prompt,
        template_kwargs: Mapping[str, Any] | None = None,
        form: PromptForm | None = None,
        images: Images = (),
    ) -> PromptSource:
        """A prompt, checked and copied; one that was made here already is returned unchanged. ``images``:
        those whose words are among token ids. On any thread. Raises InvalidRequest."""
        return PromptSource.of(prompt, self.tokenizer, self.info, template_kwargs, form, images)

    def generate(
        self, prompt: PromptSource, request: Request, checkpoint: StreamCheckpoint | None = None
    ) -> Stream:
        """Queue a request, at once or when its prompt is tokenized, with the output that a checkpoint has.
        Raises InvalidRequest, Rejected."""
        params, least = request.params, prompt.least_tokens
        self.checks.check(params, request.pooling, least)
        if checkpoint is not None:
            check(checkpoint, self.info, self.checks.stop_ids(params))
            least += len(checkpoint.token_ids)
        opened = self._opened(StreamCell(Output(request, self.clock())), checkpoint)
        worked_out = params.worked_out or (self.replays and checkpoint is not None)

        async def later() -> tuple[Prepared, StreamCheckpoint | None]:
            ids = await self._intake.encode(prompt)
            if worked_out:
                prepared = await self._intake.work_out(self._complete, ids, params, checkpoint)
            else:
                prepared = self._complete(ids, params, None)
            return prepared._replace(images=prompt.images), checkpoint

        prepared = None
        if prompt.ids is not None and not worked_out:
            try:
                prepared = self._complete(prompt.ids, params, None)._replace(images=prompt.images)
            except BaseException:
                self._left(opened)
                raise
        self._begin(opened, least, prepared, checkpoint, later, chat=prompt.chat)
        return Stream(self, opened.cell)

    def _begin(
        self,
        opened: _Opened,
        least: int,
        prepared: Prepared | None,
        checkpoint: StreamCheckpoint | None,
        later: Later,
        *,
        chat: bool = False,
    ) -> None:
        """Queue a request with at least so many tokens: if it is not ``prepared``, when ``later`` is done.
        Raises InvalidRequest, Rejected."""
        cell = opened.cell
        try:
            self._check_queue(least, self.arriving, self._arriving_tokens)
            if prepared is not None:
                self._accept(opened, prepared, checkpoint)
        except BaseException as error:
            if isinstance(error, Rejected):
                self.observers.rejected()
            self._left(opened)
            raise
        self.open[cell] = opened
        if prepared is None:
            self._begin_later(opened, least, later)
        if self.observers:
            self.observers.opened(cell.output, chat=chat)
        self._set_timer(opened, "waiting", cell.output.request.waiting_timeout)

    def _begin_later(self, opened: _Opened, least: int, later: Later) -> None:
        opened.least_tokens = least
        self.arriving += 1
        self._arriving_tokens += least
        opened.preparing = self.loop.create_task(self._prepare(opened, later), name="aioinfer-preparing")

    async def _prepare(self, opened: _Opened, later: Later) -> None:
        """Tokenize the prompt and compile grammars on worker threads, and queue the request. Cancelled when
        the request ends."""
        refused: BaseException
        try:
            prepared, checkpoint = await later()
            self._arrived(opened)
            if prepared.resumption is None or prepared.resumption.queued is None:
                resumed = 0 if checkpoint is None else len(checkpoint.token_ids)
                self._check_queue(len(prepared.prompt_ids) + resumed)
            self._accept(opened, prepared, checkpoint)
        except asyncio.CancelledError:
            if not opened.output.finished:
                self.end(opened, None)  # the loop is about to be closed
            raise
        except (RequestError, EngineError) as error:
            refused = error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as cause:  # panics of libraries in Rust are no Exceptions
            refused = InvalidRequest("prompt", f"could not be tokenized: {cause!r}")
            refused.__cause__ = cause
        else:
            opened.cell.notify()
            return
        self._arrived(opened)
        opened.output.refuse(refused)
        self._ended(opened)

    def _arrived(self, opened: _Opened) -> None:
        """Note that the prompt of a request is tokenized, or that it is not wanted any more. Idempotent."""
        if opened.preparing is not None:
            opened.preparing = None
            self.arriving -= 1
            self._arriving_tokens -= opened.least_tokens

    def _check_queue(self, tokens: int, arriving: int = 0, arriving_tokens: int = 0) -> None:
        """Raise Rejected if a request with this many tokens is too much for the queue."""
        waiting, known = self.queued
        waiting, known = waiting + arriving, known + arriving_tokens
        slots, positions = self.room
        taken = min(slots, waiting if known <= positions else waiting * positions // known)
        if taken:
            waiting, known = waiting - taken, known - known * taken // waiting
        if waiting >= self.config.max_queued_requests:
            raise Rejected(f"{waiting} requests are waiting already (max_queued_requests)")
        if known and known + tokens > self.config.max_queued_tokens:
            raise Rejected(f"{known} prompt tokens are waiting already (max_queued_tokens)")

    def check_room(self, tokens: int) -> None:
        """Raise Rejected, which is not counted, if a request with at least so many tokens would be."""
        self._check_queue(tokens, self.arriving, self._arriving_tokens)

    def when_room(self, call: Callable[[], None], place: int | None = None) -> int:
        """Have ``call`` called once when a request has begun or ended, whosever it is: amid the work of the
        engine, so it must return at once and not raise. The first in the line are called first. Returns the
        place in it, by default its end, which those keep who found no room when they were called."""
        place = next(self._places) if place is None else place
        self._awaiting_room[call] = place
        return place

    def _has_room(self) -> None:
        """A request has begun, or ended."""
        if self._awaiting_room:
            calls, self._awaiting_room = self._awaiting_room, {}
            for call in sorted(calls, key=calls.__getitem__):
                call()

    async def encode(self, prompt: PromptSource) -> Sequence[int]:
        """The token ids of a prompt, as callers see them. Raises InvalidRequest, EngineClosed."""
        await self._intake.encode(prompt)
        return prompt.shown()

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises InvalidRequest."""
        return await self._intake.decode(
            self.tokenizer, ids, self.info.vocab_size, skip_special_tokens=skip_special_tokens
        )

    # -- what computes the requests -------------------------------------------------------------

    @abstractmethod
    def _opened(self, cell: StreamCell, checkpoint: StreamCheckpoint | None) -> _Opened:
        """A request that arrives now. Raises InvalidRequest."""

    @abstractmethod
    def _complete(
        self, ids: Sequence[int], params: SamplingParams, checkpoint: StreamCheckpoint | None
    ) -> Prepared:
        """Work out what a request needs besides its prompt, on any thread. Raises InvalidRequest."""

    @abstractmethod
    def _accept(self, opened: _Opened, prepared: Prepared, checkpoint: StreamCheckpoint | None) -> None:
        """Queue a request whose prompt is tokenized. Raises InvalidRequest, Rejected, EngineError."""

    @property
    @abstractmethod
    def queued(self) -> tuple[int, int]:
        """Requests that wait to be computed, and their tokens; without those that arrive."""

    @property
    @abstractmethod
    def room(self) -> tuple[int, int]:
        """Slots and positions that are free: what these take of the queue does not wait."""

    @abstractmethod
    def _abort(self, opened: _Opened, error: RequestError | EngineError | None) -> None:
        """Have nothing more computed for a request; its output has its end then."""

    def _left(self, opened: _Opened) -> None:
        """Give back what a request holds that has ended, or was not queued."""

    @abstractmethod
    def _failed_error(self) -> EngineFailed:
        """A new exception that says why it is FAILED."""

    async def use_file(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """:meth:`aioinfer.loop.intake.Intake.use_file`."""
        return await self._intake.use_file(call, *arguments)

    # -- as StreamOwner -------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise EngineClosed in another process than its own. On any thread."""
        require_process(self.process, self.kind)

    def check_loop(self) -> None:
        """Raise WrongLoop on any other loop than its own; once it is closed, any loop will do."""
        if self.state is not EngineState.CLOSED:
            require_loop(self.loop)

    def check_serving(self) -> None:
        """Raise WrongLoop, EngineFailed or EngineClosed unless requests are accepted here and now."""
        self.check_loop()
        self.check_running()

    def check_running(self) -> None:
        """The same on any thread, without WrongLoop."""
        self.check_process()
        if self.state is EngineState.FAILED:
            raise self._failed_error()
        if self.state is not EngineState.RUNNING:
            raise EngineClosed(f"the {self.kind} is {self.state.value}")

    def abandon(self, cell: StreamCell) -> None:
        """End a request whose consumer closed its stream, on any loop and thread."""
        if running_loop() is self.loop:
            self._abandon(cell)
        else:
            self.abandon_later(cell)

    def abandon_later(self, cell: StreamCell) -> None:
        """The same for a stream that was garbage-collected, on any thread, and maybe amid a step."""
        if self.state is not EngineState.CLOSED:
            try:
                self.loop.call_soon_threadsafe(self._abandon, cell)
            except RuntimeError:
                pass  # the loop is closed, and nothing runs any more

    def _abandon(self, cell: StreamCell) -> None:
        opened = self.open.get(cell)
        if opened is not None and not cell.output.ended:
            self.end(opened, None)

    @abstractmethod
    def caught_up(self, cell: StreamCell) -> None:
        """Continue a request that was parked for its consumer, who has read enough."""

    def checkpoint(self, cell: StreamCell) -> StreamCheckpoint:
        """A checkpoint of a request so far. Raises RuntimeError."""
        found = take(cell, self.info)
        return dataclasses.replace(found, deadline=cell.output.deadline_left(self.clock()))

    @abstractmethod
    def fork(
        self, cell: StreamCell, n: int, cut: Cut, params: SamplingParams | None, options: RequestOptions
    ) -> list[Stream]:
        """As :meth:`aioinfer.Stream.fork`."""

    @abstractmethod
    def rewrite(self, cell: StreamCell, cut: Cut) -> None:
        """Have the stream of a cell go on from a cut."""

    # -- endings --------------------------------------------------------------------------------

    def forked(self) -> None:
        """This is a copy in a child of a fork: nothing is computed for it. Its streams end; what belongs to
        threads, locks and devices is left as it is."""
        self.state = EngineState.CLOSED
        for cell in list(self.open):
            cell.output.refuse(fork_error(self.kind))
            cell.notify()
        self.open.clear()

    def _set_timer(self, opened: _Opened, phase: str, seconds: float | None) -> None:
        """End a request after a number of seconds, None for never."""
        if seconds is not None and not opened.output.finished:
            opened.cell.timer = self.loop.call_later(seconds, self._expire, opened, phase)

    def _expire(self, opened: _Opened, phase: str) -> None:
        opened.cell.timer = None
        self.end(opened, TimedOut(phase, getattr(opened.output.request, f"{phase}_timeout")))

    def end(self, opened: _Opened, error: RequestError | EngineError | None) -> None:
        """End a request, whatever its state."""
        if opened.preparing is not None:
            opened.output.refuse(error)
        else:
            self._abort(opened, error)
        self._ended(opened)

    def abort(self, request_id: str) -> int:
        """End the requests with this name, with Cancelled; returns their number. O(open requests)."""
        named = [each for each in self.open.values() if each.output.label == request_id]
        for opened in named:
            self.end(opened, Cancelled("the request was aborted by its id"))
        return len(named)

    def _end_all(self, make_error: Callable[[], EngineError]) -> None:
        for opened in list(self.open.values()):
            output = opened.output
            try:
                self.end(opened, make_error())
            except Exception:
                _log.exception("%r could not be aborted cleanly", output)
            if not output.ended:
                output.refuse(make_error())
                self._ended(opened)
            if output.error is not None and not isinstance(output.error, AioInferError):
                output.error = make_error()  # it ended with what was raised, and was not reported
        self._set_drained()

    def _ended(self, opened: _Opened) -> None:
        """Report a request that has ended. Idempotent."""
        if opened.preparing is not None:
            opened.preparing.cancel()
        self._arrived(opened)
        self._left(opened)
        opened.cell.cancel_timer()
        ending, opened.cell.ending = opened.cell.ending, None
        if ending is not None:
            ending()
        opened.cell.notify()
        # Last: one that could not be reported is still open, and ends with the engine.
        if self.open.pop(opened.cell, None) is not None and self.observers:
            self.observers.ended(opened.output)
        self._has_room()
        if self._drained is not None and not self._busy:
            self._set_drained()

    @property
    def _busy(self) -> bool:
        """Requests are open that closing waits for."""
        return bool(self.open)

    @property
    def closed(self) -> bool:
        """Nothing more comes from it."""
        return self.state is EngineState.CLOSED

    @property
    def closing(self) -> bool:
        """Nothing may begin any more."""
        return self.state in (EngineState.DRAINING, EngineState.CLOSED)

    def check_open(self) -> None:
        """Raise EngineClosed when nothing may begin any more."""
        self.check_process()
        if self.closing:
            raise EngineClosed(f"the {self.kind} was closed")

    async def _drain(self, seconds: float) -> None:
        """Wait for the open requests."""
        count = len(self.open)
        _log.info("closing waits up to %g s for %d request%s", seconds, count, "s" * (count > 1))
        self._drained = self.loop.create_future()
        timer = self.loop.call_later(seconds, self._set_drained)
        try:
            await self._drained
        finally:
            timer.cancel()

    def cut_short(self) -> None:
        """Do not wait for the open requests any longer."""
        self._set_drained()

    def _set_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # -- observing ------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Tokens that the readers of open streams have not taken; O(open streams)."""
        return sum(cell.unread for cell in list(self.open))
