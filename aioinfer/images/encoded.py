"""Images as text in base64: data URIs, and the fields of request bodies that hold one."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from aioinfer.errors import InvalidRequest, shown
from aioinfer.images.source import ImageSource

__all__ = ["MEDIA_TYPES", "data_uri", "from_base64", "from_data_uri", "from_file", "media_type"]

#: what requests may send
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
#: no registered type, and written by many clients
_ALSO = {"image/jpg": "image/jpeg"}
_HEAD = re.compile(r"data:(?P<type>[^,;]*)(?P<parameters>(?:;[^,;]*)*),", re.IGNORECASE)
#: characters of a data URI in which its comma is
_LONGEST_HEAD = 256
#: how the files begin
_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"RIFF.{4}WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
)
#: Characters that are decoded at once, which takes one or two milliseconds of the interpreter's lock; whole
#: groups of four.
_SLICE = 1 << 20
_MIB = 1 << 20
_OTHER = re.compile("[^A-Za-z0-9+/]")


def from_data_uri(uri: str, field: str, most: int | None = None) -> ImageSource:
    """The image of a data URI (RFC 2397) in base64, of ``most`` bytes. Raises InvalidRequest of ``field``."""
    head = _HEAD.match(uri, 0, _LONGEST_HEAD)
    if head is None:
        raise InvalidRequest(field, f"is no data URI, data:image/png;base64,... for example: {shown(uri)}")
    if head["parameters"].lower() != ";base64":
        raise InvalidRequest(field, f"must be in base64, data:{head['type']};base64,..., got {shown(uri)}")
    return from_base64(uri[head.end() :], head["type"], field, most)


def from_base64(text: str, stated: str, field: str, most: int | None = None) -> ImageSource:
    """The image of a text in base64 (RFC 4648, section 4) that is ``stated`` to be of a media type.

    Raises InvalidRequest of ``field``: of another type, of more than ``most`` bytes, malformed.
    """
    kind = stated.lower()
    kind = _ALSO.get(kind, kind)
    if kind not in MEDIA_TYPES:
        raise InvalidRequest(field, f"must be of type {', '.join(MEDIA_TYPES)}, got {shown(stated)}")
    size = len(text) // 4 * 3
    if most is not None and size - 2 > most:
        raise _too_large(field, most)
    return from_file(_decoded(text, field), field, kind, most)


def from_file(data: bytes, field: str, stated: str | None = None, most: int | None = None) -> ImageSource:
    """The image of a file. Raises InvalidRequest of ``field``: it is empty, of no type that requests may send
    or not of the ``stated`` one, or has more than ``most`` bytes."""
    if not data:
        raise InvalidRequest(field, "is an empty image")
    if most is not None and len(data) > most:
        raise _too_large(field, most)
    found = media_type(data)
    if found is None:
        raise InvalidRequest(field, f"is no image of type {', '.join(MEDIA_TYPES)}")
    if stated is not None and stated != found:
        raise InvalidRequest(field, f"is stated to be {stated}, and begins as {found}")
    return ImageSource(data)


def data_uri(path: Path) -> str:
    """A file of an image as a data URI. Raises InvalidRequest of "image", and OSError."""
    data = path.read_bytes()
    kind = media_type(from_file(data, "image").data)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def media_type(data: bytes) -> str | None:
    """The one of ``MEDIA_TYPES`` as which a file begins; None: of no such type."""
    return next((kind for signature, kind in _SIGNATURES if signature.match(data)), None)


def _too_large(field: str, most: int) -> InvalidRequest:
    return InvalidRequest(field, f"is an image of more than {most / _MIB:g} MiB (max_image_mib)")


def _decoded(text: str, field: str) -> bytes:
    """The bytes of a text in base64. Slice by slice: other threads run meanwhile."""
    pieces = []
    if len(text) % 4 or text.endswith("==="):  # which the decoder takes behind what is complete
        raise _malformed(text[-_SLICE:], max(0, len(text) - _SLICE), True, field)
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
    return b"".join(pieces)


def _malformed(part: str, at: int, last: bool, field: str) -> InvalidRequest:
    """What is wrong with a part of a text, which begins ``at`` this character."""
    body = part.rstrip("=") if last else part
    other = _OTHER.search(body)
    if other is None:
        what = (
            f"its {at + len(part)} characters are no whole groups of four: it is cut off, or padded wrongly"
        )
        return InvalidRequest(field, f"is not base64: {what}")
    found, where = other[0], f"at character {at + other.start()}"
    names = {
        "=": "padding",
        "-": "the alphabet of URLs (-)",
        "_": "the alphabet of URLs (_)",
        "%": "an escape",
    }
    what = "white space" if found.isspace() else names.get(found, shown(found))
    return InvalidRequest(field, f"is not base64: {what} {where}")
