"""Python's literals as JSON: names, numbers and the escapes of strings."""

from __future__ import annotations

import ast
import json
import re

from aioinfer.text.tool_calls.raw_values import quoted

__all__ = ["literal", "unescaped"]

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ZEROS = re.compile(r"^([-+]?)0+(?=[0-9]+$)")
_NAMES = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
}
_HEX = {"x": 2, "u": 4, "U": 8}
_DIGITS = {8: "01234567", 16: "0123456789abcdefABCDEF"}


def literal(text: str) -> str:
    """The JSON of what is neither in quotation marks nor in brackets: a string if it is no literal."""
    if (name := _NAMES.get(text, text)) in ("true", "false", "null"):
        return name
    if _NUMBER.fullmatch(text):
        return text
    try:
        # Python refuses leading zeros.
        value = ast.literal_eval(_ZEROS.sub(r"\1", text))
        if type(value) in (int, float):
            return json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    return f'"{quoted(text)}"'


def unescaped(text: str) -> tuple[str, int] | None:
    """The part of a JSON string for the escape with which ``text`` begins, and its length; None if more of
    the text is needed to tell. A backslash that begins no escape stands for itself."""
    kind = text[1:2]
    if not kind:
        return None
    if kind in _ESCAPES:
        return quoted(_ESCAPES[kind]), 2
    if kind in _HEX:
        digits, base, most = text[2 : 2 + _HEX[kind]], 16, _HEX[kind]
    else:
        digits, base, most = text[1:4], 8, 3
    given = len(digits)
    digits = digits[: next((at for at, each in enumerate(digits) if each not in _DIGITS[base]), given)]
    if len(digits) == given < most:
        return None
    if (base == 16 and len(digits) < most) or not digits:
        return f"\\\\{quoted(kind)}", 2
    code, length = int(digits, base), len(digits) + (2 if base == 16 else 1)
    if code > 0x10FFFF:
        return f"\\\\{kind}", 2
    # Halves of a character beyond 16 bits are escapes in JSON, too.
    return (f"\\u{code:04x}" if code <= 0xFFFF else chr(code)), length
