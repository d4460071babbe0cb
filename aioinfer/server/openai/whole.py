"""Whole answers: the JSON of all choices, in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aioinfer.chat.answers import AnswerReader
from aioinfer.outputs import Result
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.pieces import PIECE, Pieces
from aioinfer.server.openai.diffusion import step_map_field
from aioinfer.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, Speller, prompt_logprobs
from aioinfer.server.openai.protocol import Call
from aioinfer.server.openai.shapes import Shape, usage_body
from aioinfer.server.wire import AnswerContext

__all__ = ["whole_answer"]


async def whole_answer(
    call: Call,
    shape: Shape,
    results: Sequence[Result],
    echoes: Sequence[str],
    speller: Speller,
    context: AnswerContext,
    logprobs: Sequence[ChatLogprobs | CompletionLogprobs | None],
) -> list[bytes]:
    """The body of an answer that is not streamed. Other callbacks run every few milliseconds."""
    pace, body = Pace(), Pieces()
    head = {"id": call.id, "object": shape.whole_object, "created": call.created, "model": call.model}
    head["system_fingerprint"] = call.fingerprint
    body.add(f'{json.dumps(head)[:-1]},"choices":[')
    choices = zip(echoes, results, context.readers, logprobs, strict=True)
    for index, (echo, result, reader, scores) in enumerate(choices):
        body.add("," if index else "")
        await _choice(body, call, shape, index, echo, result, speller, reader, scores, pace)
        await pace()
    usages = [await context.counted(result.usage, index) for index, result in enumerate(results)]
    usage = usage_body(usages, call)
    body.add(f'],"usage":{json.dumps(usage)}')
    if shape.prompt_beside:
        await _prompt(body, call, results[0], speller, pace)
    body.add("}")
    return body.end()


async def _choice(
    body: Pieces,
    call: Call,
    shape: Shape,
    index: int,
    echo: str,
    result: Result,
    speller: Speller,
    reader: AnswerReader | None,
    logprobs: ChatLogprobs | CompletionLogprobs | None,
    pace: Pace,
) -> None:
    given = index, echo + result.text, result.finish_reason, reader
    choice: dict[str, Any]
    if reader is not None and len(result.text) > PIECE:
        choice = await asyncio.to_thread(shape.choice, *given)
    else:
        choice = shape.choice(*given)
    choice |= step_map_field(result.step_map, call.step_map)
    choice["stop_reason"] = result.stop_reason
    if call.token_ids:
        choice["token_ids"] = result.token_ids
    body.add("{")
    for name, value in choice.items():
        body.add(f"{json.dumps(name)}: ")
        await body.add_json(value, pace)
        body.add(",")
    body.add('"logprobs":')
    if result.logprobs is None or logprobs is None:
        body.add("null")
    else:
        echoed = result.prompt_logprobs or [] if call.echo else []
        entries = [*echoed, *result.logprobs]
        await logprobs.write(entries, pace, body.add, result.prompt_token_ids if echoed else ())
    if not shape.prompt_beside:
        await _prompt(body, call, result, speller, pace)
    body.add("}")


async def _prompt(body: Pieces, call: Call, result: Result, speller: Speller, pace: Pace) -> None:
    """Write the parts of the answer that are about the prompt."""
    if call.token_ids:
        body.add(',"prompt_token_ids":')
        await body.add_json(list(result.prompt_token_ids), pace)
    if call.prompt_logprobs:
        body.add(',"prompt_logprobs":')
        await prompt_logprobs(result.prompt_logprobs or [], speller, pace, body.add)
