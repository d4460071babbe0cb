"""Exchange: one request of an ASGI server, and the response of an aiohttp application to it."""

from __future__ import annotations

import asyncio
import time

from aiohttp import HttpVersion11, StreamReader, web

from aioinfer.server.asgi.scopes import Receive, Scope, Send, message_of, root_of
from aioinfer.server.asgi.transport import AsgiTransport, AsgiWriter
from aioinfer.server.http.logs import AccessLog
from aioinfer.server.http.records import record_of

__all__ = ["Exchange"]

#: bytes of a body that are received ahead of their reader
_AHEAD = 1 << 16


class _Protocol(web.RequestHandler):
    """What a request and its body ask about their connection. It is told of none, which would start it.

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


class Exchange:
    """A request of aiohttp's made from a scope of type "http", and the events of its response."""

    def __init__(self, server: web.Server, scope: Scope, receive: Receive, send: Send) -> None:
        """``server``: of the application that responds."""
        message = message_of(scope)
        self._server = server
        self._receive = receive
        self._transport = AsgiTransport(scope, send)
        self._writer = AsgiWriter(self._transport, closable=message.version <= HttpVersion11)
        loop = asyncio.get_running_loop()
        protocol = self._protocol = _Protocol(server, loop=loop)
        protocol.transport = self._transport
        self._body = StreamReader(protocol, _AHEAD, loop=loop)
        task = asyncio.current_task()
        assert task is not None
        request = server.request_factory(message, self._body, protocol, self._writer, task)
        assert isinstance(request, web.Request)
        self._request = request
        record_of(request).root = root_of(scope)
        #: ends the handler when it is rescheduled
        self._leash = asyncio.timeout(None)
        self._over = False

    async def run(self, log: AccessLog | None) -> None:
        """Respond. The handler runs in this task, and is cancelled when the client leaves.

        For a client that has left or was given up this returns without the end of the response, whereupon
        the server closes the connection.
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

    async def _respond(self, log: AccessLog | None) -> None:
        request = self._request
        try:
            response = await self._server.request_handler(request)
        except web.HTTPException as refused:  # of an ``Expect``, in front of all middlewares
            response = refused
        try:
            await response.prepare(request)
            await response.write_eof()
        except ConnectionError:
            pass  # the client has left
        if log is not None:
            log.log(request, response, time.perf_counter() - record_of(request).started)

    async def _feed(self) -> None:
        """Receive the body as fast as it is read, and then the disconnect."""
        try:
            while await self._received():
                pass
        finally:
            self._leave()

    async def _received(self) -> bool:
        """Whether there may be more."""
        await self._transport.readable()
        message = await self._receive()
        if message["type"] == "http.disconnect":
            return False
        if self._body.is_eof():
            # Something in between repeats itself, as some middlewares do, and would do so for ever.
            await asyncio.Event().wait()
        # Once the response has begun, nobody reads the rest: a handler refuses it or has all of it.
        if (data := message.get("body", b"")) and not self._writer.started:
            self._body.feed_data(data)
        if not message.get("more_body", False):
            self._body.feed_eof()
        return True

    def _leave(self) -> None:
        """The client has left. While the last event is being sent, that changes nothing for the handler."""
        if self._over or self._transport.complete:
            return
        self._transport.close()
        self._leash.reschedule(asyncio.get_running_loop().time())

    async def _end(self, receiving: asyncio.Task[None] | None) -> None:
        """Leave no task behind. Raises what ``receive`` has raised."""
        tasks = [*self._transport.writing]
        if receiving is not None:
            tasks.append(receiving)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if receiving is not None and not receiving.cancelled():
            receiving.result()
