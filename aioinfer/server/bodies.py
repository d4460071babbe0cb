"""Bodies of requests: JSON in UTF-8, complete within a time."""

from __future__ import annotations

import asyncio

from aiohttp import web

from aioinfer.server.disconnects import ClientGone, is_gone
from aioinfer.server.failures import Failure, Refused
from aioinfer.server.limits import too_large

__all__ = ["read_body"]

#: what the server decompresses
_ENCODINGS = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})

_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})


async def read_body(request: web.Request, timeout: float, limit: int) -> bytes:
    """The body as it was sent, or decompressed where the application does that.

    Raises Refused: it is not declared as JSON in UTF-8, cannot be decompressed, or is incomplete after
    ``timeout`` seconds, or has more than ``limit`` bytes. Raises ClientGone.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, limit)
    except TimeoutError:
        raise _refused(408, f"the body did not arrive within {timeout:g} s", close=True) from None
    except web.RequestPayloadError as error:
        if is_gone(request):
            raise ClientGone("the client has closed its connection") from error
        # aiohttp closes the connection, because the rest of the body is lost.
        message = "the body does not have the encoding that its headers declare"
        raise _refused(400, message, close=True) from error


async def _read(request: web.Request, limit: int) -> bytes:
    if request.content.at_eof():
        return await request.read()  # a middleware has read it, or there is nothing to read
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > limit:
            raise too_large(limit)
    return bytes(body)


def _check_headers(request: web.Request) -> None:
    # A page can send other types than JSON to any server, without a preflight request.
    if request.content_type != "application/json":
        raise _refused(415, "Content-Type must be application/json")
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in _ENCODINGS:
        message = f"the Content-Encoding {encoding[:100]!r} is not supported: gzip and deflate are"
        headers = {"Accept-Encoding": "gzip, deflate"}
        raise Refused(Failure(415, "invalid_request_error", message, headers=headers))
    charset = request.charset
    if charset is not None and charset.lower() not in _CHARSETS:
        raise _refused(400, f"the charset {charset[:100]!r} is not supported: JSON is UTF-8")


def _refused(status: int, message: str, *, close: bool = False) -> Refused:
    return Refused(Failure(status, "invalid_request_error", message, close=close))
