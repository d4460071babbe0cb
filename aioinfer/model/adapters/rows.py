"""Runs of tokens with one adapter, from the lists of a batch on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Run", "blocks", "runs"]


class Run(NamedTuple):
    """The tokens [first, stop) of a step, all with the adapter of one slot."""

    slot: int
    first: int
    stop: int


def runs(slots: Sequence[int], q_lens: Sequence[int]) -> list[Run]:
    """The tokens with adapters in order, neighbours of one slot together.

    Args:
        slots: of each row; 0 is none.
        q_lens: tokens of each row.
    """
    found: list[Run] = []
    at = 0
    for slot, count in zip(slots, q_lens, strict=True):
        stop = at + count
        if slot:
            last = found[-1] if found else None
            if last is not None and last.slot == slot and last.stop == at:
                found[-1] = Run(slot, last.first, stop)
            else:
                found.append(Run(slot, at, stop))
        at = stop
    return found


def blocks(of: Iterable[Run], size: int) -> list[Run]:
    """The same in runs of at most ``size`` tokens."""
    return [
        Run(slot, at, min(at + size, stop)) for slot, first, stop in of for at in range(first, stop, size)
    ]
