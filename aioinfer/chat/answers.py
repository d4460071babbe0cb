"""Answers of chats with reasoning and tool calls: their formats, and the grammar that constrains them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aioinfer.errors import InvalidRequest, why
from aioinfer.params import Grammar, SamplingParams
from aioinfer.text import reasoning as reasoning_formats
from aioinfer.text import tool_calls
from aioinfer.text.chat_template import UNREAD
from aioinfer.text.reader import AnswerReader, joined
from aioinfer.text.reasoning import ReasoningParser
from aioinfer.text.schema_rewrites import UnsupportedKeyword, rewritten
from aioinfer.text.tokenizer import Tokenizer
from aioinfer.text.tool_calls import Functions, ToolCallParser
from aioinfer.text.tool_calls.raw_values import Signatures

if TYPE_CHECKING:  # it imports pydantic
    from aioinfer.chat.tools import Tools

__all__ = ["AnswerFormat", "AnswerReader", "ChatFormat", "joined"]

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The parsers for the answers of one call, and the functions that it offers; ``constrained``: a grammar
    was built from its tools; ``shown``: the answer includes the reasoning; ``begins``: what stands for the
    end of the prompt, where an answer continues a message; ``json``: a grammar makes the content JSON."""

    tools: type[ToolCallParser] | None
    reasoning: type[ReasoningParser] | None
    constrained: bool = False
    functions: Functions = field(default_factory=dict)
    shown: bool = True
    begins: str | None = None
    json: bool = False

    @property
    def names(self) -> tuple[str | None, ...]:
        """Of which :meth:`AnswerReader.named` makes a reader of its own."""
        parsers = self.tools, self.reasoning
        return (*(None if each is None else each.name for each in parsers), self.begins, *self.functions)

    def reader(self, prompt_end: str = "") -> AnswerReader:
        """The reader of one choice, whose prompt ends so."""
        return AnswerReader(
            None if self.tools is None else self.tools(self.functions),
            None if self.reasoning is None else self.reasoning(self.begins or prompt_end),
            shown=self.shown,
            json=self.json,
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
        names = tokenizer.template_names
        return cls(tools, parser, tokenizer.added_tokens, tokenizer.special_tokens, names)

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

    @property
    def tools_variable(self) -> str:
        """The variable of the chat template for tools: that of SmolLM3 is ``xml_tools``."""
        names = self.template_names or frozenset()
        return "xml_tools" if "xml_tools" in names and "tools" not in names else "tools"

    def offered(self, tools: Tools) -> list[dict[str, Any]]:
        """The functions as the chat template gets them. Raises InvalidRequest if nothing would tell the model
        of them."""
        names = self.template_names
        if names is not None and self.tools_variable not in names and not tools.enforced:
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
        constrained = json = False
        if own is not None and tools is not None and tools.required:
            raise InvalidRequest("tool_choice", "that requires a call cannot be combined with a grammar")
        if own is not None and own.kind not in ("json_schema", "json_object"):
            reasoning = None
        elif (own is not None and (tools or reasoning)) or (tools is not None and tools.enforced):
            grammar = self._grammar(own, tools)
            params = replace(params, grammar=grammar if begins is None else grammar.behind(begins))
            constrained = tools is not None
            json = own is not None
        if not separate:
            reasoning = None
        if tools is None and reasoning is None:
            return params, None
        if tools is None:
            answer = AnswerFormat(None, reasoning, constrained, {}, shown, begins, json)
        else:
            functions: Functions = {each.name: each.parameters for each in tools.functions}
            if self.tools is not None and self.tools.reads_schemas:
                # For all readers, and here: large bodies are parsed beside the event loop.
                functions = signatures = Signatures(functions)
                signatures.prepare()
            answer = AnswerFormat(self.tools, reasoning, constrained, functions, shown, begins, json)
        if answer.reader().tags & self.special:
            params = replace(params, skip_special_tokens=False)
        if params.stop or params.stop_regex or (params.thinking_budget is not None and begins is not None):
            params = replace(params, stop_format=answer.names)
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
        raise InvalidRequest("grammar", f"is not a JSON schema: {why(error)}") from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest("grammar", "is not a JSON schema")
    return schema
