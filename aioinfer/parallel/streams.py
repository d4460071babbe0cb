"""OpenStreams: the streams of a dispatcher for those who read them, whoever computes them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from aioinfer.errors import EngineClosed, EngineError, RequestError, TimedOut
from aioinfer.loop.loop_bound import EngineState, LoopBound
from aioinfer.observe.observers import Observers
from aioinfer.parallel.record import Record
from aioinfer.resuming.record import StreamCheckpoint
from aioinfer.scheduling.request import Request
from aioinfer.stream import StreamCell

if TYPE_CHECKING:
    from aioinfer.execution.device import DeviceInfo

__all__ = ["OpenStreams", "cell_of", "record_of"]


class OpenStreams(LoopBound):
    """Belongs to the loop on which it is made. Streams know it as their owner."""

    kind = "dispatcher"

    def __init__(self, info: DeviceInfo, clock: Callable[[], float]) -> None:
        super().__init__()
        self.info = info
        self.clock = clock
        self.observers = Observers()
        #: from their requests to their ends, in order
        self._open: dict[Record, None] = {}
        #: set while closing waits for the open streams
        self._drained: asyncio.Future[None] | None = None

    # -- as StreamOwner -------------------------------------------------------------------------

    def _abandoned(self, request: Request) -> None:
        self.end(record_of(request), None)

    def caught_up(self, request: Request) -> None:
        """As in StreamOwner."""
        record = record_of(request)
        record.parked_for = frozenset()
        if record.attempt is not None:
            record.attempt.replica.caught_up(record.attempt)

    def checkpoint(self, request: Request) -> StreamCheckpoint:
        """As in StreamOwner."""
        record = record_of(request)
        if not record.key:
            raise RuntimeError("the prompt has not been tokenized yet")
        if record.ended and record.finish_reason != "abort":
            raise RuntimeError("the output is complete: there is nothing to go on with")
        return record.read_checkpoint(self.info)

    def _set_timer(self, record: Record) -> None:
        """For its deadline while no replica has it, which would know it."""
        left = record.time_left(self.clock())
        phase, seconds = ("waiting", left[0]) if record.admitted_at is None else ("running", left[1])
        if seconds is not None:
            cell_of(record).timer = self.loop.call_later(seconds, self._expire, record, phase)

    def _expire(self, record: Record, phase: str) -> None:
        cell_of(record).timer = None
        self.end(record, TimedOut(phase, getattr(record.options, f"{phase}_timeout")))

    @abstractmethod
    def end(self, record: Record, error: RequestError | EngineError | None) -> None:
        """End a stream, whatever its state."""

    def _ended(self, record: Record) -> None:
        if record in self._open:
            del self._open[record]
            if self.observers:
                self.observers.ended(record)
        cell = cell_of(record)
        cell.cancel_timer()
        cell.notify()
        if not self._open:
            self._set_drained()

    def _end_all(self, make_error: Callable[[], EngineError]) -> None:
        for record in list(self._open):
            self.end(record, make_error())
        self._set_drained()

    @property
    def closed(self) -> bool:
        """Nothing more comes from it."""
        return self.state is EngineState.CLOSED

    @property
    def closing(self) -> bool:
        """No replica may begin any more."""
        return self.state in (EngineState.DRAINING, EngineState.CLOSED)

    @property
    def open_requests(self) -> Collection[Record]:
        """Those that have not ended, in the order of their arrival."""
        return self._open.keys()

    def check_open(self) -> None:
        """Raise EngineClosed when no replica may begin any more."""
        if self.closing:
            raise EngineClosed("the dispatcher was closed")

    async def _drain(self, seconds: float) -> None:
        """Wait for the open streams."""
        self._drained = self.loop.create_future()
        timer = self.loop.call_later(seconds, self._set_drained)
        try:
            await self._drained
        finally:
            timer.cancel()

    def cut_short(self) -> None:
        """Do not wait for the open streams any longer."""
        self._set_drained()

    def _set_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # -- observing ------------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Tokens that the readers of open streams have not taken; O(open streams)."""
        return sum(cell_of(record).unread for record in self._open)


def cell_of(record: Request) -> StreamCell:
    """The stream's end of a record."""
    assert isinstance(record.consumer, StreamCell)
    return record.consumer


def record_of(request: Request) -> Record:
    """Every request of a dispatcher is one."""
    assert isinstance(request, Record)
    return request
