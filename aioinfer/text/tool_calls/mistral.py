"""Calls after a tag that is a special token: the two formats of Mistral's models."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tool_calls.json_calls import JsonLists

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Mistral", "MistralV11"]

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
#: the head of arguments that are not within an object; some templates of v11 have no tag there
_BARE = regex.compile(
    r"\s*+(?:\[TOOL_CALLS\]\s*+){0,3}+(?P<name>[\w.-]++)\s*+"
    r"(?:\[CALL_ID\][A-Za-z0-9]*+\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{)"
)


class Mistral(JsonLists):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral's tokenizers v3 to v7.

    Reads the format of later tokenizers as well. The ids of calls have nine characters, as the templates
    demand of the ids in a conversation; one that the model writes is not used.
    """

    name: ClassVar[str] = "mistral"
    opening = _CALLS
    tags: ClassVar[tuple[str, ...]] = (_CALLS, _ID, _ARGS)

    @staticmethod
    def in_template(template: str) -> bool:
        return _CALLS in template and _ARGS not in template

    def _head(self) -> bool:
        match = self._matched(_BARE)
        if match is None:
            return super()._head()
        if match.partial:
            return False
        self._open()
        self._begin(match["name"])
        self._begun, self._depth = True, 0
        return self._go(match.end(), self._arguments)

    def _tail(self) -> bool:
        return super()._tail() if self._depth else self._close()

    def _new_id(self) -> str:
        return uuid.uuid4().hex[:9]


class MistralV11(Mistral):
    """``[TOOL_CALLS]name[ARGS]{...}`` for each call: Mistral's tokenizers from v11 on.

    Those of v11 write ``[CALL_ID]`` and an id after the name. Reads the lists of earlier tokenizers as well.
    """

    name: ClassVar[str] = "mistral-v11"
    separator: ClassVar[str | None] = ""

    @staticmethod
    def in_template(template: str) -> bool:
        return _CALLS in template and _ARGS in template

    @classmethod
    def write(cls, function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        given_id = f"({rules.tag(_ID)} /[a-zA-Z0-9]{{9}}/)?"
        return f"{rules.text(function)} {given_id} {rules.tag(_ARGS)} {rules.json(schema)}"

    @classmethod
    def told(cls, calls: Sequence[tuple[str, str]]) -> str | None:
        return "".join(f"{_CALLS}{name}{_ARGS}{given}" for name, given in calls)

    @classmethod
    def group(cls, call: str, most: int, rules: Rules) -> str:
        return call
