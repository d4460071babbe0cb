"""Awaited: what the readers of a request have in common, a stream and a chat."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex, TypeVar

__all__ = ["Awaited"]

_T = TypeVar("_T")


class Awaited(Coroutine[Any, Any, _T]):
    """Reads one request: awaited, also by a task that is made of it, and closed behind ``async with``."""

    __slots__ = ("__weakref__", "_running")

    def __init__(self) -> None:
        #: what a task that was made of it runs
        self._running: Coroutine[Any, Any, _T] | None = None

    @abstractmethod
    async def _wait_result(self) -> _T:
        """Wait for the end."""

    def __await__(self) -> Generator[Any, None, _T]:
        return self._wait_result().__await__()

    def send(self, value: Any) -> Any:
        """With :meth:`throw`: makes it a coroutine, for ``TaskGroup.create_task(stream)``."""
        if self._running is None:
            self._running = self._wait_result()
        return self._running.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise in the task that :meth:`send` runs in. If it has not begun, the request is aborted."""
        if self._running is None:
            self.close()
            self._running = self._wait_result()
        return self._running.throw(*error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def aclose(self) -> None:
        """Abort the request if it still runs. Never waits for the device. Idempotent. From another loop or
        thread, the request ends in the next turn of the engine's loop."""
        self.close()

    @abstractmethod
    def close(self) -> None:
        """The same from synchronous code."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """A copy that is dropped would abort the request of the one that is kept."""
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be copied or pickled: it is the only reader of its request")
