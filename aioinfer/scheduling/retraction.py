"""Retraction: the order in which requests lose slot and pages when others need them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from aioinfer.scheduling.sequence import Sequence

__all__ = ["victims"]


def victims(running: Collection[Sequence]) -> Iterator[Sequence]:
    """Idle ones first, then low priority, then the newest. Never the eldest that is not parked: so
    one request always moves on, and no two take each other's pages for ever."""
    eldest = min((each for each in running if not each.parked), key=lambda each: each.key, default=None)
    yield from sorted(
        (sequence for sequence in running if sequence is not eldest),
        key=lambda sequence: (not sequence.idle, sequence.priority, -sequence.key),
    )
