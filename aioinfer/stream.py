"""Stream: what ``engine.generate()`` returns. Iterate it, await it, or enter it.

It is a class and not an async generator, because a generator that is dropped or cancelled between two items
is closed late, in another task, or never; a stream aborts its request at once, in synchronous code, however
it is left.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import get_running_loop
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol, Self

from aioinfer.awaited import Awaited
from aioinfer.errors import AioInferError, Cancelled
from aioinfer.outputs import Chunk, FinishReason, RequestMetrics, Result, Usage
from aioinfer.request import Output

if TYPE_CHECKING:
    from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["Lane", "Outlet", "Stream", "StreamCell", "tell_lanes", "when_ended"]


class Want(Enum):
    """Event that a consumer waits for."""

    CHUNK = "chunk"
    RESULT = "result"
    ACCEPTANCE = "acceptance"


_CHUNK = Want.CHUNK


class StreamOwner(Protocol):
    """The engine or dispatcher that made a stream, as the stream knows it."""

    def check_loop(self) -> None:
        """Raise WrongLoop on any loop but the engine's."""

    def abandon(self, cell: StreamCell) -> None:
        """End the request, since its consumer has left: at once on the engine's loop, elsewhere one turn of
        that loop later."""

    def abandon_later(self, cell: StreamCell) -> None:
        """The same from any thread and at any point, always one turn of the loop later."""

    def caught_up(self, cell: StreamCell) -> None:
        """Continue a request that was parked for its consumer, who has read enough. On the engine's loop."""

    def checkpoint(self, cell: StreamCell) -> StreamCheckpoint:
        """A checkpoint of the request so far. Raises RuntimeError."""


