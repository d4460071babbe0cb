"""Calls between tags, each a name and JSON arguments after it."""

from __future__ import annotations

from typing import ClassVar

import regex

from aioinfer.text.tags import without_breaks
from aioinfer.text.tool_calls.base import ToolCallParser

__all__ = ["NamedCalls"]


class NamedCalls(ToolCallParser):
    """A section of calls that have a tag each. Models omit the section's tags, and those of calls.

    Attributes:
        begins: the tags that begin a section or a call, and in the group ``end`` those that end one.
        head: the text after such a tag to the arguments, with the group ``name``; in the group ``none`` the
            text of arguments that are left out.
    """

    begins: ClassVar[regex.Pattern[str]]
    head: ClassVar[regex.Pattern[str]]
    _space = regex.compile(r"\s*+(?=<)")

    def _text(self) -> bool:
        """Parse text outside calls. A tag that ends a section behind a call belongs to the call."""
        found = self.begins.search(self._held, partial=True)
        at = len(self._held) if found is None else found.start()
        content = without_breaks(self._held[:at])
        self._out.content += content
        if found is None or found.partial:
            self._held = self._held[len(content) :]
            return False
        if found["end"] and self._count:
            self._out.content += self._held[len(content) : at]
            return self._go(found.end(), self._gap)
        self._tentative = self._held[len(content) : found.end()]
        self._tag = len(self._tentative)
        return self._go(found.end(), self._head)

    def _head(self) -> bool:
        match = self._matched(self.head)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        self._begin_call(match)
        if match["none"] is None:
            return self._go(match.end(), self._arguments)
        self._pass_on("{}")
        return self._go(match.end(), self._tail)

    def _begin_call(self, head: regex.Match[str]) -> None:
        self._begin(head["name"])

    def _tail(self) -> bool:
        return self._go(0, self._gap)

    def _gap(self) -> bool:
        """Drop what ends the section, white space before another tag, and else line breaks."""
        return self._take(self.end, self._gap, otherwise=self._before_tag)

    def _before_tag(self) -> bool:
        return self._take(self._space, self._text, otherwise=super()._gap)
