"""ThreadsafeEngine: an engine for other threads than that of its loop, and for other loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack, cast, overload

from aioinfer.chat.asking import chat_request
from aioinfer.chat.results import ChatDelta, ChatResult
from aioinfer.client.chats import ChatStream
from aioinfer.client.filling import Filled, Filling, FillStream, Hole, Template
from aioinfer.embeddings.embedding import Embedding, input_form, inputs_of, of_input, source_form
from aioinfer.errors import EngineClosed, InvalidRequest, Rejected, RequestError, WrongLoop, renamed
from aioinfer.forks import this_process
from aioinfer.loop.belonging import running_loop
from aioinfer.loop.given_images import image_limits
from aioinfer.loop.options import Prompt
from aioinfer.loop.updating import Updatable, UpdateMode, WeightSource, frozen
from aioinfer.outputs import AdapterInfo, Chunk, Result
from aioinfer.params import SamplingParams, inherited
from aioinfer.request import RequestOptions
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.client.batches import Batches
    from aioinfer.embeddings.scoring import Scores
    from aioinfer.loop.service import Service

__all__ = ["RemoteStream", "ThreadsafeEngine"]

_T = TypeVar("_T")
_Item = TypeVar("_Item", Chunk, ChatDelta)
_Final = TypeVar("_Final", Result, ChatResult, Filled)


class ThreadsafeEngine:
    """An engine for any thread and any loop; :meth:`aioinfer.Engine.threadsafe` returns it.

    Arguments are checked and copied on the calling thread, then the request goes to the engine's loop. There
    is nothing to close: it lasts as long as the engine.
    """

    def __init__(self, engine: Batches, serving: Service[Any]) -> None:
        self._engine = engine
        #: what the engine was from this start to its end
        self.serving = serving
        self._loop = serving.loop
        self._defaults = engine.default_params
        self.chat_format = engine.chat_format
        self._most = engine.config.max_queued_requests + engine.config.running_requests
        #: requests on their way to the loop
        self._sent = 0
        # Reentrant: a stream that is collected while it is held takes it, too.
        self._lock = threading.RLock()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> RemoteStream[Chunk, Result]:
        """As :meth:`aioinfer.Engine.generate`; what only the engine's loop can tell is raised by the stream.

        Raises InvalidRequest; Rejected if too many requests are on their way to the loop; EngineClosed.
        """
        source = self.serving.source(prompt, chat_template_kwargs)
        params = inherited(params, self._defaults)

        async def make() -> Stream:
            return self._engine.generate(source, params, **options)

        return RemoteStream(self, self._send(make))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Any = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **options: Unpack[RequestOptions],
    ) -> RemoteStream[ChatDelta, ChatResult]:
        """As :meth:`aioinfer.Engine.chat`, with the errors of :meth:`generate`."""
        asked = chat_request(
            self.chat_format,
            messages,
            inherited(params, self._defaults),
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            chat_template_kwargs=chat_template_kwargs,
            limits=image_limits(self.serving.tokenizer),
        )
        try:
            source = self.serving.source(asked.messages, asked.template_kwargs)
        except RequestError as error:
            raise renamed(error, asked.names) from error.__cause__

        async def make() -> ChatStream:
            return self._engine.open_chat(asked, source, **options)

        return RemoteStream(self, self._send(make))

    def fill(
        self,
        prompt: Prompt,
        template: Template,
        params: SamplingParams | None = None,
        *,
        holes: Mapping[str, Hole] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> RemoteStream[Chunk, Filled]:
        """As :meth:`aioinfer.Engine.fill`, with the errors of :meth:`generate`."""
        filling = Filling.of(template, inherited(params, self._defaults), holes)
        source = self.serving.source(prompt, chat_template_kwargs)

        async def make() -> FillStream:
            return filling.open(lambda params: self._engine.generate(source, params, **options))

        return RemoteStream(self, self._send(make))

    def abort(self, request_id: str) -> concurrent.futures.Future[int]:
        """As :meth:`aioinfer.Engine.abort`."""

        async def end() -> int:
            return self._engine.abort(request_id)

        return self.run(end)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> concurrent.futures.Future[AdapterInfo]:
        """As :meth:`aioinfer.Engine.load_adapter`; cancelling the future cancels the load. Raises
        EngineClosed, the future what it raises there."""
        return self.run(lambda: self._engine.load_adapter(name, path))

    def unload_adapter(self, name: str) -> concurrent.futures.Future[None]:
        """As :meth:`aioinfer.Engine.unload_adapter`."""
        return self.run(lambda: self._engine.unload_adapter(name))

    def adapters(self) -> concurrent.futures.Future[list[AdapterInfo]]:
        """As :meth:`aioinfer.Engine.adapters`."""

        async def make() -> list[AdapterInfo]:
            return self._engine.adapters()

        return self.run(make)

    def update_weights(
        self, source: WeightSource, *, mode: UpdateMode = "keep", version: int | None = None
    ) -> concurrent.futures.Future[int]:
        """As :meth:`aioinfer.Engine.update_weights`: tensors are read until the future has a result or an
        exception; after ``cancel()`` they may be read a while longer. Raises EngineClosed, and ConfigError
        for what is no source."""
        given = frozen(source)

        async def update() -> int:
            engine = cast("Updatable", self._engine)
            return await engine.update_weights(given, mode=mode, version=version)

        return self.run(update)

    @overload
    def embed(
        self, inputs: Prompt, *, on_error: Literal["raise"] = "raise", **options: Any
    ) -> concurrent.futures.Future[Embedding]: ...

    @overload
    def embed(
        self, inputs: Sequence[Prompt], *, on_error: Literal["raise"] = "raise", **options: Any
    ) -> concurrent.futures.Future[list[Embedding]]: ...

    @overload
    def embed(
        self, inputs: Prompt | Sequence[Prompt], *, on_error: Literal["raise", "return"], **options: Any
    ) -> concurrent.futures.Future[Any]: ...

    def embed(self, inputs: Prompt | Sequence[Prompt], **options: Any) -> concurrent.futures.Future[Any]:
        """As :meth:`aioinfer.Engine.embed`, as a future: ``future.result()`` waits on this thread, and
        ``asyncio.wrap_future(future)`` on another loop; cancelling it withdraws what is left. ``progress`` is
        called on the engine's loop. Raises InvalidRequest, Rejected, EngineClosed."""
        given, one = inputs_of(inputs)
        form = input_form(self.serving.info, self._engine.sentences, options.get("truncate_prompt_tokens"))
        kept: list[Prompt] = []
        for index, each in enumerate(given):
            try:
                # A text may get another one in front of it.
                given_form = source_form(each, form)
                kept.append(each if isinstance(each, str) else self.serving.source(each, None, given_form))
            except InvalidRequest as error:
                if options.get("on_error") == "return":
                    kept.append(each)  # refused there once more, in its place
                    continue
                name = "inputs" if one else f"inputs[{index}]"
                raise of_input(error, name) from error.__cause__
        return self._send(lambda: self._engine.embed(kept[0] if one else kept, **options))

    def score(
        self, query: str | Sequence[str], documents: Sequence[str], **options: Any
    ) -> concurrent.futures.Future[Scores]:
        """As :meth:`aioinfer.Engine.score`, as a future like that of :meth:`embed`."""
        queries, texts = _kept(query), _kept(documents)
        return self._send(lambda: self._engine.score(queries, texts, **options))

    def _send(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> concurrent.futures.Future[_T]:
        self.check_process()
        with self._lock:
            if self._sent >= self._most:
                raise Rejected(f"{self._sent} requests are on their way to the loop (max_queued_requests)")
            self._sent += 1

        try:
            future = self.run(make)
        except BaseException:
            self._arrived(None)
            raise
        future.add_done_callback(self._arrived)
        return future

    def _arrived(self, _: object) -> None:
        with self._lock:
            self._sent -= 1

    def run(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> concurrent.futures.Future[_T]:
        """Run a coroutine on the engine's loop. Raises EngineClosed if the engine is closed, or its loop."""
        self.check_process()
        if self._loop.is_closed() or self.serving.closed:
            raise EngineClosed("the engine was closed, or its event loop")
        made = make()
        try:
            return asyncio.run_coroutine_threadsafe(made, self._loop)
        except RuntimeError as error:
            made.close()
            raise EngineClosed(f"the event loop of the engine was closed: {error}") from None

    @property
    def forked(self) -> bool:
        """This is a child of a fork, which has the engine's objects and not its threads."""
        return self.serving.process is not this_process()

    def check_process(self) -> None:
        """Raise EngineClosed in a child of a fork."""
        self.serving.check_process()

    def check_may_block(self) -> None:
        """Raise WrongLoop where waiting would stop the engine's own loop."""
        if running_loop() is self._loop:
            raise WrongLoop("waiting here would stop the engine's loop: await it, or use the engine itself")


def _kept(texts: Any) -> Any:
    """A copy of a list of texts; anything else unchanged."""
    return list(texts) if isinstance(texts, Sequence) and not isinstance(texts, str) else texts


class RemoteStream(Generic[_Item, _Final]):
    """One generation, read from another thread or another loop.

    * ``for chunk in stream`` and ``stream.result(timeout)`` block the calling thread;
    * ``async for chunk in stream`` and ``await stream`` wait on the running loop, whichever that is;
    * ``with stream``, ``async with stream`` and :meth:`close` end the request; so does dropping it unless its
      future is kept, cancelling that, and cancelling the task that reads it.

    Every read takes all that has come since the one before it: nothing is queued between the threads.
    """

    def __init__(self, engine: ThreadsafeEngine, opened: concurrent.futures.Future[Any]) -> None:
        self._engine = engine
        #: of the stream on the engine's loop
        self._opened = opened
        self._lock = threading.Lock()
        self._final: concurrent.futures.Future[_Final] | None = None

    def result(self, timeout: float | None = None) -> _Final:
        """Wait for the end, on this thread. Raises TimeoutError after ``timeout`` seconds, without ending the
        request; its errors; WrongLoop on the thread of the engine's loop."""
        self._engine.check_may_block()
        return _outcome(self.future(), timeout)

    def future(self) -> concurrent.futures.Future[_Final]:
        """The same as a future; cancelling it ends the request. From then on the stream is not iterated."""
        self._engine.check_process()
        with self._lock:
            if self._final is None:
                self._final = self._engine.run(self._finish)
            return self._final

    def __iter__(self) -> Iterator[_Item]:
        self._engine.check_may_block()
        while True:
            item = _outcome(self._engine.run(self._next), None)
            if item is None:
                return
            yield item

    def __aiter__(self) -> AsyncIterator[_Item]:
        return self

    async def __anext__(self) -> _Item:
        _check_asyncio()
        item = await asyncio.wrap_future(self._engine.run(self._next))
        if item is None:
            raise StopAsyncIteration
        return item

    def __await__(self) -> Generator[Any, None, _Final]:
        _check_asyncio()
        return asyncio.wrap_future(self.future()).__await__()

    def close(self) -> None:
        """End the request, one turn of the engine's loop later. Never waits; idempotent."""
        if not self._engine.forked:  # a future's lock may be held by a thread that is not there
            self._opened.cancel()
            self._opened.add_done_callback(_close)

    async def aclose(self) -> None:
        """The same."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _next(self) -> _Item | None:
        stream = await asyncio.wrap_future(self._opened)
        item: _Item | None = await anext(stream, None)
        return item

    async def _finish(self) -> _Final:
        stream = await asyncio.wrap_future(self._opened)
        final: _Final = await stream
        return final

    def __del__(self) -> None:
        # On any thread and at any point, amid a step of the engine, too.
        if not (self._engine.forked or self._opened.cancel()):
            self._opened.add_done_callback(_leave)


def _check_asyncio() -> None:
    """Raise WrongLoop where asyncio does not run."""
    if running_loop() is None:
        raise WrongLoop(
            "a stream is awaited and iterated with async for under asyncio only: use stream.result() in a "
            "thread, under trio await trio.to_thread.run_sync(stream.result), or iterate with for there"
        )


def _outcome(future: concurrent.futures.Future[_T], timeout: float | None) -> _T:
    """Wait for a future on this thread."""
    try:
        return future.result(timeout)
    except concurrent.futures.CancelledError:
        raise EngineClosed("the stream was closed, or the event loop of the engine was") from None


def _close(opened: concurrent.futures.Future[Any]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


def _leave(opened: concurrent.futures.Future[Any]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().leave()
