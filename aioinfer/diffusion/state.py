"""BlockState: one block between two rounds, as the host knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

__all__ = ["BlockState"]


@dataclass(frozen=True, slots=True)
class BlockState:
    """What a round has left of a block of B positions.

    Everything that a row remembers: handed back to the device with its next admission, the block goes on
    as if nothing had happened.
    """

    #: where the block begins in its sequence
    start: int
    #: by position; the mask id where nothing is known
    ids: Sequence[int]
    #: by position: there is a token
    known: Sequence[bool]
    #: by position: the round that wrote the token, -1 for none and for the prompt
    written_in: Sequence[int]
    #: by position: how likely the token was to the model when it was written (log); 0 where none was
    logprobs: Sequence[float]
    #: forwards that the algorithm has had for the block
    rounds: int
    #: ids are final
    done: bool
    #: the last round wrote something, so the K/V of its forward are not those of ``ids``
    changed: bool
    #: its logits were not finite; the request fails
    failed: bool
    #: what the algorithm remembers; nobody else's business
    private: tuple[int, ...] = ()

    @classmethod
    def unknown(cls, start: int, given: Sequence[int], size: int, mask_id: int) -> Self:
        """Before the first round: some tokens of the prompt, fewer than ``size``, and nothing behind."""
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
