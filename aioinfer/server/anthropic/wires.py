"""The wire of Anthropic's Messages endpoint.

A stream is a message that starts, its blocks of content one after the other, and the message's end with why
it stopped. An answer that is not streamed is the message with all its blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from aioinfer.chat.parts import Part, Parts, Step
from aioinfer.errors import InvalidRequest
from aioinfer.inputs import freeze
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.server.answers import as_chunk, deltas_of
from aioinfer.server.anthropic.errors import error_body
from aioinfer.server.anthropic.parsing import parse_message
from aioinfer.server.http.failures import Failure
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.pieces import Pieces, json_text
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openai.protocol import Call
from aioinfer.server.wire import AnswerContext, AnswerWriter, Wire

__all__ = ["MESSAGES_WIRE", "MessagesAnswer", "arguments_of"]

#: kind of part -> type of its deltas, and their field
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesAnswer(AnswerWriter):
    """The answer to one call. Its events are numbered, or their parts begin and end: none is plain."""

    def __init__(self, call: Call, context: AnswerContext) -> None:
        self._call = call
        self._context = context
        self._parts = Parts()
        self._omitted = {"reasoning"} if call.repeated.get("display") == "omitted" else set()
        self._last: Chunk | None = None

    async def open(self, events: EventStream) -> None:
        usage = _usage(self._context.usage(0))
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        await _send(events, "message_start", f'"message":{json.dumps(message)}')
        await events.send('{"type": "ping"}', "ping")

    async def chunk(self, index: int, chunk: Chunk, events: EventStream | None) -> None:
        pace = Pace()
        reader = self._context.readers[index]
        if reader is not None:
            steps: Iterable[Step] = self._parts.read(await deltas_of(reader, chunk, pace))
        else:
            steps = self._parts.text(chunk.text) if chunk.text else ()
        await self._take(steps, events, pace)
        self._last = chunk

    async def close(self, usages: Sequence[Usage], events: EventStream) -> None:
        await self._take(self._parts.end(), events, Pace())
        delta = json.dumps(self._stop(usages[0]))
        usage = json.dumps(await self._usage(usages[0]))
        await _send(events, "message_delta", f'"delta":{delta},"usage":{usage}')
        await events.send('{"type": "message_stop"}', "message_stop")
        await events.end()

    async def fail(self, failure: Failure, events: EventStream) -> None:
        await events.send(json.dumps(error_body(failure)), "error")
        await events.end()

    async def whole(self, results: Sequence[Result]) -> list[bytes]:
        result, pace = results[0], Pace()
        await self.chunk(0, as_chunk(result), None)
        await self._take(self._parts.end(), None, pace)
        content = [_block(part, part.kind not in self._omitted) for part in self._parts.all]
        usage = await self._usage(result.usage)
        pieces = Pieces()
        await pieces.add_json(self._message(content, self._stop(result.usage), usage), pace)
        return pieces.end()

    async def _take(self, steps: Iterable[Step], events: EventStream | None, pace: Pace) -> None:
        """Sends the events of parts, if there is a stream. Of parts that are omitted, those of their text are
        left out."""
        for step in steps:
            part = step.part
            if events is not None:
                match step.kind:
                    case "begin":
                        block = json.dumps(_block(part, False))
                        await _send(
                            events, "content_block_start", f'"index":{part.index},"content_block":{block}'
                        )
                    case "more" if part.kind not in self._omitted:
                        kind, name = _DELTAS[part.kind]
                        text = await json_text(step.text, pace)
                        delta = f'{{"type":"{kind}","{name}":{text}}}'
                        await _send(events, "content_block_delta", f'"index":{part.index},"delta":{delta}')
                    case "end":
                        await _send(events, "content_block_stop", f'"index":{part.index}')
            await pace()

    def _message(
        self, content: list[dict[str, Any]], stop: Mapping[str, Any], usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        head = {"id": self._call.id, "type": "message", "role": "assistant", "model": self._call.model}
        return {**head, "content": content, **stop, "usage": usage}

    def _stop(self, usage: Usage) -> dict[str, Any]:
        """Why the message ended."""
        last = self._last
        assert last is not None
        reason, stop = "end_turn", None
        if last.finish_reason != "stop":
            most = self._call.params.max_tokens
            reached = last.finish_reason != "length" or usage.completion_tokens == most
            reason = "max_tokens" if reached else "model_context_window_exceeded"
        elif self._called():
            reason = "tool_use"
        elif isinstance(last.stop_reason, str):
            reason, stop = "stop_sequence", last.stop_reason
        return {"stop_reason": reason, "stop_sequence": stop}

    def _called(self) -> bool:
        reader = self._context.readers[0]
        return reader is not None and reader.finish_reason("stop") == "tool_calls"

    async def _usage(self, usage: Usage) -> dict[str, Any]:
        thoughts = (await self._context.counted(usage)).reasoning_tokens
        return {**_usage(usage), "output_tokens_details": {"thinking_tokens": thoughts}}


async def _send(events: EventStream, kind: str, members: str) -> None:
    await events.send(f'{{"type":"{kind}",{members}}}', kind)


def _block(part: Part, whole: bool) -> dict[str, Any]:
    """The block of a part: ``whole``, or without its content."""
    text = part.text if whole else ""
    match part.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "text":
            return {"type": "text", "text": text}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments_of(text)}


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call. Text that is no JSON object, such as arguments that were cut off, is kept in
    the form that Anthropic has for it."""
    if not text:
        return {}
    try:
        # Without infinity and others that JSON has not, and not nested too deeply to be written.
        arguments = freeze("arguments", json.loads(text, parse_constant=_refused))
    except (ValueError, RecursionError, InvalidRequest):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


async def _answer(call: Call, context: AnswerContext) -> MessagesAnswer:
    return MessagesAnswer(call, context)


MESSAGES_WIRE = Wire(parse_message, _answer)
