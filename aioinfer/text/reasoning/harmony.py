"""Reasoning of gpt-oss: the messages of a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import regex

from aioinfer.text import harmony
from aioinfer.text.harmony import CHANNEL, END, MESSAGE, TAGS, held_length
from aioinfer.text.reasoning.tagged import ReasoningParser

__all__ = ["Harmony"]

_HEADER = regex.compile(harmony.HEADER)
_TAG = regex.compile(f"{harmony.BEGINS.pattern}|{harmony.ENDS.pattern}")
_LONGEST_HEADER = 1024
_REASONING, _CONTENT, _CALL, _OUTSIDE = range(4)


class Harmony(ReasoningParser):
    """Messages in the channel ``analysis`` are reasoning, those in other channels content.

    Content is passed on without its tags, a call with them, for the parser of calls. There is a line break
    between two messages of a kind. Text outside messages is content, and so is a header that is cut off.
    """

    name = "harmony"
    opening = f"{CHANNEL}analysis{MESSAGE}"
    closing = END
    opened = None
    tags: ClassVar[tuple[str, ...]] = TAGS

    def __init__(self, prompt_end: str = "") -> None:
        super().__init__(prompt_end)
        #: the kind of the text after the newest tag
        self._kind = _REASONING if self._opened else _OUTSIDE
        self._step: Callable[[], bool] = self._text if self._opened else self._header
        self._out: tuple[list[str], list[str]] = ([], [])
        #: the kinds with text that was passed on, and those that need a line break before more
        self._written: set[int] = set()
        self._apart: set[int] = set()

    @classmethod
    def in_template(cls, template: str) -> bool:
        return harmony.in_template(template)

    @classmethod
    def opened_by(cls, prompt_end: str) -> bool | None:
        return True if prompt_end.endswith(cls.opening) else None

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        while self._step():
            pass
        reasoning, content = map("".join, self._out)
        self._out = ([], [])
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        while self._step == self._header and self._held:
            self._no_header()
            while self._step():
                pass
        self._pass_on(self._held)
        self._held = ""
        return self.push("")

    def _header(self) -> bool:
        """Parse the beginning of a message."""
        match = _HEADER.match(self._held, partial=True)
        if match is None or match.end() > _LONGEST_HEADER:
            return self._no_header()
        if match.partial:
            return False
        if match["recipient"]:
            self._kind = _CALL
            self._pass_on(match[0])
        else:
            self._kind = _REASONING if match["channel"] == "analysis" else _CONTENT
            self._apart |= self._written & {self._kind}
        return self._go(match.end(), self._text)

    def _no_header(self) -> bool:
        """Make the tag a part of the text around it."""
        tag = harmony.BEGINS.match(self._held)
        upto = tag.end() if tag else 0
        self._pass_on(self._held[:upto])
        return self._go(upto, self._text)

    def _text(self) -> bool:
        match = _TAG.search(self._held)
        end = match.start() if match else len(self._held) - held_length(self._held, *TAGS)
        self._pass_on(self._held[:end])
        if match is None:
            self._held = self._held[end:]
            return False
        if harmony.BEGINS.match(match[0]):
            return self._go(end, self._header)
        if self._kind in (_CALL, _OUTSIDE):
            self._pass_on(match[0])
        if self._kind == _OUTSIDE:
            return self._go(match.end(), self._text)
        self._kind = _OUTSIDE
        return self._go(match.end(), self._header)

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        out = self._out[self._kind != _REASONING]
        if self._kind in self._apart:
            self._apart.remove(self._kind)
            out.append("\n")
        self._written.add(self._kind)
        out.append(text)

    def _go(self, upto: int, step: Callable[[], bool]) -> bool:
        self._held = self._held[upto:]
        self._step = step
        return True
