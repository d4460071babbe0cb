"""Answers of chats with reasoning and tool calls: the grammar that constrains them and the parsers that read
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest
from aioinfer.params import Grammar, SamplingParams
from aioinfer.server.tools import Tools
from aioinfer.text.reasoning import REASONING_PARSERS, ReasoningParser
from aioinfer.text.tokenizer import Tokenizer
from aioinfer.text.tool_calls import PARSERS, ToolCallDelta, ToolCallParser
from aioinfer.text.tool_grammar import AnswerGrammar

__all__ = ["AnswerFormat", "AnswerReader", "ChatFormat"]

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
#: characters per push of a parser
_PIECE = 4096


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parsers for the answers of one call; ``constrained``: a grammar was built from its tools."""

    tools: type[ToolCallParser] | None
    reasoning: type[ReasoningParser] | None
    constrained: bool = False

    def reader(self) -> AnswerReader:
        """For one choice."""
        return AnswerReader(
            None if self.tools is None else self.tools(),
            None if self.reasoning is None else self.reasoning(),
        )


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of tool calls and reasoning of a server's model, and its tokens for their tags. Without a
    parser of tool calls, tools are refused; without a parser of reasoning, the whole answer is content."""

    tools: type[ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    #: names that the chat template reads; None if not known
    template_names: frozenset[str] | None = None

    @classmethod
    def of(cls, config: ServerConfig, tokenizer: Tokenizer | None) -> ChatFormat:
        reasoning = None if config.reasoning_parser is None else REASONING_PARSERS[config.reasoning_parser]
        tools = None if config.tool_call_parser is None else PARSERS[config.tool_call_parser]
        if tokenizer is None:
            return cls(tools, reasoning)
        return cls(
            tools, reasoning, tokenizer.added_tokens, tokenizer.special_tokens, tokenizer.template_names
        )

    def apply(
        self, params: SamplingParams, tools: Tools | None
    ) -> tuple[SamplingParams, AnswerFormat | None]:
        """The parameters with the grammar that the tools require, and the parsers of the answer.

        Without parsers (None) the whole answer is content. A grammar in the request that is a regular
        expression, a choice or Lark applies to the whole answer, reasoning included. Raises InvalidRequest.
        """
        if tools is not None and self.tools is None:
            raise InvalidRequest("tools", "cannot be used: this server has no tool_call_parser")
        reasoning = self.reasoning
        own = params.structure
        constrained = False
        if own is not None and tools is not None and tools.required:
            raise InvalidRequest("tool_choice", "that requires a call cannot be combined with a grammar")
        if own is not None and own.kind not in ("json_schema", "json_object"):
            reasoning = None
        elif (own is not None and (tools or reasoning)) or (tools is not None and tools.enforced):
            params = replace(params, grammar=self._grammar(own, tools))
            constrained = tools is not None
        if tools is None and reasoning is None:
            return params, None
        answer = AnswerFormat(None if tools is None else self.tools, reasoning, constrained)
        if self._tags(answer) & self.special:
            params = replace(params, skip_special_tokens=False)
        return params, answer

    def _grammar(self, own: Grammar | None, tools: Tools | None) -> Grammar:
        grammar = AnswerGrammar(
            parser=self.tools,
            functions={} if tools is None else tools.schemas(),
            parallel=tools is not None and tools.parallel,
            text=own is None and tools is not None and not tools.required,
            answer=None if own is None else _schema(own),
            reasoning=self.reasoning,
            tokens=self.tokens,
        )
        try:
            return grammar.build()
        except InvalidRequest as refused:
            raise InvalidRequest("tools" if tools else "grammar", refused.message) from None
        except ValueError as error:
            raise InvalidRequest("tools" if tools else "grammar", str(error)) from None

    def _tags(self, answer: AnswerFormat) -> set[str]:
        tags: set[str] = set()
        if answer.tools is not None:
            call = answer.tools.write("")
            tags |= {call.opening, call.closing}
        if answer.reasoning is not None:
            tags |= {answer.reasoning.opening, answer.reasoning.closing}
        return tags


class AnswerReader:
    """Parses one answer, at once or in pieces, into the objects of OpenAI's API."""

    def __init__(self, tools: ToolCallParser | None, reasoning: ReasoningParser | None) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._called = False

    def deltas(self, text: str, *, ended: bool) -> list[dict[str, Any]]:
        """``choices[].delta`` of a piece of the answer, one per event; none if the piece is held back."""
        reasoning, content, calls = self._read(text, ended)
        deltas: list[dict[str, Any]] = []
        if reasoning:
            deltas.append({"reasoning_content": reasoning})
        if content:
            deltas.append({"content": content})
        return deltas + [{"tool_calls": [_call_delta(call)]} for call in calls]

    def message(self, text: str) -> dict[str, Any]:
        """``choices[].message`` of a whole answer."""
        reasoning, content, deltas = self._read(text, True)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content or (None if deltas else ""),
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.id is not None:
                function = {"name": delta.name, "arguments": ""}
                calls.append({"id": delta.id, "type": "function", "function": function})
            calls[-1]["function"]["arguments"] += delta.arguments
        if calls:
            message["tool_calls"] = calls
        return message

    def finish_reason(self, reason: str) -> str:
        """``tool_calls`` if the answer has complete calls and ended at an end token or a stop string."""
        whole = self._tools is not None and self._called and not self._tools.unfinished
        return "tool_calls" if whole and reason == "stop" else reason

    def _read(self, text: str, ended: bool) -> tuple[str, str, list[ToolCallDelta]]:
        reasoning, content = self._split(text, ended)
        if self._tools is None:
            return reasoning, content, []
        # In pieces: a parser copies its unparsed text at every tag that it finds.
        pieces = [content[at : at + _PIECE] for at in range(0, len(content), _PIECE)]
        parsed = [self._tools.push(piece) for piece in pieces]
        if ended:
            parsed.append(self._tools.finish())
        calls = [call for each in parsed for call in each.calls]
        self._called = self._called or bool(calls)
        return reasoning, "".join(each.content for each in parsed), calls

    def _split(self, text: str, ended: bool) -> tuple[str, str]:
        """Reasoning and the text behind it."""
        if self._reasoning is None:
            return "", text
        reasoning, content = self._reasoning.push(text)
        if ended:
            last = self._reasoning.finish()
            reasoning, content = reasoning + last[0], content + last[1]
        return reasoning, content


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _schema(grammar: Grammar) -> Mapping[str, Any] | bool:
    if grammar.kind == "json_object":
        return _ANY_OBJECT
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("grammar", f"is not a JSON schema: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest("grammar", "is not a JSON schema")
    return schema
