"""Answers of chats with reasoning and tool calls: the grammar that constrains them and the parsers that read
them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aioinfer.chat.order import UNREAD, TemplateOrder
from aioinfer.errors import InvalidRequest
from aioinfer.outputs import Usage
from aioinfer.params import Grammar, SamplingParams
from aioinfer.text import reasoning as reasoning_formats
from aioinfer.text import tool_calls
from aioinfer.text.reasoning import ReasoningParser
from aioinfer.text.schema_rewrites import UnsupportedKeyword, rewritten
from aioinfer.text.tokenizer import Tokenizer
from aioinfer.text.tool_calls import Functions, Parsed, ToolCallDelta, ToolCallParser
from aioinfer.text.tool_calls.raw_values import Signatures

if TYPE_CHECKING:  # it imports pydantic
    from aioinfer.chat.tools import Tools

__all__ = ["AnswerFormat", "AnswerReader", "ChatFormat", "joined"]

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
#: characters per push of a parser
_PIECE = 4096


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parsers for the answers of one call, and the functions that it offers; ``constrained``: a grammar
    was built from its tools; ``shown``: the answer includes the reasoning; ``begins``: what stands for the
    end of the prompt, where an answer continues a message."""

    tools: type[ToolCallParser] | None
    reasoning: type[ReasoningParser] | None
    constrained: bool = False
    functions: Functions = field(default_factory=dict)
    shown: bool = True
    begins: str | None = None

    def reader(self, prompt_end: str = "") -> AnswerReader:
        """The reader of one choice, whose prompt ends so."""
        return AnswerReader(
            None if self.tools is None else self.tools(self.functions),
            None if self.reasoning is None else self.reasoning(self.begins or prompt_end),
            shown=self.shown,
        )


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of tool calls and reasoning of an engine's model, and its tokens for their tags. Without a
    parser of tool calls, tools are refused; without a parser of reasoning, the whole answer is content."""

    tools: type[ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[str] = frozenset()
    #: names that the chat template reads; None if not known
    template_names: frozenset[str] | None = None
    #: sequences of messages that the chat template takes
    order: TemplateOrder = field(default_factory=TemplateOrder)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> ChatFormat:
        """``tool_call_parser``, ``reasoning_parser``: names of formats, "auto" for those of the model's chat
        template, or None."""
        templates = () if tokenizer is None else tokenizer.chat_templates
        tools = tool_calls.parser_of(tool_call_parser, templates)
        parser = reasoning_formats.parser_of(reasoning_parser, templates)
        if tokenizer is None:
            return cls(tools, parser)
        names, order = tokenizer.template_names, TemplateOrder.of(tokenizer)
        return cls(tools, parser, tokenizer.added_tokens, tokenizer.special_tokens, names, order)

    def continued(self, message: Mapping[str, Any]) -> str | None:
        """The stand-in for the prompt's end where the answer continues ``message``: the tag of reasoning that
        comes last in its text. None: the prompt shows where the answer begins."""
        content = message.get("content")
        if isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, dict))
            content = "".join(part for part in parts if isinstance(part, str))
        if self.reasoning is None or not isinstance(content, str) or not content.strip():
            return None
        opening, closing = self.reasoning.opening, self.reasoning.closing
        return opening if content.rfind(opening) > content.rfind(closing) else closing

    def offered(self, tools: Tools) -> list[dict[str, Any]]:
        """The functions as the chat template gets them. Raises InvalidRequest if nothing would tell the model
        of them."""
        names = self.template_names
        if names is not None and "tools" not in names and not tools.enforced:
            # The grammar of a required or strict call would.
            raise InvalidRequest("tools", UNREAD, code="unsupported_parameter")
        return tools.for_template()

    def apply(
        self,
        params: SamplingParams,
        tools: Tools | None,
        *,
        separate: bool = True,
        shown: bool = True,
        begins: str | None = None,
    ) -> tuple[SamplingParams, AnswerFormat | None]:
        """The parameters with the grammar that the tools require, and the parsers of the answer.

        Without parsers (None) the whole answer is content. A grammar in the request that is a regular
        expression, a choice or Lark applies to the whole answer, reasoning included. Without ``separate``,
        the reasoning stays in the content; without ``shown``, it is left out. ``begins``: see
        :meth:`continued`. Raises InvalidRequest.
        """
        if tools is not None and self.tools is None:
            raise InvalidRequest("tools", "cannot be used: there is no tool_call_parser for this model")
        reasoning = self.reasoning
        own = params.structure
        constrained = False
        if own is not None and tools is not None and tools.required:
            raise InvalidRequest("tool_choice", "that requires a call cannot be combined with a grammar")
        if own is not None and own.kind not in ("json_schema", "json_object"):
            reasoning = None
        elif (own is not None and (tools or reasoning)) or (tools is not None and tools.enforced):
            grammar = self._grammar(own, tools)
            params = replace(params, grammar=grammar if begins is None else grammar.behind(begins))
            constrained = tools is not None
        if not separate:
            reasoning = None
        if tools is None and reasoning is None:
            return params, None
        if tools is None:
            answer = AnswerFormat(None, reasoning, constrained, {}, shown, begins)
        else:
            functions: Functions = {each.name: each.parameters for each in tools.functions}
            if self.tools is not None and self.tools.reads_schemas:
                # For all readers, and here: large bodies are parsed beside the event loop.
                functions = signatures = Signatures(functions)
                signatures.prepare()
            answer = AnswerFormat(self.tools, reasoning, constrained, functions, shown, begins)
        if self._tags(answer) & self.special:
            params = replace(params, skip_special_tokens=False)
        return params, answer

    def _grammar(self, own: Grammar | None, tools: Tools | None) -> Grammar:
        """Raises InvalidRequest of "tools" or "grammar", as the one or the other is at fault."""
        from aioinfer.text.tool_grammar import AnswerGrammar  # imports numpy

        functions: dict[str, Any] = {}
        for name, schema in ({} if tools is None else tools.schemas()).items():
            functions[name] = _rewritten(schema, "tools", f"of the function {name!r}: ")
        grammar = AnswerGrammar(
            parser=self.tools,
            functions=functions,
            parallel=tools is not None and tools.parallel,
            text=own is None and tools is not None and not tools.required,
            answer=None if own is None else _rewritten(_schema(own), "grammar"),
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
            tags.update(answer.tools.tags)
        if answer.reasoning is not None:
            tags.update(answer.reasoning.tags)
        return tags


class AnswerReader:
    """Parses one answer, at once or in pieces, into the objects of OpenAI's API."""

    def __init__(
        self, tools: ToolCallParser | None, reasoning: ReasoningParser | None, *, shown: bool = True
    ) -> None:
        """``shown``: the reasoning is part of what is read."""
        self._shown = shown
        #: pieces of all reasoning, also where it is not shown
        self._reasoned: list[str] = []
        self._tools = tools
        self._reasoning = reasoning
        self._called = False
        #: read and not yet taken
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    def read(self, text: str, *, ended: bool) -> Iterator[None]:
        """Parse the next part of the answer, a bounded piece of it per step of the iterator."""
        content = []
        for piece in _cut(text):
            content.append(self._split(piece))
            yield
        if ended and self._reasoning is not None:
            content.append(self._kept(*self._reasoning.finish()))
        if self._tools is None:
            self._content += content
            return
        # In pieces: a parser copies its unparsed text at every tag that it finds.
        for piece in _cut("".join(content)):
            self._keep(self._tools.push(piece))
            yield
        if ended:
            self._keep(self._tools.finish())

    def take(self) -> tuple[str, str, list[ToolCallDelta]]:
        """Reasoning, content and calls since the last time."""
        taken = "".join(self._thoughts), "".join(self._content), self._calls
        self._thoughts, self._content, self._calls = [], [], []
        return taken

    def deltas(self) -> Iterator[dict[str, Any]]:
        """``choices[].delta`` of what was read since the last call, one per event; none if all of it is held
        back."""
        reasoning, content, calls = self.take()
        if reasoning:
            yield {"reasoning_content": reasoning}
        if content:
            yield {"content": content}
        for call in calls:
            yield {"tool_calls": [_call_delta(call)]}

    def message(self) -> dict[str, Any]:
        """``choices[].message`` of a whole answer that was read."""
        reasoning, content, deltas = self.take()
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

    def _split(self, text: str) -> str:
        """Keep the reasoning; return the text after it."""
        return text if self._reasoning is None else self._kept(*self._reasoning.push(text))

    def _kept(self, reasoning: str, rest: str) -> str:
        if reasoning:
            self._reasoned.append(reasoning)
        if self._shown:
            self._thoughts.append(reasoning)
        return rest

    def _keep(self, parsed: Parsed) -> None:
        self._content.append(parsed.content)
        self._calls += parsed.calls
        self._called = self._called or bool(parsed.calls)


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


def _rewritten(schema: Any, field: str, of: str = "") -> Any:
    """The schema with keywords that grammars know. Raises InvalidRequest of ``field``."""
    try:
        return rewritten(schema)
    except UnsupportedKeyword as error:
        raise InvalidRequest(field, f"{of}{error}") from None
    except RecursionError:
        raise InvalidRequest(field, f"{of}is nested too deeply") from None


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
