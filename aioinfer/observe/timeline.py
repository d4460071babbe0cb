"""Timeline: the latest events of the loop, the launch thread and the device, by step.

Always on. Each lane is a bounded deque written by one thread, so an event costs one append of a tuple.
:meth:`Timeline.chrome_trace` exports it for Perfetto and chrome://tracing::

    loop      plan 7 │pack│   resolve 6 │deliver│ plan 8 ...
    launch           │ launch 7 ────────────────│ launch 8 ...
    device             │ forward 7 ─│mask│sample│copy│  forward 8 ...
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

__all__ = ["Lane", "Overlap", "Timeline", "events_of", "named_event", "request_spans"]

#: events kept per lane; 4096 steps of the loop lane
_EVENTS = 1 << 14
#: requests kept
_REQUESTS = 1 << 12
#: events of a piece of a trace
_PIECE = 1 << 6

#: what was done, in which step, start and end
Event: TypeAlias = tuple[str, int, float, float]

now = time.perf_counter


class Lane:
    """Events of one thread: (name, step id, start, end), with times in seconds of ``perf_counter``."""

    __slots__ = ("events", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: deque[Event] = deque(maxlen=_EVENTS)

    def add(self, what: str, step: int, start: float, end: float) -> None:
        """Append a finished event; a full lane drops the oldest one."""
        self.events.append((what, step, start, end))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Device utilisation over all steps that directly followed another step."""

    steps: int
    #: seconds that the device computed, and seconds that it waited for the host between two steps
    busy: float
    gap: float

    @property
    def ratio(self) -> float:
        """Busy time over busy time plus gaps; 1 without gaps."""
        total = self.busy + self.gap
        return self.busy / total if total else 1.0

    @property
    def gap_per_step(self) -> float:
        """Seconds of idle device per step."""
        return self.gap / self.steps if self.steps else 0.0


class DeviceLane(Lane):
    """The device's lane, which also adds up busy time and gaps."""

    __slots__ = ("_ended", "_rested", "busy", "gap", "parts", "steps")

    def __init__(self) -> None:
        super().__init__("device")
        #: seconds by part of the forward, summed over all forwards, where the device counts them
        self.parts: Callable[[], Mapping[str, float]] = dict
        self.clear()

    def clear(self) -> None:
        """Reset events and sums."""
        self.events.clear()
        self.steps = 0
        self.busy = 0.0
        self.gap = 0.0
        self._ended = 0.0
        self._rested = True

    def rest(self) -> None:
        """The device is idle without work: the time until the next step is not a gap."""
        self._rested = True

    def step(self, step: int, start: float, forward: float, mask: float, end: float) -> None:
        """One step from ``start`` to ``end``: the forward ended at ``forward``, the wait for masks at
        ``mask``. A device that cannot separate them passes ``end`` for both."""
        self.add("forward", step, start, forward)
        if mask > forward:
            self.add("mask", step, forward, mask)
        if end > mask:
            self.add("sample", step, mask, end)
        if not self._rested:
            self.steps += 1
            self.gap += max(0.0, start - self._ended)
            self.busy += end - start
        self._rested = False
        self._ended = end


class Timeline:
    """The three lanes of one engine, and the delay of the loop in reading results."""

    __slots__ = ("device", "lag", "lag_worst", "launch", "loop", "requests")

    def __init__(self) -> None:
        self.loop = Lane("loop")
        self.launch = Lane("launch")
        self.device = DeviceLane()
        #: the latest requests that have ended: id, start, end, output tokens
        self.requests: deque[tuple[str, float, float, int]] = deque(maxlen=_REQUESTS)
        #: seconds between the end of a step and its read on the loop: smoothed, and the maximum
        self.lag = 0.0
        self.lag_worst = 0.0

    def noticed(self, seconds: float) -> None:
        """The loop read a result ``seconds`` after its step ended."""
        self.lag += (seconds - self.lag) / 64
        self.lag_worst = max(self.lag_worst, seconds)

    def request(self, name: str, start: float, tokens: int) -> None:
        """A request with the id ``name`` has ended now; ``start``: when it arrived."""
        self.requests.append((name, start, now(), tokens))

    def overlap(self) -> Overlap:
        """Utilisation over all steps so far."""
        device = self.device
        return Overlap(device.steps, device.busy, device.gap)

    def chrome_trace(self) -> str:
        """JSON in Chrome's trace event format; times in microseconds from the first event."""
        return "".join(self.trace_pieces())

    def trace_pieces(self) -> Iterator[str]:
        """:meth:`chrome_trace` in pieces, between which other threads run."""
        lanes: tuple[Lane, ...] = (self.loop, self.launch, self.device)
        kept = [(lane, list(lane.events)) for lane in lanes]
        requests = list(self.requests)
        begun = [events[0][2] for _, events in kept if events] + [start for _, start, _, _ in requests]
        origin = min(begun, default=0.0)
        events = chain(_lanes(kept, origin), request_spans(requests, origin))
        yield '{"traceEvents": ['
        first = True
        while piece := [*islice(events, _PIECE)]:
            yield ("" if first else ", ") + json.dumps(piece)[1:-1]
            first = False
        yield '], "displayTimeUnit": "ms"}'


def _lanes(kept: Iterable[tuple[Lane, list[Event]]], origin: float) -> Iterator[dict[str, Any]]:
    for number, (lane, events) in enumerate(kept, 1):
        yield named_event("thread_name", number, {"name": lane.name})
        yield named_event("thread_sort_index", number, {"sort_index": number})
        yield from events_of(number, events, origin)


def named_event(what: str, lane: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": lane, "name": what, "args": arguments}


def events_of(lane: int, events: Iterable[Event], origin: float) -> Iterator[dict[str, Any]]:
    for what, step, start, end in events:
        yield {
            "ph": "X",
            "pid": 1,
            "tid": lane,
            "name": f"{what} {step}",
            "cat": what,
            "ts": round(1e6 * (start - origin), 3),
            "dur": round(1e6 * (end - start), 3),
            "args": {"step": step},
        }


def request_spans(
    requests: Iterable[tuple[str, float, float, int]], origin: float
) -> Iterator[dict[str, Any]]:
    """Requests as nestable asynchronous events: they overlap, so they have a track each."""
    for number, (name, start, end, tokens) in enumerate(requests):
        shared = {"cat": "request", "id": number, "pid": 1, "tid": 1, "name": name}
        yield {"ph": "b", "ts": round(1e6 * (start - origin), 3), "args": {"tokens": tokens}, **shared}
        yield {"ph": "e", "ts": round(1e6 * (end - origin), 3), **shared}
