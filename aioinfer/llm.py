"""LLM: an engine that is called, not awaited, for scripts and for study.

An :class:`~aioinfer.Engine` on an event loop of its own, in a thread that belongs to the object. It computes
while a call waits for it, and rests between calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Unpack, overload

from aioinfer.chat.results import ChatResult
from aioinfer.client.answering import Answering
from aioinfer.client.bar import Bar
from aioinfer.client.filling import Filled, Hole, Template
from aioinfer.client.mapping import MapProgress, OnError, check_on_error
from aioinfer.client.rows import ChatArguments, Chats, Params, ParamsOf, kept, rows_of, split_chat
from aioinfer.embeddings.embedding import Embedding, EmbeddingArguments
from aioinfer.embeddings.scoring import ScoreOptions, Scores
from aioinfer.errors import AioInferError
from aioinfer.loop.options import Prompt, is_one
from aioinfer.loop.updating import UpdateMode, WeightSource, frozen
from aioinfer.outputs import AdapterInfo, Chunk, Result
from aioinfer.params import SamplingParams, inherited
from aioinfer.request import RequestOptions
from aioinfer.stepping import SteppedEngine
from aioinfer.stream import Stream

__all__ = ["LLM"]


class LLM(SteppedEngine):
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

    def fill(
        self,
        prompt: Prompt,
        template: Template,
        params: SamplingParams | None = None,
        *,
        holes: Mapping[str, Hole] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Filled:
        """Fill in a template: as :meth:`aioinfer.Engine.fill`."""

        async def filled() -> Filled:
            return await self._engine.fill(prompt, template, params, holes=holes, **options)

        return self._run(self._computed(filled))

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
