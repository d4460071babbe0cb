"""What parsers of calls have in common: the states between which a text moves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import regex

from aioinfer.text.tags import partial_length, without_breaks
from aioinfer.text.tool_calls.base import Functions, Parsed, ToolCallDelta, new_id

__all__ = ["LONGEST_EARLY", "LONGEST_HEAD", "CallStates", "JsonObject"]

#: A text that turns out not to be a call is parsed again. Limits in characters: before and behind the
#: arguments, and of what must be complete before it can be passed on.
LONGEST_HEAD, LONGEST_EARLY = 1024, 16_384


class CallStates:
    """A parser that is in one state at a time, each a method that parses a part of the held text.

    A state returns False if it needs more text. Line breaks around a call belong to it.
    """

    opening: ClassVar[str] = ""
    beginning: ClassVar[str] = ""
    separator: ClassVar[str | None] = None

    def __init__(self, functions: Functions | None = None) -> None:
        self._functions: Functions = functions or {}
        self._count = 0
        self._out = Parsed()
        #: not parsed yet
        self._held = ""
        #: the parsed part of a possible call; content if it is not one
        self._tentative = ""
        #: the characters of it that are not parsed again then: the tag
        self._tag = 0
        self._value = JsonObject()
        #: the arguments of a call ended before their brackets were closed
        self._broken = False
        self._state: Callable[[], bool] = self._text

    def push(self, text: str) -> Parsed:
        self._held += text
        while self._state():
            pass
        out, self._out = self._out, Parsed()
        return out

    def finish(self) -> Parsed:
        while self._undecided:
            # Not a call, but the text behind its tag can contain one.
            self._no_call()
            while self._state():
                pass
        self._end()
        self._held = ""
        return self.push("")

    @property
    def unfinished(self) -> bool:
        return self._broken or self._state == self._arguments

    @staticmethod
    def group(call: str, most: int) -> str:
        return call

    @property
    def _undecided(self) -> bool:
        """The text behind an opening tag may or may not be a call."""
        return self._state == self._head

    def _end(self) -> None:
        """What is held at the end of the output, and decided."""
        if self._state == self._text:
            self._out.content += self._held

    def _text(self) -> bool:
        """Outside calls."""
        at = self._held.find(self.opening)
        end = at if at >= 0 else len(self._held) - partial_length(self._held, self.opening)
        content = without_breaks(self._held[:end])
        self._out.content += content
        if at < 0:
            self._held = self._held[len(content) :]
            return False
        self._tentative = self._held[len(content) : at + len(self.opening)]
        self._tag = len(self._tentative)
        return self._go(at + len(self.opening), self._head)

    def _head(self) -> bool:
        """Behind the opening tag."""
        raise NotImplementedError

    def _arguments(self) -> bool:
        """Arguments that are written as JSON."""
        end = self._value.end(self._held)
        upto = len(self._held) if end is None else end
        self._pass_on(self._held[:upto])
        self._broken |= end is not None and not self._value.complete
        return self._go(upto, self._arguments if end is None else self._tail) and end is not None

    def _tail(self) -> bool:
        """Behind the arguments."""
        raise NotImplementedError

    def _gap(self) -> bool:
        """Behind a call."""
        self._held = self._held.lstrip("\n")
        return bool(self._held) and self._go(0, self._text)

    def _begin(self, name: str) -> None:
        self._out.calls.append(ToolCallDelta(self._count, self._new_id(), name))
        self._count += 1
        self._tentative, self._tag = "", 0
        self._value = JsonObject()

    def _new_id(self) -> str:
        return new_id()

    def _pass_on(self, arguments: str) -> None:
        if arguments:
            self._out.calls.append(ToolCallDelta(self._count - 1, arguments=arguments))

    def _no_call(self) -> bool:
        """The tag is content, and the text behind it is parsed again."""
        self._out.content += self._tentative[: self._tag]
        self._held = self._tentative[self._tag :] + self._held
        self._tentative, self._tag = "", 0
        return self._go(0, self._text)

    def _go(self, upto: int, state: Callable[[], bool]) -> bool:
        self._held = self._held[upto:]
        self._state = state
        return True


class JsonObject:
    """Finds the end of a JSON object or array that arrives in pieces, without validating it."""

    _IN_STRING = regex.compile(r'["\\]')
    _OUTSIDE = regex.compile(r'["{}\[\]<]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def complete(self) -> bool:
        """Every bracket that was opened is closed."""
        return not self._depth

    def end(self, text: str) -> int | None:
        """Where the object ends in the next piece, or None if it continues. A ``<`` outside strings, which is
        not JSON, also ends it: it can be a closing tag."""
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while found := (self._IN_STRING if self._in_string else self._OUTSIDE).search(text, at):
            at = int(found.end())
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case "<":
                    return at - 1
                case _:
                    self._depth -= 1
                    if not self._depth:
                        return at
        return None
