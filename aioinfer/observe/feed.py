"""StepFeed: what happened since a moment ago, as frames for those who watch an engine live.

Nothing is computed for a feed until a frame is asked for: it reads the lanes of the timeline, which are
written anyway.
"""

from __future__ import annotations

import json
from typing import Any

from aioinfer.observe.stats import EngineStats
from aioinfer.observe.timeline import Lane, Timeline, now

__all__ = ["GAUGES", "StepFeed"]

#: fields of :class:`EngineStats` in a frame
GAUGES = (
    "state",
    "arriving",
    "waiting",
    "running",
    "prefilling",
    "decoding",
    "waiting_tokens",
    "pages_free",
    "pages_fenced",
    "pages_private",
    "pages_cached",
    "pages_total",
    "steps",
    "steps_in_flight",
    "finished",
    "retractions",
    "prefill_tokens",
    "decode_tokens",
    "output_tokens",
    "rounds",
    "queried_tokens",
    "cached_tokens",
    "policy",
    "stalled",
    "overlap_ratio",
    "loop_lag",
    "loop_lag_worst",
)
#: events per lane and frame, which keep a frame at about 1 ms; older ones are left out
_MOST_EVENTS = 512

_Event = tuple[str, int, float, float]


class StepFeed:
    """Frames of one engine, each with the events since the frame before. Used by one thread.

    A frame is JSON. Times are integers, in microseconds since the feed was made::

        {"t": 5120000, "left_out": 0, "stats": {"running": 2, ...},
         "lanes": {"loop": [["plan", 7, 5101200, 40], ...], "launch": [...], "device": [...]}}

    ``lanes`` has (name, step, start, duration) of events that have ended, oldest first, at most 512 per lane;
    ``left_out`` is the number of lanes that had more. ``stats`` has the :data:`GAUGES`.
    """

    def __init__(self) -> None:
        self._origin = now()
        self._timeline: Timeline | None = None
        #: by lane, the last event of the frames so far
        self._last: dict[str, _Event] = {}
        self._stats: dict[str, Any] = {}

    def frame(self, timeline: Timeline, stats: EngineStats) -> tuple[str, bool]:
        """The next frame, and whether it says anything that the one before did not."""
        if timeline is not self._timeline:
            self._timeline, self._last = timeline, {}
        lanes: dict[str, list[list[Any]]] = {}
        left_out = 0
        for lane in (timeline.loop, timeline.launch, timeline.device):
            events, whole = _since(lane, self._last.get(lane.name))
            if events:
                self._last[lane.name] = events[-1]
            left_out += not whole
            lanes[lane.name] = [self._event(event) for event in events]
        gauges = {name: getattr(stats, name) for name in GAUGES}
        news = gauges != self._stats or any(lanes.values())
        self._stats = gauges
        frame = {"t": self._micros(now()), "left_out": left_out, "stats": gauges, "lanes": lanes}
        return json.dumps(frame, separators=(",", ":")), news

    def _event(self, event: _Event) -> list[Any]:
        what, step, start, end = event
        return [what, step, self._micros(start), round(1e6 * (end - start))]

    def _micros(self, moment: float) -> int:
        return round(1e6 * (moment - self._origin))


def _since(lane: Lane, last: _Event | None) -> tuple[list[_Event], bool]:
    """The events of a lane behind ``last``, and whether these are all.

    Another thread appends meanwhile, which moves the others away from the end: one is then seen twice.
    """
    found: list[_Event] = []
    for back in range(1, _MOST_EVENTS + 1):
        try:
            event = lane.events[-back]
        except IndexError:  # fewer, or cleared by now
            break
        if event is last:
            break
        if not found or event is not found[-1]:
            found.append(event)
    else:
        return found[::-1], last is None
    return found[::-1], True
