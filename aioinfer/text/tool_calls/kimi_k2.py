"""Calls in a section, each with its id: the format of Kimi K2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tool_calls.base import Functions
from aioinfer.text.tool_calls.named_calls import NamedCalls

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["KimiK2"]

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ENDS = f"(?:{regex.escape(_CALL_END)}|{regex.escape(_SECTION_END)})"


class KimiK2(NamedCalls):
    """``<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>``, between
    ``<|tool_calls_section_begin|>`` and ``<|tool_calls_section_end|>``.

    What precedes the arguments is the call's id, by which the template names its result: it is kept. The
    indices go on through a conversation.
    """

    name: ClassVar[str] = "kimi-k2"
    opening = _SECTION
    tags: ClassVar[tuple[str, ...]] = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)
    begins = regex.compile(f"{regex.escape(_SECTION)}|{regex.escape(_CALL)}|(?P<end>{_ENDS})")
    head = regex.compile(
        rf"\s*+(?:{regex.escape(_CALL)}\s*+)?+(?:functions\.)?+(?P<name>[^\s<{{\"]++)"
        rf"\s*+(?:{regex.escape(_ARGUMENTS)}\s*+)?+(?:(?P<none>(?:null\s*+)?+(?={_ENDS}))|(?=\{{))"
    )
    end = regex.compile(rf"\s*+{_ENDS}")

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._ids: set[str] = set()
        #: the index of a call without one of its own
        self._next = 0

    @property
    def openings(self) -> tuple[str, ...]:
        return _SECTION, _CALL

    @staticmethod
    def in_template(template: str) -> bool:
        return _ARGUMENTS in template

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = f"{rules.tag(_CALL)} {rules.text(f'functions.{function}:')} /[0-9]{{1,4}}/"
        return f"{before} {rules.tag(_ARGUMENTS)} {rules.json(schema)} {rules.tag(_CALL_END)}"

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        return f"{call}{{1,{most}}} {rules.tag(_SECTION_END)}"

    def _begin_call(self, head: regex.Match[str]) -> None:
        name, _, digits = head["name"].rpartition(":")
        if not name or not (digits.isdecimal() and digits.isascii() and len(digits) < 10):
            name, digits = head["name"], ""
        index = int(digits) if digits else self._next
        if f"functions.{name}:{index}" in self._ids:
            index = self._next
        self._next = max(self._next, index + 1)
        self._id = f"functions.{name}:{index}"
        self._ids.add(self._id)
        self._begin(name)

    def _new_id(self) -> str:
        return self._id
