"""Grammars of whole answers: reasoning, then text, tool calls or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.harmony import CALL, CHANNEL, END, MESSAGE, START
from aioinfer.text.reasoning import Harmony, ReasoningParser
from aioinfer.text.rules import Rules
from aioinfer.text.tool_calls import Harmony as HarmonyCalls
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
        text: any text is allowed next to the calls; instead of them, where calls have no tag.
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
        rules = Rules(self.tokens or {})
        parser = self.parser if self.functions else None
        if self.reasoning is Harmony or parser is HarmonyCalls:
            if self.reasoning not in (None, Harmony) or parser not in (None, HarmonyCalls):
                raise ValueError("needs calls and reasoning both in the format harmony, or neither")
            self._messages(rules)
            return Grammar("answer", rules.lark(), None if self.reasoning is None else self.reasoning.name)
        choices = []
        if parser is not None:
            choices.append(self._calls(parser, rules))
        if self.answer is not None:
            choices.append(rules.add("answer", rules.json(self.answer)))
        rest = rules.add("rest", " | ".join(choices))
        if self.reasoning is None:
            rules.add("start", rest)
        else:
            self._begin(self.reasoning, rest, rules)
        return Grammar("answer", rules.lark(), None if self.reasoning is None else self.reasoning.name)

    def _calls(self, parser: type[ToolCallParser], rules: Rules) -> str:
        """The form of calls, with or without text."""
        rules.add("call", self._call(parser, rules))
        rules.add("calls", parser.group("call", _MOST_CALLS if self.parallel else 1, rules))
        if not parser.opening:
            if self.text:
                rules.add("PLAIN", f"TEXT & ~/{parser.called(self.functions)}(.|\\n)*/")
            return "calls | PLAIN" if self.text else "calls"
        if self.text:
            # The text before calls ends with their tag; nothing follows a single call.
            plain = rules.without("PLAIN", parser().openings[1:])
            rules.until("prelude", parser.opening, plain)
            return f"(prelude calls)* {plain}" if self.parallel else f"prelude calls | {plain}"
        rules.add("tagged", f"{rules.tag(parser.opening)} calls")
        if not self.parallel or parser.separator is None:
            return "tagged"
        between = rules.text(parser.separator) if parser.separator else ""
        return f"tagged ({between} tagged){{0,{_MOST_CALLS - 1}}}"

    def _call(self, parser: type[ToolCallParser], rules: Rules) -> str:
        """The form of a call of any of the functions."""
        for at, (name, schema) in enumerate(self.functions.items()):
            rules.add(f"call_{at}", parser.write(name, schema, rules))
        return " | ".join(f"call_{at}" for at in range(len(self.functions)))

    def _messages(self, rules: Rules) -> None:
        """Add the rules of an answer in the messages of gpt-oss: the last one is a call or in the channel
        ``final``. Before it there may be reasoning, and what is told the user if that is not to be JSON."""
        channel, message = rules.tag(CHANNEL), rules.tag(MESSAGE)
        again = f'{rules.tag(START)} "assistant"'
        rules.until("thought", END)
        before = "analysis*" if self.answer is not None else "(analysis | commentary)*"
        if self.reasoning is None and not self.text:
            before = ""
        rules.add("analysis", f'{channel} "analysis" {message} thought {again}')
        rules.add("commentary", f'{channel} "commentary" {message} thought {again}')
        choices = []
        if self.parser is not None and self.functions:
            rules.add("call", f"{channel} ({self._call(self.parser, rules)})")
            more = f"({rules.tag(CALL)} {again} call){{0,{_MOST_CALLS - 1}}}" if self.parallel else ""
            choices.append(f"call {more}")
        if self.answer is not None or self.text:
            content = "TEXT" if self.answer is None else rules.json(self.answer)
            choices.append(f'{channel} "final" {message} {content}')
        rules.add("rest", f"{before} ({' | '.join(choices)})")
        if self.reasoning is None:
            rules.add("start", "rest")
        else:
            rules.add("opened", f"thought {again} rest")
            rules.add("unopened", "rest")

    def _begin(self, reasoning: type[ReasoningParser], rest: str, rules: Rules) -> None:
        """Add the rules for an answer that begins within, after and before the reasoning."""
        rules.until("thought", reasoning.closing)
        rules.add("BREAKS", "/\\n{1,4}/")
        rules.add("opened", f"thought BREAKS? {rest}")
        rules.add("closed", rest)
        rules.add("unopened", f"({rules.tag(reasoning.opening)} thought BREAKS?)? {rest}")
