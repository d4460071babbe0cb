"""The formats of DeepSeek V3.2 and V4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from aioinfer.text.tool_calls.tagged import Frame, TaggedCalls
from aioinfer.text.tool_calls.tagged_form import call_form

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["DeepSeekV4", "DeepSeekV32"]

_MARK = "｜DSML｜"


class DeepSeekV32(TaggedCalls):
    r"""``<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="KEY" string="true">VALUE
    </｜DSML｜parameter>\n...</｜DSML｜invoke>\n``, the calls of an answer between
    ``<｜DSML｜function_calls>`` and its closing tag.

    ``string`` says whether a value is a string or JSON; where models omit it, the function's schema does.
    """

    name: ClassVar[str] = "deepseek-v32"
    opening = f"<{_MARK}function_calls>"
    closing = f"</{_MARK}function_calls>"
    frame = Frame(
        function=(f'<{_MARK}invoke name="', '">\n'),
        key=(f'<{_MARK}parameter name="', '">'),
        value_end=f"</{_MARK}parameter>\n",
        function_end=f"</{_MARK}invoke>\n",
        attribute="string",
        mark=_MARK,
    )

    @staticmethod
    def in_template(template: str) -> bool:
        return _MARK in template and "function_calls>" in template

    @classmethod
    def write(cls, function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        return call_form(function, schema, cls.frame, rules)

    @classmethod
    def group(cls, call: str, most: int, rules: Rules) -> str:
        return f"{rules.text(chr(10))} {call}{{1,{most}}} {rules.tag(cls.closing)}"


class DeepSeekV4(DeepSeekV32):
    """The same between ``<｜DSML｜tool_calls>`` and ``</｜DSML｜tool_calls>``."""

    name: ClassVar[str] = "deepseek-v4"
    opening = f"<{_MARK}tool_calls>"
    closing = f"</{_MARK}tool_calls>"

    @staticmethod
    def in_template(template: str) -> bool:
        return _MARK in template and "function_calls>" not in template
