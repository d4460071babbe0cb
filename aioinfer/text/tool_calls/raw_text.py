"""The form of strings that are written as raw text up to a tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioinfer.text.tool_calls.raw_values import count_of

if TYPE_CHECKING:
    from aioinfer.text.rules import Rules

__all__ = ["raw_text"]

_ANY = "(.|\\n)"
_SLASH = re.compile(r"(\\.)|/|\n", re.DOTALL)
_SPECIAL = re.compile(r"[^\w<>\"\s]")


def raw_text(schema: Mapping[str, Any], closing: str, end: str, rules: Rules) -> str:
    """A terminal for strings with the lengths and the pattern of a schema, and for the text ``end`` behind.

    ``closing``: the tag that ends them, which they do not contain.
    """
    least, most = count_of(schema, "minLength") or 0, count_of(schema, "maxLength")
    limited = least or most is not None
    text = f"/{_ANY}{{{least},{'' if most is None else most}}}/" if limited else "TEXT"
    if isinstance(pattern := schema.get("pattern"), str):
        text += f" & {_regex(pattern)}"
    closed = _SPECIAL.sub(lambda found: f"\\{found[0]}", closing)
    return rules.shared("RAW", f"({text} & ~/{_ANY}*{closed}{_ANY}*/) {rules.text(end) if end else ''}")


def _regex(pattern: str) -> str:
    """Texts in which a pattern is found, as a terminal. Its anchors are those of the text."""
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begin : len(pattern) - end]
    inner = _SLASH.sub(lambda found: found[1] or {"/": "\\/", "\n": "\\n"}[found[0]], inner)
    return f"/{'' if begin else f'{_ANY}*'}({inner}){'' if end else f'{_ANY}*'}/"
