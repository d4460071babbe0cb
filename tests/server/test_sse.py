"""EventStream with a client that does not read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aioinfer.server.http.sse import ClientGone, EventStream


class Stuck:
    """A response whose writes wait until the test completes them."""

    prepared = True

    def __init__(self) -> None:
        self.written: list[bytes] = []
        #: by number of the write: set when it may complete
        self.through: list[asyncio.Event] = []

    async def write(self, data: bytes) -> None:
        self.written.append(data)
        self.through.append(asyncio.Event())
        await self.through[-1].wait()

    write_eof = write


class Transport:
    def __init__(self) -> None:
        self.aborted = False
        self._looks = 0

    def is_closing(self) -> bool:
        self._looks += 1
        return self.aborted

    async def looked_at(self) -> None:
        """Wait for the next check of the watcher."""
        end = self._looks + 2
        while self._looks < end:
            await asyncio.sleep(0)

    def abort(self) -> None:
        self.aborted = True


def stream(ping_interval: float, send_timeout: float) -> tuple[EventStream, Stuck, Transport]:
    transport, response = Transport(), Stuck()
    request: Any = SimpleNamespace(transport=transport)
    events = EventStream(request, ping_interval=ping_interval, send_timeout=send_timeout)
    events._response = response  # type: ignore[assignment]
    return events, response, transport


@pytest.mark.parametrize("last", [False, True])
async def test_a_client_that_does_not_read_is_dropped_and_not_pinged(last: bool) -> None:
    events, response, transport = stream(0.01, 0.05)
    writing = asyncio.create_task(events.end("[DONE]") if last else events.send("abc"))
    with pytest.raises(ClientGone, match=r"has not read for 0\.05 s"):
        await events.watch()
    assert transport.aborted
    assert response.written == [b"data: [DONE]\n\n" if last else b"data: abc\n\n"]
    writing.cancel()
    await asyncio.wait([writing])


async def test_every_write_has_the_full_timeout() -> None:
    events, response, transport = stream(0.01, 30.0)
    clock = 0.0
    events._time = lambda: clock
    watching = asyncio.create_task(events.watch())
    writing = [asyncio.create_task(events.send("first"))]
    for number in range(5):
        writing.append(asyncio.create_task(events.send("more")))
        clock += 29.0
        await transport.looked_at()
        response.through[number].set()
        await writing.pop(0)
    assert not transport.aborted
    clock += 31.0
    with pytest.raises(ClientGone):
        await watching
    for task in writing:
        task.cancel()
    await asyncio.wait(writing)


async def test_an_unread_ping_is_the_last_one() -> None:
    events, response, transport = stream(0.01, 0.05)
    with pytest.raises(ClientGone):
        await events.watch()
    assert transport.aborted
    assert response.written == [b": ping\n\n"]
