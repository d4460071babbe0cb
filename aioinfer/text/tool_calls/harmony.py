"""Calls as messages with a recipient: the format of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text import harmony
from aioinfer.text.harmony import CALL, CHANNEL, CONSTRAIN, MESSAGE, START, TAGS, held_length
from aioinfer.text.tags import without_breaks
from aioinfer.text.tool_calls.base import Functions, ToolCallParser

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Harmony"]

_HEAD = regex.compile(rf"{harmony.HEADER}\s*+(?=\{{)")


class Harmony(ToolCallParser):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``.

    ``<|call|>`` ends an output, so an answer has one call. Messages without a recipient are content here,
    with their tags; the reasoning parser of the format takes these off.
    """

    name: ClassVar[str] = "harmony"
    opening = CHANNEL
    separator: ClassVar[str | None] = f"{CALL}{START}assistant"
    tags: ClassVar[tuple[str, ...]] = TAGS
    end = regex.compile(rf"\s*+(?:{harmony.ENDS.pattern})")

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

    def _text(self) -> bool:
        """Parse text outside calls."""
        tag = harmony.BEGINS.search(self._held)
        end = tag.start() if tag else len(self._held) - held_length(self._held, START, CHANNEL)
        content = without_breaks(self._held[:end])
        self._out.content += content
        if tag is None:
            self._held = self._held[len(content) :]
            return False
        self._tentative = self._held[len(content) : tag.end()]
        self._tag = len(self._tentative)
        return self._go(tag.end(), self._head)

    def _head(self) -> bool:
        """Parse the head of a message, from a tag or from the beginning of the output."""
        tag = self._tentative.lstrip("\n")
        match = self._matched(_HEAD, tag + self._held)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        if not match["recipient"]:
            return self._no_call()
        self._begin(match["recipient"])
        return self._go(match.end() - len(tag), self._arguments)
