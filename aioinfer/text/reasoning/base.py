"""Splits an answer into the reasoning before and the content behind the closing tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from aioinfer.text.tags import partial_length, without_breaks

__all__ = ["ReasoningParser"]

#: maximum white space before the opening tag
_MOST_SPACE = 64
#: reasoning and content
_Split = tuple[str, str]


class ReasoningParser:
    """Text in, (reasoning, content) out; the concatenation does not depend on how the text is split.

    Reasoning can only be at the beginning: a later tag is content. Line breaks next to a tag belong to it.
    Only a possible prefix of a tag is held back.
    """

    name: ClassVar[str]
    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    #: the prompt ends with the opening tag, so the output begins with reasoning
    opened: ClassVar[bool]

    def __init__(self) -> None:
        self._held = ""
        self._state: Callable[[], _Split] = self._begin

    def push(self, text: str) -> _Split:
        """Split the next piece of output."""
        self._held += text
        return self._state()

    def finish(self) -> _Split:
        """End of the output: the held text."""
        held, self._held = self._held, ""
        thinking = self._state == self._think or (self.opened and self._state == self._begin)
        return (held, "") if thinking else ("", held)

    def _begin(self) -> _Split:
        start = self._held.lstrip()
        if len(self._held) - len(start) <= _MOST_SPACE:
            if start.startswith(self.opening):
                self._held = start[len(self.opening) :]
                return self._to(self._skip_to_think)
            if self.opening.startswith(start):
                return "", ""
        return self._to(self._think if self.opened else self._answer)

    def _skip_to_think(self) -> _Split:
        self._held = self._held.lstrip("\n")
        return self._to(self._think) if self._held else ("", "")

    def _think(self) -> _Split:
        at = self._held.find(self.closing)
        if at >= 0:
            reasoning = without_breaks(self._held[:at])
            self._held = self._held[at + len(self.closing) :]
            return reasoning, self._to(self._skip_to_answer)[1]
        end = len(self._held) - partial_length(self._held, self.closing)
        reasoning = without_breaks(self._held[:end])
        self._held = self._held[len(reasoning) :]
        return reasoning, ""

    def _skip_to_answer(self) -> _Split:
        self._held = self._held.lstrip("\n")
        return self._to(self._answer) if self._held else ("", "")

    def _answer(self) -> _Split:
        content, self._held = self._held, ""
        return "", content

    def _to(self, state: Callable[[], _Split]) -> _Split:
        self._state = state
        return state()
