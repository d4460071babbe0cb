"""The base of the parsers of tool calls: the states between which a text moves them."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import regex

from aioinfer.text.tags import tags_of, without_breaks

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = [
    "LONGEST_EARLY",
    "LONGEST_HEAD",
    "Functions",
    "JsonObject",
    "Parsed",
    "ToolCallDelta",
    "ToolCallParser",
    "new_id",
]

#: A text that turns out not to be a call is parsed again. Limits in characters: before and after the
#: arguments, and of what must be complete before it can be passed on.
LONGEST_HEAD, LONGEST_EARLY = 1024, 16_384

#: name -> JSON schema of the arguments, which describes an object
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a call. The first delta of a call has its id and its name, the others have arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """Content and calls of a piece of output; ``before``: the length of the content before the first call."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    before: int = 0


def new_id() -> str:
    """An id of a call, unique across the turns of a conversation."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser(ABC):
    """Text in, content and calls out; the concatenation does not depend on how the text is split.

    Never raises, and every character of the text is either content or part of a call; line breaks around a
    call belong to it. Arguments are passed on as they arrive, so a call remains one even if its arguments are
    not valid JSON: as with OpenAI's API, the receiver validates them.

    A parser is in one state at a time, a method that parses a part of the held text and returns False if it
    needs more. A format defines ``in_template``, ``write``, ``_head`` and ``end``; some have further states.

    Attributes:
        name: the setting's value.
        opening: the tag before calls; empty if calls are found without one.
        separator: the text between calls that have an opening tag each; None if the calls of an answer have
            one together.
        tags: parts of the text that calls are found by, even if a vocabulary has special tokens for them.
        end: the text between arguments and the end of their call.
        reads_schemas: values are written as text, and their types follow from the functions.
    """

    name: ClassVar[str]
    opening: ClassVar[str] = ""
    separator: ClassVar[str | None] = None
    tags: ClassVar[tuple[str, ...]]
    end: ClassVar[regex.Pattern[str]]
    reads_schemas: ClassVar[bool] = False

    def __init__(self, functions: Functions | None = None) -> None:
        """``functions``: the functions that the model knows. The names of calls are not checked."""
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

    @staticmethod
    @abstractmethod
    def in_template(template: str) -> bool:
        """A chat template writes calls in this format."""

    @staticmethod
    @abstractmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        """The form of a call of ``function``, as a part of a rule: arguments obey their schema.

        Raises ValueError for a schema that cannot be written.
        """

    @classmethod
    def told(cls, calls: Sequence[tuple[str, str]]) -> str | None:
        """Calls, by name and JSON of arguments, as the text of an answer, for chat templates that read only
        the content of messages. None if those of this format read calls."""
        return None

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        """The form of the calls after one opening tag: up to ``most`` if it can have several."""
        return call

    @staticmethod
    def called(functions: Iterable[str]) -> str:
        """A regular expression for answers in which calls of these may be found. Only formats without an
        opening tag are asked for it, and define it."""
        raise NotImplementedError

    def push(self, text: str) -> Parsed:
        """Parse the next piece of output."""
        self._held += text
        while self._state():
            pass
        out, self._out = self._out, Parsed()
        return out

    def finish(self) -> Parsed:
        """End the output: the held text."""
        while self._undecided:
            # Not a call, but the text after its tag can contain one.
            self._no_call()
            while self._state():
                pass
        self._end()
        self._held = ""
        return self.push("")

    @property
    def unfinished(self) -> bool:
        """The arguments of the newest call are incomplete, or those of an earlier one broke off."""
        return self._broken or self._state == self._arguments

    def fresh(self) -> Self:
        """A parser of the same format and functions that has read nothing."""
        return type(self)(self._functions)

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts with which a call can begin; none if the whole answer decides."""
        return (self.opening,) if self.opening else ()

    @property
    def outside(self) -> bool:
        """The newest text is neither in a call nor in what may become one."""
        begun = self._count or self._tentative or self._held.strip()
        return self._state in (self._text, self._gap) or not begun

    def calling(self, following: str) -> bool:
        """Text that comes next belongs to a call or to what may become one; so do line breaks behind it."""
        return not self.outside or (self._state == self._gap and following.startswith("\n"))

    @property
    def quoted(self) -> bool:
        """The newest text is within a string of arguments that are written as JSON."""
        return self._state == self._arguments and self._value.quoted

    @property
    def _undecided(self) -> bool:
        """The text after an opening tag may or may not be a call."""
        return self._state == self._head

    def _end(self) -> None:
        """Pass on what is held at the end of the output."""
        if self._state == self._text:
            self._out.content += self._held

    def _text(self) -> bool:
        """Parse text outside calls."""
        at, opening = tags_of(*self.openings).find(self._held)
        content = without_breaks(self._held[:at])
        self._out.content += content
        if not opening:
            self._held = self._held[len(content) :]
            return False
        self._tentative = self._held[len(content) : at + len(opening)]
        self._tag = len(self._tentative)
        return self._go(at + len(opening), self._head)

    @abstractmethod
    def _head(self) -> bool:
        """Parse what follows the opening tag."""

    def _arguments(self) -> bool:
        """Parse arguments that are written as JSON."""
        end = self._value.end(self._held)
        upto = len(self._held) if end is None else end
        self._pass_on(self._held[:upto])
        self._broken |= end is not None and not self._value.complete
        return self._go(upto, self._arguments if end is None else self._tail) and end is not None

    def _tail(self) -> bool:
        """Parse what follows arguments. Text that is not the end of the call is content."""
        return self._take(self.end, self._after, otherwise=lambda: self._go(0, self._text))

    def _after(self) -> bool:
        """Parse what follows a call."""
        return self._go(0, self._gap)

    def _gap(self) -> bool:
        """Drop line breaks after a call."""
        self._held = self._held.lstrip("\n")
        return bool(self._held) and self._go(0, self._text)

    def _begin(self, name: str) -> None:
        if not self._out.calls:
            self._out.before = len(self._out.content)
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
        """Make the tag content, and parse the text after it again."""
        self._out.content += self._tentative[: self._tag]
        self._held = self._tentative[self._tag :] + self._held
        self._tentative, self._tag = "", 0
        return self._go(0, self._text)

    def _matched(self, pattern: regex.Pattern[str], text: str | None = None) -> regex.Match[str] | None:
        """A match at the beginning of the held text, perhaps partial; None without one of bounded length."""
        match = pattern.match(self._held if text is None else text, partial=True)
        return None if match is None or match.end() > LONGEST_HEAD else match

    def _take(
        self, pattern: regex.Pattern[str], state: Callable[[], bool], otherwise: Callable[[], bool]
    ) -> bool:
        """Go to a state after a match, wait for the rest of a partial one, or do otherwise without one."""
        match = self._matched(pattern)
        if match is None:
            return otherwise()
        return not match.partial and self._go(match.end(), state)

    def _go(self, upto: int, state: Callable[[], bool]) -> bool:
        self._held = self._held[upto:]
        self._state = state
        return True


