"""Policies: which waiting request is admitted next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from aioinfer.request import Request

__all__ = ["Fcfs", "WaitingQueue"]


class WaitingQueue(Protocol):
    """The waiting requests in the order in which a policy would admit them."""

    def add(self, request: Request) -> None:
        """A new request."""

    def put_back(self, request: Request) -> None:
        """A retracted request; it has waited before."""

    def peek(self) -> Request | None:
        """The one to admit next."""

    def remove(self, request: Request) -> None:
        """It was admitted or has finished. O(1)."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class Fcfs:
    """First come, first served; a retracted request goes back to the front."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._queue[request.key] = request

    def put_back(self, request: Request) -> None:
        self._queue[request.key] = request
        self._queue.move_to_end(request.key, last=False)

    def peek(self) -> Request | None:
        return next(iter(self._queue.values()), None)

    def remove(self, request: Request) -> None:
        del self._queue[request.key]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())
