"""Base64 as images come in it: strict, and in slices."""

from __future__ import annotations

import binascii
import re
import time

from aioinfer.errors import InvalidRequest, shown

__all__ = ["decoded_base64"]

#: Characters that are decoded at once, which takes one or two milliseconds of the interpreter's lock; whole
#: groups of four.
_SLICE = 1 << 20
_OTHER = re.compile("[^A-Za-z0-9+/]")
_NAMES = {"=": "padding", "-": "the alphabet of URLs (-)", "_": "the alphabet of URLs (_)", "%": "an escape"}


def decoded_base64(text: str, field: str) -> bytes:
    """The bytes of a text in base64 (RFC 4648, section 4). Slice by slice: other threads run meanwhile.
    Raises InvalidRequest of ``field``, which says what is wrong and where."""
    if len(text) % 4 or text.endswith("==="):  # which the decoder takes behind what is complete
        raise _malformed(text[-_SLICE:], max(0, len(text) - _SLICE), True, field)
    pieces = []
    for at in range(0, len(text), _SLICE):
        part = text[at : at + _SLICE]
        last = at + _SLICE >= len(text)
        try:
            piece = binascii.a2b_base64(part, strict_mode=True)
        except ValueError:  # also of text that is not ASCII
            raise _malformed(part, at, last, field) from None
        if not last and len(piece) != _SLICE // 4 * 3:
            raise _malformed(part, at, last, field)
        pieces.append(piece)
        if not last:
            time.sleep(0)  # lets go of the interpreter's lock, before another thread has to ask for it
    return b"".join(pieces)


def _malformed(part: str, at: int, last: bool, field: str) -> InvalidRequest:
    """What is wrong with a part of a text, which begins ``at`` this character."""
    other = _OTHER.search(part.rstrip("=") if last else part)
    if other is None:
        what = (
            f"its {at + len(part)} characters are no whole groups of four: it is cut off, or padded wrongly"
        )
        return InvalidRequest(field, f"is not base64: {what}")
    found, where = other[0], f"at character {at + other.start()}"
    what = "white space" if found.isspace() else _NAMES.get(found, shown(found))
    return InvalidRequest(field, f"is not base64: {what} {where}")
