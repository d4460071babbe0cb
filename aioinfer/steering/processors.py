"""Logits processors: functions of a program that decide how an output goes on.

A processor is called for each position at which a token is sampled::

    def processor(ids, logits):          # async def: the row waits for it, and no other row does
        logits[forbidden] = -inf         # None: a token is sampled from the logits as they are now
        return [5, 7]                    # or exactly these tokens come next

``ids``: int64 [n], the tokens of prompt and output so far, which cannot be changed. ``logits``: float32 [V],
those of the model with ``logit_bias``, to be changed in place. Masks of grammars, penalties, temperature and
filters are applied to what it leaves, and logprobs are those of the model. Tokens that it returns pass no
mask: one that a grammar does not allow fails the request, and an end token ends it. Both arrays are valid
until it returns; ``torch.from_numpy(logits)`` shares the memory.

It must be a function of its arguments: it can be called several times for a position, for drafts that turn
out wrong and after a step that failed. One with a state has the methods of :class:`Stateful` as well. One
with a method ``batch`` and without a state is called once in a step for all rows that have the same object,
if it is the only one of theirs::

    def batch(self, ids: list[NDArray], logits: list[NDArray]) -> list[Sequence[int] | None]: ...

One with an attribute ``idle`` is not called for that many tokens more, whatever they are: it would decide
nothing.

A plain one runs on the thread of the device, and every row of the step waits for it; one that takes longer
than ``grammar_patience`` is called on a worker thread from then on, until it has been quick again, and waited
for like a coroutine.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Forced", "Ids", "Logits", "LogitsProcessor", "Stateful", "waits"]

Ids: TypeAlias = "npt.NDArray[np.int64]"
Logits: TypeAlias = "npt.NDArray[np.float32]"
#: the tokens that come next; None: one is sampled
Forced: TypeAlias = "Sequence[int] | None"
LogitsProcessor: TypeAlias = "Callable[[Ids, Logits], Forced | Awaitable[Forced]]"


@runtime_checkable
class Stateful(Protocol):
    """A processor with a state of one output: each request, fork, draft and retry has a copy."""

    def accept(self, token: int) -> None:
        """The output goes on with a token: called for each, in order, before the next decision."""

    def copy(self) -> Self:
        """Another one in the same state."""


def waits(processor: Any) -> bool:
    """It is a coroutine function, or an object that is called like one."""
    return inspect.iscoroutinefunction(processor) or inspect.iscoroutinefunction(
        getattr(processor, "__call__", None)  # noqa: B004
    )
