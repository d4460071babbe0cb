"""Wires of OpenAI's chat and completion endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from aioinfer.engine import Prompt
from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.params import SamplingParams
from aioinfer.server.http.failures import Failure
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.pieces import cut, json_text
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openai.fields import ChatBody, CompletionBody
from aioinfer.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, TextOffsets, divided
from aioinfer.server.openai.objects import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from aioinfer.server.openai.protocol import Call, parse_chat, parse_completion
from aioinfer.server.openai.shapes import CHAT, COMPLETION, Shape, usage_body
from aioinfer.server.openai.whole import whole_answer
from aioinfer.server.openapi.endpoints import Endpoint
from aioinfer.server.wire import AnswerContext, AnswerWriter, PlainEvent, Wire
from aioinfer.text.tokenizer import Tokenizer

__all__ = ["CHAT_ENDPOINT", "CHAT_WIRE", "COMPLETION_ENDPOINT", "COMPLETION_WIRE", "OpenAIAnswer"]

_DONE = "[DONE]"
#: of calls that go on with a session
IN_SESSIONS = {
    404: "There is no such model, session or path.",
    409: "The session answers another request.",
}


class OpenAIAnswer(AnswerWriter):
    """The answer to one call."""

    def __init__(self, call: Call, shape: Shape, context: AnswerContext, echoes: Sequence[str]) -> None:
        self._call = call
        self._shape = shape
        self._context = context
        self._echoes = echoes
        choices = range(len(context.readers))
        speller = context.speller
        self._speller = speller.by_id if call.tokens_by_id else speller
        self._logprobs = [self._scores(index) for index in choices]
        #: output tokens of every choice so far
        self._sent = [0 for _ in choices]
        #: those that came with reasoning
        self._reasoned = [0 for _ in choices]

    def _scores(self, index: int) -> ChatLogprobs | CompletionLogprobs | None:
        """The writer of a choice's logprobs, if these are wanted."""
        call, context = self._call, self._context
        if call.params.logprobs is None:
            return None
        prompt_ids, echo = context.prompt_ids(index), self._echoes[index]
        offsets = TextOffsets(context.tokenizer, prompt_ids, echo, call.params)
        return self._shape.logprobs(self._speller, offsets)

    async def open(self, events: EventStream) -> None:
        pace, shape = Pace(), self._shape
        for index, echo in enumerate(self._echoes):
            prompt_ids = None
            if self._call.token_ids and not (shape.prompt_beside and index):
                prompt_ids = await json_text(list(self._context.prompt_ids(index)), pace)
            if shape.opening is not None or echo or prompt_ids is not None:
                for piece in cut(echo):
                    await events.send(shape.first(self._call, index, piece, prompt_ids))
                    prompt_ids = None
                    await pace()

    def plain(self, index: int) -> PlainEvent | None:
        call, diffusion = self._call, self._call.params.diffusion
        drafts = diffusion is not None and diffusion.draft
        further = self._logprobs[index] is not None or call.token_ids
        if further or drafts or call.step_map or call.continuous_usage or self._context.readers[index]:
            return None
        before, after = self._shape.around_text(call, index)
        return PlainEvent(before, after)

    async def chunk(self, index: int, chunk: Chunk, events: EventStream) -> None:
        pace = Pace()
        reader, logprobs = self._context.readers[index], self._logprobs[index]
        for part in divided(chunk):
            scores = "null"
            if logprobs is not None and part.logprobs:
                written: list[str] = []
                await logprobs.write(part.logprobs, pace, written.append)
                scores = "".join(written)
            if reader is None:
                usage = await self._usage(index, part)
                await events.send(self._shape.delta(self._call, index, part, scores, usage))
                continue
            # A client that reads late gets much at once.
            before = reader.reasoned
            for _ in reader.read(part.text, ended=part.finish_reason is not None):
                await pace()
            if reader.reasoned > before:
                self._reasoned[index] += len(part.token_ids)
            usage = await self._usage(index, part)
            for event in self._shape.deltas(self._call, index, part, reader, scores, usage):
                await events.send(event)
                await pace()

    async def close(self, usages: Sequence[Usage], events: EventStream) -> None:
        if self._call.include_usage:
            usages = [await self._context.counted(usage, index) for index, usage in enumerate(usages)]
            await events.send(self._shape.usage(self._call, usage_body(usages, self._call)))
        await events.end(_DONE)

    async def fail(self, failure: Failure, events: EventStream) -> None:
        # Without [DONE]: clients that know no errors would take the answer for complete.
        await events.send(json.dumps(failure.body()))
        await events.end()

    async def whole(self, results: Sequence[Result]) -> list[bytes]:
        context = self._context
        return await whole_answer(
            self._call, self._shape, results, self._echoes, self._speller, context, self._logprobs
        )

    async def _usage(self, index: int, chunk: Chunk) -> dict[str, object] | None:
        """The token counts of a choice up to the end of ``chunk``, if the call asks for them."""
        if not self._call.continuous_usage:
            return None
        self._sent[index] += len(chunk.token_ids)
        usage = replace(
            self._context.usage(index),
            completion_tokens=self._sent[index],
            reasoning_tokens=self._reasoned[index],
        )
        if chunk.finish_reason is not None:
            usage = await self._context.counted(usage, index)
        return usage_body([usage], self._call)


async def _echoes(call: Call, tokenizer: Tokenizer | None) -> list[str]:
    """The prompt of every choice, or empty texts without ``echo``."""
    if not call.echo:
        return [""] * len(call.choices())
    loop = asyncio.get_running_loop()
    texts = [
        await loop.run_in_executor(None, _echo, prompt, call.params, tokenizer) for prompt in call.prompts
    ]
    return [text for text in texts for _ in range(call.n)]


def _echo(prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None) -> str:
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequest("echo", "the model has no tokenizer")
    ids = cast("list[int]", prompt)
    return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


async def _answer(shape: Shape, call: Call, context: AnswerContext) -> OpenAIAnswer:
    return OpenAIAnswer(call, shape, context, await _echoes(call, context.tokenizer))


CHAT_WIRE = Wire(parse_chat, partial(_answer, CHAT))
COMPLETION_WIRE = Wire(parse_completion, partial(_answer, COMPLETION))

CHAT_ENDPOINT = Endpoint(
    "POST",
    "/chat/completions",
    "Generate the answer in a chat",
    body=ChatBody,
    example={"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 64},
    answer=ChatAnswer,
    events=ChatChunk,
    statuses=IN_SESSIONS,
    generates=True,
)
COMPLETION_ENDPOINT = Endpoint(
    "POST",
    "/completions",
    "Generate text after a prompt",
    body=CompletionBody,
    example={"prompt": "Once upon a time", "max_tokens": 32},
    answer=CompletionAnswer,
    events=CompletionChunk,
    statuses=IN_SESSIONS,
    generates=True,
)
