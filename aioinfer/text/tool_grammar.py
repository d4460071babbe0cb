"""Grammars of whole answers: reasoning, then text, tool calls or JSON, in llguidance's dialect of Lark.

Tags are single tokens in some vocabularies and plain text in others. llguidance does not match an added token
by its text, so a grammar names it by its id: ``<[id]>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.guidance import ADDED_TO_SCHEMAS
from aioinfer.text.reasoning import ReasoningParser
from aioinfer.text.tool_calls import ToolCallParser

__all__ = ["AnswerGrammar"]

#: maximum number of calls in an answer that consists of calls only
_MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The form of an answer.

    Attributes:
        parser: the format of calls; None if calls are not allowed.
        functions: name -> JSON schema of the arguments, for each function that may be called.
        parallel: several calls are allowed.
        text: any text is allowed next to the calls.
        answer: instead of calls the answer may be an instance of this JSON schema.
        reasoning: the format of the reasoning before the answer.
        tokens: text -> id of the vocabulary's added tokens.
    """

    parser: type[ToolCallParser] | None
    functions: Mapping[str, Mapping[str, Any]]
    parallel: bool = True
    text: bool = False
    answer: Mapping[str, Any] | bool | None = None
    reasoning: type[ReasoningParser] | None = None
    tokens: Mapping[str, int] | None = None

    def build(self) -> Grammar:
        """Raises InvalidRequest for too large a grammar, ValueError for a schema that cannot be written."""
        rules = ["%llguidance {}", f"start: {self._start()}", "TEXT: /(.|\\n)*/", "BREAKS: /\\n{1,4}/"]
        if self.reasoning is not None:
            rules.append(self._until("thought", self.reasoning.closing))
        if self.parser is not None and self.functions:
            rules += self._calls(self.parser)
        if self.answer is not None:
            rules.append(f"answer: {_json(self.answer)}")
        return Grammar("answer", "\n".join(rules))

    def _calls(self, parser: type[ToolCallParser]) -> list[str]:
        opening = parser.write("").opening
        rules = [
            self._until("prelude", opening),
            f"call: {self._tag(opening)} body",
            "body: " + " | ".join(f"call_{at}" for at in range(len(self.functions))),
        ]
        for at, (name, schema) in enumerate(self.functions.items()):
            call = parser.write(name)
            after = f"{json.dumps(call.after)} {self._tag(call.closing)}"
            rules.append(f"call_{at}: {json.dumps(call.before)} {_json(schema)} {after}")
        return rules

    def _start(self) -> str:
        if self.text:
            # The text before a call ends with its tag; nothing follows a single call.
            rest = "(prelude body)* TEXT" if self.parallel else "(prelude body | TEXT)"
        else:
            calls = f'call ("\\n" call){{0,{_MOST_CALLS - 1}}}' if self.parallel else "call"
            choices = [calls] * bool(self.functions) + ["answer"] * (self.answer is not None)
            rest = f"({' | '.join(choices)})"
        if self.reasoning is None:
            return rest
        if self.reasoning.opened:
            return f"thought BREAKS? {rest}"
        return f"({self._tag(self.reasoning.opening)} thought BREAKS?)? {rest}"

    def _until(self, rule: str, tag: str) -> str:
        """A rule for any text up to and including a tag."""
        return f"{rule}{'' if self._is_token(tag) else '[lazy]'}: TEXT {self._tag(tag)}"

    def _tag(self, tag: str) -> str:
        return f"<[{self.tokens[tag]}]>" if self.tokens and tag in self.tokens else json.dumps(tag)

    def _is_token(self, tag: str) -> bool:
        return bool(self.tokens) and tag in (self.tokens or ())


def _json(schema: Mapping[str, Any] | bool) -> str:
    given = schema if isinstance(schema, bool) else {**schema, **ADDED_TO_SCHEMAS}
    try:
        return f"%json {json.dumps(given)}"
    except RecursionError:
        raise ValueError("is nested too deeply") from None
