"""Express: the text of plain streams to their sockets, without a task per token.

A stream is plain if its event differs from chunk to chunk by nothing but the text: see
:meth:`aioinfer.server.wire.AnswerWriter.plain`. Its handler sleeps to the end of the request. Meanwhile the
engine tells the lane after each step which streams have moved, and the lane writes one frame for each, in a
callback of its own after the planning of the next step::

    step resolved --moved--> Lane --call_soon--> frames: chunk size, prefix, "text", suffix --> transports

A frame takes pieces of text from the stream's cell by the cursors that ``async for`` uses, at the moment in
which it is written. So what the lane has not written by the end, the handler finds there and writes with the
finish reason. Nothing is taken while more than 64 KiB wait for the client: the text stays in the request, and
is one event later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as _quoted

from aioinfer.cells import Outlet
from aioinfer.server.http.disconnects import ClientGone
from aioinfer.server.http.sse import EventStream
from aioinfer.server.wire import PlainEvent
from aioinfer.stream import Stream

__all__ = ["ExpressLane", "ExpressOutlet"]

_log = logging.getLogger("aioinfer.server")

#: seconds of writing between two turns of the loop; frames that are written in any case, so that steps that
#: land all the time do not keep their own tokens from being written; frames between two looks at the clock
_SLICE, _LEAST, _FRAMES = 0.003, 128, 16
#: bytes that wait for a client at most when a frame is added
_UNSENT = 1 << 16
#: pieces of text in a frame: some milliseconds of formatting at most
_PIECES = 4096
#: seconds until a stream whose client reads too slowly is looked at again, unless it gets a token before
_RETRY = 0.1


class ExpressOutlet:
    """One stream on the lane: its transport, and the bytes around the text of each event."""

    __slots__ = ("after", "before", "cell", "events", "lane", "pending", "size", "stream", "transport")

    def __init__(
        self,
        lane: ExpressLane,
        stream: Stream,
        event: PlainEvent,
        events: EventStream,
        transport: asyncio.Transport,
    ) -> None:
        self.lane = lane
        self.stream = stream
        self.cell = stream.cell
        self.transport = transport
        self.events = events
        name = "" if event.name is None else f"event: {event.name}\n"
        before, after = f"{name}data: {event.before}", f"{event.after}\n\n"
        #: bytes of an event without text
        self.size = len(before.encode()) + len(after.encode())
        self.before = f"\r\n{before}"
        self.after = f"{after}\r\n"
        #: it is in the lane's list
        self.pending = False


class ExpressLane:
    """All plain streams of one engine's routes. as :class:`aioinfer.cells.Lane`; on the event loop only."""

    def __init__(self) -> None:
        #: those that have moved since they were last written, each once
        self._moved: list[ExpressOutlet] = []
        self._due = False
        #: those whose clients have not read what was written
        self._blocked: set[ExpressOutlet] = set()
        self._retrying: asyncio.TimerHandle | None = None

    def outlet(self, stream: Stream, event: PlainEvent | None, events: EventStream) -> ExpressOutlet | None:
        """For a stream whose prompt was accepted; None if it has to be written chunk by chunk."""
        transport = events.transport
        if event is None or transport is None or not stream.cell.output.has_text:
            return None
        return ExpressOutlet(self, stream, event, events, transport)

    def moved(self, outlets: Sequence[Outlet]) -> None:
        """As in Lane."""
        for outlet in outlets:
            assert isinstance(outlet, ExpressOutlet)
            if not outlet.pending:
                outlet.pending = True
                self._moved.append(outlet)
        self._schedule()

    def _schedule(self) -> None:
        if self._moved and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write what there is, for some milliseconds; other callbacks run before the rest is written."""
        self._due = False
        moved, self._moved = self._moved, []
        now, end = asyncio.get_running_loop().time(), time.perf_counter() + _SLICE
        for at, outlet in enumerate(moved):
            if at % _FRAMES == 0 and at >= _LEAST and time.perf_counter() >= end:
                self._moved = moved[at:] + self._moved
                break
            outlet.pending = False
            try:
                self._write(outlet, now)
            except Exception as error:
                _log.error("a stream could not be written", exc_info=error)
                outlet.transport.abort()
                outlet.events.give_up(ClientGone(f"the client could not be written to: {error!r}"))
        self._schedule()

    def _write(self, outlet: ExpressOutlet, now: float) -> None:
        cell = outlet.cell
        pieces, taken = cell.output.pieces, cell.taken_pieces
        count = len(pieces)
        if count == taken or cell.outlet is not outlet:
            return
        transport = outlet.transport
        if transport.is_closing():
            return  # the handler learns of it from the watcher
        if transport.get_write_buffer_size() > _UNSENT:
            self._block(outlet)
            return
        if count - taken == 1:
            text = _quoted(pieces[taken])
        else:
            count = min(count, taken + _PIECES)
            text = _quoted("".join(pieces[taken:count]))
        frame = f"{outlet.size + len(text):x}{outlet.before}{text}{outlet.after}".encode()
        transport.write(frame)
        cell.taken_pieces, cell.blocked = count, False
        if count == len(pieces):
            cell.taken_ids = len(cell.output.token_times)
        else:
            self.moved((outlet,))
        outlet.events.wrote(len(frame), now)
        if cell.parked:
            outlet.stream.caught_up()

    def _block(self, outlet: ExpressOutlet) -> None:
        """The client reads more slowly than its text comes. No token may come while its request is parked."""
        outlet.cell.blocked = True
        self._blocked.add(outlet)
        if self._retrying is None:
            self._retrying = asyncio.get_running_loop().call_later(_RETRY, self._retry)

    def _retry(self) -> None:
        blocked, self._blocked, self._retrying = self._blocked, set(), None
        self.moved([*blocked])
