"""Calls that are JSON objects: one reader of the shapes in which models write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tool_calls.base import LONGEST_EARLY, LONGEST_HEAD, Functions, JsonObject, ToolCallParser

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["KEYS", "JsonCalls", "JsonLists"]

_NAME, _ARGUMENTS, _PLAIN = ("name", "function"), ("arguments", "parameters"), ("id", "type", "index")
#: the keys of calls
KEYS = (*_NAME, *_ARGUMENTS, *_PLAIN)
_SCALAR = regex.compile(r"[-+\w.]++(?=[\s,}\]])")
#: arguments that are none
_NOTHING = regex.compile(r'null|"\s*+"|\[\s*+\]')
#: A text that turns out not to be a call is parsed again, as often as there are tags in it.
_SHORTEST_LIMIT = 256


class JsonCalls(ToolCallParser):
    """Finds the name and the arguments in each object behind a tag.

    There may be one object, several of them, or a list. The name is that of ``name`` or ``function``, the
    arguments are those of ``arguments`` or ``parameters``; both can be within ``function``, as in OpenAI's
    API. Arguments that are a text hold JSON; without any, or if they are null, there are none (``{}``).
    Other keys belong to the call and are dropped; an object of a name and other keys only is no call.
    A brace or a bracket too many or too few, a code fence and repeated tags do not matter.

    If the name comes first, arguments are passed on as they arrive. Otherwise they are when their object
    ends; one that does not end within LONGEST_EARLY characters is content.

    Attributes:
        also: further tags before calls.
        closing: the tag after calls; empty without.
        strict: objects with unknown keys are no calls.
        key: the key of arguments.
        before, after: what encloses a call between its tags, in grammars.
    """

    also: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[str] = ""
    strict: ClassVar[bool] = False
    key: ClassVar[str] = "arguments"
    before: ClassVar[str] = ""
    after: ClassVar[str] = ""
    _first: ClassVar[regex.Pattern[str]]
    _next: ClassVar[regex.Pattern[str]]
    _further: ClassVar[regex.Pattern[str]]
    _again: ClassVar[regex.Pattern[str]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        openings = "|".join(regex.escape(tag) for tag in (cls.opening, *cls.also) if tag) or "(?!)"
        tags = (cls.closing, *(tag.replace("<", "</", 1) for tag in cls.also))
        closing = "|".join(regex.escape(tag) for tag in tags if tag) or "(?!)"
        fence = r"(?:```\w*+\s*+)?+"
        cls._first = regex.compile(rf"\s*+(?:(?:{openings})\s*+){{0,3}}+{fence}(?P<list>\[\s*+)?+\{{")
        # Without its brace, an object ends before what cannot be a part of it. No lookahead: partial matches
        # would be longer than whole ones.
        ends = rf"(?P<brace>\}})|(?P<end>\]|{closing})|(?P<other>[\[{{;]|{openings})"
        cls._next = regex.compile(rf'[\s,]*+(?:"(?P<key>[^"\\]{{0,64}}+)"\s*+:\s*+(?=\S)|{ends})')
        mark = rf"(?P<mark>\{{|\]|{closing})|(?P<other>{openings})"
        cls._further = regex.compile(rf"(?:\s*+\}}){{0,2}}+[\s,;]*+(?:```\s*+)?+(?:{mark})")
        cls._again = regex.compile(rf"\s*+(?:{closing})")

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        #: The name of a call is certain enough to pass on arguments before their object ends.
        self._sure = True
        #: the most characters of an object before its arguments are passed on
        self._limit = LONGEST_EARLY
        self._listed = False
        self._open()

    def _open(self) -> None:
        """Begin with an object."""
        self._depth = 1
        self._key = ""
        self._name: str | None = None
        self._given: str | None = None
        #: there are keys of unknown meaning
        self._others = False
        #: its arguments are passed on as they arrive
        self._begun = False

    @property
    def _most(self) -> int:
        """The most characters that are kept before the arguments of an object, or behind them."""
        return LONGEST_HEAD if self._begun else self._limit

    @property
    def _without(self) -> bool:
        """There are no arguments so far."""
        return not self._begun and (self._given is None or _NOTHING.fullmatch(self._given) is not None)

    @classmethod
    def write(cls, function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = rules.text(f'{cls.before}{{"name": {json.dumps(function)}, "{cls.key}": ')
        return f"{before} {rules.json(schema)} {rules.text('}' + cls.after)}"

    @classmethod
    def told(cls, calls: Sequence[tuple[str, str]]) -> str | None:
        around = f"{cls.opening}{cls.before}", f"{cls.after}{cls.closing}"
        return (cls.separator or "").join(cls._objects([call]).join(around) for call in calls)

    @classmethod
    def _objects(cls, calls: Sequence[tuple[str, str]]) -> str:
        return ", ".join(f'{{"name": {json.dumps(name)}, "{cls.key}": {given}}}' for name, given in calls)

    @property
    def openings(self) -> tuple[str, ...]:
        return (*super().openings, *self.also)

    @property
    def outside(self) -> bool:
        return super().outside or (self._state == self._between and not self._held)

    def calling(self, following: str) -> bool:
        if self._state == self._between and not self._held.strip():
            return following.isspace()
        return super().calling(following)

    @property
    def _undecided(self) -> bool:
        # What ends behind arguments belongs to their call, but for further keys.
        within = self._state in (self._head, self._member, self._read, self._skip)
        return within and not (self._begun and '"' not in self._tentative + self._held)

    def _end(self) -> None:
        super()._end()
        if self._state == self._gap:
            self._out.content += self._held

    def _head(self) -> bool:
        """Parse what precedes the first object."""
        match = self._matched(self._first)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        self._listed = match["list"] is not None
        self._open()
        self._tentative += match[0]
        return self._go(match.end(), self._member)

    def _member(self) -> bool:
        """Parse a key, or the end of an object."""
        match = self._matched(self._next)
        if match is None or len(self._tentative) > self._most:
            return self._no_call()
        if match.partial:
            return False
        if match["key"] is not None:
            self._key = match["key"]
            if self.strict and self._key not in KEYS:
                return self._no_call()
            self._tentative += match[0]
            return self._go(match.end(), self._read)
        upto = match.end() if match["brace"] else match.start("end" if match["end"] else "other")
        self._tentative += match[0][:upto]
        self._go(upto, self._member)
        if match["brace"] and self._depth == 2:
            self._depth = 1
            return True
        # Where its end is not written, a name alone may be cut off.
        self._others |= match["other"] is not None
        return self._close()

    def _read(self) -> bool:
        """Parse the beginning of a value."""
        first = self._held[0]
        if first == "{" and self._key == "function" and self._depth == 1:
            self._depth = 2
            self._tentative += first
            return self._go(1, self._member)
        if first == "{" and self._key in _ARGUMENTS and self._name and self._without and self._sure:
            self._begin(self._name)
            self._begun = True
            return self._go(0, self._arguments)
        self._value = JsonObject()
        self._from = len(self._tentative)
        if first in '"{[':
            return self._go(0, self._skip)
        match = self._matched(_SCALAR)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        self._tentative += match[0]
        return self._go(match.end(), self._member) and self._keep(match[0])

    def _skip(self) -> bool:
        """Parse a text, a list or an object, which is kept until the call is known."""
        # Not beyond the limit: what follows is parsed again if this is no call.
        piece = self._held[: max(self._most + 1 - len(self._tentative), 0)]
        end = self._value.end(piece)
        piece = piece[:end]
        self._tentative += piece
        self._held = self._held[len(piece) :]
        length = len(self._tentative) - self._from
        long = length > LONGEST_HEAD and self._key in (*_NAME, *_PLAIN)
        if long or len(self._tentative) > self._most or (end is not None and not self._value.complete):
            return self._no_call()
        if end is None:
            return False
        return self._go(0, self._member) and self._keep(self._tentative[self._from :])

    def _tail(self) -> bool:
        return self._go(0, self._member)

    def _keep(self, value: str) -> bool:
        """Keep the value of a key."""
        if self._key in _ARGUMENTS and self._without:
            self._given = value
        elif self._key in _NAME and self._name is None:
            self._name = _decoded(value)
        else:
            self._others |= self._key not in _PLAIN
        return True

    def _close(self) -> bool:
        """End an object."""
        if not self._begun:
            arguments = self._written()
            if not self._name or arguments is None:
                return self._no_call()
            self._begin(self._name)
            self._pass_on(arguments)
        self._tentative, self._tag = "", 0
        return self._go(0, self._between)

    def _written(self) -> str | None:
        """The arguments of an object; None if it is no call."""
        if self._given is None:
            return None if self._others else "{}"
        text = (_decoded(self._given) or "").strip() if self._given.startswith('"') else self._given
        if _NOTHING.fullmatch(self._given) or _NOTHING.fullmatch(text):
            return "{}"
        return text if text.startswith("{") and JsonObject().end(text) == len(text) else None

    def _between(self) -> bool:
        """Parse what follows an object."""
        match = self._matched(self._further)
        if match is None or (match["mark"] == "]" and not self._listed and not match.partial):
            return self._go(0, self._gap)
        if match.partial:
            return False
        if match["mark"] == "{":
            self._open()
            self._tentative = match[0]
            return self._go(match.end(), self._member)
        self._listed = False
        upto = match.start("other") if match["other"] else match.end()
        return self._go(upto, self._between if match["mark"] == "]" else self._gap)

    def _gap(self) -> bool:
        """Drop closing tags and line breaks behind calls."""
        self._held = self._held.lstrip("\n")
        match = self._matched(self._again)
        if match is None:
            return bool(self._held) and self._go(0, self._text)
        return not match.partial and self._go(match.end(), self._gap)

    def _no_call(self) -> bool:
        # What follows complete arguments is no part of their call.
        self._begun = False
        if len(self._tentative) > _SHORTEST_LIMIT:
            self._limit = max(self._limit // 2, _SHORTEST_LIMIT)
        return super()._no_call()


class JsonLists(JsonCalls):
    """Calls of an answer are one list behind one tag."""

    @classmethod
    def told(cls, calls: Sequence[tuple[str, str]]) -> str | None:
        return f"{cls.opening}[{cls._objects(calls)}]{cls.closing}"

    @classmethod
    def group(cls, call: str, most: int, rules: Rules) -> str:
        others = f' ("," " "? {call}){{0,{most - 1}}}' if most > 1 else ""
        # Tokenizers with SentencePiece write a space after a tag.
        end = f" {rules.tag(cls.closing)}" if cls.closing else ""
        return f'" "? "[" {call}{others} "]"{end}'


def _decoded(value: str) -> str | None:
    """The text of a JSON string; None if it is none that can be written in UTF-8."""
    try:
        text = json.loads(value, strict=False)
        text.encode()
    except (ValueError, AttributeError, RecursionError):
        return None
    return str(text)
