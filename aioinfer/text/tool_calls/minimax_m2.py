"""The format of MiniMax M2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from aioinfer.text.tool_calls.tagged import Frame, TaggedCalls
from aioinfer.text.tool_calls.tagged_form import call_form

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["MinimaxM2"]


class MinimaxM2(TaggedCalls):
    r"""``<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n...</invoke>\n
    ...</minimax:tool_call>``: the calls of an answer are between the same two tags."""

    name: ClassVar[str] = "minimax-m2"
    opening = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"
    frame = Frame(
        function=('<invoke name="', '">\n'),
        key=('<parameter name="', '">'),
        value_end="</parameter>\n",
        function_end="</invoke>\n",
    )

    @staticmethod
    def in_template(template: str) -> bool:
        return MinimaxM2.opening in template and '<invoke name="' in template

    @classmethod
    def write(cls, function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        return call_form(function, schema, cls.frame, rules)

    @staticmethod
    def group(call: str, most: int, rules: Rules) -> str:
        return f"{rules.text(chr(10))} {call}{{1,{most}}} {rules.tag(MinimaxM2.closing)}"
