"""Calls after a tag that is a special token: the two formats of Mistral's models."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tool_calls.base import LONGEST_HEAD, Functions
from aioinfer.text.tool_calls.json_calls import Heads, JsonCalls, pattern

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Mistral", "MistralV11"]

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
#: the head of arguments that are not within an object; some templates of v11 have no tag there
_BARE = regex.compile(r"\s*+(?P<name>[\w.-]++)(?:\[CALL_ID\][A-Za-z0-9]*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
_GIVEN_ID = r'(?:,\s*+"id"\s*+:\s*+"[A-Za-z0-9_-]*+"\s*+)?+'
_ID_FIRST = r'(?:"id"\s*+:\s*+"[A-Za-z0-9_-]*+"\s*+,\s*+)?+'
_LIST_END = regex.compile(r"\s*+\]")


class Mistral(JsonCalls):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral's tokenizers v3 to v7.

    Reads the format of later tokenizers as well. The ids of calls have nine characters, as the templates
    demand of the ids in a conversation; one that the model writes is not used.
    """

    name: ClassVar[str] = "mistral"
    opening = _CALLS
    tags: ClassVar[tuple[str, ...]] = (_CALLS, _ID, _ARGS)
    heads = Heads.of(r"\s*+\[", first=_ID_FIRST)
    further_heads = Heads.of(r"\s*+,", first=_ID_FIRST)
    name_last = pattern(rf"\s*+,\s*+NAME{_GIVEN_ID}\}}")
    end = pattern(rf"\s*+{_GIVEN_ID}\}}")

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        #: the newest call is not within a list
        self._bare = False

    @staticmethod
    def in_template(template: str) -> bool:
        return _CALLS in template and _ARGS not in template

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = rules.text(f'{{"name": {json.dumps(function)}, "arguments": ')
        return f"{before} {rules.json(schema)} {rules.text('}')}"

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        # The tokenizers with SentencePiece write a space after the tag.
        others = f' ("," " "? {call}){{0,{most - 1}}}' if most > 1 else ""
        return f'" "? "[" {call}{others} "]"'

    @property
    def _undecided(self) -> bool:
        # The comma after a call belongs to it if there is no other.
        further = self._state == self._further and self._held.strip() not in ("", ",")
        return super()._undecided or further

    def _head(self) -> bool:
        match = _BARE.match(self._held, partial=True)
        self._bare = match is not None and match.end() <= LONGEST_HEAD
        if match is None or not self._bare:
            return super()._head()
        if match.partial:
            return False
        self._begin(match["name"])
        return self._go(match.end(), self._arguments)

    def _tail(self) -> bool:
        return self._go(0, self._gap) if self._bare else super()._tail()

    def _after(self) -> bool:
        return self._go(0, self._further)

    def _further(self) -> bool:
        """Parse what follows an object of the list."""
        match = _LIST_END.match(self._held)
        if match is None or match.end() > LONGEST_HEAD:
            return self._object(self.further_heads)
        return self._go(match.end(), self._gap)

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

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        given_id = f"({rules.tag(_ID)} /[a-zA-Z0-9]{{9}}/)?"
        return f"{rules.text(function)} {given_id} {rules.tag(_ARGS)} {rules.json(schema)}"

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        return call
