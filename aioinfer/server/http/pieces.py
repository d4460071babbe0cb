"""Pieces: JSON of any size, made and sent with bounded work per turn of the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from aioinfer.server.http.pace import Pace

__all__ = ["PIECE", "Pieces", "PiecesPayload", "cut", "json_response", "json_text", "whole_response"]

#: characters, or values of a list, that are converted at once
PIECE = 1 << 15


class Pieces:
    """Collects ASCII text as bytes, so that nothing is ever as long as the whole."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0
        self._done: list[bytes] = []

    def add(self, text: str) -> None:
        """Append a short text."""
        self._parts.append(text)
        self._size += len(text)
        if self._size >= PIECE:
            self._flush()

    async def add_json(self, value: Any, pace: Pace) -> None:
        """Append ``json.dumps(value)``."""
        for part in _parts(value):
            self.add(part)
            await pace()

    def end(self) -> list[bytes]:
        """All of it."""
        self._flush()
        return self._done

    def _flush(self) -> None:
        if not self._parts:
            return
        self._done.append("".join(self._parts).encode("ascii"))
        self._parts.clear()
        self._size = 0


async def json_text(value: Any, pace: Pace) -> str:
    """``json.dumps(value)``, with turns of the loop in between if it is long."""
    if isinstance(value, str) and len(value) <= PIECE:
        return _quoted(value)
    pieces = Pieces()
    await pieces.add_json(value, pace)
    return b"".join(pieces.end()).decode("ascii")


def cut(text: str) -> Iterator[str]:
    """The text in pieces, at least one."""
    for at in range(0, len(text) or 1, PIECE):
        yield text[at : at + PIECE]


def _parts(value: Any) -> Iterator[str]:
    """``json.dumps(value)`` in parts."""
    match value:
        case str() if len(value) > PIECE:
            yield '"'
            for piece in cut(value):
                yield _quoted(piece)[1:-1]
            yield '"'
        case dict():
            yield "{"
            for at, (key, each) in enumerate(value.items()):
                yield f"{', ' if at else ''}{_quoted(key)}: "
                yield from _parts(each)
            yield "}"
        case list() if value and isinstance(value[0], (int, float)):
            for at in range(0, len(value), PIECE):
                yield ("[" if at == 0 else ", ") + json.dumps(value[at : at + PIECE])[1:-1]
            yield "]"
        case list():
            for at, each in enumerate(value):
                yield ", " if at else "["
                yield from _parts(each)
            yield "]" if value else "[]"
        case _:
            yield json.dumps(value)


class PiecesPayload(Payload):
    """The body of a response. A client that reads none of it for ``timeout`` seconds is given up."""

    def __init__(self, pieces: Sequence[bytes], timeout: float, give_up: Callable[[], None]) -> None:
        super().__init__(pieces)
        self._size = sum(map(len, pieces))
        self._pieces = pieces
        self._timeout = timeout
        self._give_up = give_up

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._pieces).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        pace = Pace()
        for piece in self._pieces:
            try:
                async with asyncio.timeout(self._timeout):
                    await writer.write(piece)
            except TimeoutError:
                self._give_up()
                raise ConnectionResetError(f"the client has not read for {self._timeout:g} s") from None
            await pace()


async def json_response(request: web.Request, value: Mapping[str, Any], timeout: float) -> web.Response:
    """``value`` as the JSON of a response, which may be large. As :func:`whole_response`."""
    pieces = Pieces()
    await pieces.add_json(dict(value), Pace())
    return whole_response(request, pieces.end(), timeout)


def whole_response(request: web.Request, pieces: Sequence[bytes], timeout: float) -> web.Response:
    """JSON as a response. A client that reads none of it for ``timeout`` seconds is disconnected."""
    body: bytes | PiecesPayload = pieces[0]
    if len(pieces) > 1:
        body = PiecesPayload(pieces, timeout, partial(_abort, request))
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
