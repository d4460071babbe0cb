"""ResultMap: what ``engine.map()`` returns, the results of many prompts in their order."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sized
from types import TracebackType
from typing import Any, Literal, Self

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
from aioinfer.outputs import Result
from aioinfer.stream import Stream, when_ended

__all__ = ["MapProgress", "OnError", "Prompts", "ResultMap", "Submit"]

OnError = Literal["raise", "return"]
Prompts = Iterable[Prompt] | AsyncIterable[Prompt]
#: called with how many prompts are done and how many there are, None if that is not known
MapProgress = Callable[[int, int | None], object]
#: makes the stream of a prompt, by the number of prompts of the same map that wait before it
Submit = Callable[[Prompt, int], Stream]

#: prompts that are queued between two turns of the loop
_PER_TURN = 16
#: after these no further prompt has a chance
_FATAL = (EngineClosed, EngineFailed, WrongLoop)


class ResultMap(AsyncIterator[Result | AioInferError]):
    """The results of many prompts, in the order of the prompts.

    Prompts are read when there is room for them: at most ``concurrency`` requests are open, and as many
    further results are kept after one that takes long. Work advances only while iterated.

    Leaving it aborts what is open, as with a :class:`~aioinfer.Stream`: a ``break``, an exception, a
    cancelled task, :meth:`aclose`. An iterator of prompts is left where it is, and not closed.
    """

    def __init__(
        self,
        submit: Submit,
        prompts: Prompts,
        *,
        concurrency: int,
        progress: MapProgress | None,
        on_error: OnError,
    ) -> None:
        """Raises InvalidRequest."""
        if type(concurrency) is not int or concurrency < 1:
            raise InvalidRequest("concurrency", f"must be a positive number, got {shown(concurrency)}")
        if on_error not in ("raise", "return"):
            raise InvalidRequest("on_error", f"must be 'raise' or 'return', got {shown(on_error)}")
        if progress is not None and not callable(progress):
            raise InvalidRequest("progress", f"must be callable, got {shown(progress)}")
        self._source: Any = _iterator(prompts)
        self._total = len(prompts) if isinstance(prompts, Sized) else None
        self._submit = submit
        self._concurrency = concurrency
        self._progress = progress
        self._raises = on_error == "raise"
        #: in the order of the prompts: open and ended requests, and what could not be queued
        self._window: deque[Stream | AioInferError] = deque()
        #: requests in the window that have not ended
        self._open = 0
        #: prompts that are done, and how many of them were reported
        self._done = self._reported = 0
        #: a prompt that was read and did not fit into the queue
        self._held: list[Prompt] = []
        #: the reading of the next prompt of an asynchronous iterator
        self._pulling: asyncio.Task[Prompt] | None = None
        #: no further prompt is read; with what the iterator raised, if it did
        self._exhausted = False
        self._failure: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reading = False
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result | AioInferError:
        """The result of the next prompt, or with ``on_error="return"`` the error of its request.

        Raises the first error otherwise, then what the iterator of prompts or ``progress`` raised, and errors
        of the engine as such (EngineClosed, EngineFailed, WrongLoop) in any case; all else is aborted then.
        """
        if self._closed:
            raise StopAsyncIteration
        if self._reading:
            raise RuntimeError("another task is reading this map")
        self._reading = True
        try:
            return await self._next()
        except GeneratorExit:
            # Closed by the collector, for example: at any point, amid a step, too.
            self._close(Stream.leave)
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self._reading = False

    async def _next(self) -> Result | AioInferError:
        while True:
            queued = self._fill()
            self._report()
            if self._window:
                head = self._window[0]
                if not isinstance(head, Stream) or head.done:
                    self._window.popleft()
                    return await self._outcome(head)
            elif self._exhausted:
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            if queued == _PER_TURN:
                await asyncio.sleep(0)
            else:
                await self._wait()

    async def _outcome(self, head: Stream | AioInferError) -> Result | AioInferError:
        error = head
        if isinstance(head, Stream):
            try:
                return await head  # has ended: this does not wait
            except AioInferError as raised:
                error = raised
        assert isinstance(error, AioInferError)
        if self._raises or isinstance(error, _FATAL):
            raise error
        return error

    # -- prompts --------------------------------------------------------------------------------

    def _fill(self) -> int:
        """Queue prompts as far as there is room; returns how many."""
        queued = 0
        while (
            queued < _PER_TURN
            and self._open < self._concurrency
            and len(self._window) < 2 * self._concurrency
            and self._pull()
        ):
            if not self._queue(self._held[0]):
                break
            self._held.clear()
            queued += 1
        return queued

    def _queue(self, prompt: Prompt) -> bool:
        """False if it has to wait for requests of this map to end."""
        waiting = sum(isinstance(each, Stream) and not (each.admitted or each.done) for each in self._window)
        try:
            stream = self._submit(prompt, waiting)
        except Rejected as full:
            if self._open:
                return False
            self._refuse(full)
        except _FATAL:
            raise
        except AioInferError as error:
            self._refuse(error)
        else:
            self._window.append(stream)
            self._open += 1
            when_ended(stream, _Ended(self))
        return True

    def _refuse(self, error: AioInferError) -> None:
        self._window.append(error)
        self._done += 1

    def _pull(self) -> bool:
        """A prompt is at hand in ``_held``."""
        if self._held:
            return True
        if self._exhausted:
            return False
        if not hasattr(self._source, "__anext__"):
            try:
                self._held.append(next(self._source))
            except StopIteration:
                self._exhausted = True
            except Exception as error:
                # The prompts before it are computed first.
                self._exhausted, self._failure = True, error
            return bool(self._held)
        if self._pulling is None:
            self._pulling = asyncio.ensure_future(_pulled(self._source))
            self._pulling.add_done_callback(_Ended(self, of_request=False))
        if not self._pulling.done():
            return False
        task, self._pulling = self._pulling, None
        self._take(task)
        return bool(self._held)

    def _take(self, task: asyncio.Task[Prompt]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._held.append(task.result())
            return
        self._exhausted = True
        self._failure = None if isinstance(error, _Exhausted) else error

    # -- waiting --------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until a request has ended, or a prompt is there."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self, *, ended: bool) -> None:
        """A request has ended, or a prompt is there. Called by the engine amid its work."""
        if ended:
            self._open -= 1
            self._done += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _report(self) -> None:
        if self._progress is not None and self._done != self._reported:
            self._reported = self._done
            self._progress(self._done, self._total)

    # -- leaving --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is open. Waits for nothing but an iterator of prompts that is being read."""
        pulling = self._pulling
        self.close()
        if pulling is not None:
            await asyncio.wait([pulling])

    def close(self) -> None:
        """The same from synchronous code, without waiting for the iterator of prompts."""
        self._close(Stream.close)

    def _close(self, leave: Callable[[Stream], None]) -> None:
        self._closed = True
        window, self._window = self._window, deque()
        self._held.clear()
        for each in window:
            if isinstance(each, Stream):
                leave(each)
        if self._pulling is not None:
            pulling, self._pulling = self._pulling, None
            pulling.cancel()

    def __del__(self) -> None:
        # On any thread, and amid a step: a task can be cancelled on the thread of its loop only.
        pulling = getattr(self, "_pulling", None)
        if pulling is not None and not pulling.get_loop().is_closed():
            pulling.get_loop().call_soon_threadsafe(pulling.cancel)


class _Ended:
    """Tells a map of what it waits for, if it is still there: the engine does not keep it."""

    __slots__ = ("_map", "_of_request")

    def __init__(self, each: ResultMap, *, of_request: bool = True) -> None:
        self._map = weakref.ref(each)
        self._of_request = of_request

    def __call__(self, *_: Any) -> None:
        found = self._map()
        if found is not None:
            found.wake(ended=self._of_request)


class _Exhausted(Exception):
    """The end of an asynchronous iterator, which a task cannot raise."""


async def _pulled(source: AsyncIterator[Prompt]) -> Prompt:
    try:
        return await anext(source)
    except StopAsyncIteration:
        raise _Exhausted from None


def _iterator(prompts: Any) -> Any:
    if isinstance(prompts, (str, bytes, Mapping)):
        raise InvalidRequest("prompts", f"must be several prompts, got {shown(prompts)}")
    if hasattr(prompts, "__aiter__"):
        return aiter(prompts)
    try:
        return iter(prompts)
    except TypeError:
        raise InvalidRequest("prompts", f"must be iterable, got {shown(prompts)}") from None
