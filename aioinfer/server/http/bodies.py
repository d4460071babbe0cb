"""Bodies of requests: JSON in UTF-8, complete within a time, and all together within a bound."""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web
from aiohttp.http import StreamWriter

from aioinfer.errors import Rejected
from aioinfer.ledger import LEDGER, Share
from aioinfer.server.http.disconnects import ClientGone, is_gone
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.limits import too_large

__all__ = ["BODIES", "BodyBytes", "encoding_of", "expected", "make_room", "read_body"]

#: what the server decompresses
_ENCODINGS = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})

_MIB = 1 << 20
#: bytes of each body that are not counted: connections, which are bounded in number, have buffers, too
_UNCOUNTED = 1 << 16
#: bytes of all bodies at least and at most, unless single ones may be that large; and part of what is left
_LEAST, _MOST, _PART = 64 * _MIB, 256 * _MIB, 32
#: as many of the largest ones have room
_LARGEST = 4

#: the bodies of all requests under way in this process, until these end
BODIES = Share("bodies", bound=_LEAST)

_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})


def make_room(largest: int) -> None:
    """Have room for bodies, as the memory allows; ``largest``: bytes that a body may have."""
    left = LEDGER.left()
    wanted = _MOST if left is None else min(_MOST, left.bytes // _PART)
    BODIES.bound = max(BODIES.bound or 0, _LEAST, wanted, _LARGEST * largest)


class BodyBytes:
    """The memory that the body of a request takes, from its first byte to the end of the request."""

    __slots__ = ("_counted",)

    def __init__(self) -> None:
        self._counted = 0

    def count(self, size: int) -> None:
        """It takes ``size`` bytes now. On any thread. Raises Rejected: there is no room for them beside those
        of other requests."""
        more = size - _UNCOUNTED - self._counted
        if more <= 0:
            return
        if not BODIES.take(more):
            raise Rejected(f"body: those of all requests have {BODIES.bound} bytes at most, try again later")
        self._counted += more

    def add(self, size: int) -> None:
        """It takes ``size`` further bytes. Raises as :meth:`count`."""
        self.count(self._counted + _UNCOUNTED + size)

    def release(self) -> None:
        """The request has ended. Idempotent."""
        BODIES.give(self._counted)
        self._counted = 0


async def read_body(request: web.Request, timeout: float, limit: int, held: BodyBytes) -> bytes:
    """Read the body as it was sent, or decompressed where the application does that.

    Raises Rejected: there is no room for it. Raises Refused: it is not declared as JSON in UTF-8, cannot be
    decompressed, or is incomplete after ``timeout`` seconds, or has more than ``limit`` bytes. Raises
    ClientGone.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, limit, held)
    except TimeoutError:
        raise _refused(408, f"the body did not arrive within {timeout:g} s", close=True) from None
    except web.RequestPayloadError as error:
        if is_gone(request):
            raise ClientGone("the client has closed its connection") from error
        # aiohttp closes the connection, because the rest of the body is lost.
        message = "the body does not have the encoding that its headers declare"
        raise _refused(400, message, close=True) from error


async def expected(request: web.Request) -> web.StreamResponse | None:
    """Answer ``Expect`` before all other handlers: aiohttp's own one answers in plain text."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() != "100-continue":
        message = f"the Expect {request.headers['Expect'][:100]!r} is not supported: 100-continue is"
        return Failure(417, "invalid_request_error", message).response()
    assert isinstance(request.writer, StreamWriter)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # what follows is a response of its own
    return None


async def _read(request: web.Request, limit: int, held: BodyBytes) -> bytes:
    if request.content.at_eof():
        return await request.read()  # a middleware has read it, or there is nothing to read
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > limit:
            raise too_large(limit)
        held.count(len(body))
    return bytes(body)


def encoding_of(request: web.Request) -> str:
    """The encodings of the body as a list. Several headers mean the same as one with a list."""
    return ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()


def _check_headers(request: web.Request) -> None:
    # A page can send other types than JSON to any server, without a preflight request.
    if request.content_type != "application/json":
        raise _refused(415, "Content-Type must be application/json")
    encoding = encoding_of(request)
    if encoding not in _ENCODINGS:
        message = f"the Content-Encoding {encoding[:100]!r} is not supported: gzip and deflate are"
        headers = {"Accept-Encoding": "gzip, deflate"}
        raise Refused(Failure(415, "invalid_request_error", message, headers=headers))
    charset = request.charset
    if charset is not None and charset.lower() not in _CHARSETS:
        raise _refused(400, f"the charset {charset[:100]!r} is not supported: JSON is UTF-8")


def _refused(status: int, message: str, *, close: bool = False) -> Refused:
    return Refused(Failure(status, "invalid_request_error", message, close=close))
