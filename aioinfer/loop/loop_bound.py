"""LoopBound: what engines and dispatchers share that are running: a loop, a state, and streams that leave."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from aioinfer.errors import EngineClosed, EngineFailed, WrongLoop

if TYPE_CHECKING:
    from aioinfer.scheduling.request import Request

__all__ = ["EngineState", "LoopBound", "asyncio_loop", "require_loop", "running_loop"]


class EngineState(Enum):
    """``NEW -> STARTING -> RUNNING -> DRAINING -> CLOSED``; from RUNNING to FAILED if the device is lost."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The running loop, if there is one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """The running loop. Raises WrongLoop where there is none, under trio for example."""
    loop = running_loop()
    if loop is None:
        raise WrongLoop(
            "an engine runs on an asyncio event loop, and none is running here. Under trio, say, "
            "start it in a thread of its own with asyncio.run, and use its threadsafe() from here; without "
            "any loop, use LLM"
        )
    return loop


def require_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise WrongLoop unless ``loop`` is the running one."""
    running = running_loop()
    if running is not loop:
        where = "there is no running loop here" if running is None else "this is another one"
        raise WrongLoop(
            f"the engine belongs to the event loop that started it, and {where}. Start and use it in one "
            "asyncio.run, on that thread; with pytest-asyncio, give the fixture that starts it and the tests "
            "the same loop_scope"
        )


class LoopBound(ABC):
    """Belongs to the loop on which it is made. A part of what streams call of their owner."""

    #: in messages
    kind: ClassVar[str] = "engine"

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.state = EngineState.RUNNING

    def check_loop(self) -> None:
        """Raise WrongLoop on any other loop than its own; once it is closed, any loop will do."""
        if self.state is not EngineState.CLOSED:
            require_loop(self.loop)

    def check_serving(self) -> None:
        """Raise WrongLoop, EngineFailed or EngineClosed unless requests are accepted here and now."""
        self.check_loop()
        if self.state is EngineState.FAILED:
            raise self._failed_error()
        if self.state is not EngineState.RUNNING:
            raise EngineClosed(f"the {self.kind} is {self.state.value}")

    def abandon(self, request: Request) -> None:
        """The consumer closed its stream, on any loop and thread."""
        if running_loop() is self.loop:
            self._abandon(request)
        else:
            self.abandon_later(request)

    def abandon_later(self, request: Request) -> None:
        """The stream was garbage-collected, on any thread, and maybe amid a step."""
        if self.state is not EngineState.CLOSED:
            try:
                self.loop.call_soon_threadsafe(self._abandon, request)
            except RuntimeError:
                pass  # the loop is closed, and nothing runs any more

    def _abandon(self, request: Request) -> None:
        if not request.ended:
            self._abandoned(request)

    @abstractmethod
    def _abandoned(self, request: Request) -> None:
        """End a request that has not ended: its consumer has left."""

    @abstractmethod
    def _failed_error(self) -> EngineFailed:
        """Why it is FAILED."""
