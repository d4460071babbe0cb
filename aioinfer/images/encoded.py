"""Images as text in base64: data URIs, and the fields of request bodies that hold one."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from aioinfer.checkpoint.regular import read_regular
from aioinfer.errors import InvalidRequest, shown
from aioinfer.images.base64 import decoded_base64
from aioinfer.images.limits import DEFAULT_LIMITS, ImageLimits

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


def from_data_uri(uri: str, field: str, limits: ImageLimits) -> bytes:
    """The file in a data URI (RFC 2397) in base64. Raises InvalidRequest of ``field``."""
    head = _HEAD.match(uri, 0, _LONGEST_HEAD)
    if head is None:
        raise InvalidRequest(field, f"is no data URI, data:image/png;base64,... for example: {shown(uri)}")
    if head["parameters"].lower() != ";base64":
        raise InvalidRequest(field, f"must be in base64, data:{head['type']};base64,..., got {shown(uri)}")
    return from_base64(uri[head.end() :], head["type"], field, limits)


def from_base64(text: str, stated: str, field: str, limits: ImageLimits) -> bytes:
    """The file in a text in base64 that is ``stated`` to be of a media type. Raises InvalidRequest of
    ``field``: it is of another type, too large, or malformed."""
    kind = stated.lower()
    kind = _ALSO.get(kind, kind)
    if kind not in MEDIA_TYPES:
        raise InvalidRequest(field, f"must be of type {', '.join(MEDIA_TYPES)}, got {shown(stated)}")
    limits.check_bytes(max(0, len(text) // 4 * 3 - 2) or len(text), field)
    return from_file(decoded_base64(text, field), field, limits, kind)


def from_file(data: bytes, field: str, limits: ImageLimits, stated: str | None = None) -> bytes:
    """The file itself. Raises InvalidRequest of ``field``: it is empty or too large, of no type that
    requests may send or not of the ``stated`` one."""
    limits.check_bytes(len(data), field)
    found = media_type(data)
    if found is None:
        raise InvalidRequest(field, f"is no image of type {', '.join(MEDIA_TYPES)}")
    if stated is not None and stated != found:
        raise InvalidRequest(field, f"is stated to be {stated}, and begins as {found}")
    return data


def data_uri(path: Path) -> str:
    """A file of an image as a data URI. Raises InvalidRequest of "image", and OSError."""
    data = from_file(read_regular(path, DEFAULT_LIMITS.max_bytes), "image", DEFAULT_LIMITS)
    kind = media_type(data)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def media_type(data: bytes) -> str | None:
    """The one of ``MEDIA_TYPES`` as which a file begins; None: of no such type."""
    return next((kind for signature, kind in _SIGNATURES if signature.match(data)), None)
