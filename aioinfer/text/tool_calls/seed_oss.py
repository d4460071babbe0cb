"""The format of Seed-OSS."""

from __future__ import annotations

from typing import ClassVar

from aioinfer.text.tool_calls.tagged import Frame, TaggedCalls

__all__ = ["SeedOss"]


class SeedOss(TaggedCalls):
    r"""``<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n...</function>\n</seed:tool_call>``.

    That of Qwen3-Coder with other tags, and without line breaks around values.
    """

    name: ClassVar[str] = "seed-oss"
    opening = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    separator: ClassVar[str | None] = "\n"
    frame = Frame(
        function=("\n<function=", ">\n"),
        key=("<parameter=", ">"),
        value_end="</parameter>\n",
        function_end="</function>\n",
    )

    @staticmethod
    def in_template(template: str) -> bool:
        return all(tag in template for tag in (SeedOss.opening, "<function=", "<parameter="))
