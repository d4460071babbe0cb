"""The wire of OpenAI's Responses endpoint.

A stream is a sequence of numbered events: the response is created, its items begin, grow and end one after
the other, and the response ends with the whole object. An answer that is not streamed is that last object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from aioinfer.chat.parts import Part, Parts, Step
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.server.answers import as_chunk, deltas_of
from aioinfer.server.http.failures import Failure
from aioinfer.server.http.pace import Pace
from aioinfer.server.http.pieces import cut, json_text
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openai.logprobs import ChatLogprobs, divided
from aioinfer.server.openai.protocol import Call
from aioinfer.server.responses import objects
from aioinfer.server.responses.objects import ITEM
from aioinfer.server.responses.parsing import parse_response
from aioinfer.server.responses.stored import Item, output_item
from aioinfer.server.wire import AnswerContext, AnswerWriter, Wire

__all__ = ["RESPONSES_WIRE", "ResponsesAnswer"]


class ResponsesAnswer(AnswerWriter):
    """The answer to one call. Its events are numbered, or their parts begin and end: none is plain."""

    def __init__(self, call: Call, context: AnswerContext) -> None:
        self._call = call
        self._context = context
        self._logprobs = None if call.params.logprobs is None else ChatLogprobs(context.speller)
        self._parts = Parts()
        #: the number of the next event
        self._number = 0
        #: items that ended, as JSON, and the logprobs of the one that has not
        self._items: list[str] = []
        #: the same as objects, of a response that is to be stored
        self._stored: list[Item] = []
        self._scores: list[str] = []
        self._finish: str | None = None
        self._common: str | None = None

    async def open(self, events: EventStream) -> None:
        response = await self._response("in_progress")
        for kind in ("response.created", "response.in_progress"):
            await self._send(events, kind, f'"response":{response}')

    async def chunk(self, index: int, chunk: Chunk, events: EventStream | None) -> None:
        pace = Pace()
        for part in divided(chunk):
            scores = ""
            if self._logprobs is not None and part.logprobs:
                written: list[str] = []
                await self._logprobs.entries(part.logprobs, pace, written.append)
                scores = "".join(written)
            reader = self._context.readers[index]
            if reader is not None:
                await self._take(self._parts.read(await deltas_of(reader, part, pace)), events, pace)
            elif part.text or scores:
                await self._take(self._parts.text(part.text), events, pace, scores)
        self._finish = chunk.finish_reason

    async def close(self, usages: Sequence[Usage], events: EventStream) -> None:
        kind, response = await self._ended(usages[0], events)
        await self._send(events, f"response.{kind}", f'"response":{response}')
        await events.end()

    async def fail(self, failure: Failure, events: EventStream) -> None:
        error = {name: failure.body()["error"][name] for name in ("code", "message", "param")}
        await self._send(events, "error", json.dumps(error)[1:-1])
        response = await self._response("failed", failure=failure)
        await self._send(events, "response.failed", f'"response":{response}')
        await events.end()

    async def whole(self, results: Sequence[Result]) -> list[bytes]:
        await self.chunk(0, as_chunk(results[0]), None)
        _, response = await self._ended(results[0].usage, None)
        return [piece.encode("ascii") for piece in cut(response)]

    async def _ended(self, usage: Usage, events: EventStream | None) -> tuple[str, str]:
        """Ends the last item; returns how the response ended, and the whole of it."""
        pace = Pace()
        whole = self._finish == "stop"
        status = "completed" if whole else "incomplete"
        await self._take(self._parts.end(with_text=True), events, pace, status=status)
        reason = "max_output_tokens" if self._finish == "length" else None
        body = objects.usage_body(await self._context.counted(usage))
        response = await self._response(status, reason=reason, usage=body)
        if self._call.draft is not None:
            self._call.draft.store(self._stored, response)
        return status, response

    async def _response(self, status: str, **members: Any) -> str:
        call = self._call
        if self._common is None:
            # Once for all events: it has all that the body has of tools and instructions.
            self._common = (await json_text(dict(call.repeated), Pace()))[1:-1]
        head = {"id": call.id, "object": "response", "created_at": call.created, "model": call.model}
        return objects.response(json.dumps(head)[1:-1], self._common, status, self._items, **members)

    # -- parts ----------------------------------------------------------------------------------

    async def _take(
        self,
        steps: Iterable[Step],
        events: EventStream | None,
        pace: Pace,
        scores: str = "",
        status: str = "completed",
    ) -> None:
        for step in steps:
            match step.kind:
                case "begin":
                    await self._begin(step.part, events)
                case "more":
                    if scores:
                        self._scores.append(scores)
                    if events is not None:
                        await self._more(step, events, pace, scores)
                case "end":
                    await self._end(step.part, events, pace, status)
            await pace()

    async def _begin(self, part: Part, events: EventStream | None) -> None:
        self._scores = []
        if events is None:
            return
        item = objects.item(part, self._id(part), "in_progress", None)
        await self._send(events, "response.output_item.added", f'"output_index":{part.index},"item":{item}')
        if part.kind != "call":
            content = objects.content_part(part.kind, '""', "")
            await self._send(events, "response.content_part.added", f'{self._at(part)},"part":{content}')

    async def _more(self, step: Step, events: EventStream, pace: Pace, scores: str) -> None:
        delta = f'{self._at(step.part)},"delta":{await json_text(step.text, pace)}'
        if step.part.kind == "text":
            delta += f',"logprobs":[{scores}]'
        await self._send(events, f"response.{_deltas(step.part)}.delta", delta)

    async def _end(self, part: Part, events: EventStream | None, pace: Pace, status: str) -> None:
        text = await json_text(part.text, pace)
        scores = ",".join(self._scores)
        item = objects.item(part, self._id(part), status, text, scores)
        self._items.append(item)
        if self._call.draft is not None:
            self._stored.append(output_item(part, self._id(part), status))
        if events is None:
            return
        at, kind = self._at(part), f"response.{_deltas(part)}.done"
        if part.kind == "call":
            name = json.dumps(part.name)
            await self._send(events, kind, f'{at},"name":{name},"arguments":{text}')
        else:
            more = f',"logprobs":[{scores}]' if part.kind == "text" else ""
            await self._send(events, kind, f'{at},"text":{text}{more}')
            content = objects.content_part(part.kind, text, scores)
            await self._send(events, "response.content_part.done", f'{at},"part":{content}')
        await self._send(events, "response.output_item.done", f'"output_index":{part.index},"item":{item}')

    def _id(self, part: Part) -> str:
        return f"{ITEM[part.kind][0]}_{self._call.id.removeprefix('resp_')}_{part.index}"

    def _at(self, part: Part) -> str:
        content = "" if part.kind == "call" else ',"content_index":0'
        return f'"item_id":"{self._id(part)}","output_index":{part.index}{content}'

    async def _send(self, events: EventStream, kind: str, members: str) -> None:
        number, self._number = self._number, self._number + 1
        await events.send(f'{{"type":"{kind}","sequence_number":{number},{members}}}', kind)


def _deltas(part: Part) -> str:
    """The name of the events of a part's text."""
    return "function_call_arguments" if part.kind == "call" else ITEM[part.kind][2]


async def _answer(call: Call, context: AnswerContext) -> ResponsesAnswer:
    return ResponsesAnswer(call, context)


RESPONSES_WIRE = Wire(parse_response, _answer)
