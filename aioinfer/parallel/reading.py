"""Reading: how the stream of an attempt becomes rows, next to its engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from aioinfer.loop.options import RequestOptions
from aioinfer.parallel.record import Ending, Record
from aioinfer.parallel.replica import Rows
from aioinfer.stream import Outlet, Stream, when_ended

__all__ = ["Reading", "ReadingLane", "options_of"]


def options_of(record: Record, waiting: float | None, running: float | None) -> RequestOptions:
    """What an attempt at a record is queued with; ``waiting`` and ``running``: seconds that are left."""
    return dataclasses.replace(
        record.options,
        waiting_timeout=waiting,
        running_timeout=running,
        queue_behind=0,
        request_id=record.request_id,
    )


class ReadingLane(Protocol):
    """What is told of readings, amid a step: nothing is raised."""

    def moved(self, outlets: Sequence[Outlet]) -> None:
        """As in Lane: a step has moved these."""

    def finished(self, reading: Reading) -> None:
        """Its stream has ended. Once."""


class Reading:
    """Reads the stream of one attempt: an outlet that takes tokens as well as text."""

    __slots__ = ("_at", "_drafts", "_first", "_pieces", "lane", "request", "stream")

    def __init__(self, lane: ReadingLane, stream: Stream, resumed: int) -> None:
        """``resumed``: tokens of the output with which the stream began."""
        self.lane = lane
        self.stream = stream
        self.request = stream.cell.request
        #: tokens, pieces and characters of its output that were taken, and the version of the newest draft
        self._first = resumed
        self._pieces = self._at = self._drafts = 0

    def begin(self) -> None:
        """From now on, the lane is told."""
        self.stream.cell.outlet = self
        when_ended(self.stream, self._ended)

    @property
    def news(self) -> bool:
        """There is something to take."""
        request = self.request
        return (
            len(request.token_times) > self._first  # it has fewer until a restored request is prepared
            or len(request.text.pieces) != self._pieces
            or self._redrafted
        )

    @property
    def _redrafted(self) -> bool:
        return self.request.draft_version > self._drafts and not self.request.text_behind

    def take(self, ending: Ending | None = None) -> Rows:
        """What is new, and the end. Of what weights of several versions have computed, that of the first of
        them: there are news still, or the end has not come."""
        request, first, at, redrafted = self.request, self._first, self._at, self._redrafted
        count, pieces = max(first, len(request.token_times)), len(request.text.pieces)
        version, switch = request.newest_version, request.switch_behind(first, self._pieces)
        if switch is not None:
            count, pieces, version = switch
            redrafted, ending = False, None
        text = "".join(request.text.pieces[self._pieces : pieces])
        self._first, self._pieces, self._at = count, pieces, at + len(text)
        if redrafted:
            self._drafts = request.draft_version
        steps = request.cursor.step_map
        return Rows(
            first,
            at,
            request.output_ids[first:count],
            text,
            request.token_times[first:count],
            admitted_at=request.admitted_at,
            cached_tokens=request.kv.cached_tokens,
            identical=request.identical,
            weight_version=version,
            adapter_fingerprint="" if request.adapter is None else request.adapter.fingerprint,
            logprobs=() if request.params.logprobs is None else request.logprobs[first:count],
            prompt_logprobs=request.prompt_logprobs,
            steps=() if steps is None else steps[first:count],
            draft=request.draft if redrafted else None,
            ending=ending,
        )

    def ending(self) -> Ending:
        """How the stream has ended."""
        request, usage = self.request, self.request.usage
        predicted = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
        pooled = None
        if request.pooled is not None and request.error is None:
            pooled = request.pooled.result(len(request.prompt_ids))
        return Ending(request.finish_reason, request.stop_reason, request.error, predicted, pooled)

    def leave(self) -> None:
        """Nothing more is wanted."""
        self.stream.leave()

    def _ended(self) -> None:
        self.lane.finished(self)
