"""Stream: what ``engine.generate()`` returns. Iterate it, await it, or enter it.

It is a class and not an async generator, because a generator that is dropped or cancelled between two items
is closed late, in another task, or never; a stream aborts its request at once, in synchronous code, however
it is left.
"""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, Unpack

from aioinfer.awaited import Awaited
from aioinfer.cells import Cut, Outlet, StreamCell, Want
from aioinfer.errors import AioInferError, Cancelled
from aioinfer.outputs import Chunk, FinishReason, RequestMetrics, Result, Usage

if TYPE_CHECKING:
    from aioinfer.params import SamplingParams
    from aioinfer.request import RequestOptions
    from aioinfer.resuming.record import StreamCheckpoint

__all__ = ["Stream"]

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

    def fork(
        self, cell: StreamCell, n: int, cut: Cut, params: SamplingParams | None, options: RequestOptions
    ) -> list[Stream]:
        """As :meth:`Stream.fork`."""

    def rewrite(self, cell: StreamCell, cut: Cut) -> None:
        """Have the stream of a cell go on from a cut."""


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
        #: the loop on which a chunk was read last; None: none was, or it was awaited since
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

    # -- another way on -------------------------------------------------------------------------

    def fork(
        self,
        n: int = 1,
        *,
        at: int | None = None,
        then: str | Sequence[int] = (),
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Stream]:
        """``n`` streams (1 to 128) that go on from this one, which goes on, too. Does not wait.

        They share all whole pages of KV up to there. Each is a request like any other, to be read, awaited
        and left by itself; its chunks begin behind what is kept, its result has the whole output. Either all
        are queued or none. This stream may have ended, also in the middle of a thought; it may be closed
        right after.

        Args:
            at: how many tokens of the output are kept. By default those of the chunks that were read; if
                none were, or it was awaited since, all that are known, but not one that ended it: an end
                token, or the last of a stop string.
            then: token ids that follow as if the model had written them, or text, tokenized by itself.
                They are the first that is delivered.
            params: by default those of this stream. What ``generate`` would take from the model, where it is
                not set, is taken from this stream. ``max_tokens`` counts the whole output. The seeds follow
                ``params.seed`` as those of choices do; without one, the first is this stream's and 1.
            options: those of ``generate``; by default this stream's, but ``request_id``, with what is left of
                its ``deadline``.

        Raises:
            InvalidRequest: an argument is bad, or does not agree with what is kept. What only the text of
                ``then`` shows, or a grammar, is raised by the streams.
            RuntimeError: the prompt is not tokenized yet, or nothing is generated.
            Rejected, EngineClosed, EngineFailed, WrongLoop: as of ``generate``.
        """
        return self._owner.fork(self._cell, n, Cut(at, self._iterated, then), params, options)

    def inject(self, text_or_ids: str | Sequence[int], *, at: int | None = None) -> None:
        """Go on in this stream as if the model had written this behind ``at`` tokens; what it had computed
        beyond them is dropped. Arguments and errors are those of :meth:`fork`, with ``inject`` for ``then``.
        Place in the queue, deadlines and seed remain. Does not wait: where something has to be worked out,
        the next cut has to wait for :meth:`accepted`."""
        self._rewrite(Cut(at, self._iterated, text_or_ids, then_name="inject"))

    def rewind(self, to: int) -> None:
        """The same with nothing behind the first ``to`` tokens. With the same noise, the same follows. The
        reader gets what follows these tokens, or those that it has, if they are fewer."""
        self._rewrite(Cut(to, self._iterated, at_name="to", then_name=""))

    def _rewrite(self, cut: Cut) -> None:
        self._owner.rewrite(self._cell, cut)
        self._ended = False

    @property
    def _iterated(self) -> bool:
        return self._loop is not None

    # -- async for ------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Raises the request's error, once everything produced before it was delivered."""
        # Runs once per token: what most chunks need is written out here, the rest is called.
        cell = self._cell
        try:
            loop = get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop or loop is None:
            self._owner.check_loop()
            self._loop = loop
        while not (cell.closed or self._ended):
            chunk, output = None, cell.output  # which is another one after a rewind
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
        self._loop = None
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

    def fork_beside(self, at: int, then: Sequence[int], params: SamplingParams | None = None) -> Stream:
        """For searches: one fork, that waits in the queue where this stream is."""
        cut = Cut(at, self._iterated, then, beside=True)
        return self._owner.fork(self._cell, 1, cut, params, {})[0]

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
