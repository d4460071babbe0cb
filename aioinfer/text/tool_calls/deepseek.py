"""Calls between DeepSeek's tags: the formats of V3, R1-0528 and V3.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import regex

from aioinfer.text.tool_calls.named_calls import NamedCalls

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["DeepSeekV3", "DeepSeekV31"]

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"


def _spelled(tag: str) -> str:
    """An expression for a tag. Distilled models spell tags with other bars and spaces."""
    return regex.escape(tag).replace("｜", "[|｜]").replace("▁", r"(?:▁|_|\\_|\ )")


_ENDS = f"(?:{_spelled(_CALL_END)}|{_spelled(_SECTION_END)})"


class DeepSeekV3(NamedCalls):
    r"""``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>``, between
    ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``: DeepSeek V3 and R1-0528.

    Reads V3.1's format as well: ``NAME<｜tool▁sep｜>{...}``, without a code fence.
    """

    name: ClassVar[str] = "deepseek-v3"
    opening = _SECTION
    tags: ClassVar[tuple[str, ...]] = (_SECTION, _SECTION_END, _CALL, _CALL_END, _SEPARATOR)
    begins = regex.compile(rf"{_spelled(_SECTION)}|{_spelled(_CALL)}|(?P<end>{_ENDS})")
    head = regex.compile(
        rf"\s*+(?:{_spelled(_CALL)}\s*+)?+(?:function\s*+{_spelled(_SEPARATOR)}\s*+)?"
        rf"(?P<name>[^\s<`{{\"]++)\s*+(?:{_spelled(_SEPARATOR)}\s*+)?+(?:```\w*+\s*+)?+"
        rf"(?:(?P<none>(?:null\s*+)?+(?=(?:```\s*+)?+{_ENDS}))|(?=\{{))"
    )
    end = regex.compile(rf"\s*+(?:(?:```\s*+)?+{_ENDS}|```\s*+(?={_spelled(_CALL)}))")

    @property
    def openings(self) -> tuple[str, ...]:
        return _SECTION, _CALL

    @staticmethod
    def in_template(template: str) -> bool:
        return _CALL in template and "```" in template

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = f'{rules.tag(_CALL)} "function" {rules.tag(_SEPARATOR)}'
        fenced = f"{rules.text(function + _FENCE)} {rules.json(schema)} {rules.text(_FENCE_END)}"
        return f"{before} {fenced} {rules.tag(_CALL_END)}"

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        more = f'("\\n" {call}){{0,{most - 1}}}' if most > 1 else ""
        return f"{call} {more} {rules.tag(_SECTION_END)}"


class DeepSeekV31(DeepSeekV3):
    """``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` in the same section: DeepSeek V3.1.

    Reads V3's format as well.
    """

    name: ClassVar[str] = "deepseek-v31"

    @staticmethod
    def in_template(template: str) -> bool:
        return _CALL in template and "```" not in template

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = f"{rules.tag(_CALL)} {rules.text(function)} {rules.tag(_SEPARATOR)}"
        return f"{before} {rules.json(schema)} {rules.tag(_CALL_END)}"

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        return f"{call}{{1,{most}}} {rules.tag(_SECTION_END)}"
