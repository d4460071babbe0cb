"""Losses: what is said of the streams and the replicas of a dispatcher that are lost."""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.errors import EngineFailed
from aioinfer.parallel.record import Record
from aioinfer.parallel.replica import Replica

__all__ = ["lost_for_good", "none_left"]


def none_left(replicas: Sequence[Replica]) -> EngineFailed:
    """The error of all streams, with the last replica."""
    causes = [f"{each.name}: {each.cause}" for each in replicas if each.cause is not None]
    error = EngineFailed(f"no replica is left: {'; '.join(causes)}")
    error.__cause__ = next((each.cause for each in replicas if each.cause), None)
    return error


def lost_for_good(
    replicas: Sequence[Replica], record: Record, reason: str, cause: BaseException | None = None
) -> EngineFailed:
    """The error of a stream that goes on nowhere. ``cause``: of that; else why its replicas were lost."""
    causes = [cause] if cause is not None else record.losses
    causes = causes or [each.cause for each in replicas if each.cause is not None]
    error = EngineFailed(f"{reason}: {'; '.join(map(str, causes))}")
    error.__cause__ = causes[-1] if causes else None
    return error
