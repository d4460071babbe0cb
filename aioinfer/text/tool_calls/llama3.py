"""Answers that are calls as JSON, without tags: the format of Llama 3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tool_calls.base import Functions
from aioinfer.text.tool_calls.json_calls import Heads, JsonCalls, pattern

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Llama3"]

_PYTHON_TAG = "<|python_tag|>"
_BEGIN = r"\s*+(?:<\|python_tag\|>\s*+)?+"
#: models write "arguments", too, and the type in front
_KEY, _TYPE = "parameters|arguments", r'(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+'
#: As the templates tell the model, and write calls themselves; tools have a description between the keys.
_WRITTEN = regex.compile(r'\{"name": (?:(?!"description").){0,120}?"parameters": ', regex.DOTALL)
#: the tags of other formats whose templates can have this text
_OTHERS = ("<tool_call>", "[TOOL_CALLS]")


class Llama3(JsonCalls):
    """``{"name": ..., "parameters": {...}}`` as the whole answer: Llama 3.1, 3.2 and 3.3.

    The beginning of the answer decides: what does not begin with a call is content to its end. A call may
    have ``<|python_tag|>`` before it, and further calls after it, separated by semicolons or white space.
    """

    name: ClassVar[str] = "llama3"
    beginning = r'\s*(<\|python_tag\|>\s*)?\{\s*"(name|type|parameters|arguments)"'
    tags: ClassVar[tuple[str, ...]] = (_PYTHON_TAG,)
    heads = Heads.of(_BEGIN, _KEY, _TYPE)
    further_heads = Heads.of(rf"\s*+;?+{_BEGIN}", _KEY, _TYPE)
    name_last = pattern(r"\s*+,\s*+NAME\}")
    end = pattern(r"\s*+\}")

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._state = self._head

    @staticmethod
    def in_template(template: str) -> bool:
        return _WRITTEN.search(template) is not None and not any(tag in template for tag in _OTHERS)

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = rules.text(f'{{"name": {json.dumps(function)}, "parameters": ')
        return f"{before} {rules.json(schema)} {rules.text('}')}"

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        return f'{call} ("; " {call}){{0,{most - 1}}}' if most > 1 else call

    @property
    def _undecided(self) -> bool:
        # The text between calls belongs to the earlier one if no other follows.
        further = self._state == self._further and self._held.replace(";", "").strip() != ""
        return super()._undecided or further

    def _text(self) -> bool:
        self._out.content += self._held
        self._held = ""
        return False

    def _after(self) -> bool:
        return self._go(0, self._further)

    def _further(self) -> bool:
        """Parse what follows a call."""
        return self._object(self.further_heads)
