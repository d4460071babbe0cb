"""Request: one sequence being generated, and everything the scheduler knows about it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from aioinfer.outputs import FinishReason, RequestMetrics, Result, Usage
from aioinfer.text.output import OutputText

if TYPE_CHECKING:
    from aioinfer.params import SamplingParams

__all__ = ["Request", "RequestState"]


class RequestState(Enum):
    """``WAITING -> RUNNING -> FINISHED``; retraction goes back from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence. Only the thread that plans (the event loop) reads or writes it.

    Positions of a running request, with two tokens in flight::

        prompt_ids            output_ids     pending
        |---------------------|--------------|--|     length = prompt + output + pending
        |-------- computed ------------------|        KV written by launched steps

    ``pending`` counts placeholders: tokens sampled on the device that the host has not read.
    """

    __slots__ = (
        "admitted_at",
        "arrival",
        "computed",
        "consumer",
        "error",
        "finish_reason",
        "finished_at",
        "key",
        "last_step",
        "max_length",
        "output_ids",
        "pages",
        "params",
        "pending",
        "prompt_ids",
        "relay_ready",
        "retractions",
        "seed",
        "sent_pages",
        "slot",
        "state",
        "stop_ids",
        "stop_reason",
        "text",
        "token_times",
    )

    def __init__(
        self,
        key: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        stop_ids: frozenset[int],
        max_length: int,
        arrival: float = 0.0,
        text: OutputText | None = None,
    ) -> None:
        #: minted by the engine, increasing with arrival; a client's own id is only a label
        self.key = key
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        #: prompt and output together never exceed this
        self.max_length = max_length
        self.arrival = arrival
        self.admitted_at: float | None = None
        self.finished_at: float | None = None
        self.state = RequestState.WAITING
        self.output_ids: list[int] = []
        self.token_times: list[float] = []
        self.pending = 0
        self.computed = 0
        self.slot = 0
        self.pages: list[int] = []
        #: how many of ``pages`` the device side has been told of
        self.sent_pages = 0
        #: the newest launched step that holds a row of this request
        self.last_step = 0
        #: the relay cell of ``slot`` holds (or will hold) this request's newest token
        self.relay_ready = False
        self.retractions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: BaseException | None = None
        #: the text side of the output
        self.text: OutputText = text if text is not None else OutputText(None)
        #: who hears of its progress; the engine keeps a StreamCell here
        self.consumer: object | None = None

    @property
    def length(self) -> int:
        """Tokens of the sequence, placeholders included."""
        return len(self.prompt_ids) + len(self.output_ids) + self.pending

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def usage(self) -> Usage:
        return Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.output_ids))

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(self.arrival, self.admitted_at, self.finished_at, tuple(self.token_times))

    def result(self) -> Result:
        """What there is of the output; final once the request has finished."""
        return Result(
            text=self.text.text,
            token_ids=list(self.output_ids),
            finish_reason=self.finish_reason or "abort",
            usage=self.usage,
            stop_reason=self.stop_reason,
            metrics=self.metrics,
        )

    def known_ids(self, start: int, stop: int) -> Sequence[int]:
        """Host-known token ids at positions [start, stop)."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return [*self.prompt_ids[start:], *self.output_ids[: stop - prompt]]

    def __repr__(self) -> str:
        return (
            f"<Request {self.key} {self.state.value} prompt={len(self.prompt_ids)} "
            f"output={len(self.output_ids)}+{self.pending} computed={self.computed} slot={self.slot}>"
        )
