"""Intake: the worker threads that tokenize prompts, compile grammars and read adapters."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aioinfer.errors import EngineClosed, EngineError, InvalidRequest
from aioinfer.execution.workers import WorkerExecutor
from aioinfer.inputs import check_ids
from aioinfer.loop.options import Prepared, PromptSource
from aioinfer.params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.resuming.record import StreamCheckpoint
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["Asks", "Completes", "Encoding", "Intake", "Preparation"]

_T = TypeVar("_T")


class Completes(Protocol):
    """What knows how to prepare requests."""

    def complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, checkpoint: StreamCheckpoint | None = None
    ) -> Prepared:
        """As in Core."""


#: called on the loop with what a preparation made, or with why it failed
Prepare = Callable[[Prepared | None, BaseException | None], None]

_THREADS = 2
#: characters of a prompt that takes 10 to 50 ms to tokenize
_LONG = 1 << 15


class Intake:
    """Two thread pools: one for tokenizing, one for requests that need a grammar; and a thread each for
    reading adapters and weights.

    The pools are separate so that a grammar, however large, never delays plain prompts. Of the two threads
    that tokenize, long prompts use one at a time, so a short prompt waits for short ones only. What waits can
    be withdrawn, and leaves nothing behind.
    """

    __slots__ = ("_asking", "_compilers", "_decoding", "_encodings", "_grammars", "_long", "_readers",
                 "_short", "_weights", "_workers", "loop")  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._workers = WorkerExecutor(_THREADS, "aioinfer-text")
        self._compilers = WorkerExecutor(_THREADS, "aioinfer-text-grammar")
        #: of adapters: these can be large, and nothing else waits for them
        self._readers = WorkerExecutor(1, "aioinfer-adapters")
        #: of other weights for the model, which no adapter waits for either
        self._weights = WorkerExecutor(1, "aioinfer-weights")
        self._short = _Lane(loop, self._workers, _THREADS)
        self._long = _Lane(loop, self._workers, 1)
        self._grammars = _Lane(loop, self._compilers, _THREADS)
        #: prompts that are being tokenized, each once for all requests that wait for it
        self._encodings: dict[PromptSource, Encoding] = {}
        self._decoding = asyncio.Lock()
        #: coroutines that wait for one of them
        self._asking: set[_Asking] = set()

    async def run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The result of a blocking call, made on a worker thread."""
        return await self.loop.run_in_executor(self._workers, call, *arguments)

    def read(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The result of reading an adapter, on a thread of its own. Cancelled when closed."""
        return self._read(self._readers, call, *arguments)

    def read_weights(self, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The same for weights of the model, on another thread."""
        return self._read(self._weights, call, *arguments)

    def _read(self, readers: WorkerExecutor, call: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        reading = self.loop.run_in_executor(readers, call, *arguments)
        reading.add_done_callback(_seen)
        return reading

    def prepare(
        self,
        core: Completes,
        source: PromptSource,
        params: SamplingParams,
        prepared: Prepare,
        checkpoint: StreamCheckpoint | None = None,
    ) -> Preparation:
        """Make the token ids of a prompt, the grammar of its output and the text of a checkpoint on worker
        threads, then call ``prepared``, in a later turn of the loop."""
        preparation = Preparation(core, source, params, prepared, self._grammars, checkpoint)
        if source.ids is not None:
            preparation.encoded(None)
            return preparation
        self.join(source, preparation)
        return preparation

    async def encode(self, source: PromptSource) -> Sequence[int]:
        """The token ids of a prompt, made on a worker thread in its turn. Raises InvalidRequest, and
        EngineClosed."""
        if source.ids is None:
            asking = _Asking(self.loop.create_future())
            self._asking.add(asking)
            self.join(source, asking)
            try:
                await asking.known
            finally:
                self._asking.discard(asking)
                if asking.encoding is not None:
                    asking.encoding.leave(asking)
        return source.encode()

    def join(self, source: PromptSource, asking: Asks) -> None:
        """Have ``asking`` told when the token ids of a prompt are known."""
        encoding = self._encodings.get(source)
        if encoding is None:
            lane = self._long if source.size > _LONG else self._short
            encoding = Encoding(source, lane, self._encodings)
            lane.submit(encoding)
        encoding.join(asking)

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
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._weights.shutdown(wait=False, cancel_futures=True)
        try:
            # A thread of the other pool waits for them, and is free then.
            await self.loop.run_in_executor(self._compilers, self._workers.shutdown)
        finally:
            self._compilers.shutdown(wait=False)

    def close(self) -> None:
        """Let the threads end, and drop the calls that have not begun."""
        for asking in self._asking:
            asking.encoded(EngineClosed("the engine was closed"))
        for lane in (self._short, self._long, self._grammars):
            lane.waiting.clear()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._weights.shutdown(wait=False, cancel_futures=True)


def _seen(reading: asyncio.Future[Any]) -> None:
    """Whoever waited for it may have left."""
    if not reading.cancelled():
        reading.exception()


class _Job(Protocol):
    """A call for a worker thread."""

    def call(self) -> Any:
        """On the worker thread."""

    def ended(self, result: Any, error: BaseException | None) -> None:
        """On the loop, after the call."""


class Asks(Protocol):
    """What waits for the token ids of a prompt."""

    #: while they are made
    encoding: Encoding | None

    def encoded(self, error: BaseException | None) -> None:
        """They are known, or could not be made."""


class _Asking:
    """A coroutine that waits for the token ids of a prompt."""

    __slots__ = ("encoding", "known")

    def __init__(self, known: asyncio.Future[None]) -> None:
        self.known = known
        self.encoding: Encoding | None = None

    def encoded(self, error: BaseException | None) -> None:
        if self.known.done():
            return
        if error is None:
            self.known.set_result(None)
        else:
            self.known.set_exception(_own(error))


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
        self.waiting: OrderedDict[_Job, None] = OrderedDict()

    def submit(self, job: _Job) -> None:
        self.waiting[job] = None
        self._fill()

    def withdraw(self, job: _Job) -> None:
        """If it waits, it never begins."""
        self.waiting.pop(job, None)

    def _fill(self) -> None:
        while self.waiting and self._busy < self._width:
            job, _ = self.waiting.popitem(last=False)
            try:
                future = self._loop.run_in_executor(self._executor, job.call)
            except RuntimeError as error:  # no thread can be started
                self._loop.call_soon(job.ended, None, EngineError(f"no thread for the prompt: {error}"))
                continue
            self._busy += 1
            future.add_done_callback(partial(self._ended, job))

    def _ended(self, job: _Job, future: asyncio.Future[Any]) -> None:
        self._busy -= 1
        self._fill()
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        job.ended(None if error is not None else future.result(), error)


class Encoding:
    """The tokenizing of one prompt, for all preparations that need it."""

    __slots__ = ("_lane", "_open", "_preparations", "_source")

    def __init__(self, source: PromptSource, lane: _Lane, encodings: dict[PromptSource, Encoding]) -> None:
        """It is in ``encodings`` until it has ended, or until all preparations have left before it began."""
        self._source = source
        self._lane = lane
        self._open = encodings
        self._preparations: dict[Asks, None] = {}
        encodings[source] = self

    def join(self, preparation: Asks) -> None:
        self._preparations[preparation] = None
        preparation.encoding = self

    def leave(self, preparation: Asks) -> None:
        del self._preparations[preparation]
        if not self._preparations and self in self._lane.waiting:
            self._lane.withdraw(self)
            del self._open[self._source]

    def call(self) -> None:
        self._source.encode()

    def ended(self, result: None, error: BaseException | None) -> None:
        self._open.pop(self._source, None)
        for preparation in list(self._preparations):
            preparation.encoding = None
            preparation.encoded(error)


class Preparation:
    """The part of one request in the work on its prompt and its grammar."""

    __slots__ = (
        "_checkpoint",
        "_compilers",
        "_core",
        "_params",
        "_prepared",
        "_source",
        "encoding",
        "least_tokens",
    )

    def __init__(
        self,
        core: Completes,
        source: PromptSource,
        params: SamplingParams,
        prepared: Prepare,
        compilers: _Lane,
        checkpoint: StreamCheckpoint | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._core = core
        self._source = source
        self._params = params
        self._prepared: Prepare | None = prepared
        self._compilers = compilers
        #: while the prompt is tokenized
        self.encoding: Encoding | None = None
        #: the prompt has at least this many tokens, as far as that was known
        self.least_tokens = source.least_tokens

    def cancel(self) -> None:
        """The request has ended: what has not begun is not done for it, and nothing is called. Idempotent."""
        self._prepared = None
        if self.encoding is not None:
            self.encoding.leave(self)
            self.encoding = None
        self._compilers.withdraw(self)

    def encoded(self, error: BaseException | None) -> None:
        """The token ids are known, or could not be made."""
        if error is not None:
            self._end(None, _own(error))
        elif self._params.worked_out or self._checkpoint is not None:
            self._compilers.submit(self)
        else:
            self._end(self._core.complete(self._source.encode(), self._params), None)

    def call(self) -> Prepared:
        return self._core.complete(self._source.encode(), self._params, self._checkpoint)

    def ended(self, result: Prepared | None, error: BaseException | None) -> None:
        self._end(result, error)

    def _end(self, result: Prepared | None, error: BaseException | None) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared(result, error)


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
