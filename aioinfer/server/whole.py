"""Whole answers: the JSON of all choices at once, written in slices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from aioinfer.outputs import Result
from aioinfer.server.diffusion import step_map_field
from aioinfer.server.logprobs import Speller
from aioinfer.server.pace import Pace
from aioinfer.server.protocol import Call
from aioinfer.server.shapes import Shape, usage_body

__all__ = ["whole_answer"]

#: characters of an answer that a parser reads on a worker thread
_LONG = 1 << 15


async def whole_answer(
    call: Call, shape: Shape, results: Sequence[Result], echoes: Sequence[str], speller: Speller
) -> bytes:
    """The body of an answer that is not streamed. Other callbacks run every few milliseconds."""
    pace, choices = Pace(), []
    for index, (echo, result) in enumerate(zip(echoes, results, strict=True)):
        choices.append(await _choice(call, shape, index, echo, result, speller, pace))
        await pace()
    head = {"id": call.id, "object": shape.whole_object, "created": call.created, "model": call.model}
    usage = usage_body([result.usage for result in results], call.n)
    body = f'{json.dumps(head)[:-1]},"choices":[{",".join(choices)}],"usage":{json.dumps(usage)}}}'
    return body.encode("ascii")


async def _choice(
    call: Call, shape: Shape, index: int, echo: str, result: Result, speller: Speller, pace: Pace
) -> str:
    logprobs = "null"
    if result.logprobs is not None:
        entries = [*(result.prompt_logprobs or []), *result.logprobs]
        logprobs = await shape.logprobs(speller).write(entries, pace, result.prompt_token_ids[0])
    reader = None if call.answer is None else call.answer.reader()
    given = index, echo + result.text, result.finish_reason, reader
    choice: dict[str, Any]
    if reader is not None and len(result.text) > _LONG:
        choice = await asyncio.to_thread(shape.choice, *given)
    else:
        choice = shape.choice(*given)
    choice |= step_map_field(result.step_map, call.step_map)
    return f'{json.dumps(choice)[:-1]},"logprobs":{logprobs}}}'
