"""Calls in a notation of their own, with a tag as quotation mark: the format of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tags import partial_length
from aioinfer.text.tool_calls.base import Functions
from aioinfer.text.tool_calls.gemma4_grammar import CLOSING, OPENING, QUOTE, arguments_form
from aioinfer.text.tool_calls.raw_values import as_json, quoted
from aioinfer.text.tool_calls.states import LONGEST_HEAD, CallStates

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Gemma4"]

_QUOTE = regex.escape(QUOTE)
_FUNCTION = regex.compile(r"\s*+call:(?P<name>[^\s{}<>]++)\s*+\{")
_BARE_KEY = r"(?P<bare>[^\s:,{}\[\]<][^:,{}\[\]<]*+)"
_KEY = regex.compile(rf"\s*+(?:{_QUOTE}(?P<quoted>[^<]*+){_QUOTE}|{_BARE_KEY})\s*+:")
_STRING = regex.compile(rf"\s*+{_QUOTE}")
_OPEN = regex.compile(r"\s*+(?P<bracket>[{\[])")
_CLOSE = regex.compile(r"\s*+(?P<bracket>[}\]])")
_COMMA = regex.compile(r"\s*+,")
_TAG_REST = f"(?:{'|'.join(regex.escape(tag[1:]) for tag in (OPENING, CLOSING, QUOTE))})"
#: a "<" that begins no tag belongs to it
_BARE = regex.compile(
    rf"\s*+(?P<value>(?:[^\s,{{}}\[\]<]|<(?!{_TAG_REST}))(?:[^,{{}}\[\]<]|<(?!{_TAG_REST}))*+)(?=[,{{}}\[\]<])"
)
_CALL_END = regex.compile(rf"\s*+{regex.escape(CLOSING)}")
#: the types of what is not between quotation marks
_OTHER_TYPES = frozenset({"number", "boolean", "null"})
_BRACKETS = {"{": "}", "[": "]"}


class Gemma4(CallStates):
    """``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>``.

    Strings are between the tags ``<|"|>``, without escapes, and keys are bare; the rest is as in JSON. What
    is neither is a string. ``None``, ``True`` and ``False`` count as JSON.
    """

    name: ClassVar[str] = "gemma4"
    opening = OPENING
    separator: ClassVar[str | None] = ""
    tags: ClassVar[tuple[str, ...]] = (OPENING, CLOSING, QUOTE)

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        #: the brackets that are open, and whether there is a value within each
        self._open: list[str] = []
        self._filled: list[bool] = []

    @staticmethod
    def in_template(template: str) -> bool:
        return f"{OPENING}call:" in template

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        return f"{rules.text(f'call:{function}')} {arguments_form(schema, rules)} {rules.tag(CLOSING)}"

    @property
    def unfinished(self) -> bool:
        return self._broken or self._state in (self._key, self._item, self._string, self._next)

    def _end(self) -> None:
        # What is cut off is incomplete JSON.
        cut = self._held[: len(self._held) - partial_length(self._held, QUOTE)].strip()
        if self._state == self._item and cut:
            self._pass_on(self._comma() + cut)
        if self._state == self._key and (key := cut.removeprefix(QUOTE).removesuffix(QUOTE)):
            self._pass_on(f'{self._comma()}"{quoted(key)}')
        super()._end()

    def _head(self) -> bool:
        match = _FUNCTION.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._no_call()
        if match.partial:
            return False
        self._begin(match["name"])
        self._open, self._filled = [], []
        return self._enter("{", match.end())

    def _key(self) -> bool:
        """Within an object, in front of a key."""
        if match := self._bracket(_CLOSE):
            return self._leave(match["bracket"], match.end())
        match = _KEY.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._break_off()
        if match.partial:
            return False
        key = match["bare"].rstrip() if match["quoted"] is None else match["quoted"]
        self._pass_on(f'{self._comma()}"{quoted(key)}": ')
        # The comma is that of the key.
        self._filled[-1] = False
        return self._go(match.end(), self._item)

    def _item(self) -> bool:
        """In front of a value."""
        if self._open[-1] == "[" and (match := self._bracket(_CLOSE)):
            return self._leave(match["bracket"], match.end())
        if match := self._bracket(_OPEN):
            self._pass_on(self._comma())
            return self._enter(match["bracket"], match.end())
        match = _STRING.match(self._held, partial=True)
        if match and not match.partial:
            self._pass_on(f'{self._comma()}"')
            return self._go(match.end(), self._string)
        match = match or _BARE.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._break_off()
        if match.partial:
            return False
        self._pass_on(self._comma() + as_json(match["value"].rstrip(), _OTHER_TYPES))
        return self._go(match.end(), self._next)

    def _string(self) -> bool:
        at = self._held.find(QUOTE)
        end = at if at >= 0 else len(self._held) - partial_length(self._held, QUOTE)
        self._pass_on(quoted(self._held[:end]))
        if at < 0:
            self._held = self._held[end:]
            return False
        self._pass_on('"')
        return self._go(at + len(QUOTE), self._next)

    def _next(self) -> bool:
        """Behind a value."""
        if match := self._bracket(_CLOSE):
            return self._leave(match["bracket"], match.end())
        match = _COMMA.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._break_off()
        return not match.partial and self._go(match.end(), self._key if self._open[-1] == "{" else self._item)

    def _tail(self) -> bool:
        """Behind the arguments, or what cannot be one. Text that is not the end of the call is content."""
        match = _CALL_END.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._go(0, self._text)
        return not match.partial and self._go(match.end(), self._gap)

    def _break_off(self) -> bool:
        """What comes cannot be part of the arguments."""
        self._broken = True
        return self._go(0, self._tail)

    def _bracket(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        match = pattern.match(self._held)
        return match if match and match.end() <= LONGEST_HEAD else None

    def _enter(self, bracket: str, upto: int) -> bool:
        self._open.append(bracket)
        self._filled.append(False)
        self._pass_on(bracket)
        return self._go(upto, self._key if bracket == "{" else self._item)

    def _leave(self, bracket: str, upto: int) -> bool:
        if bracket != _BRACKETS[self._open[-1]]:
            return self._break_off()
        self._open.pop()
        self._filled.pop()
        self._pass_on(bracket)
        return self._go(upto, self._next if self._open else self._tail)

    def _comma(self) -> str:
        """In front of a key or of a value of a list."""
        before = ", " if self._filled[-1] else ""
        self._filled[-1] = True
        return before
