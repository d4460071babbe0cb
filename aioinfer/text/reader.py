"""The reader of one answer: reasoning, content and calls, from its text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Usage
from aioinfer.text.reasoning import REASONING_PARSERS, ReasoningParser
from aioinfer.text.tokenizer import Tokenizer
from aioinfer.text.tool_calls import PARSERS, Parsed, ToolCallDelta, ToolCallParser

__all__ = ["AnswerReader", "joined"]

#: characters per push of a parser
_PIECE = 4096


class AnswerReader:
    """Parses one answer, at once or in pieces, into the objects of OpenAI's API.

    The parser of reasoning reads first and writes the answer, in which calls are, to this object.
    """

    def __init__(
        self,
        tools: ToolCallParser | None,
        reasoning: ReasoningParser | None,
        *,
        shown: bool = True,
        json: bool = False,
    ) -> None:
        """``shown``: the reasoning is part of what is read. ``json``: a grammar makes the content JSON, whose
        texts may have tags."""
        self._shown = shown
        self._json = json
        #: pieces of all reasoning, also where it is not shown
        self._reasoned: list[str] = []
        self._tools = tools
        self._reasoning = reasoning
        self._called = False
        #: tags in the newest content are text: it is JSON, or code, with an odd number of backticks before it
        self._literal = False
        #: read and not yet taken, in order
        self._read: list[tuple[str, Any]] = []
        #: what was taken, if it is remembered
        self._all: list[tuple[str, Any]] | None = None
        if reasoning is not None:
            reasoning.into = self

    @classmethod
    def named(cls, names: Sequence[str | None], prompt_end: str = "") -> AnswerReader:
        """Of ``SamplingParams.stop_format``. Raises InvalidRequest for a format that is not known."""
        tools, reasoning, begins, *functions = names
        try:
            return cls(
                None if tools is None else PARSERS[tools]({str(name): {} for name in functions}),
                None if reasoning is None else REASONING_PARSERS[reasoning](begins or prompt_end),
            )
        except KeyError as name:
            raise InvalidRequest("stop_format", f"has no format {name}") from None

    @property
    def tags(self) -> set[str]:
        """What has to be in the text, even if a vocabulary has special tokens for it."""
        parsers = (self._tools, self._reasoning)
        return {tag for each in parsers if each is not None for tag in each.tags}

    def read(self, text: str, *, ended: bool) -> Iterator[None]:
        """Parse the next part of the answer, a bounded piece of it per step of the iterator."""
        # In pieces: a parser copies its unparsed text at every tag that it finds.
        push = self.write if self._reasoning is None else self._reasoning.push
        for piece in _cut(text):
            push(piece)
            yield
        while ended and self._reasoning is not None and (rest := self._reasoning.finish()):
            for piece in _cut(rest):
                push(piece)
                yield
        if ended and self._tools is not None:
            self._keep(self._tools.finish())

    def answering(self, following: str) -> bool:
        """Text that comes next would be content, as far as that is known yet: the text so far does not end
        within reasoning or a call, or what may become one."""
        if self._reasoning is not None and not self._reasoning.answering(following):
            return False
        return self._tools is None or not self._tools.calling(following)

    # -- what a parser of reasoning writes to ----------------------------------------------------------

    @property
    def openings(self) -> tuple[str, ...]:
        return () if self._tools is None else self._tools.openings

    @property
    def quoted(self) -> bool:
        return self._tools is not None and self._tools.quoted

    def draft(self) -> ToolCallParser:
        assert self._tools is not None
        return self._tools.fresh()

    def think(self, text: str) -> None:
        self._reasoned.append(text)
        if self._shown:
            self._read.append(("reasoning_content", text))

    def write(self, text: str) -> None:
        if self._tools is None:
            self._add(text)
        else:
            self._keep(self._tools.push(text))

    def call(self, text: str) -> None:
        if self._tools is not None:
            self._keep(self._tools.push(text))

    def takes(self, tag: str) -> bool:
        known = self._tools is None or self._tools.outside
        if not known and self._tools is not None:
            # Behind a call without its end the parser finds out what follows.
            parsed = self._tools.push(tag)
            known = parsed.content.endswith(tag)
            parsed.content = parsed.content.removesuffix(tag)
            self._keep(parsed)
        if not known or not self._literal:
            return known
        self.write(tag)
        return False

    # -- what was read ---------------------------------------------------------------------------------

    def remember(self) -> None:
        """Have :meth:`message` know what is taken from now on."""
        self._all = []

    def _taken(self) -> list[tuple[str, Any]]:
        read, self._read = self._read, []
        if self._all is not None:
            self._all += read
        return read

    def take(self) -> tuple[str, str, list[ToolCallDelta]]:
        """Reasoning, content and calls since the last time."""
        return _sorted(self._taken())

    def deltas(self) -> Iterator[dict[str, Any]]:
        """``choices[].delta`` of what was read since the last call, one per event; none if all of it is held
        back."""
        for kind, parts in groupby(self._taken(), key=lambda each: each[0]):
            if kind == "tool_calls":
                for _, call in parts:
                    yield {"tool_calls": [_call_delta(call)]}
            else:
                yield {kind: "".join(text for _, text in parts)}

    def message(self) -> dict[str, Any]:
        """``choices[].message`` of a whole answer that was read; of all of it after :meth:`remember`."""
        read = self._taken()
        reasoning, content, deltas = _sorted(read if self._all is None else self._all)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if deltas else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in joined(deltas)
        ]
        if calls:
            message["tool_calls"] = calls
        return message

    @property
    def reasoned(self) -> int:
        """Pieces of reasoning so far."""
        return len(self._reasoned)

    async def counted(self, usage: Usage, tokenizer: Tokenizer | None) -> Usage:
        """The token counts of the answer, those of its reasoning included."""
        text = "".join(self._reasoned)
        if not text or tokenizer is None:
            return usage
        try:
            count = len(await asyncio.to_thread(tokenizer.encode_part, text))
        except InvalidRequest:  # text that a tokenizer made need not be text that it takes
            return usage
        return replace(usage, reasoning_tokens=min(count, usage.completion_tokens))

    def finish_reason(self, reason: str) -> str:
        """``tool_calls`` if the answer has complete calls and ended at an end token or a stop string."""
        whole = self._tools is not None and self._called and not self._tools.unfinished
        return "tool_calls" if whole and reason == "stop" else reason

    def _keep(self, parsed: Parsed) -> None:
        content = parsed.content
        if parsed.calls:
            self._add(content[: parsed.before])
            self._read += [("tool_calls", call) for call in parsed.calls]
            self._called = True
            content = content[parsed.before :]
        self._add(content)

    def _add(self, content: str) -> None:
        if content:
            self._read.append(("content", content))
            self._literal = self._json or self._literal ^ bool(content.count("`") % 2)


def _sorted(read: Sequence[tuple[str, Any]]) -> tuple[str, str, list[ToolCallDelta]]:
    """Reasoning, content and calls."""
    reasoning = "".join(each for kind, each in read if kind == "reasoning_content")
    content = "".join(each for kind, each in read if kind == "content")
    return reasoning, content, [each for kind, each in read if kind == "tool_calls"]


def _cut(text: str) -> Iterator[str]:
    for at in range(0, len(text), _PIECE):
        yield text[at : at + _PIECE]


def joined(deltas: Sequence[ToolCallDelta]) -> Iterator[ToolCallDelta]:
    """The calls, each as one delta, from all deltas of an answer."""
    first: ToolCallDelta | None = None
    arguments: list[str] = []
    for at, delta in enumerate(deltas):
        arguments.append(delta.arguments)
        if delta.id is not None:
            first = delta
        if at + 1 == len(deltas) or deltas[at + 1].id is not None:
            assert first is not None
            yield replace(first, arguments="".join(arguments))
            arguments = []


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
