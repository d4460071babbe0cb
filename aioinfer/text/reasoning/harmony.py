"""Reasoning of gpt-oss: the messages of a channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import regex

from aioinfer.text import harmony
from aioinfer.text.harmony import BEGINS, CALL, CHANNEL, END, ENDS, MESSAGE, START, TAGS
from aioinfer.text.reasoning.base import ReasoningParser
from aioinfer.text.tags import tags_of

__all__ = ["Harmony"]

_HEADER = regex.compile(harmony.HEADER)
_LEAD = regex.compile(harmony.LEAD)
#: what is left out of a header without its end
_CUT = regex.compile(
    r"\s*+(?:<\|start\|>\s*+(?:assistant)?+)?+"
    r"(?:\s*+<\|channel\|>\s*+(?P<channel>(?:analysis|commentary|final)\b)?+)?+\s*+"
)
#: words of headers; what is left of one that is cut off is the beginning of one, or has a recipient or a tag
_WORDS = ("assistant", "analysis", "commentary", "final", "to=", "code", "json")
_CUT_OFF = regex.compile(r"\w*+\s*+<|to=")
_TYPE = regex.compile(r"(?:<\|constrain\|>\s*+[\w./+-]*+)?+\s*+")
_LONGEST_HEADER = 1024
_TAGS = tags_of(*TAGS)
_THOUGHT_ENDS = tags_of(*BEGINS, *ENDS)
_ANY_TAG = regex.compile("|".join(map(regex.escape, TAGS)))
_WITHIN = tuple(tag for tag in TAGS if tag not in ENDS)
_REASONING, _CONTENT, _CALL, _OUTSIDE = range(4)


class Harmony(ReasoningParser):
    """Messages in the channel ``analysis``, or to the assistant itself, are reasoning, those to others calls;
    the rest is content, text outside messages, too.

    No tag is passed on, but for those within the strings of arguments. There is a line break between two
    messages of a kind.
    """

    name = "harmony"
    opening = f"{CHANNEL}analysis{MESSAGE}"
    closing = END
    tags: ClassVar[tuple[str, ...]] = TAGS

    def __init__(self, prompt_end: str = "") -> None:
        super().__init__(prompt_end)
        #: the kind of the text after the newest tag
        self._kind = _REASONING if self._opened else _OUTSIDE
        self._state: Callable[[], bool] = self._text if self._opened else self._header
        #: the kinds with text that was passed on, and those that need a line break before more
        self._written: set[int] = set()
        self._apart: set[int] = set()

    @classmethod
    def in_template(cls, template: str) -> bool:
        return harmony.in_template(template)

    @classmethod
    def opened_by(cls, prompt_end: str) -> bool | None:
        return True if prompt_end.endswith(cls.opening) else None

    @classmethod
    def begun(cls, text: str) -> bool | None:
        if not text.endswith(MESSAGE):
            return False
        match = _HEADER.search(text.rsplit(MESSAGE, 2)[-2] + MESSAGE)
        return match is not None and cls._kind_of(match["channel"], match["recipient"]) == _REASONING

    @classmethod
    def ended(cls, text: str) -> int:
        at, tag = _THOUGHT_ENDS.find(text)
        return at if tag else -1

    def push(self, text: str) -> None:
        self._held += text
        while self._state():
            pass

    def finish(self) -> str:
        if self._state == self._header:
            self._end_header(self._held)
        held, self._held = self._held, ""
        self._pass_on(held)
        return ""

    def answering(self, following: str) -> bool:
        if self._state == self._header and (self._held or _LEAD.match(following, partial=True)):
            return False
        return self._kind in (_CONTENT, _OUTSIDE) and not (self._held + following).startswith(TAGS)

    def _header(self) -> bool:
        """Parse the beginning of a message, or what is not one."""
        lead = _LEAD.match(self._held, partial=True)
        if lead is None or lead.end() > _LONGEST_HEADER:
            return self._go(0, self._text)
        if lead.partial:
            return False
        match = _HEADER.match(self._held, partial=True)
        if match is None or match.end() > _LONGEST_HEADER:
            return self._no_header(lead.end())
        if match.partial:
            return False
        self._message(match["channel"], match["recipient"])
        return self._go(match.end(), self._text)

    def _end_header(self, held: str) -> None:
        """A header that is cut off, or white space behind a message, is not for anybody."""
        begun = "<|" in held or held.lstrip().startswith("to=") or held.isspace()
        cut = _CUT.match(held)
        if not begun or cut is None or not _HEADER.match(held, partial=True):
            return
        type_ = _TYPE.match(held, cut.end())
        rest = held[type_.end() if type_ else cut.end() :]
        if _CUT_OFF.match(rest) or any(word.startswith(rest.rstrip()) for word in _WORDS):
            self._held = ""
            return
        rest = _ANY_TAG.sub("", rest)
        self._held = held[: cut.end()] + rest[: _TAGS.find(rest)[0]]
        self._no_header(0)

    def _message(self, channel: str | None, recipient: str | None) -> None:
        self._leave()
        self._kind = self._kind_of(channel, recipient)
        if self._kind == _CALL:
            self.into.call(f"{START}assistant to={recipient}{CHANNEL}commentary{MESSAGE}")
        else:
            self._apart |= self._written & {self._kind}

    @staticmethod
    def _kind_of(channel: str | None, recipient: str | None) -> int:
        itself = recipient == "assistant"
        if recipient not in harmony.USERS and not itself:
            return _CALL
        return _REASONING if channel == "analysis" or (itself and channel != "final") else _CONTENT

    def _leave(self) -> None:
        """End the message."""
        if self._kind == _CALL:
            self.into.call(CALL)
        self._kind = _OUTSIDE

    def _no_header(self, lead: int) -> bool:
        """Leave out the tags of a header without its end; what follows is the text of its message."""
        cut = _CUT.match(self._held)
        assert cut is not None
        if cut["channel"]:
            self._message(cut["channel"], None)
        if cut.end() > lead:
            return self._go(cut.end(), self._text)
        # A tag that ends a message is one with and without the rest of it here.
        tag = "" if lead else next(filter(self._held.startswith, _WITHIN), "")
        self._pass_on(self._held[:lead])
        return self._go(lead + len(tag), self._text)

    def _text(self) -> bool:
        at, tag = _TAGS.find(self._held)
        self._pass_on(self._held[:at])
        if not tag:
            self._held = self._held[at:]
            return False
        if self._kind == _CALL and self.into.quoted:
            self.into.call(tag)
        elif tag in ENDS:
            self._leave()
            return self._go(at + len(tag), self._header)
        elif tag in BEGINS or self._kind == _OUTSIDE:
            return self._go(at, self._header)
        return self._go(at + len(tag), self._text)

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        if self._kind == _CALL:
            self.into.call(text)
            return
        if self._kind in self._apart:
            self._apart.remove(self._kind)
            text = "\n" + text
        self._written.add(self._kind)
        if self._kind == _REASONING:
            self.into.think(text)
        else:
            self.into.write(text)

    def _go(self, upto: int, state: Callable[[], bool]) -> bool:
        self._held = self._held[upto:]
        self._state = state
        return True
