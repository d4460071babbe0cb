"""Rows: how the output of an attempt has changed, in one process and in messages between two."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from aioinfer.outputs import Draft, FinishReason, TokenLogprob
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.sent_errors import SentError

__all__ = ["Ending", "Rows", "check", "restored", "sendable_part"]

_Count = Annotated[int, Meta(ge=0)]


class Ending(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The end of an attempt that was not lost."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    error: BaseException | None = None
    #: tokens of the prediction that were right, and that were not
    predicted: tuple[_Count, _Count] = (0, 0)
    #: of a request that pools, what it pooled
    pooled: npt.NDArray[np.float32] | None = None


class Rows(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """New output of one attempt, from one step or several. Lists are as long as ``ids`` or empty."""

    #: index in the output of the first of ``ids``, and in its text of the first character of ``text``
    first: _Count
    at: _Count
    ids: Sequence[_Count] = ()
    text: str = ""
    #: when the loop read them; empty: now
    times: Sequence[float] = ()
    #: of the first step, in the first rows after it; in a message: how many seconds ago it was
    admitted_at: float | None = None
    #: counts with ``admitted_at``
    cached_tokens: _Count = 0
    #: the output is that of an undisturbed request
    identical: bool = True
    logprobs: Sequence[TokenLogprob] = ()
    #: those that follow the ones of the rows before, or all of them with other weights and without output
    prompt_logprobs: Sequence[TokenLogprob] = ()
    #: of a diffusion model, the rounds that wrote the tokens
    steps: Sequence[int] = ()
    #: makes the newest draft; None: there is no new one
    draft: Callable[[], Draft | None] | None = None
    #: nothing follows. It comes with the last tokens: an output is never complete and without its end
    ending: Ending | None = None
    #: of the weights that computed the tokens; None: those of the rows before
    weight_version: int | None = None
    #: of the files of the adapter that computes them; empty: none, or as of the rows before
    adapter_fingerprint: str = ""


def check(rows: Iterable[tuple[int, Rows]], vocab_size: int) -> None:
    """Raise FrameError if rows of a message do not fit together, or have tokens beyond ``vocab_size``."""
    for _, row in rows:
        if row.ids and max(row.ids) >= vocab_size:
            raise FrameError(f"a token {max(row.ids)} that is not in the vocabulary")
        for name, values in (("logprobs", row.logprobs), ("steps", row.steps)):
            if len(values) not in (0, len(row.ids)):
                raise FrameError(f"{name} for other tokens than there are")
        row.times = ()  # by another clock


# -- what is encoded in its own way ---------------------------------------------------------------------


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An array of float32."""

    shape: tuple[_Count, ...]
    data: bytes


def sendable_part(value: Any) -> Any:
    """The form in which a message has an error, an array, or what makes a draft."""
    if isinstance(value, BaseException):
        return SentError.of(value)
    if isinstance(value, np.ndarray):
        return _Array(value.shape, value.astype("<f4").tobytes())
    if callable(value):
        return value()
    # As msgspec asks of an encoder's hook: the fields of messages have no other types.
    raise NotImplementedError(f"a {type(value).__name__} in a message")


def restored(kind: Any, value: Any) -> Any:
    """The value again that :func:`sendable_part` was given, for a field of this type. Raises ValueError."""
    if kind is BaseException:
        return msgspec.convert(value, SentError).error()
    if getattr(kind, "__origin__", None) is np.ndarray:
        array = msgspec.convert(value, _Array)
        if 4 * math.prod(array.shape) != len(array.data):
            raise ValueError("an array of another size than its shape says")
        return np.frombuffer(array.data, "<f4").astype(np.float32).reshape(array.shape)
    return functools.partial(_same, msgspec.convert(value, Draft))


def _same(draft: Draft) -> Draft:
    return draft
