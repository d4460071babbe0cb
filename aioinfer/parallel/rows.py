"""Rows of a step as messages carry them. Times are ages, since two processes need not have one clock."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from aioinfer.outputs import Draft, FinishReason, TokenLogprob
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.sent_errors import SentError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Ending", "Row", "Rows", "packed", "unpacked"]


class Ending:
    """How an attempt ended, when it was not lost."""

    __slots__ = ("error", "finish_reason", "pooled", "predicted", "stop_reason")

    def __init__(
        self,
        finish_reason: Any,
        stop_reason: str | int | None = None,
        error: BaseException | None = None,
        predicted: tuple[int, int] = (0, 0),
        pooled: Any = None,
    ) -> None:
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.error = error
        #: tokens of the prediction that were right, and that were not
        self.predicted = predicted
        #: of a request that pools, what it pooled
        self.pooled = pooled


class Rows:
    """What a step brought one attempt, or several steps did. Lists are as long as ``ids`` or empty."""

    __slots__ = ("adapter_fingerprint", "admitted_at", "at", "cached_tokens", "draft", "ending", "first",
                 "identical", "ids", "logprobs", "prompt_logprobs", "steps", "text", "times",
                 "weight_version")  # fmt: skip

    def __init__(
        self,
        first: int,
        at: int,
        ids: Sequence[int] = (),
        text: str = "",
        times: Sequence[float] = (),
        *,
        admitted_at: float | None = None,
        cached_tokens: int = 0,
        identical: bool = True,
        logprobs: Sequence[TokenLogprob] = (),
        prompt_logprobs: Sequence[TokenLogprob] = (),
        steps: Sequence[int] = (),
        draft: Callable[[], Draft | None] | None = None,
        ending: Ending | None = None,
        weight_version: int | None = None,
        adapter_fingerprint: str = "",
    ) -> None:
        #: index in the output of the first of ``ids``, and in its text of the first character of ``text``
        self.first = first
        self.at = at
        self.ids = ids
        self.text = text
        #: when the loop read them
        self.times = times
        self.admitted_at = admitted_at
        self.cached_tokens = cached_tokens
        #: the output is that of an undisturbed request
        self.identical = identical
        self.logprobs = logprobs
        #: all that are known by now
        self.prompt_logprobs = prompt_logprobs
        #: of a diffusion model, the rounds that wrote the tokens
        self.steps = steps
        #: makes the newest draft; None: there is no new one
        self.draft = draft
        #: nothing follows. It comes with the last tokens: an output is never complete and without its end
        self.ending = ending
        #: of the weights that computed the tokens; None: those of the rows before
        self.weight_version = weight_version
        #: of the files of the adapter that computes them; empty: none, or as of the rows before
        self.adapter_fingerprint = adapter_fingerprint


_Count = Annotated[int, Meta(ge=0)]
_Logprob = tuple[int, float, tuple[tuple[int, float], ...]]


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array of float32."""

    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 0 or 4 * math.prod(self.shape) != len(self.data):
            raise ValueError("an array of another size than its shape says")

    def array(self) -> npt.NDArray[np.float32]:
        import numpy as np

        return np.frombuffer(self.data, "<f4").astype(np.float32).reshape(self.shape)


class _End(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    finish_reason: FinishReason
    stop_reason: str | int | None
    error: SentError | None
    predicted: tuple[int, int]
    pooled: _Array | None


class _Rare(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Fields that few rows have."""

    #: seconds since the first step
    admitted: float | None = None
    cached_tokens: int = 0
    weights: int | None = None
    adapter: str = ""
    logprobs: list[_Logprob] = []
    prompt_logprobs: list[_Logprob] = []
    steps: list[int] = []
    draft: Draft | None = None
    ending: _End | None = None


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Output of one step for one attempt."""

    number: int
    first: _Count
    at: _Count
    ids: tuple[_Count, ...]
    text: str
    identical: bool
    rare: _Rare | None


def packed(rows: Iterable[tuple[int, Rows]], now: float) -> list[Row]:
    """Rows of attempts for a message. ``prompt_logprobs`` are those that were not sent before, drafts those
    of this moment, and ``admitted_at`` and ``cached_tokens`` count where the former is not None."""
    return [
        Row(number, row.first, row.at, row.ids, row.text, row.identical, _rare(row, now))  # type: ignore[arg-type]
        for number, row in rows
    ]


def _rare(row: Rows, now: float) -> _Rare | None:
    found: dict[str, Any] = {}
    if row.admitted_at is not None:
        found["admitted"], found["cached_tokens"] = max(0.0, now - row.admitted_at), row.cached_tokens
    if row.weight_version is not None:
        found["weights"] = row.weight_version
    if row.adapter_fingerprint:
        found["adapter"] = row.adapter_fingerprint
    if row.logprobs:
        found["logprobs"] = _plain(row.logprobs)
    if row.prompt_logprobs:
        found["prompt_logprobs"] = _plain(row.prompt_logprobs)
    if row.steps:
        found["steps"] = row.steps
    if row.draft is not None and (draft := row.draft()) is not None:
        found["draft"] = draft
    if row.ending is not None:
        found["ending"] = _end(row.ending)
    return _Rare(**found) if found else None


def _plain(logprobs: Sequence[TokenLogprob]) -> list[_Logprob]:
    return [(each.token_id, each.logprob, each.top) for each in logprobs]


def _end(ending: Ending) -> _End:
    error, pooled = ending.error, ending.pooled
    return _End(
        ending.finish_reason,
        ending.stop_reason,
        None if error is None else SentError.of(error),
        ending.predicted,
        None if pooled is None else _Array(pooled.shape, pooled.astype("<f4").tobytes()),
    )


def unpacked(rows: Iterable[Row], now: float, vocab_size: int) -> list[tuple[int, Rows]]:
    """The rows of a message, with ``now`` as the time of all their tokens, which are below ``vocab_size``.
    Raises FrameError."""
    found: list[tuple[int, Rows]] = []
    one = (now,)
    for sent in rows:
        ids, count = sent.ids, len(sent.ids)
        if count and max(ids) >= vocab_size:
            raise FrameError(f"a token {max(ids)} that is not in the vocabulary")
        row = Rows(sent.first, sent.at, ids, sent.text, one if count == 1 else one * count)
        row.identical = sent.identical
        if sent.rare is not None:
            _add(row, sent.rare, now)
        found.append((sent.number, row))
    return found


def _add(row: Rows, rare: _Rare, now: float) -> None:
    for name, values in (("logprobs", rare.logprobs), ("steps", rare.steps)):
        if len(values) not in (0, len(row.ids)):
            raise FrameError(f"{name} for other tokens than there are")
    if rare.admitted is not None:
        row.admitted_at, row.cached_tokens = now - rare.admitted, rare.cached_tokens
    row.weight_version, row.adapter_fingerprint = rare.weights, rare.adapter
    row.logprobs = [TokenLogprob(*each) for each in rare.logprobs]
    row.prompt_logprobs = [TokenLogprob(*each) for each in rare.prompt_logprobs]
    row.steps = rare.steps
    if rare.draft is not None:
        row.draft = functools.partial(_same, rare.draft)
    if rare.ending is not None:
        row.ending = _ending(rare.ending)


def _same(draft: Draft) -> Draft:
    return draft


def _ending(end: _End) -> Ending:
    error = None if end.error is None else end.error.error()
    pooled = None if end.pooled is None else end.pooled.array()
    return Ending(end.finish_reason, end.stop_reason, error, end.predicted, pooled)
