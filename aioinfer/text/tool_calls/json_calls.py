"""Calls that are JSON objects of a name and of arguments, in either order."""

from __future__ import annotations

import json
from typing import ClassVar, NamedTuple, Self

import regex

from aioinfer.text.tool_calls.base import LONGEST_EARLY, LONGEST_HEAD, Functions, JsonObject, ToolCallParser

__all__ = ["Heads", "JsonCalls", "pattern"]

#: Each time up to LONGEST_EARLY characters are parsed again, in which there may be as many tags as fit.
_MOST_NAMELESS = 4
_NAME = r'"name"\s*+:\s*+(?P<name>"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++")\s*+'


def pattern(text: str) -> regex.Pattern[str]:
    """A regular expression, in which NAME is the key "name" with its value."""
    return regex.compile(text.replace("NAME", _NAME))


class Heads(NamedTuple):
    """The text before arguments."""

    #: the usual order: arguments are passed on as they arrive
    name_first: regex.Pattern[str]
    #: the other order: the name follows the arguments
    arguments_first: regex.Pattern[str]

    @classmethod
    def of(cls, before: str, key: str = "arguments", first: str = "") -> Self:
        """``before``: the expression for what precedes the object; ``key``: that for the key of the
        arguments; ``first``: that for what may precede both keys."""
        begin = rf"{before}\s*+\{{\s*+{first}"
        arguments = rf'"(?:{key})"\s*+:\s*+(?=\{{)'
        return cls(pattern(rf"{begin}NAME,\s*+{arguments}"), pattern(rf"{begin}{arguments}"))


class JsonCalls(ToolCallParser):
    """Finds the name and the arguments of each object.

    Attributes:
        heads: the heads of the first object after an opening tag.
        name_last: the text after arguments that came first, to the end of the object and its tag.
    """

    heads: ClassVar[Heads]
    name_last: ClassVar[regex.Pattern[str]]

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        #: how often arguments that came first led to no name
        self._nameless = 0

    @property
    def _undecided(self) -> bool:
        return self._state in (self._head, self._early_arguments, self._late_name)

    def _head(self) -> bool:
        return self._object(self.heads)

    def _object(self, heads: Heads) -> bool:
        """Parse the name, or the arguments before it."""
        usual = heads.name_first.match(self._held, partial=True)
        match = usual
        if usual is None and self._nameless < _MOST_NAMELESS:
            match = heads.arguments_first.match(self._held, partial=True)
        if match is None or match.end() > LONGEST_HEAD:
            return self._no_call()
        if match.partial:
            return False
        if usual:
            self._begin(json.loads(usual["name"]))
            return self._go(usual.end(), self._arguments)
        self._value = JsonObject()
        self._tentative += self._held[: match.end()]
        #: where the arguments begin in ``_tentative``
        self._from = len(self._tentative)
        return self._go(match.end(), self._early_arguments)

    def _early_arguments(self) -> bool:
        """Parse arguments of a call whose name is not known yet."""
        end = self._value.end(self._held)
        upto = len(self._held) if end is None else end
        self._tentative += self._held[:upto]
        self._go(upto, self._early_arguments if end is None else self._late_name)
        if len(self._tentative) - self._from > LONGEST_EARLY:
            return self._no_call()
        return end is not None

    def _no_call(self) -> bool:
        self._nameless += self._state in (self._early_arguments, self._late_name)
        return super()._no_call()

    def _late_name(self) -> bool:
        match = self._matched(self.name_last)
        if match is None:
            return self._no_call()
        if match.partial:
            return False
        arguments = self._tentative[self._from :]
        self._begin(json.loads(match["name"]))
        self._pass_on(arguments)
        return self._go(match.end(), self._after)
