"""Generation: the one way of a request for tokens, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from aiohttp import web

from aioinfer.chat.answers import AnswerReader
from aioinfer.client.engine_like import EngineLike
from aioinfer.client.infilling import infilled
from aioinfer.config import ServerConfig
from aioinfer.errors import Rejected, RequestError
from aioinfer.loop.given_images import image_limits
from aioinfer.loop.options import PromptSource
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.server.express import ExpressLane
from aioinfer.server.http.bodies import make_room, read_body
from aioinfer.server.http.disconnects import ClientGone, Watched, Watcher
from aioinfer.server.http.failures import as_failure
from aioinfer.server.http.fetching import Fetcher
from aioinfer.server.http.limits import Limits
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.parsing import BodyParser, refuse_large
from aioinfer.server.http.pieces import whole_response
from aioinfer.server.http.records import Record, record_of
from aioinfer.server.http.sse import EventStream
from aioinfer.server.images import BodyImages, reads_images
from aioinfer.server.openai.cost import check_answer
from aioinfer.server.openai.fingerprint import fingerprint
from aioinfer.server.openai.logprobs import Speller
from aioinfer.server.openai.protocol import OPTIONS, Call, Served
from aioinfer.server.operations.metrics import Metrics
from aioinfer.server.responses.stored import StoredResponses
from aioinfer.server.sessions.table import Sessions
from aioinfer.server.sessions.turns import Prompted, Turn
from aioinfer.server.wire import AnswerContext, AnswerWriter, Wire
from aioinfer.stream import Stream
from aioinfer.text.tokenizer import NO_IMAGES, end_of

__all__ = ["Generation"]

_T = TypeVar("_T")


class Generation:
    """Calls of one engine: parsed, generated, and written whole or as events."""

    def __init__(
        self,
        engine: EngineLike,
        config: ServerConfig,
        models: Sequence[str],
        stored: StoredResponses,
        sessions: Sessions,
        metrics: Metrics | None = None,
    ) -> None:
        """``models``: the names of the model, that of answers to calls without a name first."""
        self._engine = engine
        self._metrics = metrics
        self._stored = stored
        self._sessions = sessions
        self._config = config
        self._model, self._aliases = models[0], frozenset(models[1:])
        self._speller = Speller(self._spell)
        self._parser = BodyParser()
        self._fetcher = Fetcher(config)
        #: bytes of the largest body that there is room for
        self._largest = Limits.of(config, None, batch=True).body
        make_room(self._largest)
        self._watcher = Watcher(min(config.ping_interval, config.send_timeout))
        self._lane = ExpressLane()
        #: requests that only want tokens or their text
        self._tokenizing = 0

    async def respond(self, request: web.Request, wire: Wire) -> web.StreamResponse:
        """The answer to a request in the protocol of ``wire``."""
        record = record_of(request)
        with record.admitted():
            call, limits = await self.parsed(request, wire.parse)
            check_answer(call, limits)
            self.called(call.n)
            record.model, record.call = call.model, call.id
            try:
                return await self._answer(request, call, wire, record)
            except RequestError as error:
                raise call.named(error) from None
            finally:
                self._engine.timeline.request(record.id, record.started, record.output_tokens)

    def called(self, n: int) -> None:
        """Counts a call for ``n`` choices."""
        if self._metrics is not None:
            self._metrics.called(n)

    async def count(self, request: web.Request, parse: Callable[[bytes, Served], Call]) -> int:
        """The number of tokens in the prompt of a request."""
        with self.tokenizing(request):
            call, _ = await self.parsed(request, parse)
            try:
                kwargs = call.chat_template_kwargs
                tokenizing = self._engine.tokenize(call.prompts[0], chat_template_kwargs=kwargs)
                async with self.watched(request):
                    return len(await tokenizing)
            except RequestError as error:
                raise call.named(error) from None

    @contextmanager
    def tokenizing(self, request: web.Request) -> Iterator[None]:
        """Counts a request that only wants tokens or their text, against its key and all others. Raises
        Refused, Rejected."""
        most = self._engine.config.max_queued_requests
        with record_of(request).admitted():
            if self._tokenizing >= most:
                raise Rejected(f"{most} requests are being tokenized (max_queued_requests)")
            self._tokenizing += 1
            try:
                yield
            finally:
                self._tokenizing -= 1

    async def parsed(
        self, request: web.Request, parse: Callable[[bytes, Served], _T], *, batch: bool = False
    ) -> tuple[_T, Limits]:
        """The body of a request, read and parsed within the server's limits, and these. ``batch``: it may
        have many prompts. Raises Refused, InvalidRequest, ClientGone."""
        engine = self._engine
        context = engine.info.max_model_len if engine.ready else None
        reads = reads_images(engine)
        limits = Limits.of(self._config, context, batch=batch, images=reads)
        if limits.body > self._largest:  # a model that reads images has come
            self._largest = limits.body
            make_room(limits.body)
        # The limit of the application, too, where the engine is mounted in one.
        longest = min(limits.body, request.client_max_size or limits.body)
        refuse_large(request, longest)
        held = record_of(request).body
        raw = await read_body(request, self._config.body_timeout, longest, held)
        raw = await self._parser.plain(request, raw, longest, held)
        chat = engine.chat_format
        refusal = "" if reads or not engine.ready else getattr(engine.tokenizer, "no_images", NO_IMAGES)
        images = BodyImages(image_limits(engine.tokenizer), self._fetcher, refusal)
        computes = fingerprint(self._model, engine.config, engine.info)
        most = {name: getattr(engine.config, name, None) for name in OPTIONS}
        served = Served(
            self._model,
            engine.default_params,
            chat,
            self._config.max_messages,
            computes,
            most,
            aliases=self._aliases,
            adapters=frozenset(each.name for each in engine.adapters()),
            ready=engine.ready,
            request_id=record_of(request).id,
            stored=self._stored,
            sessions=self._sessions,
            owner=record_of(request).owner,
            images=images,
        )
        parsed = await self._parser.parse(lambda body: parse(body, served), raw, limits, held)
        if not images.complete:
            async with self.watched(request):
                await images.fetch(held)
        return parsed, limits

    async def close(self) -> None:
        """Close connections to hosts of images. Idempotent."""
        await self._fetcher.close()

    def watched(self, request: web.Request) -> Watched:
        """``async with``: raises ClientGone where the task waits if the client disconnects."""
        return Watched(request, self._watcher)

    async def _answer(
        self, request: web.Request, call: Call, wire: Wire, record: Record
    ) -> web.StreamResponse:
        streams: list[Stream] = []
        # The stack closes every stream, on errors and cancellation too, once they are counted.
        async with AsyncExitStack() as stack:
            with record.counting(streams, call.n):
                prompts: Sequence[PromptSource | Prompted]
                if call.turn is not None:
                    prompts = await self._queue_turn(call, call.turn, streams, stack, record)
                elif call.beams is not None:
                    async with self.watched(request):
                        prompts = await self._search(call, call.beams, streams, stack, record)
                else:
                    prompts = await self._queue(call, streams, stack, record)
                if call.stream:
                    make_writer = partial(self._writer, wire, call, prompts, streams, record)
                    return await self._stream(request, call, make_writer, streams, record)
                async with self.watched(request):
                    results = await _all([partial(_result, stream) for stream in streams])
                pieces = await (await self._writer(wire, call, prompts, streams, record)).whole(results)
                if call.turn is not None:
                    call.turn.read(record.readers)
                return whole_response(request, pieces, self._config.send_timeout)

    async def _queue(
        self, call: Call, streams: list[Stream], stack: AsyncExitStack, record: Record
    ) -> Sequence[PromptSource]:
        """Queue all choices of a call; returns its prompts."""
        # Each prompt is tokenized once for its n choices.
        asked = [(prompt, call.params) for prompt in self._prompts(call)]
        if call.suffix:
            asked = [await infilled(self._engine, prompt, call.suffix, params) for prompt, params in asked]
        pace = Pace()
        for index in range(len(asked) * call.n):
            # A request of many choices gets its turns among other requests, not before them.
            prompt, params = asked[index // call.n]
            stream = self._engine.generate(
                prompt,
                params.for_choice(index % call.n),
                queue_behind=index,
                request_id=record.id,
                **call.scheduling,
            )
            streams.append(await stack.enter_async_context(stream))
            await pace()
        return [prompt for prompt, _ in asked]

    def _prompts(self, call: Call) -> list[PromptSource]:
        kwargs = call.chat_template_kwargs
        return [
            self._engine.prompt(prompt, chat_template_kwargs=kwargs, **call.form) for prompt in call.prompts
        ]

    async def _search(
        self,
        call: Call,
        beams: Mapping[str, Any],
        streams: list[Stream],
        stack: AsyncExitStack,
        record: Record,
    ) -> Sequence[PromptSource]:
        """Search for all choices of a call, which have ended then; returns its prompts."""
        prompts = self._prompts(call)
        # What was computed counts, whatever ends the search.
        options = {**call.scheduling, "request_id": record.id, **beams, "lost": streams}
        search = self._engine.beam_streams
        found = await _all([partial(search, prompt, call.n, call.params, **options) for prompt in prompts])
        for stream, _ in chain.from_iterable(found):
            streams.append(await stack.enter_async_context(stream))
        return prompts

    async def _queue_turn(
        self, call: Call, turn: Turn, streams: list[Stream], stack: AsyncExitStack, record: Record
    ) -> Sequence[Prompted]:
        """Queue a call that goes on with a session; returns its prompt."""
        stack.callback(turn.leave)
        options = {**call.scheduling, "request_id": record.id}
        (prompt,) = call.prompts
        if call.asked is None:
            stream = turn.text(prompt, call.params, options)
        else:
            whole = self._engine.prompt(prompt, chat_template_kwargs=call.chat_template_kwargs)
            stream = turn.chat(call.asked, whole, options)
        streams.append(await stack.enter_async_context(stream))
        return [Prompted(stream)]

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        make_writer: Callable[[], Coroutine[Any, Any, AnswerWriter]],
        streams: Sequence[Stream],
        record: Record,
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
                writer = await make_writer()
                await events.open()
                await self._send_all(call, writer, streams, events, record)
        except ClientGone:
            if not events.response.prepared:
                raise
            record.finish_reason = "disconnect"
        except Exception as error:
            if not events.response.prepared:
                raise
            # Writing has failed amid the response: no other one can follow on this connection.
            as_failure(error)
            record.finish_reason = "error"
            if request.transport is not None:
                request.transport.abort()
        return events.response

    async def _send_all(
        self, call: Call, writer: AnswerWriter, streams: Sequence[Stream], events: EventStream, record: Record
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
            failure = replace(as_failure(call.named(error)), request_id=record.id)
            await writer.fail(failure, events)
        else:
            if call.turn is not None:
                # Before the end is sent: a client may then send its next turn.
                call.turn.read(record.readers)
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
        self,
        wire: Wire,
        call: Call,
        prompts: Sequence[PromptSource | Prompted],
        streams: Sequence[Stream],
        record: Record,
    ) -> AnswerWriter:
        record.readers = self._readers(call, prompts)
        context = AnswerContext(
            tokenizer=self._engine.tokenizer,
            speller=self._speller,
            readers=record.readers,
            usage=lambda index: streams[index].usage,
            prompt_ids=lambda index: prompts[index // call.n].shown(),
        )
        return await wire.answer(call, context)

    def _readers(self, call: Call, prompts: Sequence[PromptSource | Prompted]) -> list[AnswerReader | None]:
        """The parsers of every choice, which begin as the end of its prompt says."""
        tokenizer = self._engine.tokenizer
        if call.answer is None or tokenizer is None:
            return [None] * (len(prompts) * call.n)
        ends = [end_of(prompt.shown(), tokenizer) for prompt in prompts]
        readers = [call.answer.reader(end) for end in ends for _ in range(call.n)]
        if call.turn is not None:
            readers[0].remember()
        return [*readers]

    def _spell(self, token: int) -> bytes:
        tokenizer = self._engine.tokenizer
        return b"" if tokenizer is None else tokenizer.token_bytes(token)


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
