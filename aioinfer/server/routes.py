"""Routes: OpenAI's endpoints over one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine, Prompt
from aioinfer.errors import ConfigError, InvalidRequest, RequestError
from aioinfer.loop.options import PromptSource
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.params import SamplingParams
from aioinfer.server.access import ApiKey, WebAccess
from aioinfer.server.answers import AnswerReader, ChatFormat
from aioinfer.server.bodies import expected, read_body
from aioinfer.server.disconnects import ClientGone, ended, is_gone, unless_gone, unless_raises
from aioinfer.server.failures import as_failure
from aioinfer.server.fingerprint import fingerprint
from aioinfer.server.limits import Limits
from aioinfer.server.logprobs import Speller, divided
from aioinfer.server.pace import Pace
from aioinfer.server.parsing import BodyParser, plain, refuse_large
from aioinfer.server.pieces import PiecesPayload, cut
from aioinfer.server.protocol import Call, Served, model_not_found, parse_chat, parse_completion
from aioinfer.server.shapes import CHAT, COMPLETION, Shape, usage_body
from aioinfer.server.sse import EventStream
from aioinfer.server.whole import whole_answer
from aioinfer.stream import Stream
from aioinfer.text.tokenizer import Tokenizer, end_of

__all__ = ["Routes"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Parser = Callable[[bytes, Served], Call]
#: the parts of a choice that is streamed
_Choice = tuple[Stream, AnswerReader | None]
#: nginx's status of a closed connection, for the access log
_CLIENT_GONE = 499


class Routes:
    """The handlers; added to an application by :func:`aioinfer.server.setup`."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._model = config.served_model_name or engine.config.model_name
        self._speller = Speller(self._spell)
        self._parser = BodyParser()
        self._key = ApiKey(config.api_key)
        self._access = WebAccess(config)
        self._chat: tuple[Tokenizer | None, ChatFormat] | None = None

    def add_to(self, app: web.Application, prefix: str, health: str | None) -> None:
        """Raises ConfigError if the application has one of the routes."""
        routes: list[tuple[str, str, _Handler]] = [
            ("POST", f"{prefix}/chat/completions", self._guarded(self.chat)),
            ("POST", f"{prefix}/completions", self._guarded(self.completions)),
            ("GET", f"{prefix}/models", self._guarded(self.models)),
            ("GET", f"{prefix}/models/{{model}}", self._guarded(self.model)),
        ]
        if health is not None:
            routes.append(("GET", health, self.health))
            routes.append(("GET", health.rsplit("/", 1)[0] + "/debug/trace", self._guarded(self.trace)))
        taken = {
            (method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None
            for method in (("GET", "POST") if route.method == "*" else (route.method,))
        }
        for method, path, _ in routes:
            if (method, path) in taken:
                raise ConfigError(
                    f"the application already has the route {path}: choose another prefix or health path"
                )
        for method, path, handler in routes:
            add = app.router.add_get if method == "GET" else app.router.add_post
            add(path, handler, expect_handler=expected)

    # -- endpoints ------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_chat, CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_completion, COMPLETION)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._model_body()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["model"] != self._model:
            raise model_not_found(self._model, request.match_info["model"])
        return web.json_response(self._model_body())

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while requests are accepted and steps finish, 503 otherwise."""
        status = self._engine.state.value
        if self._engine.ready:
            stalled = self._engine.stats().stalled > self._config.stall_timeout
            status = "stalled" if stalled else "ok"
        return web.json_response({"status": status}, status=200 if status == "ok" else 503)

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """The latest steps as a Chrome trace, for Perfetto or chrome://tracing."""
        if not self._key.given:
            self._access.check_local(request)
        trace = await asyncio.to_thread(self._engine.timeline.chrome_trace)
        return web.Response(text=trace, content_type="application/json")

    def _model_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self._model, "object": "model", "created": 0, "owned_by": "aioinfer"}
        if self._engine.ready:
            body["max_model_len"] = self._engine.info.max_model_len
        return body

    # -- around every handler -------------------------------------------------------------------

    def _guarded(self, handler: _Handler) -> _Handler:
        """Check the key; turn exceptions into OpenAI's error objects."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                self._key.check(request)
                return await handler(request)
            except ClientGone:
                return web.Response(status=_CLIENT_GONE)
            except Exception as error:
                if isinstance(error, ConnectionError) and is_gone(request):
                    return web.Response(status=_CLIENT_GONE)
                response = as_failure(error).response()
                if request.content.exception() is not None:
                    # The rest of the body is lost. aiohttp would read it, and log an error of its own.
                    request.content.feed_eof()
                    response.force_close()
                return response

        return guarded

    def _chat_format(self) -> ChatFormat:
        """Of the engine's tokenizer, found out once for each."""
        tokenizer = self._engine.tokenizer
        if self._chat is None or self._chat[0] is not tokenizer:
            self._chat = tokenizer, ChatFormat.of(self._config, tokenizer)
        return self._chat[1]

    # -- generation -----------------------------------------------------------------------------

    async def _generate(self, request: web.Request, parse: _Parser, shape: Shape) -> web.StreamResponse:
        engine = self._engine
        limits = Limits.of(self._config, engine.info.max_model_len if engine.ready else None)
        # The limit of the application, too, where the engine is mounted in one.
        most = min(limits.body, request.client_max_size or limits.body)
        refuse_large(request, most)
        raw = await plain(request, await read_body(request, self._config.body_timeout, most), most)
        chat = self._chat_format()
        computes = fingerprint(self._model, engine.config, engine.info)
        served = Served(self._model, engine.default_params, chat, self._config.max_messages, computes)
        call = await self._parser.parse(lambda body: parse(body, served), raw, limits)
        limits.check_answer(call)
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
