"""The format of Qwen3-Coder, Qwen 3.5 and Nemotron 3."""

from __future__ import annotations

from typing import ClassVar

from aioinfer.text.tool_calls.tagged import Frame, TaggedCalls

__all__ = ["Qwen3Coder"]


class Qwen3Coder(TaggedCalls):
    r"""``<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n...</function>\n</tool_call>``.

    Qwen3-Coder, Qwen 3.5, Nemotron 3 and Step 3.5. Models omit ``<tool_call>``.
    """

    name: ClassVar[str] = "qwen3-coder"
    opening = "<tool_call>"
    closing = "</tool_call>"
    separator: ClassVar[str | None] = "\n"
    frame = Frame(
        function=("\n<function=", ">\n"),
        key=("<parameter=", ">\n"),
        value_end="\n</parameter>\n",
        function_end="</function>\n",
    )

    @staticmethod
    def in_template(template: str) -> bool:
        return all(tag in template for tag in (Qwen3Coder.opening, "<function=", "<parameter="))
