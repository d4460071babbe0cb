"""TimedLauncher: runs a device in virtual time, one step after the other, each as long as stated."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from aioinfer.execution.device import Device, DeviceInfo, DeviceLost, Progress
from aioinfer.execution.launcher import StepHandle
from aioinfer.observe.timeline import Timeline
from aioinfer.scheduling.step import Step

__all__ = ["TimedLauncher"]

_T = TypeVar("_T")


class TimedLauncher:
    """Computes a step at the virtual moment at which it ends, not when it was launched, so that anything
    the host did meanwhile to memory that the step uses shows up as a wrong result."""

    blocking = False
    asynchronous = False

    def __init__(self, device: Device, step_time: Callable[[Step], float]) -> None:
        self.timeline = Timeline()
        self.device = device
        self.device.lane = self.timeline.device
        self._step_time = step_time
        self._free_at = 0.0
        #: launched and not computed, in their order, and calls between them
        self._launched: deque[tuple[Any, StepHandle] | tuple[Callable[[Device], Any], None]] = deque()
        self._calls: deque[asyncio.Future[Any]] = deque()
        #: a device that hangs: steps are accepted and never end
        self.hung = False

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        self._free_at = asyncio.get_running_loop().time()
        return self.device.open(progress)

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        loop = asyncio.get_running_loop()
        handle = StepHandle(step, landed)
        self._launched.append((self.device.prepare(step), handle))
        self._free_at = max(self._free_at, loop.time()) + self._step_time(step)
        loop.call_at(self._free_at, self._compute)
        return handle

    def _compute(self) -> None:
        """The oldest step: timers of about the same time need not come in the order of their times."""
        if self.hung:
            return
        prepared, handle = self._launched.popleft()
        if handle is None:
            self._make(prepared, self._calls.popleft())
            return
        try:
            result = self.device.launch(prepared).wait()
        except Exception as error:
            try:
                self.device.check()
            except DeviceLost as lost:
                lost.__cause__ = error
                handle.settle(None, lost)
            else:
                handle.settle(None, error)
        else:
            handle.settle(result, delay=0.0)

    async def call(self, work: Callable[[Device], _T]) -> _T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()
        self._launched.append((work, None))
        self._calls.append(done)
        self._free_at = max(self._free_at, loop.time())
        loop.call_at(self._free_at, self._compute)
        return await done

    def _make(self, work: Callable[[Device], Any], done: asyncio.Future[Any]) -> None:
        try:
            result, error = work(self.device), None
        except Exception as raised:
            result, error = None, raised
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def watch(self, lost: Callable[[BaseException], None]) -> None:
        """There is no thread."""

    async def aclose(self, timeout: float = 10.0) -> bool:
        while self._calls:
            self._make(_closed, self._calls.popleft())
        self.device.close()
        return not self.hung


def _closed(device: Device) -> NoReturn:
    raise DeviceLost("the device is closed")
