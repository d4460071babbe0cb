"""Report: what a bench tells while it runs, row by row, so that one that is cut off has told something."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["PartReport"]


class PartReport:
    """The part's end of the pipe to :class:`bench.report.Report`; ``send(kind, value)`` is the other."""

    def __init__(self, send: Callable[[str, Any], None], seconds: float) -> None:
        self._send = send
        self._end = time.monotonic() + seconds
        #: seconds of the longest case so far
        self._longest = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the bench should be done; then it is cut off."""
        return self._end - time.monotonic()

    def row(self, **cells: Any) -> None:
        """A line of the bench's table."""
        self._send("row", cells)

    def fact(self, name: str, value: Any) -> None:
        """Something that holds for the whole bench."""
        self._send("fact", (name, value))

    def note(self, text: str) -> None:
        self._send("note", text)

    def failed(self, what: str) -> None:
        """The exception at hand is this bench's failure, and it goes on."""
        self._send("error", f"{what}: {traceback.format_exc(limit=-4)}")

    def guarded(self, what: str, work: Callable[..., object], *arguments: Any) -> None:
        """One case: its exception is a failure of its own. It is left out, with a note, if there is less time
        than the longest case so far has taken."""
        if self._has_time(what):
            start = time.monotonic()
            try:
                work(*arguments)
            except Exception:
                self.failed(what)
            self._took(start)

    async def guarded_async(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        """The same where a case has to be awaited."""
        if self._has_time(what):
            start = time.monotonic()
            try:
                await work()
            except Exception:
                self.failed(what)
            self._took(start)

    def _has_time(self, what: str) -> bool:
        if self.remaining > self._longest:
            return True
        self.note(f"{what}: no time left")
        return False

    def _took(self, start: float) -> None:
        self._longest = max(self._longest, time.monotonic() - start)
