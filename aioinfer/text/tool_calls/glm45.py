"""The format of GLM 4.5 and later."""

from __future__ import annotations

from typing import ClassVar

from aioinfer.text.tool_calls.tagged import Frame, TaggedCalls

__all__ = ["Glm45"]


class Glm45(TaggedCalls):
    r"""``<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n...</tool_call>``.

    GLM 4.5 and 4.6, Ling 3; GLM 4.7, Laguna and Spark 2.5 have no line breaks.
    """

    name: ClassVar[str] = "glm45"
    opening = "<tool_call>"
    closing = "</tool_call>"
    separator: ClassVar[str | None] = "\n"
    frame = Frame(
        function=("", "\n"),
        key=("<arg_key>", "</arg_key>\n<arg_value>"),
        value_end="</arg_value>\n",
        function_end="",
        breaks_optional=True,
    )

    @staticmethod
    def in_template(template: str) -> bool:
        return all(tag in template for tag in (Glm45.opening, "<arg_key>", "<arg_value>"))
