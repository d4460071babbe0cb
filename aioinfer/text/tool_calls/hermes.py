"""Calls as JSON between tags: the format of the Hermes and Qwen models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from aioinfer.text.tool_calls.json_calls import JsonCalls

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Hermes"]


class Hermes(JsonCalls):
    r"""``<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>``: Hermes, Qwen 2.5, Qwen 3, Granite 4,
    SmolLM3.

    An output that ends inside the closing tag completes the call.
    """

    name: ClassVar[str] = "hermes"
    opening = "<tool_call>"
    closing = "</tool_call>"
    separator: ClassVar[str | None] = "\n"
    tags: ClassVar[tuple[str, ...]] = (opening, closing)
    before = "\n"
    after = "\n"

    @staticmethod
    def in_template(template: str) -> bool:
        # Others have something else than JSON between the same tags, or these tags in the prompt only.
        text = template.replace('\\"', '"')
        json_ = all(f'"{key}"' in text for key in ("name", "arguments"))
        return json_ and Hermes.opening in text and not any(tag in text for tag in _OTHERS)

    @classmethod
    def write(cls, function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        return f"{super().write(function, schema, rules)} {rules.tag(cls.closing)}"


_OTHERS = ("<function=", "<tool_calls>")
