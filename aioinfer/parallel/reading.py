"""Reading: how the stream of an attempt becomes rows, next to its engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

from aioinfer.cells import Lane, when_ended
from aioinfer.parallel.record import Record, TimeLeft
from aioinfer.parallel.rows import Ending, Rows
from aioinfer.request import Request
from aioinfer.stream import Stream

__all__ = ["Reading", "request_of"]


def request_of(record: Record, left: TimeLeft) -> Request:
    """The request that an attempt at a record is queued with."""
    return dataclasses.replace(
        record.request,
        params=record.params,
        waiting_timeout=left.waiting,
        running_timeout=left.running,
        deadline=left.deadline,
        ttft_target=left.ttft_target,
        queue_behind=0,
        request_id=record.output.request_id,
    )


class Reading:
    """Reads the stream of one attempt: an outlet that takes tokens as well as text."""

    __slots__ = ("_admitted", "_at", "_drafts", "_first", "_pieces", "_scored", "_version", "lane", "output",
                 "stream")  # fmt: skip

    def __init__(self, lane: Lane, stream: Stream, resumed: int) -> None:
        """``resumed``: tokens of the output with which the stream began."""
        self.lane = lane
        self.stream = stream
        self.output = stream.cell.output
        #: what was taken: tokens, pieces and characters of its output, logprobs of the prompt, the version of
        #: the newest draft, and that of the weights
        self._first = resumed
        self._pieces = self._at = self._scored = self._drafts = 0
        self._version: int | None = None
        self._admitted = False

    def begin(self, finished: Callable[[Self], None]) -> None:
        """From now on, the lane is told what moves it, and ``finished`` called once when the stream has
        ended, amid a step."""
        self.stream.cell.outlet = self
        when_ended(self.stream.cell, functools.partial(self._ended, finished))

    def _ended(self, finished: Callable[[Self], None]) -> None:
        self.stream.cell.outlet = None  # else prompts stay until cycles are collected
        finished(self)

    @property
    def news(self) -> bool:
        """There is something to take."""
        output = self.output
        return (
            len(output.token_times) > self._first  # it has fewer until a restored request is prepared
            or len(output.pieces) != self._pieces
            or self._redrafted
        )

    @property
    def _redrafted(self) -> bool:
        return self.output.draft_version > self._drafts and not self.output.text_behind

    def take(self, *, ended: bool = False) -> Rows:
        """The output that is new since the last call, and the end of a stream that has ``ended``. If weights
        of several versions have computed it, only that of the first of them; the rest and the end are
        for further calls."""
        output, first, at, redrafted = self.output, self._first, self._at, self._redrafted
        count, pieces = max(first, len(output.token_times)), len(output.pieces)
        version, switch = output.newest_version, output.switch_after(first, self._pieces)
        if switch is not None:
            count, pieces, version = switch
            redrafted = ended = False
        text = "".join(output.pieces[self._pieces : pieces])
        self._first, self._pieces, self._at = count, pieces, at + len(text)
        if redrafted:
            self._drafts = output.draft_version
        times = output.token_times[first:count]
        found = Rows(first, at, output.token_ids[first:count], text, times, identical=output.identical)
        if not self._admitted:
            self._admitted = output.admitted_at is not None
            found.admitted_at, found.cached_tokens = output.admitted_at, output.cached_tokens
            found.adapter_fingerprint = output.adapter_fingerprint
        if version != self._version:
            self._version = found.weight_version = version
            if not first:
                self._scored = 0  # nothing was output, and all of them are computed again
        if output.prompt_logprobs:
            found.prompt_logprobs = output.prompt_logprobs[self._scored :]
            self._scored = len(output.prompt_logprobs)
        if output.request.params.logprobs is not None:
            found.logprobs = output.logprobs[first:count]
        if output.step_map is not None:
            found.steps = output.step_map[first:count]
        if redrafted:
            found.draft = output.draft
        if ended:
            found.ending = self._ending()
        return found

    def _ending(self) -> Ending:
        output = self.output
        predicted = output.accepted_prediction, output.rejected_prediction
        pooled = output.pooled if output.error is None else None
        return Ending(output.finish_reason or "abort", output.stop_reason, output.error, predicted, pooled)
