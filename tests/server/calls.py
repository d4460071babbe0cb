"""Calls of a server, whose answers are read to their ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy

__all__ = ["Http", "Reply", "http"]


@dataclass(frozen=True)
class Reply:
    """A response that has been read."""

    status: int
    headers: CIMultiDictProxy[str]
    #: the content type without its parameters
    type: str
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json()["error"]

    @property
    def refusal(self) -> tuple[int, str | None]:
        """The status, and the field that is at fault."""
        return self.status, self.error["param"]

    def events(self) -> list[Any]:
        """The data of the events that are objects."""
        return [json.loads(line[6:]) for line in self.text.splitlines() if line.startswith("data: {")]


class Http:
    """A client of one server. Underscores in names of headers are hyphens."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """``body`` is sent as JSON, bytes as they are."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None
        if body is not None:
            data = BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
            given = {"Content-Type": "application/json", **given}
        async with self.session.request(method, path, headers=given, data=data) as response:
            text = await response.text()
            return Reply(response.status, response.headers, response.content_type, text)

    async def get(self, path: str, **headers: str) -> Reply:
        return await self("GET", path, **headers)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await self("POST", path, body, **headers)


@asynccontextmanager
async def http(url: str, **headers: str) -> AsyncIterator[Http]:
    """A client of the server at ``url``, which sends ``headers`` with every request."""
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0)
    if url.startswith("unix:"):
        connector, url = aiohttp.UnixConnector(url.removeprefix("unix:")), "http://localhost"
    async with aiohttp.ClientSession(url, connector=connector, headers=headers) as session:
        yield Http(session)