class _Callback:
    """In place of a consumer's future: something that is called once."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def done(self) -> bool:
        return self._call is None

    def set_result(self, result: None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Outlet(Protocol):
    """Takes the text of one stream from its cell, so that no task is woken for it: see
    :meth:`Stream.until_ended`."""

    @property
    def lane(self) -> Lane: ...


class Lane(Protocol):
    """Outlets that write together."""

    def moved(self, outlets: Sequence[Outlet]) -> None:
        """There may be text for each of these. Called amid a step: it is written in a later callback, and
        nothing is raised."""


class StreamCell:
    """The position of one consumer in the output of its request, and the future that wakes it.

    Text and ids stay in the request; the cell counts how much of them was taken. So a slow consumer costs no
    more memory than the output itself, and is woken at most once for all that has accumulated. Of drafts
    only the newest is delivered, made when it is taken. The engine refers to the cell and never to the
    stream, so that a dropped stream is garbage-collected and aborts its request.
    """

    __slots__ = (
        "blocked",
        "closed",
        "context",
        "delivered",
        "ending",
        "max_lag",
        "outlet",
        "output",
        "parked",
        "taken_draft",
        "taken_ids",
        "taken_pieces",
        "timer",
        "waiter",
        "wants",
    )

    def __init__(self, output: Output) -> None:
        self.output = output
        #: the consumer has left; nothing more is delivered
        self.closed = False
        self.taken_pieces = 0
        self.taken_ids = 0
        self.taken_draft = 0
        #: characters that its consumer had before a restored output has its text
        self.delivered = 0
        self.waiter: asyncio.Future[None] | _Callback | None = None
        #: called once when the request has ended, on its engine's loop; as with :func:`when_ended`
        self.ending: Callable[[], object] | None = None
        #: what takes the text while the consumer waits for the end
        self.outlet: Outlet | None = None
        #: the outlet could not take it when it last wanted to
        self.blocked = False
        #: what wakes the waiting consumer, besides the end
        self.wants = Want.CHUNK
        #: in which its logits processors are called, if they are coroutines
        self.context: contextvars.Context | None = None
        #: the deadline of the phase the request is in
        self.timer: asyncio.TimerHandle | None = None
        #: unread tokens beyond which the request is parked
        self.max_lag = output.request.max_lag
        #: nothing is computed for the request until its consumer reads
        self.parked = False

    @property
    def unread(self) -> int:
        """Tokens that the consumer could read and has not. (A waiting consumer has read all that there is;
        the other tokens are then held back for a stop string, or it waits for the whole result. One with an
        outlet always waits, and has read all unless that is blocked.)"""
        return 0 if self.reading else len(self.output.token_times) - self.taken_ids

    @property
    def reading(self) -> bool:
        """The consumer waits, or has an outlet that is not blocked."""
        return self.waiter is not None if self.outlet is None else not self.blocked

    @property
    def lags(self) -> bool:
        """More tokens are unread than ``max_lag``."""
        return self.max_lag is not None and self.unread > self.max_lag

    def ready(self) -> bool:
        """Whether the consumer may go on: what it wants is there, or the end is."""
        output = self.output
        if self.closed or output.ended:
            return True
        if self.wants is Want.ACCEPTANCE:
            return output.accepted
        if self.wants is Want.RESULT:
            return False
        if output.has_text:
            more = len(output.pieces) > self.taken_pieces
        else:
            more = len(output.token_times) > self.taken_ids
        return more or (output.draft_version > self.taken_draft and not output.text_behind)

    def notify(self) -> None:
        """Wake the consumer if what it waits for is there, or its outlet."""
        waiter, output, outlet = self.waiter, self.output, self.outlet
        if outlet is not None and not (self.closed or output.ended):
            outlet.lane.moved((outlet,))
            return
        if waiter is None:
            return
        if output.plain and self.wants is _CHUNK and not (output.finished or self.closed):
            ready = len(output.pieces) > self.taken_pieces  # as in ready(), but short: once per token
        else:
            ready = self.ready()
        if ready and not waiter.done():
            waiter.set_result(None)

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def take(self) -> Chunk | None:
        """Everything not taken yet, with the newest draft; None if there is nothing to deliver."""
        output = self.output
        # Newer tokens have no text yet, and may lie after a stop.
        count, finished = len(output.token_times), output.ended
        # None if the block of the newest draft is gone.
        draft = None if output.text_behind else output.draft()
        redrafted = draft is not None and output.draft_version > self.taken_draft
        if count == self.taken_ids and not (finished or redrafted):
            return None
        end, version, final = len(output.pieces), output.weight_version, finished
        if output.switches:
            # What earlier weights have computed is a chunk of its own.
            switch = output.switch_after(self.taken_ids, self.taken_pieces)
            if switch is not None:
                count, end, version = switch
                draft, redrafted, finished = None, False, False
            else:
                version = output.newest_version
        text = "".join(output.pieces[self.taken_pieces : end])
        token_ids = output.token_ids[self.taken_ids : count]
        ended = finished and output.error is None
        # The last tokens may have no text of their own, also those before a switch.
        bare = final or not output.has_text or end < len(output.pieces)
        if not (ended or text or redrafted or (token_ids and bare)):
            return None
        chunk = Chunk(text, token_ids, draft=draft, weight_version=version)
        if output.request.params.logprobs is not None:
            chunk.logprobs = output.logprobs[self.taken_ids : count]
        step_map = output.step_map
        if step_map is not None:
            chunk.step_map = step_map[self.taken_ids : count]
        if ended:
            chunk.finish_reason, chunk.stop_reason = output.finish_reason, output.stop_reason
            chunk.usage = output.usage
        self.taken_pieces, self.taken_ids = end, count
        if not output.text_behind:  # else the newest draft is still to come
            self.taken_draft = output.draft_version
        return chunk


class Stream(Awaited[Result]):
    """One generation in progress.

    * ``async for chunk in stream`` yields chunks; the last one carries ``finish_reason``.
    * ``await stream`` waits for the end and returns the :class:`~aioinfer.Result`; so does a task made of it
      with ``asyncio.create_task(stream)`` or ``TaskGroup.create_task(stream)``.
    * ``async with stream`` closes it on the way out.

    The request was queued when the stream was made. It is aborted when the stream is closed, its consumer
    cancelled, or the stream dropped; its memory is given back when the steps in flight have landed, by
    default two at the most. Errors of the request (:class:`~aioinfer.RequestError`,
    :class:`~aioinfer.EngineError`) are raised where it is read.
    """

    __slots__ = ("_cell", "_ended", "_loop", "_owner")

    def __init__(self, owner: StreamOwner, cell: StreamCell) -> None:
        super().__init__()
        self._owner = owner
        self._cell = cell
        self._ended = False
        #: the loop on which it was read last
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def admitted(self) -> bool:
        """The request has had a row in a step."""
        return self._cell.output.admitted_at is not None

    @property
    def done(self) -> bool:
        """The request has ended, with or without an error; nothing more is computed for it."""
        return self._cell.output.ended or self._cell.closed

    @property
    def usage(self) -> Usage:
        """The token counts so far; of the prompt, 0 before it is tokenized."""
        return self._cell.output.usage

    @property
    def request_id(self) -> str:
        """The caller's name for the request, or one that was made for it."""
        return self._cell.output.request_id

    @property
    def metrics(self) -> RequestMetrics:
        """The times so far."""
        return self._cell.output.metrics

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output has ended; "abort" also for an error. None while it goes on."""
        return self._cell.output.finish_reason if self.done else None

    def result(self) -> Result:
        """The output so far, without waiting, also of a request that failed after it was queued.

        Raises the error of a request that was never queued, and RuntimeError before the prompt is tokenized.
        ``await stream`` waits for the end.
        """
        if not self._cell.output.accepted:
            self._raise_error()
            if self.done:
                raise Cancelled("the stream was closed before its prompt was tokenized")
            raise RuntimeError(
                "the prompt has not been tokenized yet, and result() does not wait: await the stream, or use "
                "one of engine.threadsafe()"
            )
        return self._cell.output.result()

    def checkpoint(self) -> StreamCheckpoint:
        """A checkpoint of the request so far, for :meth:`aioinfer.Engine.restore`: also when it was aborted,
        or the engine failed or was closed. Does not wait.

        Raises RuntimeError before the prompt is tokenized, when the output is complete, and for what
        generates nothing: scores and embeddings.
        """
        return self._owner.checkpoint(self._cell)

    # -- async for ------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Raises the request's error, once everything produced before it was delivered."""
        # Runs once per token: what most chunks need is written out here, the rest is called.
        cell = self._cell
        output = cell.output
        try:
            loop = get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop or loop is None:
            self._owner.check_loop()
            self._loop = loop
        while not (cell.closed or self._ended):
            chunk = None
            if output.plain and not output.finished:
                pieces, first, count = output.pieces, cell.taken_pieces, len(output.pieces)
                if count > first:
                    known = len(output.token_times)
                    text = pieces[first] if count - first == 1 else "".join(pieces[first:])
                    chunk = Chunk(
                        text,
                        output.token_ids[cell.taken_ids : known],
                        weight_version=output.weight_version,
                    )
                    cell.taken_pieces, cell.taken_ids = count, known
            else:
                chunk = cell.take()
                self._ended = output.ended if chunk is None else chunk.finish_reason is not None
            if chunk is not None:
                if cell.parked:
                    self.caught_up()
                return chunk
            if self._ended:
                self._raise_error()
                break
            if cell.waiter is not None or loop is None or cell.parked:
                await self._wait(_CHUNK)
            else:
                cell.wants = _CHUNK
                cell.waiter = waiter = loop.create_future()
                try:
                    await waiter
                except BaseException as error:
                    self._interrupted(error)
                    raise
                finally:
                    cell.waiter = None
            if cell.closed:
                raise Cancelled("the stream was closed while it was being read")
        raise StopAsyncIteration

    # -- await ----------------------------------------------------------------------------------

    async def _wait_result(self) -> Result:
        cell = self._cell
        self._owner.check_loop()
        while not self.done:
            await self._wait(Want.RESULT)
        self._raise_error()
        if cell.output.finish_reason == "abort":
            raise Cancelled("the stream was closed before its end")
        return cell.output.result()

    async def until_ended(self, outlet: Outlet) -> None:
        """Have ``outlet`` take the text as it comes, and wait for the end of the request.

        The outlet moves the cursors of ``cell``. What it has not taken, the finish reason and errors are read
        as usual afterwards.
        """
        self._owner.check_loop()
        cell = self._cell
        if cell.outlet is not None:
            raise RuntimeError("another task is reading this stream")
        cell.outlet = outlet
        try:
            outlet.lane.moved((outlet,))
            while not self.done:
                await self._wait(Want.RESULT)
        finally:
            cell.outlet, cell.blocked = None, False

    @property
    def cell(self) -> StreamCell:
        """For outlets: what was produced, and how much of it was taken."""
        return self._cell

    def caught_up(self) -> None:
        """Continue a request that was parked for its reader. Call it after moving the cursors."""
        if self._cell.parked:
            self._owner.caught_up(self._cell)

    async def accepted(self) -> None:
        """Wait until the prompt is tokenized, checked and queued. Raises InvalidRequest, Rejected."""
        self._owner.check_loop()
        while not (self._cell.output.accepted or self.done):
            await self._wait(Want.ACCEPTANCE)
        self._raise_error()

    # -- leaving --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._owner.check_loop()
        return self

    def close(self) -> None:
        """The same from synchronous code."""
        self._leave(self._owner.abandon)

    def leave(self) -> None:
        """The same one turn of the loop later, from any thread and at any point: amid a step, too."""
        self._leave(self._owner.abandon_later)

    def __del__(self) -> None:
        if not self.done:
            self.leave()

    def _leave(self, abandon: Callable[[StreamCell], None]) -> None:
        if not self._cell.closed:
            self._cell.closed = True
            abandon(self._cell)

    # -- inside ---------------------------------------------------------------------------------

    async def _wait(self, want: Want) -> None:
        cell = self._cell
        if cell.waiter is not None:
            raise RuntimeError("another task is reading this stream")
        cell.waiter = waiter = get_running_loop().create_future()
        cell.wants = want
        self.caught_up()
        try:
            await waiter
        except BaseException as error:
            self._interrupted(error)
            raise
        finally:
            cell.waiter = None

    def _interrupted(self, error: BaseException) -> None:
        """The consumer has left while it waited."""
        if isinstance(error, GeneratorExit):
            # Closed, by the collector for example: on any thread and at any point, amid a step, too.
            self.leave()
        else:
            self.close()  # its task was cancelled, by a timeout for example

    def _raise_error(self) -> None:
        error = self._cell.output.error
        if error is None:
            return
        if isinstance(error, AioInferError) and error.request_id is None:
            error.request_id = self.request_id
        raise error


def tell_lanes(cells: Sequence[StreamCell]) -> list[StreamCell]:
    """Tell the outlets of streams that have moved, lane by lane; returns the other streams, and those that
    have ended or whose consumer can lag."""
    others: list[StreamCell] = []
    lane: Lane | None = None
    outlets: list[Outlet] = []
    for cell in cells:
        outlet = cell.outlet
        if outlet is None or cell.max_lag is not None or cell.output.finished:
            others.append(cell)
            continue
        if outlet.lane is not lane:
            if lane is not None:
                lane.moved(outlets)
            lane, outlets = outlet.lane, []
        outlets.append(outlet)
    if lane is not None:
        lane.moved(outlets)
    return others


def when_ended(cell: StreamCell, call: Callable[[], object]) -> None:
    """Have ``call`` called once when the request of a stream with this cell has ended, amid the work of the
    engine: it must return at once, not raise, and not refer to the stream. From then on, that can only be
    awaited."""
    cell.waiter, cell.wants = _Callback(call), Want.RESULT
    cell.notify()