class JsonObject:
    """Finds the end of a JSON object, array or string that arrives in pieces, without validating it."""

    _OUTSIDE: ClassVar = regex.compile(r'["{}\[\]<]')
    _WITHIN: ClassVar = {'"': regex.compile(r'["\\]'), "'": regex.compile(r"['\\]")}

    def __init__(self) -> None:
        self._depth = 0
        #: the quotation mark of the string that is open
        self._quote = ""
        self._escaped = False

    @property
    def quoted(self) -> bool:
        """A string is open."""
        return bool(self._quote)

    @property
    def complete(self) -> bool:
        """Every bracket that was opened is closed."""
        return not self._depth

    def end(self, text: str) -> int | None:
        """The end of the object in the next piece, or None if it continues. A ``<`` outside strings, which is
        not JSON, also ends it: it can be a closing tag."""
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while found := (self._WITHIN[self._quote] if self._quote else self._OUTSIDE).search(text, at):
            at = int(found.end())
            match found[0]:
                case "\\":
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[" | "(":
                    self._depth += 1
                case "}" | "]" | ")":
                    self._depth -= 1
                    if not self._depth:
                        return at
                case "<":
                    return at - 1
                case other:
                    self._other(other)
                    if not self._quote and not self._depth:
                        return at
        return None

    def _other(self, found: str) -> None:
        """A quotation mark."""
        self._quote = "" if self._quote else found
