"""Clients that speak HTTP by hand, and what a server logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import pytest

__all__ = ["Raw", "errors", "request"]


def request(method: str = "GET", path: str = "/health", body: Any = None, **headers: str) -> bytes:
    """The bytes of a request; underscores in names of headers are hyphens. ``body`` is sent as JSON."""
    content = b"" if body is None else json.dumps(body).encode()
    fields = {"Host": "localhost"}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + content


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """The next response up to its body. Raises IncompleteReadError, ConnectionError."""
        return await self._reader.readuntil(b"\r\n\r\n")

    async def status(self) -> int:
        """The status code of the next response, whose body must have a length; 0: closed without one."""
        try:
            head = await self.head()
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await self._reader.readexactly(int(line.partition(b":")[2]))
        return int(head.split()[1])

    async def closed(self) -> bool:
        """Waits for the end of the connection; whether it came without a further byte."""
        try:
            return await self._reader.read(1) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as an error or with a traceback."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR or each.exc_info]
