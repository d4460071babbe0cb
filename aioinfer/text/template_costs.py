"""Steps that an operator, filter or method in a chat template takes, by the size of what it makes.

They are known before it is made: ``2 ** (2 ** 32)`` or ``"x" | center(10 ** 9)`` would take all memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["CHARACTERS", "made"]

#: characters, bytes or elements that take one step to make
CHARACTERS = 500
#: widths in format strings
_WIDTH = re.compile(r"[%:.][^%:.{}a-zA-Z]{0,8}?(\d{4,})")
_NESTED = re.compile(r"%[^a-zA-Z]*\*|\{[^{}]*\{")
#: filters and methods that fill up to a width or a number
_FILLING = frozenset({"batch", "center", "ljust", "rjust", "round", "slice", "wordwrap", "zfill"})
#: those that do so in each of many places
_INDENTING = frozenset({"expandtabs", "indent"})
#: characters of an indentation in JSON, of which every line of a long text can have many
_MOST_INDENT = 16
_REFUSED = 1 << 62


def made(name: str, value: Any, arguments: Sequence[Any]) -> int:
    """Steps for ``value`` and what the operator, filter or method ``name`` makes of it, at most."""
    sizes = [_number(each) for each in arguments]
    largest, size = max(sizes, default=0), _number(value)
    match name:
        case "*" if isinstance(value, int) and isinstance(arguments[0], int):
            count = value.bit_length() * arguments[0].bit_length() // 64
        case "*":
            count = size * largest
        case "**":
            exponent = arguments[0]
            whole = isinstance(value, int) and isinstance(exponent, int) and exponent > 0
            count = (value.bit_length() * exponent) ** 2 // 64 if whole else 0
        case "%" | "format" | "format_map" if isinstance(value, str):
            count = sum(int(width[:18]) for width in _WIDTH.findall(value))
            if _NESTED.search(value):
                inner = [_number(each) for one in arguments if isinstance(one, tuple) for each in one]
                count += sum(inner) + sum(sizes)
        case "join":
            count = size * largest if isinstance(value, (str, list, tuple, dict)) else largest
        case "replace" if len(arguments) > 1:
            count = (size // max(1, sizes[0]) + 1) * sizes[1]
        case "sum":
            # Lists would be copied for each of them.
            count = _REFUSED if any(isinstance(each, (list, tuple)) for each in arguments) else 0
        case "tojson":
            indents = [each for each in arguments if not isinstance(each, tuple)]
            count = _REFUSED if any(_number(each) > _MOST_INDENT for each in indents) else 0
        case _ if name in _INDENTING:
            count = (size + 1) * largest
        case _ if name in _FILLING:
            count = largest
        case _:
            count = 0
    return count // CHARACTERS


def _number(value: Any) -> int:
    """A length, or a number itself."""
    if isinstance(value, (int, float)):
        return abs(int(value)) if -1e18 < value < 1e18 else _REFUSED
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 1
