"""The service as an ASGI application: an aiohttp application, driven by any ASGI server.

A request of aiohttp's is made from the scope, and what its response writes becomes events. Nothing is framed
and no connection is kept here: both are the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from aiohttp import ClientConnectionResetError, HttpVersion, HttpVersion11, StreamReader, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.engine import EngineState
from aioinfer.errors import AioInferError
from aioinfer.loop.belonging import asyncio_loop
from aioinfer.server.http.failures import Failure
from aioinfer.server.http.logs import ACCESS, CLIENT_GONE, HTTP, AccessLog, Throttle
from aioinfer.server.http.records import record_of

__all__ = ["AsgiApplication"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_log = logging.getLogger("aioinfer.server")

#: what aiohttp decodes headers with, so that no byte is lost
_CODEC = ("utf-8", "surrogateescape")
#: headers of a response that are the server's own
_SERVERS = (hdrs.DATE, hdrs.SERVER, hdrs.TRANSFER_ENCODING)
#: bytes of a body that are received ahead of their reader
_AHEAD = 1 << 16
_NOT_STARTED = (
    "the engine is not started: servers run the lifespan of the outermost application only, so the one in "
    "which this is mounted has to start it in its own lifespan, with 'async with engine: yield'"
)


class AsgiApplication:
    """An application of ASGI 3, for :func:`aioinfer.server.asgi_app`.

    A server that runs it alone starts and closes the engine by its lifespan. Where it is mounted in another
    application, that one does; requests get 503 before.
    """

    def __init__(self, engine: EngineLike, config: ServerConfig, make: Callable[[], web.Application]) -> None:
        """``make`` makes the aiohttp application, one for each event loop. Raises what it raises."""
        self._engine = engine
        self._make = make
        self._log = AccessLog(ACCESS, config.access_log_format) if config.access_log else None
        self._next: web.Application | None = make()
        self._life: _Life | None = None
        self._unstarted = Throttle(_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "websocket":
                await receive()
                await send(
                    {"type": "websocket.close", "code": 1000, "reason": "there are no WebSockets here"}
                )
            case other:
                raise ValueError(f"scopes of type {other!r} are unknown")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        life = self._life
        if life is None or life.loop is not asyncio_loop():
            if self._engine.state in (EngineState.NEW, EngineState.CLOSED):
                self._unstarted.warning(_NOT_STARTED)
                await _refuse_unstarted(send)
                return
            life = self._begin()
        await _Exchange(await life.server(), scope, receive, send).run(self._log)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        life = self._begin()
        failed: Exception | None = None
        drain = False
        try:
            try:
                await life.server()  # starts the engine
            except Exception as error:
                failed = error
            if failed is None:
                await send({"type": "lifespan.startup.complete"})
                await receive()
                drain = True
        finally:
            if self._life is life:
                self._life = None
            await life.end(drain=drain)
        if failed is None:
            await send({"type": "lifespan.shutdown.complete"})
            return
        if not isinstance(failed, AioInferError):
            _log.error("the application could not be started", exc_info=failed)
        await send({"type": "lifespan.startup.failed", "message": f"{type(failed).__name__}: {failed}"})

    def _begin(self) -> _Life:
        app, self._next = self._next or self._make(), None
        self._life = _Life(app)
        return self._life


class _Life:
    """An aiohttp application on one event loop, from the start of an engine to its end."""

    def __init__(self, app: web.Application) -> None:
        self.loop = asyncio_loop()
        self._runner = web.AppRunner(app, access_log=None, logger=HTTP)
        self._starting = asyncio.Lock()

    async def server(self) -> web.Server:
        """The maker of requests, which also handles them; the first call starts the application."""
        async with self._starting:
            if self._runner.server is None:
                await self._runner.setup()
        assert self._runner.server is not None
        return self._runner.server

    async def end(self, *, drain: bool) -> None:
        """Close the engine, if the application has started it; with ``drain``, after the open requests."""
        await (self._runner.cleanup() if drain else self._runner.app.cleanup())


async def _refuse_unstarted(send: Send) -> None:
    failure = Failure(503, "service_unavailable_error", _NOT_STARTED, code="engine_not_started")
    body = json.dumps(failure.body()).encode()
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"5"),
    ]
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# -- one request ---------------------------------------------------------------------------------------


class _Exchange:
    """A request of aiohttp's made from a scope of type "http", and the events of its response."""

    def __init__(self, server: web.Server, scope: Scope, receive: Receive, send: Send) -> None:
        message = _message_of(scope)
        loop = asyncio.get_running_loop()
        self._server = server
        self._receive = receive
        self._transport = _Transport(scope, send)
        self._writer = _Writer(self._transport, closable=message.version <= HttpVersion11)
        self._protocol = _Protocol(server, loop=loop)
        self._protocol.transport = self._transport
        self._body = StreamReader(self._protocol, _AHEAD, loop=loop)
        task = asyncio.current_task()
        assert task is not None
        request = server.request_factory(message, self._body, self._protocol, self._writer, task)
        assert isinstance(request, web.Request)
        self._request = request
        record_of(request).root = _root_of(scope)
        #: ends the handler when it is rescheduled
        self._leash = asyncio.timeout(None)
        self._over = False

    async def run(self, log: AccessLog | None) -> None:
        """Respond. The handler runs in this task, and is cancelled when the client leaves.

        For a client that has left or was given up this returns without the end of the response, whereupon
        the server closes the connection. If nothing of it was sent, there is an empty one of status 499,
        which reaches nobody: middlewares take an application for faulty that sends nothing.
        """
        receiving: asyncio.Task[None] | None = None
        try:
            async with self._leash:
                receiving = asyncio.create_task(self._feed())
                await self._respond(log)
        except TimeoutError:
            if not self._leash.expired():
                raise
        finally:
            self._over = True
            self._protocol.connection_lost(None)  # it and its parser refer to each other
            await self._end(receiving)
        await self._transport.answer_gone()

    async def _respond(self, log: AccessLog | None) -> None:
        request = self._request
        try:
            response = await self._server.request_handler(request)
        except web.HTTPException as refused:  # of an ``Expect``, before all middlewares
            response = refused
        with contextlib.suppress(ConnectionError):  # the client has left
            await response.prepare(request)
            await response.write_eof()
        if log is not None:
            log.log(request, response, time.perf_counter() - record_of(request).started)

    async def _feed(self) -> None:
        """Receive the body as fast as it is read, and then the disconnect."""
        try:
            while await self._received():
                pass
        finally:
            # While the last event is being sent, a client that leaves changes nothing for the handler.
            if not (self._over or self._transport.complete):
                self._transport.close()
                self._leash.reschedule(asyncio.get_running_loop().time())

    async def _received(self) -> bool:
        """Receive one event. Returns whether there may be more."""
        await self._transport.readable.wait()
        message = await self._receive()
        if message["type"] == "http.disconnect":
            return False
        if self._body.is_eof():
            # Something in between repeats itself, as some middlewares do, and would do so for ever.
            await asyncio.Event().wait()
        # Once the response has begun, nothing reads the rest: a handler refuses it or has all of it.
        if (data := message.get("body", b"")) and not self._writer.started:
            self._body.feed_data(data)
        if not message.get("more_body", False):
            self._body.feed_eof()
        return True

    async def _end(self, receiving: asyncio.Task[None] | None) -> None:
        """Leave no task running. Raises what ``receive`` has raised."""
        tasks = [*self._transport.writing, *(() if receiving is None else (receiving,))]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if receiving is not None and not receiving.cancelled():
            receiving.result()


