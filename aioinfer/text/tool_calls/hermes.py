"""Calls as JSON between tags: the format of the Hermes and Qwen models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from aioinfer.text.tool_calls.json_calls import Heads, JsonCalls, pattern

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["Hermes"]

_CLOSING = "</tool_call>"
_AFTER = "}\n"


class Hermes(JsonCalls):
    r"""``<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>``: Hermes, Qwen 2.5, Qwen 3.

    Line breaks around a call belong to it. An output that ends inside the closing tag completes the call.
    The first Hermes models write the arguments before the name.
    """

    name: ClassVar[str] = "hermes"
    opening = "<tool_call>"
    separator: ClassVar[str | None] = "\n"
    tags: ClassVar[tuple[str, ...]] = (opening, _CLOSING)
    heads = Heads.of("")
    name_last = pattern(rf"\s*+,\s*+NAME\}}\s*+{_CLOSING}")
    #: the brace is optional: models omit it
    end = pattern(rf"\s*+(?:\}}\s*+)?{_CLOSING}")

    @staticmethod
    def in_template(template: str) -> bool:
        # Others have something else than JSON between the same tags.
        json_ = all(f'"{key}"' in template for key in ("name", "arguments"))
        return json_ and Hermes.opening in template and "<function=" not in template

    @staticmethod
    def write(function: str, schema: Mapping[str, Any], rules: Rules) -> str:
        before = rules.text(f'\n{{"name": {json.dumps(function)}, "arguments": ')
        return f"{before} {rules.json(schema)} {rules.text(_AFTER)} {rules.tag(_CLOSING)}"
