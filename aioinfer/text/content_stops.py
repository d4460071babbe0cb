"""Stops of answers: looked for in their content, and neither in reasoning nor in calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from aioinfer.text.tags import Tags, without_breaks

if TYPE_CHECKING:
    from aioinfer.text.reader import AnswerReader

__all__ = ["ContentStops", "Matcher"]

#: what follows such a character of content is content, too: no call begins with them, but for a tag
_WORDS = re.compile(r"[\w ]+")


class Matcher(Protocol):
    """What finds stops in streamed text: :class:`~aioinfer.text.stop.StopMatcher` says how."""

    @property
    def matched(self) -> str: ...

    def push(self, text: str) -> tuple[str, str | None]: ...

    @property
    def held(self) -> str: ...

    def flush(self) -> str: ...


class ContentStops:
    """A matcher for the content of an answer. A match begins and ends in one run of content.

    Which characters are content, the reader of the answer says one after the other, words aside, so that
    nothing depends on how the text is split. The possible prefix of a tag and line breaks, which belong to a
    tag that comes next, are held back, too: these are no content.
    """

    __slots__ = ("_answer", "_make", "_matcher", "_tags", "_tail", "_used")

    def __init__(self, make: Callable[[], Matcher], answer: AnswerReader) -> None:
        """``make``: a matcher for one run; ``answer``: a reader of its own, that nobody else uses."""
        self._make = make
        self._matcher = make()
        self._answer = answer
        tags = sorted(answer.tags.union(answer.openings), key=len)
        self._tags = Tags(*[tag for at, tag in enumerate(tags) if not tag.startswith(tuple(tags[:at]))])
        #: the matcher has seen content
        self._used = False
        #: what may begin a tag
        self._tail = ""

    @property
    def matched(self) -> str:
        return self._matcher.matched

    @property
    def held(self) -> str:
        return self._matcher.held + self._tail

    def push(self, text: str) -> tuple[str, str | None]:
        """Append text: returns the text to release, and the stop that it completed, if any."""
        released: list[str] = []
        rest = self._tail + text
        while True:
            at, tag = self._tags.find(rest)
            known = len(without_breaks(rest[:at]))
            stop = self._search(rest[:known], released)
            self._tail = "" if tag else rest[known:]
            if stop is not None or not tag:
                return "".join(released), stop
            self._leave(rest[known : at + len(tag)], released)
            rest = rest[at + len(tag) :]

    def settle(self) -> tuple[str, str | None]:
        """The same at the end of the text: what may begin a tag is none."""
        released: list[str] = []
        rest, self._tail = self._tail, ""
        stop = self._search(rest, released)
        return "".join(released), stop

    def flush(self) -> str:
        """End of the text: what is held; empty after a match."""
        return self._matcher.flush()

    def _search(self, text: str, released: list[str]) -> str | None:
        """Append text without tags; returns the stop that it completed, if any."""
        begin = at = 0
        while at < len(text):
            if self._answer.answering(text[at]):
                words = _WORDS.match(text, at)
                end = at + 1 if words is None else words.end()
                self._feed(text[at:end])
                at = end
                continue
            if stop := self._match(text[begin:at], released):
                return stop
            self._leave(text[at], released)
            begin = at = at + 1
        return self._match(text[begin:], released)

    def _match(self, content: str, released: list[str]) -> str | None:
        if not content:
            return None
        self._used = True
        safe, stop = self._matcher.push(content)
        released.append(safe)
        return stop

    def _leave(self, text: str, released: list[str]) -> None:
        """Append text that is no content: no match spans it."""
        released += self._matcher.flush(), text
        if self._used:
            self._matcher = self._make()
            self._used = False
        self._feed(text)

    def _feed(self, text: str) -> None:
        for _ in self._answer.read(text, ended=False):
            pass
        self._answer.take()
