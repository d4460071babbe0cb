"""StreamCell: where the consumer of one request is in its output, and what wakes it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from aioinfer.outputs import Chunk
from aioinfer.request import Output

__all__ = ["Cut", "Lane", "Outlet", "StreamCell", "Want", "tell_lanes", "when_ended"]


class Want(Enum):
    """Event that a consumer waits for."""

    CHUNK = "chunk"
    RESULT = "result"
    ACCEPTANCE = "acceptance"


_CHUNK, _RESULT = Want.CHUNK, Want.RESULT


class Cut(NamedTuple):
    """Where an output is cut, so that something else follows."""

    #: output tokens that are kept; None: those that the consumer has taken, or all if it does not iterate
    at: int | None
    iterated: bool
    #: token ids or text that follow as if the model had written them
    then: str | Sequence[int] = ()
    #: the arguments that these were
    at_name: str = "at"
    then_name: str = "then"
    #: a fork waits in the queue where its stream is, not behind all others
    beside: bool = False


class _Callback:
    """In place of a consumer's future: something that is called once."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def done(self) -> bool:
        return self._call is None

    def set_result(self, result: None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Outlet(Protocol):
    """Takes the text of one stream from its cell, so that no task is woken for it: see
    :meth:`Stream.until_ended`."""

    @property
    def lane(self) -> Lane: ...


class Lane(Protocol):
    """Outlets that write together."""

    def moved(self, outlets: Sequence[Outlet]) -> None:
        """There may be text for each of these. Called amid a step: it is written in a later callback, and
        nothing is raised."""


class StreamCell:
    """The position of one consumer in the output of its request, and the future that wakes it.

    Text and ids stay in the request; the cell counts how much of them was taken. So a slow consumer costs no
    more memory than the output itself, and is woken at most once for all that has accumulated. Of drafts
    only the newest is delivered, made when it is taken. The engine refers to the cell and never to the
    stream, so that a dropped stream is garbage-collected and aborts its request.
    """

    __slots__ = (
        "blocked",
        "closed",
        "concluded",
        "context",
        "delivered",
        "ending",
        "max_lag",
        "outlet",
        "output",
        "parked",
        "parsed",
        "taken_draft",
        "taken_ids",
        "taken_pieces",
        "timer",
        "waiter",
        "wants",
    )

    def __init__(self, output: Output) -> None:
        self.output = output
        #: the consumer has left; nothing more is delivered
        self.closed = False
        self.taken_pieces = 0
        self.taken_ids = 0
        self.taken_draft = 0
        #: characters that its consumer had before a restored output has its text
        self.delivered = 0
        self.waiter: asyncio.Future[None] | _Callback | None = None
        #: called once when the request has ended, on its engine's loop; as with :func:`when_ended`
        self.ending: Callable[[], object] | None = None
        #: what takes the text while the consumer waits for the end
        self.outlet: Outlet | None = None
        #: the outlet could not take it when it last wanted to
        self.blocked = False
        #: what wakes the waiting consumer, besides the end
        self.wants = Want.CHUNK
        #: in which its logits processors are called, if they are coroutines
        self.context: contextvars.Context | None = None
        if output.request.params.logits_processors:
            self.context = contextvars.copy_context()
        #: the deadline of the phase the request is in
        self.timer: asyncio.TimerHandle | None = None
        #: unread tokens beyond which the request is parked
        self.max_lag = output.request.max_lag
        #: nothing is computed for the request until its consumer reads
        self.parked = False
        #: what was read is parsed, and stays as it is; and so does its end, on which a chat or session builds
        self.parsed = self.concluded = False

    @property
    def unread(self) -> int:
        """Tokens that the consumer could read and has not. (A waiting consumer has read all that there is;
        the other tokens are then held back for a stop string, or it waits for the whole result. One with an
        outlet always waits, and has read all unless that is blocked.)"""
        return 0 if self.reading else len(self.output.token_times) - self.taken_ids

    @property
    def reading(self) -> bool:
        """The consumer waits, or has an outlet that is not blocked."""
        return self.waiter is not None if self.outlet is None else not self.blocked

    @property
    def lags(self) -> bool:
        """More tokens are unread than ``max_lag``."""
        return self.max_lag is not None and self.unread > self.max_lag

    def ready(self) -> bool:
        """Whether the consumer may go on: what it wants is there, or the end is."""
        output = self.output
        if self.closed or output.ended:
            return True
        if self.wants is Want.ACCEPTANCE:
            return output.accepted
        if self.wants is Want.RESULT:
            return False
        if output.has_text:
            more = len(output.pieces) > self.taken_pieces
        else:
            more = len(output.token_times) > self.taken_ids
        return more or (output.draft_version > self.taken_draft and not output.text_behind)

    def notify(self) -> None:
        """Wake the consumer if what it waits for is there, or its outlet."""
        waiter, output, outlet = self.waiter, self.output, self.outlet
        if outlet is not None and not (self.closed or output.ended):
            outlet.lane.moved((outlet,))
            return
        if waiter is None:
            return
        if output.plain and self.wants is _CHUNK and not (output.finished or self.closed):
            ready = len(output.pieces) > self.taken_pieces  # as in ready(), but short: once per token
        else:
            ready = self.ready()
        if ready and not waiter.done():
            waiter.set_result(None)

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def take(self) -> Chunk | None:
        """Everything not taken yet, with the newest draft; None if there is nothing to deliver."""
        output = self.output
        # Newer tokens have no text yet, and may lie after a stop.
        count, finished = len(output.token_times), output.ended
        # None if the block of the newest draft is gone.
        draft = None if output.text_behind else output.draft()
        redrafted = draft is not None and output.draft_version > self.taken_draft
        if count == self.taken_ids and not (finished or redrafted):
            return None
        end, version, final = len(output.pieces), output.weight_version, finished
        if output.switches:
            # What earlier weights have computed is a chunk of its own.
            switch = output.switch_after(self.taken_ids, self.taken_pieces)
            if switch is not None:
                count, end, version = switch
                draft, redrafted, finished = None, False, False
            else:
                version = output.newest_version
        text = "".join(output.pieces[self.taken_pieces : end])
        token_ids = output.token_ids[self.taken_ids : count]
        ended = finished and output.error is None
        # The last tokens may have no text of their own, also those before a switch.
        bare = final or not output.has_text or end < len(output.pieces)
        if not (ended or text or redrafted or (token_ids and bare)):
            return None
        chunk = Chunk(text, token_ids, draft=draft, weight_version=version)
        if output.request.params.logprobs is not None:
            chunk.logprobs = output.logprobs[self.taken_ids : count]
        step_map = output.step_map
        if step_map is not None:
            chunk.step_map = step_map[self.taken_ids : count]
        if ended:
            chunk.finish_reason, chunk.stop_reason = output.finish_reason, output.stop_reason
            chunk.usage = output.usage
        self.taken_pieces, self.taken_ids = end, count
        if not output.text_behind:  # else the newest draft is still to come
            self.taken_draft = output.draft_version
        return chunk


def tell_lanes(cells: Sequence[StreamCell]) -> list[StreamCell]:
    """Tell the outlets of streams that have moved, lane by lane; returns the other streams, and those that
    have ended or whose consumer can lag. One that waits for the end is not told before."""
    others: list[StreamCell] = []
    lane: Lane | None = None
    outlets: list[Outlet] = []
    for cell in cells:
        outlet = cell.outlet
        if cell.max_lag is not None or cell.output.finished or cell.closed:
            others.append(cell)
            continue
        if outlet is None:
            if cell.wants is not _RESULT:
                others.append(cell)
            continue
        if outlet.lane is not lane:
            if lane is not None:
                lane.moved(outlets)
            lane, outlets = outlet.lane, []
        outlets.append(outlet)
    if lane is not None:
        lane.moved(outlets)
    return others


def when_ended(cell: StreamCell, call: Callable[[], object]) -> None:
    """Have ``call`` called once when the request of a stream with this cell has ended, amid the work of the
    engine: it must return at once, not raise, and not refer to the stream. From then on, that can only be
    awaited."""
    cell.waiter, cell.wants = _Callback(call), Want.RESULT
    cell.notify()
