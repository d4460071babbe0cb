"""BlockState: the state of one block between two rounds, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

__all__ = ["BlockState", "Tops"]

#: by position, tokens and their logprobs, the likeliest first; empty where nothing was written
Tops: TypeAlias = "list[tuple[tuple[int, float], ...]]"


@dataclass(frozen=True, slots=True)
class BlockState:
    """The state of a block of B positions after a round.

    It is complete: a retracted request continues its block from it, with the same tokens, once it is admitted
    again.
    """

    #: position of the block in its sequence
    start: int
    #: by position: the token, the mask id if unknown
    ids: Sequence[int]
    #: by position: whether it holds a token
    known: Sequence[bool]
    #: by position: the round that wrote the token, -1 for none and for the prompt
    written_in: Sequence[int]
    #: by position: logprob of the token when it was written; 0 where none was
    logprobs: Sequence[float]
    #: rounds so far
    rounds: int
    #: ids are final
    done: bool
    #: the last round wrote something, so the K/V of its forward are not those of ``ids``
    changed: bool
    #: its logits were not finite; the request fails
    failed: bool
    #: the counters of the algorithm, opaque to everything else
    private: tuple[int, ...] = ()
    #: by position: the token of a way on that a grammar allows, -1 for none; empty: there is none
    path: Sequence[int] = ()
    #: the alternatives of each token when it was written; empty: none were asked for. Not in the device's
    #: record
    tops: Sequence[tuple[tuple[int, float], ...]] = ()

    @classmethod
    def unknown(cls, start: int, given: Sequence[int], size: int, mask_id: int) -> Self:
        """A block before its first round: the prompt's tokens ``given``, up to ``size``, then unknown
        ones."""
        rest = size - len(given)
        return cls(
            start=start,
            ids=[*given, *[mask_id] * rest],
            known=[True] * len(given) + [False] * rest,
            written_in=[-1] * size,
            logprobs=[0.0] * size,
            rounds=0,
            done=not rest,
            changed=False,
            failed=False,
        )
