"""Calls as messages with a recipient: the format of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text import harmony
from aioinfer.text.harmony import CALL, CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, TAGS
from aioinfer.text.tags import tags_of
from aioinfer.text.tool_calls.base import Functions, ToolCallParser

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Harmony"]

_HEAD = regex.compile(harmony.HEADER)
_TAGS = tags_of(*harmony.BEGINS, *harmony.ENDS)


class Harmony(ToolCallParser):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``.

    ``<|call|>`` ends an output, so an answer has one call. Other arguments than an object are passed on as
    they are, and none become ``{}``. Messages without a recipient are content here, with their tags; the
    reasoning parser of the format takes these off.
    """

    name: ClassVar[str] = "harmony"
    opening = CHANNEL
    separator: ClassVar[str | None] = f"{CALL}{START}assistant"
    tags: ClassVar[tuple[str, ...]] = TAGS

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        # The beginning of the first header can be in the prompt.
        self._state = self._head

    @staticmethod
    def in_template(template: str) -> bool:
        return harmony.in_template(template)

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = f"{rules.text(f'commentary to=functions.{function} ')} {rules.tag(CONSTRAIN)}"
        return f"{before} {rules.text('json')} {rules.tag(MESSAGE)} {rules.json(schema)}"

    @property
    def openings(self) -> tuple[str, ...]:
        return harmony.BEGINS

    @property
    def unfinished(self) -> bool:
        return super().unfinished or self._state in (self._body, self._raw)

    def _head(self) -> bool:
        """Parse the head of a message, from a tag or from the beginning of the output."""
        tag = self._tentative.lstrip("\n")
        match = self._matched(_HEAD, tag + self._held)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        if match["recipient"] in (*harmony.USERS, "assistant"):
            return self._no_call()
        self._begin(match["recipient"].removeprefix("functions."))
        return self._go(match.end() - len(tag), self._body)

    def _body(self) -> bool:
        """Parse the beginning of arguments."""
        self._held = self._held.lstrip()
        at, tag = _TAGS.find(self._held)
        if not self._held or (at == 0 and not tag):
            return False
        if at == 0:
            self._pass_on("{}")
            return self._go(0, self._tail)
        return self._go(0, self._arguments if self._held[0] == "{" else self._raw)

    def _raw(self) -> bool:
        """Parse arguments that are no object."""
        at, tag = _TAGS.find(self._held)
        self._pass_on(self._held[:at])
        self._broken = True
        return self._go(at, self._tail if tag else self._raw) and bool(tag)

    def _tail(self) -> bool:
        """Parse what follows arguments, to the end of the message: content, but for white space before it."""
        self._held = self._held.lstrip()
        return bool(self._held) and self._go(0, self._rest)

    def _rest(self) -> bool:
        at, tag = _TAGS.find(self._held)
        self._out.content += self._held[:at]
        if not tag:
            self._held = self._held[at:]
            return False
        return self._go(at + len(tag) if tag in ENDS else at, self._after)

    def _end(self) -> None:
        if self._state == self._raw:
            self._pass_on(self._held)
        if self._state == self._rest:
            self._out.content += self._held
        super()._end()
