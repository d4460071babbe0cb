"""Recorder: counts the requests and steps of an engine while it runs.

A request is counted at its end, from the times that it has anyway; a step adds two numbers. The gaps
between tokens are counted some thousand at a time between turns of the loop, since many long requests may end
at once.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aioinfer.errors import (
    Cancelled,
    ConstraintFailed,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    Rejected,
    StepFailed,
    TimedOut,
)
from aioinfer.observe.metrics import histograms
from aioinfer.observe.metrics.histograms import Counts, Histogram
from aioinfer.observe.observers import Observer

if TYPE_CHECKING:
    from aioinfer.observe.stats import EngineStats
    from aioinfer.request import Output
    from aioinfer.scheduling.step import Step

__all__ = ["CAUSES", "FINISH_REASONS", "Recorder", "Snapshot", "cause_of"]

FINISH_REASONS = ("stop", "length", "abort")

#: Why a request was ended, by its error. "closed": its consumer left, by a disconnect for example.
_CAUSES: dict[type[BaseException], str] = {
    InvalidRequest: "invalid",
    ConstraintFailed: "constraint",
    Rejected: "queue_full",
    Cancelled: "closed",
    OutOfMemory: "out_of_memory",
    StepFailed: "step_failed",
    EngineFailed: "engine_failed",
    EngineClosed: "engine_closed",
}
_CLOSED, _OTHER = "closed", "other"
#: codes of requests that would have been late
_LATE = ("ttft_target", "deadline")
#: every value of the label ``cause``
CAUSES = (*_CAUSES.values(), *_LATE, "waiting_timeout", "running_timeout", _OTHER)

#: times of tokens whose gaps are counted in one turn of the loop, in some 0.1 ms
_TIMES_PER_TURN = 2048


def cause_of(error: BaseException | None) -> str:
    """One of :data:`CAUSES`, for a request that was ended with ``error`` or by its consumer."""
    if error is None:
        return _CLOSED
    if isinstance(error, TimedOut):
        return "running_timeout" if error.phase == "running" else "waiting_timeout"
    if isinstance(error, Rejected):
        return error.code if error.code in _LATE else _CAUSES[Rejected]
    return next((cause for kind, cause in _CAUSES.items() if isinstance(error, kind)), _OTHER)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that the metrics of an engine are made of, at one moment."""

    stats: EngineStats
    #: tokens that no consumer has read yet, over all open streams
    backlog: int
    #: by the names of :class:`Recorder`
    histograms: Mapping[str, Counts]
    finished: Mapping[str, int]
    aborts: Mapping[str, int]
    rejections: int


class Recorder(Observer):
    """Histograms and counts of one running engine; ``histograms`` by name, in seconds or counts.

    Each has one observation per request that reached what it measures, however the request ended;
    ``gap`` one per time at which tokens were read after others of the same request, ``step_tokens`` and
    ``lag`` one per step, ``n`` one per call of the HTTP API.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        max_model_len: int,
        stats: Callable[[], tuple[EngineStats, int]],
    ) -> None:
        """``stats`` returns the engine's statistics and its backlog of tokens."""
        self._loop = loop
        self._stats = stats
        tokens = histograms.token_bounds(max_model_len)
        self.ttft = Histogram(histograms.TTFT)
        self.gap = Histogram(histograms.GAP)
        self.per_token = Histogram(histograms.GAP)
        self.queued = Histogram(histograms.LATENCY)
        self.prefill = Histogram(histograms.LATENCY)
        self.decode = Histogram(histograms.LATENCY)
        self.inference = Histogram(histograms.LATENCY)
        self.whole = Histogram(histograms.LATENCY)
        self.prompt_tokens = Histogram(tokens)
        self.output_tokens = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.n = Histogram(histograms.N)
        self.step_tokens = Histogram(histograms.STEP_TOKENS)
        self.lag = Histogram(histograms.LAG)
        self.histograms = {name: each for name, each in vars(self).items() if isinstance(each, Histogram)}
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.aborts = dict.fromkeys(CAUSES, 0)
        self.rejections = 0
        #: times of tokens whose gaps are not counted yet, and the index of the first
        self._uncounted: deque[tuple[list[float], int]] = deque()
        self._counting = False
        # Not the one of the task in which a request ended.
        self._context = contextvars.Context()
        self._gap_bounds = np.array(histograms.GAP)

    # -- as Observer ----------------------------------------------------------------------------

    def ended(self, output: Output) -> None:
        """O(1) in its tokens."""
        reason = output.finish_reason or "abort"
        if reason == "abort" or output.error is not None:
            reason = "abort"
            cause = cause_of(output.error)
            self.aborts[cause] += 1
            self.rejections += isinstance(output.error, Rejected)
        self.finished[reason] += 1
        arrival, admitted, finished = output.arrival, output.admitted_at, output.finished_at
        times = output.computed_times
        if output.accepted:
            self.prompt_tokens.observe(len(output.prompt_ids))
            self.output_tokens.observe(len(times))
            if output.request.params.max_tokens is not None:
                self.max_tokens.observe(output.request.params.max_tokens)
        if admitted is not None:
            self.queued.observe(admitted - arrival)
            if finished is not None:
                self.inference.observe(finished - admitted)
        if finished is not None:
            self.whole.observe(finished - arrival)
        if times:
            first, last = times[0], times[-1]
            self.ttft.observe(first - arrival)
            self.decode.observe(last - first)
            if admitted is not None:
                self.prefill.observe(first - admitted)
            if len(times) > 1:
                self.per_token.observe((last - first) / (len(times) - 1))
                self._uncounted.append((times, 0))
                self._count_soon()

    def rejected(self) -> None:
        self.rejections += 1

    def stepped(self, step: Step, lag: float) -> None:
        self.step_tokens.observe(step.num_tokens)
        self.lag.observe(lag)

    def called(self, n: int) -> None:
        """A call of the HTTP API asks for ``n`` choices."""
        self.n.observe(n)

    # -- gaps -----------------------------------------------------------------------------------

    @property
    def counted(self) -> bool:
        """The gaps of all requests that have ended are in the histogram."""
        return not self._uncounted

    def _count_soon(self) -> None:
        if not self._counting:
            self._counting = True
            self._loop.call_soon(self._count, context=self._context)

    def _count(self) -> None:
        """Count as many gaps as one turn of the loop may take; others follow in later turns."""
        self._counting = False
        joined: list[float] = []
        #: of the gaps that are none, from one request to the next
        borders: list[int] = []
        while self._uncounted and len(joined) < _TIMES_PER_TURN:
            times, start = self._uncounted.popleft()
            stop = min(len(times), start + max(2, _TIMES_PER_TURN - len(joined)))
            joined += times[start:stop]
            borders.append(len(joined) - 1)
            if stop < len(times):
                self._uncounted.appendleft((times, stop - 1))
        gaps = np.diff(np.array(joined))
        gaps[borders[:-1]] = 0.0
        gaps = gaps[gaps > 0.0]  # tokens of one step are read together
        buckets = np.bincount(np.searchsorted(self._gap_bounds, gaps), minlength=len(self.gap.counts))
        self.gap.add(buckets.tolist(), float(gaps.sum()))
        if self._uncounted:
            self._count_soon()

    # -- reading --------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """O(open streams), some 50 us without any. From another thread than the loop's, what belongs together
        may be some microseconds apart."""
        stats, backlog = self._stats()
        return Snapshot(
            stats=stats,
            backlog=backlog,
            histograms={name: each.read() for name, each in self.histograms.items()},
            finished=dict(self.finished),
            aborts=dict(self.aborts),
            rejections=self.rejections,
        )
