"""Virtual trace: the steps and requests of a simulation, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aioinfer.observe.timeline import events_of, named_event, request_spans

__all__ = ["VirtualTrace"]


class VirtualTrace:
    """Keeps the first ``most`` steps and requests, each 200 to 300 bytes of the file; one lane per replica.
    Times are virtual seconds."""

    def __init__(self, most: int = 200_000) -> None:
        #: steps and requests that are kept, and those that came later
        self.kept = self.left_out = 0
        self._most = most
        self._steps: dict[int, list[Any]] = {}
        self._requests: list[Any] = []

    def step(self, replica: int, what: str, step: int, start: float, end: float, tokens: int) -> None:
        """Note that a replica did this in a step of so many tokens."""
        self._note(self._steps.setdefault(replica, []), (what, step, start, end, tokens))

    def request(self, name: str, start: float, end: float, tokens: int) -> None:
        """Note a request, from its arrival to its end, with its output tokens."""
        self._note(self._requests, (name, start, end, tokens))

    def write(self, path: str | Path) -> None:
        """Write them as JSON in Chrome's trace event format. Raises OSError."""
        events = [*self._lanes(), *request_spans(self._requests, 0.0)]
        facts = {"displayTimeUnit": "ms", "otherData": {"left out": self.left_out}}
        Path(path).write_text(json.dumps({"traceEvents": events, **facts}))

    def _note(self, events: list[Any], event: tuple[Any, ...]) -> None:
        if self.kept < self._most:
            events.append(event)
            self.kept += 1
        else:
            self.left_out += 1

    def _lanes(self) -> Iterator[dict[str, Any]]:
        for lane, (replica, steps) in enumerate(sorted(self._steps.items()), 1):
            yield named_event("thread_name", lane, {"name": f"replica {replica}"})
            yield named_event("thread_sort_index", lane, {"sort_index": lane})
            for event, kept in zip(events_of(lane, (each[:4] for each in steps), 0.0), steps, strict=True):
                yield {**event, "args": {"step": kept[1], "tokens": kept[4]}}
