"""LLM: an engine that is called, not awaited, for scripts and for study.

An :class:`~aioinfer.Engine` on an event loop of its own, in a thread that belongs to the object. It computes
while a call waits for it, and rests between calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from aioinfer.chat.results import ChatResult
from aioinfer.checkpoint.sentences import Sentences
from aioinfer.client.answering import Answering
from aioinfer.client.bar import Bar
from aioinfer.client.in_thread import LoopThread
from aioinfer.client.mapping import MapProgress, OnError, check_on_error
from aioinfer.client.rows import ChatArguments, Chats, Params, ParamsOf, kept, rows_of, split_chat
from aioinfer.config import EngineConfig, given
from aioinfer.embeddings.embedding import Embedding, EmbeddingArguments
from aioinfer.embeddings.scoring import ScoreOptions, Scores
from aioinfer.engine import Engine
from aioinfer.errors import AioInferError
from aioinfer.execution.device import Device
from aioinfer.loop import factory
from aioinfer.loop.options import Prompt, is_one
from aioinfer.loop.updating import UpdateMode, WeightSource, frozen
from aioinfer.observe.stats import EngineStats
from aioinfer.outputs import AdapterInfo, Chunk, Result
from aioinfer.params import SamplingParams, inherited
from aioinfer.request import RequestOptions
from aioinfer.stream import Stream

if TYPE_CHECKING:
    from aioinfer.execution.launcher import Launcher
    from aioinfer.loop.core import Core
    from aioinfer.speculation.drafter import Drafter
    from aioinfer.text.tokenizer import Tokenizer

__all__ = ["LLM"]

_T = TypeVar("_T")


class LLM:
    """A language model that is called, not awaited.

    ::

        with LLM(EngineConfig(model="/models/Qwen3-0.6B")) as llm:
            for result in llm.generate(["Hello", "Once upon a time"]):
                print(result.text)

    :meth:`add_request`, :meth:`step` and :meth:`has_unfinished` are the loop in its parts: each ``step``
    computes one forward pass of everything that can run and returns the requests that finished with it;
    :meth:`take_chunks` has what is new of the others.

    The engine has a thread and an event loop of its own. So an LLM also works in a notebook and within an
    event loop, and any number of threads may call it: the requests of their calls share its steps. An
    exception that interrupts a call, such as KeyboardInterrupt, ends the requests of that call and no others.
    In a child of a fork it raises EngineClosed. Errors, options and their defaults are those of
    :class:`~aioinfer.Engine`.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        device: Callable[[EngineConfig], Device] | None = None,
        tokenizer: Callable[[EngineConfig], Tokenizer | None] = factory.load_tokenizer,
        drafter: Drafter | None = None,
    ) -> None:
        """Load the model. Raises ConfigError, OutOfMemory. ``device`` and ``tokenizer`` replace the real
        ones in tests; ``drafter`` proposes tokens in place of ``config.speculation``."""
        self.config = given(config)
        launcher = factory.make_launcher if device is None else _inline(device)
        # The loop has nothing else to do: steps are launched on its thread.
        inline = dataclasses.replace(self.config, launch_mode="inline")
        self._engine = Engine(inline, launcher=launcher, tokenizer=tokenizer, drafter=drafter)
        self._home = LoopThread(self._engine, "LLM")
        self._keys = itertools.count(1)
        #: requests of :meth:`add_request` that were not returned, by key, and those that have ended
        self._open: dict[int, Stream] = {}
        #: of these, those whose chunks have not all been taken
        self._unread: dict[int, Stream] = {}
        #: calls for which the engine runs
        self._calls = 0
        self._run(self._engine.pause())

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the engine's loop, which alone changes what this object has. What interrupts the
        wait cancels it. Raises EngineClosed, WrongLoop."""
        return self._home.run(work)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Have the engine compute, with all that it has."""
        self._calls += 1
        self._engine.resume()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls and not self._engine.closed:
                await self._engine.pause()

    # -- the loop in its parts ------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> int:
        """Queue a prompt; returns the key of its result in :meth:`step`. Raises InvalidRequest, Rejected.

        The options are those of :meth:`aioinfer.Engine.generate`. All arguments are copied.
        """
        return self._run(self._add(prompt, params, chat_template_kwargs, options))

    async def _add(self, *asked: Any) -> int:
        stream = await self._queued(*asked)
        key = next(self._keys)
        self._open[key] = self._unread[key] = stream
        return key

    async def _queued(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        template_kwargs: Mapping[str, Any] | None,
        options: RequestOptions,
    ) -> Stream:
        stream = self._engine.generate(prompt, params, chat_template_kwargs=template_kwargs, **options)
        await stream.accepted()
        return stream

    def has_unfinished(self) -> bool:
        """A request has not been returned by :meth:`step` yet, or a step is in flight."""
        return self._home.open and bool(self._open or self._engine._started().driver.steps_in_flight)

    def step(self) -> dict[int, Result]:
        """Compute one step and return the requests that finished with it, by key.

        As in the engine, ``overlap_steps`` steps are launched ahead of the one whose result is read. Raises
        the error of a request that failed; other requests that finished are returned by the next call.
        """
        return self._run(self._step())

    async def _step(self) -> dict[int, Result]:
        await self._engine._serving().driver.step()
        ended = {key: stream for key, stream in self._open.items() if stream.done}
        for key, stream in ended.items():
            error = stream.cell.output.error
            if error is not None:
                del self._open[key]
                raise error
        for key in ended:
            del self._open[key]
        return {key: stream.result() for key, stream in ended.items()}

    def take_chunks(self) -> dict[int, Chunk]:
        """New output of the requests since the previous call, by key; also of those that finished in the
        latest :meth:`step`. The chunks of one request are like those of a :class:`~aioinfer.Stream`: after
        an update of the weights its last ones can take further calls, until one has ``finish_reason``."""
        return self._run(self._take())

    async def _take(self) -> dict[int, Chunk]:
        chunks: dict[int, Chunk] = {}
        for key, stream in list(self._unread.items()):
            chunk = stream.cell.take()
            if chunk is not None:
                chunks[key] = chunk
            if stream.done and (chunk is None or chunk.finish_reason is not None):
                del self._unread[key]
        return chunks

    def abort(self, key: int) -> bool:
        """End a request; :meth:`step` does not return it. False if it is not there or has ended."""
        return self._home.open and self._run(self._abort(key))

    async def _abort(self, key: int) -> bool:
        stream = self._open.get(key)
        if stream is None or stream.done:
            return False
        del self._open[key], self._unread[key]
        stream.close()
        return True

    # -- whole answers --------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        on_error: Literal["raise"] = "raise",
        progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        on_error: OnError,
        progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Result | AioInferError]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        on_error: OnError = "raise",
        progress: bool | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any:
        """Generate for all prompts; results in their order.

        A single prompt (text, a list of token ids, a list of messages) is a list of one. ``params`` is one
        for all or a list with one for each; ``options``, for all, are those of
        :meth:`aioinfer.Engine.generate`. ``progress`` shows a bar; by default only on a terminal. A single
        message is refused: a chat is a list. With ``on_error="return"``, a prompt that fails has its error in
        its place.

        Raises InvalidRequest before anything is computed, with ``field`` "prompts[3]" for the prompt at index
        3, if there are several; and the errors of requests. Whatever it is, no request of this call is left,
        and ``results`` of the exception, also of KeyboardInterrupt, is the list with what was done, and None
        for the rest.
        """
        given: Any = prompts
        batch = [given] if is_one(given) else list(given)
        return self._answers(batch, params, options, {}, "prompts", progress, on_error)

    @overload
    def chat(
        self,
        chats: Chats,
        params: Params = None,
        *,
        on_error: Literal["raise"] = "raise",
        progress: bool | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> list[ChatResult]: ...

    @overload
    def chat(
        self,
        chats: Chats,
        params: Params = None,
        *,
        on_error: OnError,
        progress: bool | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> list[ChatResult | AioInferError]: ...

    def chat(
        self,
        chats: Chats,
        params: Params = None,
        *,
        on_error: OnError = "raise",
        progress: bool | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> Any:
        """The next answers of all chats, in their order, parsed as by :meth:`aioinfer.Engine.chat`.

        A single chat (a list of messages, or a :class:`~aioinfer.ChatRow`) is a list of one. Chats that are
        rows have parameters, tools, formats and names of their own; the arguments of the call, which are
        those of :meth:`aioinfer.Engine.chat`, are for rows that have none. Otherwise as :meth:`generate`,
        with ``field`` "chats[3].messages[0].role" in errors.
        """
        usual, options = split_chat(arguments)
        return self._answers(rows_of(chats), params, options, usual, "chats", progress, on_error)

    def _answers(
        self,
        rows: Sequence[Any],
        params: Any,
        options: Any,
        usual: Mapping[str, Any],
        name: str,
        progress: bool | None,
        on_error: OnError,
    ) -> list[Any]:
        each = ParamsOf(params, rows)
        check_on_error(on_error)
        found: list[Any] = []

        async def answer(shown: MapProgress) -> None:
            self._engine.check_job(each.common, options)
            if any(value is not None for value in usual.values()):
                # What is wrong with all is not the error of each.
                self._engine.asked_chat([{"role": "user", "content": "?"}], each.common, **usual)
            answering = Answering(self._engine, each, options, usual)
            await answering.into(found, rows, name=name, progress=shown, on_error=on_error)

        with kept(found), Bar(len(rows), progress) as shown:
            self._run(self._computed(partial(answer, shown)))
        return found

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Chunk]:
        """The chunks of one answer, as they come; other requests advance with it.

        The arguments are checked and copied at once. The request is queued when the first chunk is wanted,
        and aborted when the iterator is closed or dropped. Raises InvalidRequest; the iterator also Rejected
        and the errors of the request.
        """
        self._home.check_open()
        serving = self._engine._runtime
        assert serving is not None
        source, settled = serving.source(prompt, chat_template_kwargs), inherited(params, self.default_params)
        serving.checks.check(settled, None, source.least_tokens)
        return self._chunks(source, settled, options)

    def _chunks(self, source: Prompt, params: SamplingParams, options: RequestOptions) -> Iterator[Chunk]:
        stream = self._run(self._queued(source, params, None, options))
        try:
            while (chunk := self._run(self._next(stream))) is not None:
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            stream.leave()

    async def _next(self, stream: Stream) -> Chunk | None:
        chunk = stream.cell.take()
        if chunk is None or stream.cell.parked:
            async with self._running():
                return await anext(stream, None) if chunk is None else chunk
        return chunk

    @overload
    def embed(  # type: ignore[overload-overlap]
        self,
        inputs: Prompt,
        *,
        on_error: Literal["raise"] = "raise",
        progress: bool | None = None,
        **asked: Unpack[EmbeddingArguments],
    ) -> Embedding: ...

    @overload
    def embed(  # type: ignore[overload-overlap]
        self,
        inputs: Prompt,
        *,
        on_error: OnError,
        progress: bool | None = None,
        **asked: Unpack[EmbeddingArguments],
    ) -> Embedding | AioInferError: ...

    @overload
    def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        on_error: Literal["raise"] = "raise",
        progress: bool | None = None,
        **asked: Unpack[EmbeddingArguments],
    ) -> list[Embedding]: ...

    @overload
    def embed(
        self,
        inputs: Sequence[Prompt],
        *,
        on_error: OnError,
        progress: bool | None = None,
        **asked: Unpack[EmbeddingArguments],
    ) -> list[Embedding | AioInferError]: ...

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        on_error: OnError = "raise",
        progress: bool | None = None,
        **asked: Unpack[EmbeddingArguments],
    ) -> Any:
        """As :meth:`aioinfer.Engine.embed`; ``progress`` as of :meth:`generate`."""
        given: Any = inputs
        found: list[Any] = []
        with kept(found), Bar(1 if is_one(given) else len(given), progress) as shown:
            self._run(
                self._computed(
                    lambda: self._engine.embed_into(found, inputs, on_error=on_error, progress=shown, **asked)
                )
            )
        return found[0] if is_one(given) else found

    def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        adapter: str | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        **asked: Unpack[ScoreOptions],
    ) -> Scores:
        """As :meth:`aioinfer.Engine.score`; ``progress`` as of :meth:`generate`."""
        with Bar(len(documents), progress) as shown:
            return self._run(
                self._computed(
                    lambda: self._engine.score(
                        query, documents, adapter=adapter, on_error=on_error, progress=shown, **asked
                    )
                )
            )

    async def _computed(self, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """The result of a call while the engine computes."""
        async with self._running():
            return await call()

    # -- adapters and weights -------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """As :meth:`aioinfer.Engine.load_adapter`; requests advance meanwhile."""
        return self._run(self._computed(lambda: self._engine.load_adapter(name, path)))

    def unload_adapter(self, name: str) -> None:
        """As :meth:`aioinfer.Engine.unload_adapter`."""
        self._run(self._engine.unload_adapter(name))

    def adapters(self) -> list[AdapterInfo]:
        """The adapters that new requests can have."""
        return self._engine.adapters()

    def update_weights(
        self, source: WeightSource, *, mode: UpdateMode = "keep", version: int | None = None
    ) -> int:
        """As :meth:`aioinfer.Engine.update_weights`; with mode "wait", requests advance meanwhile."""
        return self._run(self._update(frozen(source), mode, version))

    async def _update(self, given: WeightSource, mode: UpdateMode, version: int | None) -> int:
        await self._engine.pause()  # which ends the steps in flight
        if mode != "wait":
            return await self._engine.update_weights(given, mode=mode, version=version)
        async with self._running():
            return await self._engine.update_weights(given, mode=mode, version=version)

    # -- observing ------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self._engine.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """Recommendations of the model for outputs."""
        return self._engine.default_params

    @property
    def sentences(self) -> Sentences:
        """Recommendations of the model for embeddings."""
        return self._engine.sentences

    @property
    def weight_version(self) -> int:
        """Version of the weights that compute the next step."""
        return self._engine.weight_version

    def stats(self) -> EngineStats:
        """A snapshot; O(1)."""
        return self._engine.stats()

    @property
    def _core(self) -> Core:
        return self._engine._core

    # -- its end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self._home.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _inline(device: Callable[[EngineConfig], Device]) -> Callable[[EngineConfig], Launcher]:
    def launcher(config: EngineConfig) -> Launcher:
        from aioinfer.execution.launcher import InlineLauncher

        return InlineLauncher(device(config))

    return launcher
