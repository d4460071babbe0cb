"""Generation: the one way of a request for tokens, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from aioinfer.chat.answers import AnswerReader, ChatFormat
from aioinfer.config import ServerConfig
from aioinfer.engine import Engine
from aioinfer.errors import RequestError
from aioinfer.loop.options import PromptSource
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.server.express import ExpressLane
from aioinfer.server.http.bodies import read_body
from aioinfer.server.http.disconnects import ClientGone, Watched, Watcher
from aioinfer.server.http.failures import as_failure
from aioinfer.server.http.limits import Limits
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.parsing import BodyParser, plain, refuse_large
from aioinfer.server.http.pieces import PiecesPayload
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openai.cost import check_answer
from aioinfer.server.openai.fingerprint import fingerprint
from aioinfer.server.openai.logprobs import Speller
from aioinfer.server.openai.protocol import Call, Served
from aioinfer.server.wire import AnswerContext, AnswerWriter, Wire
from aioinfer.stream import Stream
from aioinfer.text.tokenizer import Tokenizer, end_of

__all__ = ["Generation"]

_T = TypeVar("_T")


class Generation:
    """Calls of one engine: parsed, generated, and written whole or as events."""

    def __init__(self, engine: Engine, config: ServerConfig, model: str) -> None:
        self._engine = engine
        self._config = config
        self._model = model
        self._speller = Speller(self._spell)
        self._parser = BodyParser()
        self._watcher = Watcher(min(config.ping_interval, config.send_timeout))
        self._lane = ExpressLane()
        self._chat: tuple[Tokenizer | None, ChatFormat] | None = None

    async def respond(self, request: web.Request, wire: Wire) -> web.StreamResponse:
        """The answer to a request in the protocol of ``wire``."""
        engine = self._engine
        limits = Limits.of(self._config, engine.info.max_model_len if engine.ready else None)
        # The limit of the application, too, where the engine is mounted in one.
        most = min(limits.body, request.client_max_size or limits.body)
        refuse_large(request, most)
        raw = await plain(request, await read_body(request, self._config.body_timeout, most), most)
        chat = self._chat_format()
        computes = fingerprint(self._model, engine.config, engine.info)
        served = Served(self._model, engine.default_params, chat, self._config.max_messages, computes)
        call = await self._parser.parse(lambda body: wire.parse(body, served), raw, limits)
        check_answer(call, limits)
        try:
            return await self._answer(request, call, wire)
        except RequestError as error:
            raise call.named(error) from None

    async def _answer(self, request: web.Request, call: Call, wire: Wire) -> web.StreamResponse:
        async with AsyncExitStack() as stack:
            # Each prompt is tokenized once for its n choices.
            prompts = [
                self._engine.prompt(prompt, chat_template_kwargs=call.chat_template_kwargs)
                for prompt in call.prompts
            ]
            # The stack closes every stream, on errors and cancellation too.
            pace, streams = Pace(), []
            for index, (_, params) in enumerate(call.choices()):
                # A request of many choices gets its turns among other requests, not before them.
                prompt = prompts[index // call.n]
                stream = self._engine.generate(prompt, params, queue_behind=index, **call.scheduling)
                streams.append(await stack.enter_async_context(stream))
                await pace()
            if call.stream:
                return await self._stream(request, call, wire, prompts, streams)
            async with Watched(request, self._watcher):
                results = await _all([partial(_result, stream) for stream in streams])
            pieces = await (await self._writer(wire, call, prompts, streams)).whole(results)
            body: bytes | PiecesPayload = pieces[0]
            if len(pieces) > 1:
                body = PiecesPayload(pieces, self._config.send_timeout, partial(_abort, request))
            return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        wire: Wire,
        prompts: Sequence[PromptSource],
        streams: Sequence[Stream],
    ) -> web.StreamResponse:
        config = self._config
        events = EventStream(
            request, self._watcher, ping_interval=config.ping_interval, send_timeout=config.send_timeout
        )
        try:
            async with events:
                # A refusal at tokenizing still gets its HTTP status, before the response begins.
                for stream in streams:
                    await stream.accepted()
                writer = await self._writer(wire, call, prompts, streams)
                await events.open()
                await self._send_all(call, writer, streams, events)
        except ClientGone:
            if not events.response.prepared:
                raise
        return events.response

    async def _send_all(
        self, call: Call, writer: AnswerWriter, streams: Sequence[Stream], events: EventStream
    ) -> None:
        """All choices, then what ends the answer. After an error, the error is the last event."""
        try:
            await writer.open(events)
            usages = await _all(
                [partial(self._send_choice, writer, *each, events) for each in enumerate(streams)]
            )
        except ClientGone:
            raise
        except Exception as error:
            await writer.fail(as_failure(call.named(error)), events)
        else:
            await writer.close(usages, events)

    async def _send_choice(
        self, writer: AnswerWriter, index: int, stream: Stream, events: EventStream
    ) -> Usage:
        outlet = self._lane.outlet(stream, writer.plain(index), events)
        if outlet is not None:
            await stream.until_ended(outlet)
        last: Chunk | None = None
        async for chunk in stream:
            await writer.chunk(index, chunk, events)
            last = chunk
        assert last is not None
        assert last.usage is not None
        return last.usage

    async def _writer(
        self, wire: Wire, call: Call, prompts: Sequence[PromptSource], streams: Sequence[Stream]
    ) -> AnswerWriter:
        context = AnswerContext(
            tokenizer=self._engine.tokenizer,
            speller=self._speller,
            readers=self._readers(call, prompts),
            usage=lambda index: streams[index].usage,
        )
        return await wire.answer(call, context)

    def _readers(self, call: Call, prompts: Sequence[PromptSource]) -> list[AnswerReader | None]:
        """The parsers of every choice, which begin as the end of its prompt says."""
        tokenizer = self._engine.tokenizer
        if call.answer is None or tokenizer is None:
            return [None] * (len(prompts) * call.n)
        ends = [end_of(prompt.encode(), tokenizer) for prompt in prompts]
        return [call.answer.reader(end) for end in ends for _ in range(call.n)]

    def _spell(self, token: int) -> str:
        tokenizer = self._engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    def _chat_format(self) -> ChatFormat:
        """Of the engine's tokenizer, found out once for each."""
        tokenizer = self._engine.tokenizer
        if self._chat is None or self._chat[0] is not tokenizer:
            self._chat = (
                tokenizer,
                ChatFormat.of(tokenizer, self._config.tool_call_parser, self._config.reasoning_parser),
            )
        return self._chat[1]


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _all(works: Sequence[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
    """All results in order; the first failure is raised at once."""
    if len(works) == 1:
        return [await works[0]()]  # without a task of its own
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work()) for work in works]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _result(stream: Stream) -> Result:
    return await stream
