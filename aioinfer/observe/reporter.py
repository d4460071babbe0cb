"""Reporter: one line of figures in the log every some seconds, while there is something to say."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable

from aioinfer.observe.observers import Observer
from aioinfer.observe.stats import EngineStats

__all__ = ["STATS", "Reporter", "line"]

#: of the lines; level INFO
STATS = logging.getLogger("aioinfer.stats")


def line(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """The log line: throughput over ``seconds``, and the present load."""
    queried = after.queried_tokens - before.queried_tokens
    hits = after.cached_tokens - before.cached_tokens
    parts = [
        f"prompt {(after.prefill_tokens - before.prefill_tokens) / seconds:.1f} tok/s",
        f"output {(after.output_tokens - before.output_tokens) / seconds:.1f} tok/s",
        f"running {after.running}",
        f"waiting {after.waiting + after.arriving}",
        f"KV {100 * after.kv_usage:.1f} %",
        f"cache hits {100 * hits / queried:.1f} %" if queried else "cache hits -",
        f"loop lag {1e3 * after.loop_lag:.2f} ms",
    ]
    return ", ".join(parts)


def _idle(before: EngineStats, after: EngineStats) -> bool:
    work = after.running or after.waiting or after.arriving or after.shelved
    return not work and (before.steps, before.output_tokens) == (after.steps, after.output_tokens)


class Reporter(Observer):
    """Logs :func:`line` every ``interval`` seconds; of an idle engine once. Works on a timer of the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval: float,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._interval = interval
        self._stats = stats
        self._clock = clock
        self._context = contextvars.Context()
        self._before = stats()
        self._since = clock()
        self._silent = False
        self._timer = self._again()

    def _again(self) -> asyncio.TimerHandle:
        return self._loop.call_later(self._interval, self._report, context=self._context)

    def _report(self) -> None:
        now, stats = self._clock(), self._stats()
        idle = _idle(self._before, stats)
        if not (idle and self._silent):
            text = line(self._before, stats, max(now - self._since, 1e-9))
            STATS.info("%s%s", text, ", idle" if idle else "")
        self._silent = idle
        self._before, self._since = stats, now
        self._timer = self._again()

    def closed(self) -> None:
        self._timer.cancel()
