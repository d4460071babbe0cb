"""Shapes: the JSON of choices, of the chat and of the completion endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from aioinfer.chat.answers import AnswerReader
from aioinfer.outputs import Chunk, Usage
from aioinfer.server.openai.diffusion import chunk_fields
from aioinfer.server.openai.logprobs import ChatLogprobs, CompletionLogprobs, Speller, TextOffsets
from aioinfer.server.openai.protocol import Call

__all__ = ["CHAT", "COMPLETION", "Shape", "usage_body"]

_EMPTY = '"delta":{}'
_OPENING_WITHOUT_CONTENT = '"delta":{"role":"assistant","content":null}'


class Shape:
    """The JSON of one endpoint. Deltas are formatted as text, without a JSON encoder for the whole event: a
    server writes one per token and stream."""

    def __init__(
        self, *, whole_object: str, chunk_object: str, delta: str, opening: str | None, chat: bool
    ) -> None:
        self.whole_object = whole_object
        self._chunk_object = chunk_object
        self._delta = delta
        #: the delta that opens a choice; None: only an echo does
        self.opening = opening
        self._chat = chat
        #: what is said of the prompt stands beside the choices, and not in each
        self.prompt_beside = chat

    def logprobs(self, speller: Speller, offsets: TextOffsets) -> ChatLogprobs | CompletionLogprobs:
        """The writer of the logprobs of one choice."""
        return ChatLogprobs(speller) if self._chat else CompletionLogprobs(speller, offsets)

    def choice(
        self, index: int, text: str, finish_reason: str, reader: AnswerReader | None = None
    ) -> dict[str, Any]:
        """A whole choice, without its logprobs."""
        body: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
        if reader is not None:
            for _ in reader.read(text, ended=True):
                pass
            body["message"] = _both(reader.message())
            body["finish_reason"] = reader.finish_reason(finish_reason)
        elif self._chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        return body

    def first(self, call: Call, index: int, echo: str, prompt_ids: str | None = None) -> str:
        """The event that opens a choice. ``prompt_ids``: JSON, in the choice or beside all choices."""
        delta = self.opening if self.opening is not None else self._delta % _quoted(echo)
        if call.answer is not None:
            delta = _OPENING_WITHOUT_CONTENT
        event = self._event(call, index, delta, "null")
        if prompt_ids is None:
            return event
        end = "}" if self.prompt_beside else "}]"
        at = event.rindex(end)
        return f'{event[:at]},"prompt_token_ids":{prompt_ids}{event[at:]}'

    def delta(
        self,
        call: Call,
        index: int,
        chunk: Chunk,
        logprobs: str = "null",
        usage: dict[str, Any] | None = None,
    ) -> str:
        """The event of a chunk; the last one has the finish reason. The delta of a chunk with only a draft is
        empty. ``logprobs`` is JSON; ``usage``: of the choice so far."""
        reason = "null" if chunk.finish_reason is None else f'"{chunk.finish_reason}"'
        delta = self._delta % _quoted(chunk.text)
        if self._chat and chunk.draft is not None and not chunk.text:
            delta = _EMPTY
        more = _further(chunk, call)
        return self._event(call, index, delta, reason, logprobs, more, usage)

    def around_text(self, call: Call, index: int) -> tuple[str, str]:
        """The parts of :meth:`delta` before and after the text, which is a JSON string."""
        event = self.delta(call, index, Chunk("", []))
        before, empty, after = event.rpartition(self._delta % '""')
        start, _, end = self._delta.partition("%s")
        assert empty
        return before + start, end + after

    def deltas(
        self,
        call: Call,
        index: int,
        chunk: Chunk,
        reader: AnswerReader,
        logprobs: str = "null",
        usage: dict[str, Any] | None = None,
    ) -> Iterator[str]:
        """The events of a chunk that a parser has read: none while its text is held back. The first event has
        the logprobs, the last one the finish reason and the fields of diffusion models."""
        more = _further(chunk, call)
        reason = json.dumps(chunk.finish_reason and reader.finish_reason(chunk.finish_reason))
        deltas = reader.deltas()
        delta = next(deltas, None)
        if delta is None and (chunk.finish_reason is not None or logprobs != "null" or more):
            delta = {}
        while delta is not None:
            following = next(deltas, None)
            last = following is None
            text = f'"delta":{json.dumps(_both(delta))}'
            ending, fields = (reason, more) if last else ("null", None)
            yield self._event(call, index, text, ending, logprobs, fields, usage)
            delta, logprobs = following, "null"

    def usage(self, call: Call, usage: dict[str, Any]) -> str:
        """The event after all choices."""
        return f'{self._head(call)},"choices":[],"usage":{json.dumps(usage)}}}'

    def _event(
        self,
        call: Call,
        index: int,
        delta: str,
        reason: str,
        logprobs: str = "null",
        more: Mapping[str, Any] | None = None,
        counts: dict[str, Any] | None = None,
    ) -> str:
        usage = ',"usage":null' if call.include_usage else ""
        if counts is not None:
            usage = f',"usage":{json.dumps(counts)}'
        added = f",{json.dumps(more)[1:-1]}" if more else ""
        return (
            f'{self._head(call)},"choices":[{{"index":{index},{delta},"logprobs":{logprobs},'
            f'"finish_reason":{reason}{added}}}]{usage}}}'
        )

    def _head(self, call: Call) -> str:
        return _head_of(self._chunk_object, call.id, call.created, call.model, call.fingerprint)


def _both(message: dict[str, Any]) -> dict[str, Any]:
    """A message or delta with its reasoning under both names that clients know."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {**message, "reasoning": reasoning}


def _further(chunk: Chunk, call: Call) -> dict[str, Any]:
    """Fields of a streamed choice beyond OpenAI's."""
    found = chunk_fields(chunk, call.step_map)
    if chunk.finish_reason is not None:
        found["stop_reason"] = chunk.stop_reason
    if call.token_ids:
        found["token_ids"] = chunk.token_ids
    return found


def usage_body(usages: Sequence[Usage], call: Call) -> dict[str, Any]:
    """``usage`` of a call, of its choices; a prompt counts once."""
    n = call.n
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages[::n])},
    }
    if call.params.prediction is not None or (call.answer is not None and call.answer.reasoning is not None):
        found["completion_tokens_details"] = {
            name: sum(getattr(usage, name) for usage in usages)
            for name in ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
        }
    return found


@lru_cache(maxsize=1024)
def _head_of(kind: str, name: str, created: int, model: str, fingerprint: str) -> str:
    """The common start of the events of one call."""
    head = f'{{"id":"{name}","object":"{kind}","created":{created},"model":{_quoted(model)}'
    return f'{head},"system_fingerprint":"{fingerprint}"'


CHAT = Shape(
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    delta='"delta":{"content":%s}',
    opening='"delta":{"role":"assistant","content":""}',
    chat=True,
)
COMPLETION = Shape(
    whole_object="text_completion",
    chunk_object="text_completion",
    delta='"text":%s',
    opening=None,
    chat=False,
)
