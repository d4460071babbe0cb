"""Parsing: the bodies of requests, decompressed and parsed without holding up the loop."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from aioinfer.errors import InvalidRequest
from aioinfer.server.http.bodies import BodyBytes, encoding_of
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.limits import Limits, too_large

__all__ = ["BodyParser", "decompress", "refuse_large"]

_T = TypeVar("_T")
#: bytes that are decompressed at once: about a millisecond
_SLICE = 1 << 18
#: bytes of a body that is parsed on the loop
_SMALL = 1 << 14
#: what takes long at any size: patterns are compiled, conversations that are kept are read, and an escape may
#: spell their fields
_COSTLY = (b"stop_regex", b"previous_response_id", b'"session"', b"\\u")
#: bytes that a value takes when it is parsed
_VALUE = 64
#: zlib reads the header of gzip
_GZIP = 16 + zlib.MAX_WBITS
#: low bits of the first byte of zlib's format (RFC 1950, section 2.2)
_DEFLATED = 8


def refuse_large(request: web.Request, limit: int) -> None:
    """Raise Refused for a body that is longer than ``limit`` bytes (413), or whose length is no number (400),
    before any of it is read."""
    length = request.headers.get("Content-Length", "0")
    # Servers of ASGI may leave the check to their applications.
    if not (length.isascii() and length.isdecimal()):
        message = f"the Content-Length {length[:100]!r} is not a number of bytes"
        raise Refused(Failure(400, "invalid_request_error", message, close=True))
    if len(length) > 20 or int(length) > limit:
        raise too_large(limit)


async def decompress(raw: bytes, limit: int, encoding: str, held: BodyBytes | None = None) -> bytes:
    """The text of a gzip or deflate body, slice by slice. Raises InvalidRequest; Refused beyond ``limit``;
    Rejected where ``held`` finds no room."""
    wbits = _GZIP
    if encoding == "deflate":
        # With a header, as the standard has it, or without, as some clients have it. aiohttp accepts both.
        wbits = zlib.MAX_WBITS if raw[0] & 0xF == _DEFLATED else -zlib.MAX_WBITS
    stream = zlib.decompressobj(wbits)
    out = bytearray()
    for at in range(0, len(raw), _SLICE):
        rest = raw[at : at + _SLICE]
        while not stream.eof:
            try:
                part = stream.decompress(rest, _SLICE)
            except zlib.error as error:
                raise InvalidRequest("body", f"cannot be decompressed: {error}") from None
            if not part:
                break
            out += part
            if len(out) > limit:
                raise too_large(limit)
            if held is not None:
                held.count(len(raw) + len(out))
            rest = stream.unconsumed_tail
            await asyncio.sleep(0)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest("body", "cannot be decompressed: it is cut off, or goes on behind its end")
    return bytes(out)


class BodyParser:
    """Parses bodies: small ones at once, others on a worker thread, one at a time.

    A thread does not free the loop while ``json.loads`` runs, since that holds the interpreter's lock; the
    number of values bounds how long that takes. What is checked in Python afterwards yields to the loop.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "aioinfer-bodies")
        #: bodies are decompressed one after the other: the slices of all would take long in each turn
        self._decompressing = asyncio.Lock()

    async def plain(self, request: web.Request, raw: bytes, limit: int, held: BodyBytes) -> bytes:
        """The body without its encoding, of at most ``limit`` bytes. Raises Refused (413), InvalidRequest,
        Rejected.

        aiohttp decompresses bodies of applications that are not run by :func:`aioinfer.server.serve`.
        """
        if len(raw) > limit:
            raise too_large(limit)
        encoding = encoding_of(request)
        decompressed = getattr(request.content, "total_compressed_bytes", None) is not None
        if not raw or decompressed or encoding in ("", "identity"):
            return raw
        async with self._decompressing:
            return await decompress(raw, limit, encoding, held)

    async def parse(
        self, parse: Callable[[bytes], _T], raw: bytes, limits: Limits, held: BodyBytes | None = None
    ) -> _T:
        """Return ``parse(raw)``. Raises InvalidRequest for too many values, and what ``parse`` raises;
        Rejected where ``held`` finds no room for these."""
        if len(raw) <= _SMALL and not any(mark in raw for mark in _COSTLY):
            return _parse(parse, [raw], limits, held)
        # If the client leaves before its turn, the worker's queue does not keep the body.
        given = [raw]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._worker, _parse, parse, given, limits, held)
        finally:
            given.clear()


def _parse(parse: Callable[[bytes], _T], given: list[bytes], limits: Limits, held: BodyBytes | None) -> _T:
    (raw,) = given
    values = limits.check_values(raw)
    if held is not None:
        held.count(len(raw) + _VALUE * values)
    return parse(raw)
