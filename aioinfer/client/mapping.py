"""ResultMap: what ``engine.map()`` returns, the results of many rows in their order."""

from __future__ import annotations

import asyncio
import bisect
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sized
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

from aioinfer.cells import when_ended
from aioinfer.client.chats import ChatStream
from aioinfer.errors import (
    AioInferError,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    Rejected,
    WrongLoop,
    shown,
)
from aioinfer.loop.options import Prompt
from aioinfer.stream import Stream

__all__ = ["MapProgress", "OnError", "Open", "Opened", "Prompts", "ResultMap", "Rows", "check_on_error"]

_Item = TypeVar("_Item")
OnError: TypeAlias = Literal["raise", "return"]
Rows: TypeAlias = Iterable[_Item] | AsyncIterable[_Item]
Prompts: TypeAlias = Rows[Prompt]
Opened: TypeAlias = Stream | ChatStream
#: called with how many rows are done and how many there are, None if that is not known
MapProgress = Callable[[int, int | None], object]
#: checks a row; what it returns makes the stream of it, by the number of rows of the same map that wait
#: before it, as often as it is called. Raises AioInferError
Open = Callable[[Any], Callable[[int], Opened]]

#: rows that are queued between two turns of the loop
_PER_TURN = 16
#: seconds after which a full queue is tried again without a sign that it has room: others may fill it of whom
#: nothing is seen here, such as other dispatchers of the same replicas
_AGAIN = 1.0
#: after these no further row has a chance
_FATAL = (EngineClosed, EngineFailed, WrongLoop)
#: in place of a result: there are no more
_END: Any = object()


class _Row:
    """A row that was read and not delivered."""

    __slots__ = ("__weakref__", "index", "open", "outcome")

    def __init__(self, index: int) -> None:
        self.index = index
        #: makes its stream
        self.open: Callable[[int], Opened] | None = None
        #: its stream, or why there is none; None: it waits for room in the queue
        self.outcome: Opened | AioInferError | None = None

    @property
    def waits(self) -> bool:
        """Its request is queued and has not begun."""
        opened = self.outcome
        return isinstance(opened, (Stream, ChatStream)) and not (opened.admitted or opened.done)

    @property
    def done(self) -> bool:
        return isinstance(self.outcome, AioInferError) or (self.outcome is not None and self.outcome.done)

    @property
    def refused(self) -> bool:
        """The queue was full when its prompt was tokenized."""
        opened = self.outcome
        if not isinstance(opened, (Stream, ChatStream)):
            return False
        output = opened.cell.output
        return isinstance(output.error, Rejected) and output.error.full and not output.accepted


