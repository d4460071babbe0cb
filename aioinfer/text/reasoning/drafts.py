"""Calls within thoughts: drafts, or the answer if the thought is never closed."""

from __future__ import annotations

from aioinfer.text.reasoning.base import Calls, Found

__all__ = ["Draft"]


class Draft:
    """The text of a thought from what may be a call on.

    Attributes:
        called: there is a call.
        closed: the thought was closed by a tag.
    """

    def __init__(self, parser: Calls, closing: str) -> None:
        self._parser = parser
        self._closing = closing
        self.called = False
        self.closed = False
        #: from the call on, and its length
        self._parts: list[str] = []
        self._size = 0
        #: where in it there is a closing tag that seemed to be in the arguments of a call
        self._within: int | None = None

    def push(self, text: str) -> str:
        """Read more, without a closing tag; returns what is not a call: a part of the thought."""
        return self._read(text, self._parser.push(text))

    def close(self) -> str:
        """Read a closing tag; returns the end of the thought, unless that is in the arguments of a call."""
        before = self._size
        if self.called:
            parsed = self._parser.push(self._closing)
            self._read(self._closing, parsed)
            if not parsed.content.endswith(self._closing):
                self._within = before if self._within is None else self._within
                return ""
        self.closed = True
        return "".join(self._parts)[:before]

    def end(self) -> tuple[str, str]:
        """At the end of the output: what was a thought, and the answer after it, from the call or from the
        closing tag on."""
        thought = self._read("", self._parser.finish())
        text = "".join(self._parts)
        if not self.called:
            return thought + text, ""
        if self._within is None or not self._parser.unfinished:
            return thought, text
        self.closed = True
        return thought + text[: self._within], text[self._within + len(self._closing) :]

    @property
    def empty(self) -> bool:
        """All that was read was returned."""
        return not self._size

    def _read(self, text: str, parsed: Found) -> str:
        self._parts.append(text)
        self._size += len(text)
        if self.called:
            return ""
        self.called = bool(parsed.calls)
        upto = parsed.before if self.called else len(parsed.content)
        if not upto:
            return ""
        joined = "".join(self._parts)
        self._parts = [joined[upto:]]
        self._size -= upto
        return joined[:upto]
