"""Generation: the one way of a request for tokens, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import cast

from aiohttp import web

from aioinfer.chat.answers import AnswerReader
from aioinfer.config import ServerConfig
from aioinfer.engine import Engine, Prompt
from aioinfer.errors import InvalidRequest, RequestError
from aioinfer.loop.options import PromptSource
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.params import SamplingParams
from aioinfer.server.http.bodies import read_body
from aioinfer.server.http.disconnects import ClientGone, ended, unless_gone, unless_raises
from aioinfer.server.http.failures import as_failure
from aioinfer.server.http.limits import Limits
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.parsing import BodyParser, plain, refuse_large
from aioinfer.server.http.pieces import PiecesPayload, cut
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openai.cost import check_answer
from aioinfer.server.openai.fingerprint import fingerprint
from aioinfer.server.openai.logprobs import Speller, divided
from aioinfer.server.openai.protocol import Call, Served
from aioinfer.server.openai.shapes import Shape, usage_body
from aioinfer.server.openai.whole import whole_answer
from aioinfer.stream import Stream
from aioinfer.text.tokenizer import end_of

__all__ = ["Generation", "Parser"]

#: a body as bytes becomes a call
Parser = Callable[[bytes, Served], Call]
#: the parts of a choice that is streamed
_Choice = tuple[Stream, AnswerReader | None]


class Generation:
    """Calls of one engine: parsed, generated, and written whole or as events."""

    def __init__(self, engine: Engine, config: ServerConfig, model: str) -> None:
        self._engine = engine
        self._config = config
        self._model = model
        self._speller = Speller(self._spell)
        self._parser = BodyParser()

    async def respond(self, request: web.Request, parse: Parser, shape: Shape) -> web.StreamResponse:
        """The answer to a body that ``parse`` understands, written as ``shape`` has it."""
        engine = self._engine
        limits = Limits.of(self._config, engine.info.max_model_len if engine.ready else None)
        # The limit of the application, too, where the engine is mounted in one.
        most = min(limits.body, request.client_max_size or limits.body)
        refuse_large(request, most)
        raw = await plain(request, await read_body(request, self._config.body_timeout, most), most)
        chat = engine.chat_format
        computes = fingerprint(self._model, engine.config, engine.info)
        served = Served(self._model, engine.default_params, chat, self._config.max_messages, computes)
        call = await self._parser.parse(lambda body: parse(body, served), raw, limits)
        check_answer(call, limits)
        try:
            return await self._answer(request, call, shape)
        except RequestError as error:
            raise call.named(error) from None

    async def _answer(self, request: web.Request, call: Call, shape: Shape) -> web.StreamResponse:
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
                return await self._stream(request, call, shape, prompts, streams)
            results = await unless_gone(request, _gather(streams))
            echoes, readers = await self._echoes(call), self._readers(call, prompts)
            pieces = await whole_answer(call, shape, results, echoes, self._speller, readers)
            body: bytes | PiecesPayload = pieces[0]
            if len(pieces) > 1:
                body = PiecesPayload(pieces, self._config.send_timeout, partial(_abort, request))
            return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        shape: Shape,
        prompts: Sequence[PromptSource],
        streams: Sequence[Stream],
    ) -> web.StreamResponse:
        events = EventStream(
            request, ping_interval=self._config.ping_interval, send_timeout=self._config.send_timeout
        )
        # A refusal at tokenizing still gets its HTTP status, before the response begins.
        await unless_gone(request, _accepted(streams))
        echoes, readers = await self._echoes(call), self._readers(call, prompts)
        choices = list(zip(streams, readers, strict=True))
        await events.open()
        watch = asyncio.create_task(events.watch())
        try:
            await unless_raises(watch, self._send_all(call, shape, choices, echoes, events))
        except ClientGone:
            return events.response
        finally:
            await ended(watch)
        return events.response

    async def _send_all(
        self, call: Call, shape: Shape, choices: Sequence[_Choice], echoes: list[str], events: EventStream
    ) -> None:
        """All choices, then usage, then the end. After an error, the error is the last event."""
        pace = Pace()
        try:
            for index, echo in enumerate(echoes):
                if shape.opening is not None or echo:
                    for piece in cut(echo):
                        await events.send(shape.first(call, index, piece))
                        await pace()
            async with asyncio.TaskGroup() as group:
                sending = [
                    group.create_task(self._send_choice(call, shape, index, choice, events))
                    for index, choice in enumerate(choices)
                ]
        except BaseExceptionGroup as failed:
            error = failed.exceptions[0]
            if isinstance(error, ClientGone) or not isinstance(error, Exception):
                raise error from None
            await events.send(json.dumps(as_failure(call.named(error)).body()))
            await events.close(failed=True)
        else:
            if call.include_usage:
                await events.send(shape.usage(call, usage_body([task.result() for task in sending], call.n)))
            await events.close()

    async def _send_choice(
        self, call: Call, shape: Shape, index: int, choice: _Choice, events: EventStream
    ) -> Usage:
        stream, reader = choice
        last: Chunk | None = None
        writer = None if call.params.logprobs is None else shape.logprobs(self._speller)
        counts = replace(stream.usage, completion_tokens=0) if call.continuous_usage else None
        async for whole in stream:
            pace = Pace()
            for chunk in divided(whole):
                if counts is not None:
                    counts = replace(
                        counts, completion_tokens=counts.completion_tokens + len(chunk.token_ids)
                    )
                usage = None if counts is None else usage_body([counts], 1)
                logprobs = "null"
                if writer is not None and chunk.logprobs:
                    written: list[str] = []
                    await writer.write(chunk.logprobs, pace, written.append)
                    logprobs = "".join(written)
                if reader is None:
                    await events.send(shape.delta(call, index, chunk, logprobs, usage))
                    continue
                # A client that reads late gets much at once.
                for _ in reader.read(chunk.text, ended=chunk.finish_reason is not None):
                    await pace()
                for event in shape.deltas(call, index, chunk, reader, logprobs, usage):
                    await events.send(event)
                    await pace()
            last = whole
        assert last is not None
        assert last.usage is not None
        return last.usage

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

    async def _echoes(self, call: Call) -> list[str]:
        """The prompt of every choice, or empty texts without ``echo``."""
        if not call.echo:
            return [""] * len(call.choices())
        loop = asyncio.get_running_loop()
        texts = [await loop.run_in_executor(None, self._echo, prompt, call.params) for prompt in call.prompts]
        return [text for text in texts for _ in range(call.n)]

    def _echo(self, prompt: Prompt, params: SamplingParams) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("echo", "the model has no tokenizer")
        ids = cast("list[int]", prompt)
        return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def _accepted(streams: Sequence[Stream]) -> None:
    for stream in streams:
        await stream.accepted()


async def _gather(streams: Sequence[Stream]) -> list[Result]:
    """All results in order; the first failure is raised at once."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_result(stream)) for stream in streams]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _result(stream: Stream) -> Result:
    return await stream
