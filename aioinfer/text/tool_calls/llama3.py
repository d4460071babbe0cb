"""Calls as JSON without tags: the format of Llama 3."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import regex

from aioinfer.text.tags import without_breaks
from aioinfer.text.tool_calls.base import Functions
from aioinfer.text.tool_calls.json_calls import KEYS, JsonCalls

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Llama3"]

_PYTHON_TAG = "<|python_tag|>"
_BEGINS = regex.compile(r"<\|python_tag\|>|(?:```\w{0,16}+\s{0,16}+)?+(?P<list>\[\s{0,16}+)?+(?P<object>\{)")
#: As the templates tell the model, and write calls themselves; tools have a description between the keys.
_WRITTEN = regex.compile(r'\{"name": (?:(?!"description").){0,120}?"parameters": ', regex.DOTALL)
#: the tags of other formats whose templates can have this text
_OTHERS = ("<tool_call>", "[TOOL_CALLS]")


class Llama3(JsonCalls):
    """``{"name": ..., "parameters": {...}}``: Llama 3.1, 3.2 and 3.3.

    At the beginning of an answer and behind ``<|python_tag|>``, objects with a name and arguments are calls,
    between semicolons, commas or white space, or in a list. Behind other text an object is a call if it is
    valid JSON and names one of the functions; one without arguments is if it names one of them.
    """

    name: ClassVar[str] = "llama3"
    also = (_PYTHON_TAG,)
    separator: ClassVar[str | None] = "; "
    tags: ClassVar[tuple[str, ...]] = (_PYTHON_TAG,)
    strict = True
    key = "parameters"

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._state = self._head

    @staticmethod
    def in_template(template: str) -> bool:
        return _WRITTEN.search(template) is not None and not any(tag in template for tag in _OTHERS)

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        return f'{call} ("; " {call}){{0,{most - 1}}}' if most > 1 else call

    @staticmethod
    def called(functions: Iterable[str]) -> str:
        first = rf'\s*(<\|python_tag\|>\s*)?(\[\s*)?\{{\s*"({"|".join(KEYS)})"'
        names = "|".join(map(regex.escape, functions))
        return rf'({first}|(.|\n)*(<\|python_tag\|>|"(name|function)"\s*:\s*"({names})"))'

    def _text(self) -> bool:
        match = _BEGINS.search(self._held, partial=True)
        content = without_breaks(self._held[: match.start() if match else None])
        self._out.content += content
        if match is None or match.partial:
            self._held = self._held[len(content) :]
            return False
        self._tentative = self._held[len(content) : match.end()]
        self._tag = len(self._tentative)
        self._open()
        self._listed = match["list"] is not None
        self._sure = match["object"] is None
        return self._go(match.end(), self._head if self._sure else self._member)

    def _keep(self, value: str) -> bool:
        super()._keep(value)
        known = self._sure or self._name is None or self._name in self._functions
        return known or self._no_call()

    def _written(self) -> str | None:
        arguments = super()._written()
        if arguments is None or (self._given is None and self._name not in self._functions):
            return None
        if not self._sure:
            try:
                json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        return arguments
