"""Faults: which requests end when a part of planning raises, a plugin's queue policy for example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from aioinfer.scheduling.policy import Policy
    from aioinfer.scheduling.queues import RequestQueues
    from aioinfer.scheduling.request import Request

__all__ = ["PlanFaults", "PolicyFailed", "end_with"]


class PolicyFailed(Exception):
    """The queue policy raised; ``__cause__`` is what it raised."""

    @classmethod
    def because(cls, policy: Policy, error: Exception) -> Self:
        failed = cls(f"the queue policy {policy.name} raised {error!r}")
        failed.__cause__ = error
        return failed


def end_with(
    queues: RequestQueues, request: Request, error: BaseException, *, distrust: bool = False
) -> bool:
    """End a request for which ``error`` was raised; True the first time. Raises RuntimeError, caused by
    ``error``, if that left the request in a state in which it cannot be ended.

    ``distrust``: its KV must not be shared.
    """
    try:
        if distrust:
            queues.memory.distrust(request)
        return queues.finish(request, "abort", error)
    except Exception as second:
        raise RuntimeError(f"{error!r} left {request} in a state that has no end: {second!r}") from error


class PlanFaults:
    """The requests that ended with an error while steps were planned, until :meth:`take` is called."""

    __slots__ = ("_ended", "_queues")

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._ended: list[tuple[Request, Exception]] = []

    def __bool__(self) -> bool:
        return bool(self._ended)

    def take(self) -> list[tuple[Request, Exception]]:
        """The requests that ended since the last call, with what was raised."""
        ended, self._ended = self._ended, []
        return ended

    def end(self, requests: Iterable[Request], error: Exception) -> None:
        """End requests of which the step that is being planned has no row, and those that the policy did not
        queue."""
        queues = self._queues
        unqueued = [request for request in queues.shelved.values() if not request.parked]
        for request in [*requests, *unqueued]:
            # A row that was begun is launched with no step: what it holds is not fenced by it.
            request.kv.last_step = min(request.kv.last_step, queues.last_step)
            if end_with(queues, request, error):
                self._ended.append((request, error))