class ResultMap(AsyncIterator[_Item], Generic[_Item]):
    """The results of many rows, in the order of the rows.

    Rows are read when there is room for them: at most ``concurrency`` requests are open, and as many
    further results are kept after one that takes long. Where the queue is full, whoever fills it, rows wait
    until some request begins or ends. Work advances only while iterated.

    Leaving it aborts what is open, as with a :class:`~aioinfer.Stream`: a ``break``, an exception, a
    cancelled task, :meth:`aclose`; :meth:`undelivered` has what was done by then. An iterator of rows is
    left where it is, and not closed.
    """

    def __init__(
        self,
        open: Open,
        rows: Rows[Any],
        *,
        concurrency: int,
        room: Callable[[Callable[[], None], int | None], int],
        progress: MapProgress | None = None,
        on_error: OnError = "raise",
        patient: bool = True,
    ) -> None:
        """``room``: :meth:`aioinfer.loop.service.Service.when_room`; ``patient``: False if the queue must
        have room for the first row at once. Raises InvalidRequest."""
        if type(concurrency) is not int or concurrency < 1:
            raise InvalidRequest("concurrency", f"must be a positive number, got {shown(concurrency)}")
        check_on_error(on_error)
        if progress is not None and not callable(progress):
            raise InvalidRequest("progress", f"must be callable, got {shown(progress)}")
        self._source: Any = _iterator(rows)
        self._total = len(rows) if isinstance(rows, Sized) else None
        self._make = open
        self._concurrency = concurrency
        self._when_room = room
        self._progress = progress
        self._raises = on_error == "raise"
        self._patient = patient
        #: rows that were read and not delivered, and those of them that wait for room, in their order
        self._window: deque[_Row] = deque()
        self._unsent: list[_Row] = []
        #: the queue was full, and nothing has shown since that it has room
        self._full = False
        self._room, self._timed = _Told(self, ResultMap.roomy), False
        #: the place in the line of those that wait for room, since a row was queued
        self._place: int | None = None
        #: rows that were read; requests that have not ended
        self._read = self._open = 0
        #: rows that are done, and how many of them were reported
        self._done = self._reported = 0
        #: the reading of the next row of an asynchronous iterator
        self._pulling: asyncio.Task[Any] | None = None
        #: no further row is read; with what the iterator raised, if it did
        self._exhausted = False
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reading = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Item:
        """The result of the next row, or with ``on_error="return"`` the error of its request.

        Raises the first error otherwise, then what the iterator of rows or ``progress`` raised, and errors
        of the engine as such (EngineClosed, EngineFailed, WrongLoop) in any case; all else is aborted then.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._reading:
            raise RuntimeError("another task is reading this map")
        self._reading = True
        try:
            found = await self._next()
        except GeneratorExit:
            # Closed by the collector, for example: at any point, amid a step, too.
            self._close(lambda opened: opened.leave())
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, StopAsyncIteration):  # which would end the loop as if all were done
                raise RuntimeError("the rows or progress raised StopAsyncIteration") from error
            raise
        finally:
            self._reading = False
        if found is _END:
            self.close()
            raise StopAsyncIteration
        item: _Item = found
        return item

    async def _next(self) -> Any:
        while True:
            queued = self._fill()
            self._report()
            if self._window:
                head = self._window[0]
                if head.done and not head.refused:
                    # It is kept until its result is there: parsing an answer takes turns of the loop.
                    found = await self._outcome(head.outcome)
                    self._window.popleft()
                    return found
            elif self._exhausted:
                if self._failure is not None:
                    raise self._failure
                return _END
            if queued == _PER_TURN:
                await asyncio.sleep(0)
            else:
                await self._wait()

    async def _outcome(self, outcome: Any) -> Any:
        error = outcome
        if not isinstance(outcome, AioInferError):
            try:
                return await outcome  # has ended: this waits for no step
            except AioInferError as raised:
                error = raised
        if self._raises or isinstance(error, _FATAL):
            raise error
        return error

    # -- rows -----------------------------------------------------------------------------------

    def _fill(self) -> int:
        """Queue rows as far as there is room; returns how many."""
        queued, waiting = 0, sum(each.waits for each in self._window)
        while queued < _PER_TURN and self._open < self._concurrency and not self._full:
            if not self._unsent and not self._read_row():
                break
            if self._unsent and not self._queue(self._unsent[0], waiting + queued):
                break
            queued += 1
        return queued

    def _read_row(self) -> bool:
        """Read a row into the window; False if there is none, or no place."""
        if len(self._window) >= 2 * self._concurrency:
            return False
        given = self._pull()
        if given is _END:
            return False
        row = _Row(self._read)
        self._read += 1
        self._window.append(row)
        try:
            row.open = self._make(given)
        except _FATAL:
            raise
        except AioInferError as error:
            self._refuse(row, error)
        else:
            self._unsent.append(row)
        return True

    def _queue(self, row: _Row, waiting: int) -> bool:
        """Queue it behind others that are ``waiting``. False if it has to wait for room."""
        assert row.open is not None
        try:
            opened = row.open(waiting)
        except Rejected as full:
            if self._patient and full.full:
                self._stand_in_line()
                self._await_room()
                return False
            del self._unsent[0]
            self._refuse(row, full)
            return True
        except _FATAL:
            raise
        except AioInferError as error:
            del self._unsent[0]
            self._refuse(row, error)
            return True
        del self._unsent[0]
        row.outcome, self._patient, self._place = opened, True, None
        self._open += 1
        when_ended(opened.cell, _Told(self, ResultMap.ended, row))
        return True

    def _refuse(self, row: _Row, error: AioInferError) -> None:
        row.outcome = error
        self._done += 1

    def _pull(self) -> Any:
        """The next row; ``_END`` if none is at hand."""
        if self._exhausted:
            return _END
        if not hasattr(self._source, "__anext__"):
            try:
                return next(self._source)
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                # The rows before it are computed first.
                self._exhausted, self._failure = True, error
            return _END
        if self._pulling is None:
            self._pulling = asyncio.ensure_future(_pulled(self._source))
            self._pulling.add_done_callback(_Told(self, ResultMap.wake))
        if not self._pulling.done():
            return _END
        task, self._pulling = self._pulling, None
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is None:
            return task.result()
        self._exhausted = True
        self._failure = None if isinstance(failure, _Exhausted) else failure
        return _END

    # -- waiting --------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until a request has ended, the queue may have room, or a row is there."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """There may be something to do. Called by the engine amid its work, as the following are."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def ended(self, row: _Row) -> None:
        """The request of a row has ended."""
        self._open -= 1
        if row.refused:
            row.outcome = None
            bisect.insort(self._unsent, row, key=lambda each: each.index)
            self._await_room()
            self.wake()
        else:
            self._done += 1
            row.open = None
            self._stand_in_line()  # those that wait are told before it

    def _stand_in_line(self) -> None:
        self._place = self._when_room(self._room, self._place)

    def _await_room(self) -> None:
        """The queue was full: wait until a request of this map ends, the engine tells of room, or a while
        has passed."""
        self._full = True
        if not self._timed:
            self._timed = True
            asyncio.get_running_loop().call_later(_AGAIN, _Told(self, ResultMap._again))

    def _again(self) -> None:
        self._timed = False
        self.roomy()

    def roomy(self) -> None:
        """The queue may have room."""
        self._full = False
        self.wake()

    def _report(self) -> None:
        if self._progress is not None and self._done != self._reported:
            self._reported = self._done
            self._progress(self._done, self._total)

    # -- leaving --------------------------------------------------------------------------------

    async def undelivered(self) -> dict[int, _Item]:
        """What is done and was not delivered, by the number of its row: results, and errors with
        ``on_error="return"``. Also after the map was left."""
        found: dict[int, _Item] = {}
        for row in [*self._window]:
            if row.done and not row.refused:
                try:
                    found[row.index] = await self._outcome(row.outcome)
                except AioInferError:
                    continue
        return found

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is open. Waits for nothing but an iterator of rows that is being read."""
        pulling = self._pulling
        self.close()
        if pulling is not None:
            await asyncio.wait([pulling])

    def close(self) -> None:
        """The same from synchronous code, without waiting for the iterator of rows."""
        self._close(lambda opened: opened.close())

    def _close(self, leave: Callable[[Opened], None]) -> None:
        self._closed = True
        self._unsent.clear()
        window, self._window = self._window, deque(row for row in self._window if row.done)
        for row in window:
            if isinstance(row.outcome, (Stream, ChatStream)) and not row.done:
                leave(row.outcome)
        if self._pulling is not None:
            pulling, self._pulling = self._pulling, None
            pulling.cancel()

    def __del__(self) -> None:
        # On any thread, and amid a step: a task can be cancelled on the thread of its loop only.
        pulling = getattr(self, "_pulling", None)
        if pulling is not None and not pulling.get_loop().is_closed():
            pulling.get_loop().call_soon_threadsafe(pulling.cancel)


class _Told:
    """Calls a method of a map, if it is still there: the engine does not keep it, or its rows."""

    __slots__ = ("_call", "_map", "_row")

    def __init__(self, each: ResultMap[Any], call: Callable[..., None], row: _Row | None = None) -> None:
        self._map = weakref.ref(each)
        self._call = call
        self._row = None if row is None else weakref.ref(row)

    def __call__(self, *_: Any) -> None:
        found = self._map()
        if found is None:
            return
        if self._row is None:
            self._call(found)
        elif (row := self._row()) is not None:
            self._call(found, row)


class _Exhausted(Exception):
    """The end of an asynchronous iterator, which a task cannot raise."""


async def _pulled(source: AsyncIterator[Any]) -> Any:
    try:
        return await anext(source)
    except StopAsyncIteration:
        raise _Exhausted from None


def check_on_error(given: Any) -> None:
    """Raise InvalidRequest unless it says what becomes of errors."""
    if given not in ("raise", "return"):
        raise InvalidRequest("on_error", f"must be 'raise' or 'return', got {shown(given)}")


def _iterator(rows: Any) -> Any:
    if isinstance(rows, (str, bytes, Mapping)):
        raise InvalidRequest("prompts", f"must be several prompts, got {shown(rows)}")
    if hasattr(rows, "__aiter__"):
        return aiter(rows)
    try:
        return iter(rows)
    except TypeError:
        raise InvalidRequest("prompts", f"must be iterable, got {shown(rows)}") from None