class _Protocol(web.RequestHandler):
    """The connection of a request and its body. It is told of none, which would start it.

    A body pauses it when it is read slowly, and here there is no parser to be paused too.
    """

    __slots__ = ()

    def pause_reading(self) -> None:
        self._reading_paused = True  # bodies of aiohttp 3.13 look at it
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        self._reading_paused = False
        if self.transport is not None:
            self.transport.resume_reading()


class _Transport(asyncio.Transport):
    """The transport of a request: events to ``send``, one after the other.

    It is closing from the moment in which the client has left or was given up. ``abort`` ends the response
    where it is: the exchange returns without its end, and the server closes the connection.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        client = scope.get("client")
        super().__init__({"peername": None if client is None else tuple(client)})
        self._send = send
        self._turn = asyncio.Lock()
        self._unsent = 0
        self._closing = False
        #: something was passed on
        self._begun = False
        #: the body may be received further
        self.readable = asyncio.Event()
        self.readable.set()
        #: the last event was passed on, or is being passed on
        self.complete = False
        #: tasks of :meth:`write`
        self.writing: set[asyncio.Task[None]] = set()

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin the response. Raises ClientConnectionResetError."""
        raw = [(name.lower().encode(), value.encode(*_CODEC)) for name, value in headers.items()]
        await self._pass_on({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send a part of the body, the last one unless ``more``, when the server has taken all before it.
        Raises ClientConnectionResetError."""
        self._unsent += len(data)
        try:
            await self._pass_on({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._unsent -= len(data)

    async def answer_gone(self) -> None:
        """The response for a client that has left before there was any."""
        if self._begun:
            return
        with contextlib.suppress(OSError):
            await self._send({"type": "http.response.start", "status": CLIENT_GONE, "headers": []})
            await self._send({"type": "http.response.body", "body": b""})

    async def _pass_on(self, message: Message) -> None:
        async with self._turn:
            if self._closing or self.complete:
                raise ClientConnectionResetError("Cannot write to closing transport")
            self._begun = True
            self.complete = not message.get("more_body", True)
            try:
                await self._send(message)
            except OSError as error:  # what a server may raise when the client has left
                self.close()
                raise ClientConnectionResetError("the client has closed its connection") from error

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send a part of the body without waiting: for the rare and small, such as pings."""
        task = asyncio.get_running_loop().create_task(self._write(bytes(data)))
        self.writing.add(task)
        task.add_done_callback(self.writing.discard)

    async def _write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the handler learns of it
            await self.send(data, more=True)

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def pause_reading(self) -> None:
        self.readable.clear()

    def resume_reading(self) -> None:
        self.readable.set()


class _Writer(AbstractStreamWriter):
    """The writer of a response: its headers and pieces become events. A slow client slows it down."""

    def __init__(self, transport: _Transport, *, closable: bool) -> None:
        """``closable``: the version of HTTP has the header ``Connection``."""
        self._transport = transport
        self._closable = closable
        #: the headers were passed on
        self.started = False
        self._ended = False

    @property
    def transport(self) -> _Transport:
        return self._transport

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Those that are the server's are taken out of ``headers``: so a response, too, knows that its body
        is not chunked here."""
        if self.started:
            self._transport.abort()
            raise ClientConnectionResetError("a response was begun already")
        self.started = True
        # Nothing reads the rest of the request now: it must not be in the way of a disconnect.
        self._transport.resume_reading()
        for name in _SERVERS:
            headers.popall(name, None)
        if not (self._closable and headers.get(hdrs.CONNECTION) == "close"):
            headers.popall(hdrs.CONNECTION, None)
        await self._transport.start(int(status_line.split(" ")[1]), headers)

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        if chunk:
            self.output_size += len(chunk)
            await self._transport.send(bytes(chunk), more=True)

    async def write_eof(self, chunk: bytes = b"") -> None:
        if not self._ended:
            self._ended = True
            self.output_size += len(chunk)
            await self._transport.send(bytes(chunk), more=False)

    async def drain(self) -> None:
        """Nothing: every write has waited already."""

    def enable_chunking(self) -> None:
        """Nothing: the server does that."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Refused: no handler of ours compresses; the application's own server or middleware does."""
        raise NotImplementedError("compression of responses")


# -- scopes --------------------------------------------------------------------------------------------


def _message_of(scope: Scope) -> RawRequestMessage:
    """The request in a scope of type "http", with its path below ``root_path``."""
    path = _path_below_root(scope)
    query = scope.get("query_string", b"").decode("latin-1")
    # ``Expect: 100-continue`` is met by the server when the body is received.
    raw = tuple(
        (bytes(name), bytes(value))
        for name, value in scope["headers"]
        if not (name.lower() == b"expect" and value.lower() == b"100-continue")
    )
    headers = CIMultiDict((name.decode(*_CODEC), value.decode(*_CODEC)) for name, value in raw)
    major, _, minor = scope.get("http_version", "1.1").partition(".")
    return RawRequestMessage(
        method=scope["method"],
        path=f"{path}?{query}" if query else path,
        version=HttpVersion(int(major), int(minor or 0)),
        headers=CIMultiDictProxy(headers),
        raw_headers=raw,
        should_close=False,  # connections are the server's
        compression=None,
        upgrade=False,
        chunked="chunked" in headers.get(hdrs.TRANSFER_ENCODING, "").lower(),
        url=URL.build(path=path, query_string=query, encoded=True),
    )


def _root_of(scope: Scope) -> str:
    """The path that the application is mounted at, decoded; empty: at the root."""
    root: str = scope.get("root_path", "")
    return root.rstrip("/")


def _path_below_root(scope: Scope) -> str:
    """The path as it was sent, without the root. Its escapes stay: a name of a model may hold a slash."""
    path: str = scope["path"]
    raw = (scope.get("raw_path") or b"").partition(b"?")[0].decode(*_CODEC) or quote(path)
    root = _root_of(scope)
    # Servers and frameworks of before 2023 have taken the root off already.
    if not root or not f"{path}/".startswith(f"{root}/"):
        return raw or "/"
    slashes = root.count("/") + 1
    parts = raw.split("/", slashes)
    if unquote("/".join(parts[:slashes])) == root:
        return f"/{''.join(parts[slashes:])}"
    return quote(path.removeprefix(root)) or "/"
