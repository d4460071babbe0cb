"""ASGI applications, run by uvicorn on loopback or driven by hand in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Literal

import pytest

__all__ = ["Application", "Exchange", "uvicorned"]

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")

Application = Callable[[Any, Any, Any], Awaitable[None]]


@contextlib.asynccontextmanager
async def uvicorned(app: Application, *, lifespan: Literal["on", "off"] = "on") -> AsyncIterator[int]:
    """The port of an application that uvicorn runs in this loop."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", lifespan=lifespan, loop="none")
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext
        task = asyncio.create_task(server.serve(sockets=[bound]))
        while not (server.started or task.done()):
            await asyncio.sleep(0.001)
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            await task


class Exchange:
    """One request in process: ``receive`` and ``send`` are the test's."""

    def __init__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        parts: Iterable[bytes] | None = None,
        headers: Iterable[tuple[str, str]] = (),
        **scope: Any,
    ) -> None:
        """``body`` is sent as JSON, in one piece; ``parts``: the body in pieces, whose end is not told."""
        given = [("host", "localhost"), *headers]
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        if parts is not None:
            for part in parts:
                self.give(part, more=True)
        else:
            data = b"" if body is None else json.dumps(body).encode()
            given.append(("content-length", str(len(data))))
            self.give(data)
        if body is not None or parts is not None:
            given.append(("content-type", "application/json"))
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given],
            "client": ("127.0.0.1", 5000),
            "server": ("127.0.0.1", 80),
            **scope,
        }
        self.events: list[dict[str, Any]] = []
        #: sending waits for it
        self.reading = asyncio.Event()
        self.reading.set()

    def give(self, data: bytes, *, more: bool = False) -> None:
        self.incoming.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        """The client disconnects."""
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def send(self, event: dict[str, Any]) -> None:
        await self.reading.wait()
        assert not self.complete, "an event behind the last one"
        assert (event["type"] == "http.response.start") == (not self.events)
        self.events.append(event)

    async def run(self, app: Application) -> Exchange:
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def complete(self) -> bool:
        return bool(self.events) and not self.events[-1].get("more_body", True)

    @property
    def status(self) -> int:
        found: int = self.events[0]["status"]
        return found

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.events[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.events[1:])

    def json(self) -> Any:
        return json.loads(self.body)
