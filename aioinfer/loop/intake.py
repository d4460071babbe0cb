"""Intake: the worker threads that tokenize prompts, compile grammars and read files."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from aioinfer.errors import EngineClosed, EngineError, InvalidRequest
from aioinfer.execution.workers import WorkerExecutor
from aioinfer.inputs import check_ids
from aioinfer.loop.options import Abandoned, PromptSource
from aioinfer.loop.waiting import finish

if TYPE_CHECKING:
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Intake"]

_T = TypeVar("_T")

_THREADS = 2
#: characters of a prompt that takes 10 to 50 ms to tokenize
_LONG = 1 << 15


class Intake:
    """Two thread pools: one for tokenizing, one for requests that need a grammar; and a thread each for
    reading adapters and weights.

    The pools are separate so that a grammar, however large, never delays plain prompts. Of the two threads
    that tokenize, long prompts use one at a time, so a short prompt waits for short ones only. A cancelled
    call that no thread has begun is never made.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._workers = WorkerExecutor(_THREADS, "aioinfer-text")
        self._compilers = WorkerExecutor(_THREADS, "aioinfer-text-grammar")
        #: for adapters: these can be large, and nothing else waits for them
        self._readers = WorkerExecutor(1, "aioinfer-adapters")
        #: for other weights of the model, which no adapter waits for either
        self._weights = WorkerExecutor(1, "aioinfer-weights")
        self._short = _Lane(loop, self._workers, _THREADS)
        self._long = _Lane(loop, self._workers, 1)
        self._grammars = _Lane(loop, self._compilers, _THREADS)
        #: prompts that a thread is tokenizing, each once for all requests that wait for it
        self._encodings: dict[PromptSource, asyncio.Future[Any]] = {}
        #: requests that wait for each
        self._wanted: Counter[PromptSource] = Counter()
        self._decoding = asyncio.Lock()
        #: done when it is closed
        self._closed: asyncio.Future[None] = loop.create_future()

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The result of a blocking call, made on a worker thread."""
        return await self.loop.run_in_executor(self._workers, call, *arguments)

    def begin(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The same, beside what its caller does meanwhile."""
        return _seen(self.loop.run_in_executor(self._workers, call, *arguments))

    def read(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The result of reading an adapter, on a thread of its own. Cancelled when closed."""
        return _seen(self.loop.run_in_executor(self._readers, call, *arguments))

    async def use_file(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The result of a call that opens or completes a file, on the thread that reads adapters. It has
        ended when this returns or raises. Raises EngineClosed."""
        if self._closed.done():
            raise EngineClosed("the engine was closed")
        #: for the thread that begins it, or for the caller who leaves before
        ticket, left = [call], False
        using = self.read(lambda: ticket.pop()(*arguments))

        def leave() -> None:
            nonlocal left
            left = True
            with suppress(IndexError):  # a thread has begun
                ticket.pop()
                using.cancel()

        try:
            return await finish(using, leave)
        except asyncio.CancelledError:
            if left:
                raise
            raise EngineClosed("the engine was closed") from None

    def read_weights(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The same for weights of the model, on another thread."""
        return _seen(self.loop.run_in_executor(self._weights, call, *arguments))

    async def encode(self, source: PromptSource) -> Sequence[int]:
        """The token ids of a prompt, made on a worker thread in its turn. Raises InvalidRequest, and
        EngineClosed."""
        self._wanted[source] += 1
        source.abandoned = False
        try:
            return await self._encoded(source)
        finally:
            self._wanted[source] -= 1
            if not self._wanted[source]:
                del self._wanted[source]
                source.abandoned = True

    async def _encoded(self, source: PromptSource) -> Sequence[int]:
        while source.ids is None:
            encoding = self._encodings.get(source)
            if encoding is None:
                lane = self._long if source.size > _LONG else self._short
                await lane.turn()
                if source.ids is not None or source in self._encodings:
                    lane.leave()  # another request with this prompt was faster
                    continue
                encoding = self._encodings[source] = lane.start(source.encode)
                encoding.add_done_callback(lambda _: self._encodings.pop(source, None))
            # Others may have left just before this request came.
            with suppress(Abandoned):
                await self._result(encoding)
        return source.encode()

    async def work_out(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The result of a call that may compile a grammar, made on a worker thread in its turn."""
        await self._grammars.turn()
        return await self._result(self._grammars.start(call, *arguments))

    async def _result(self, future: asyncio.Future[_T]) -> _T:
        """The result of what a thread does, which goes on if this is cancelled. Raises EngineClosed."""
        await asyncio.wait((future, self._closed), return_when=asyncio.FIRST_COMPLETED)
        if not future.done() or future.cancelled():
            raise EngineClosed("the engine was closed")
        error = future.exception()
        if error is not None:
            raise _own(error)
        return future.result()

    async def decode(
        self, tokenizer: Tokenizer | None, ids: Sequence[int], vocab_size: int, *, skip_special_tokens: bool
    ) -> str:
        """The text of token ids. Raises InvalidRequest."""
        if tokenizer is None:
            raise InvalidRequest("tokens", "the model has no tokenizer")
        items = list(ids)

        def text() -> str:
            check_ids("tokens", items, vocab_size)
            return tokenizer.decode(items, skip_special_tokens=skip_special_tokens)

        # One at a time: prompts of others have their turns between.
        async with self._decoding:
            return await self.run(text)

    @property
    def waiting(self) -> int:
        """Calls that no thread has begun."""
        return sum(len(lane.waiting) for lane in (self._short, self._long, self._grammars))

    async def aclose(self) -> None:
        """Close, and wait until the calls that have begun are done. Only before the first request."""
        for readers in (self._workers, self._readers, self._weights):
            readers.shutdown(wait=False, cancel_futures=True)
        try:
            # A thread of the other pool waits for them, and is free then.
            await self.loop.run_in_executor(self._compilers, self._workers.shutdown)
        finally:
            self._compilers.shutdown(wait=False)

    def close(self) -> None:
        """Let the threads end, and drop the calls that have not begun."""
        if not self._closed.done() and not self.loop.is_closed():
            self._closed.set_result(None)
        for lane in (self._short, self._long, self._grammars):
            lane.close()
        for workers in (self._workers, self._compilers, self._readers, self._weights):
            workers.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """Gives calls to an executor, at most ``width`` at a time and in order.

    The others wait here: the queue of an executor keeps calls that were cancelled.
    """

    __slots__ = ("_busy", "_executor", "_loop", "_width", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: WorkerExecutor, width: int) -> None:
        self._loop = loop
        self._executor = executor
        self._width = width
        self._busy = 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait for a turn; :meth:`start` or :meth:`leave` ends it."""
        if self._busy < self._width:
            self._busy += 1
            return
        turn = self._loop.create_future()
        self.waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn in self.waiting:
                self.waiting.remove(turn)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()  # it was given the turn and cancelled
            raise

    def start(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """Begin a call in this turn, which ends with it. Raises EngineError if there is no thread."""
        try:
            future = self._loop.run_in_executor(self._executor, call, *arguments)
        except RuntimeError as error:
            self.leave()
            raise EngineError(f"no thread for the prompt: {error}") from error
        future.add_done_callback(lambda _: self.leave())
        return _seen(future)

    def leave(self) -> None:
        """Give the turn to the next one that waits."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._busy -= 1

    def close(self) -> None:
        """Raise EngineClosed in all that wait."""
        while self.waiting:
            turn = self.waiting.popleft()
            if not (turn.done() or self._loop.is_closed()):
                turn.set_exception(EngineClosed("the engine was closed"))


def _seen(future: asyncio.Future[_T]) -> asyncio.Future[_T]:
    """Have its exception count as retrieved: what waited for it may have left."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _own(error: BaseException) -> BaseException:
    """An exception for one request: several tasks may raise theirs. Other errors are wrapped for each."""
    own: InvalidRequest | EngineError
    if type(error) is InvalidRequest:
        own = InvalidRequest(error.field, error.message, code=error.code)
    elif type(error) is EngineError:
        own = EngineError(*error.args)
    else:
        return error
    own.__cause__ = error.__cause__
    return own
