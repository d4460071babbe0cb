"""TwinLauncher: a device and the host beside it in virtual time, as long as their costs say.

::

    host      │plan, pack│               │read│plan, pack│
    device               ├── step ──────┤             ├── step ...
                          begin          notice         (or at once behind a step that is in flight)

Nothing is computed: every token is the same, and prompts have its number where they contain outputs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConfigError
from aioinfer.execution.device import CompletedFlight, DeviceInfo, DeviceLost, Progress, StepResult
from aioinfer.execution.launcher import StepHandle
from aioinfer.observe.timeline import DeviceLane, Timeline
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.costs import IDLE, Costs, Sizes
from aioinfer.twin.load import ANSWER, CONTENTS

if TYPE_CHECKING:
    from aioinfer.config import EngineConfig
    from aioinfer.loop.runtime import Runtime
    from aioinfer.scheduling.step import Step
    from aioinfer.twin.virtual_trace import VirtualTrace

__all__ = ["TwinDevice", "TwinLauncher", "tokens_of_step"]

_T = TypeVar("_T")
#: context of a model whose own is not known
_LONGEST = 1 << 20
#: draws that are made at a time
_BLOCK = 1 << 14


class TwinDevice:
    """What an engine asks of a device, without one."""

    synchronous = False

    def __init__(self, config: EngineConfig, max_model_len: int | None) -> None:
        self.lane = DeviceLane()
        pages = config.num_pages or 4096
        capacity = pages * config.positions_per_page
        self._info = DeviceInfo(
            vocab_size=CONTENTS,
            max_model_len=min(capacity, config.max_model_len or max_model_len or _LONGEST),
            num_pages=pages,
            eos_token_ids=frozenset(),
            description="a twin: nothing is computed",
            page_bytes=1,
            page_layout="twin",
        )
        self._page = bytearray(1)

    def open(self, progress: Progress | None = None) -> DeviceInfo:
        return self._info

    def page_views(self, page: int) -> Sequence[memoryview]:
        """As of HostPages, so that replicas leave pages for each other: all have the same byte."""
        return [memoryview(self._page)]

    def state_views(self, cell: int) -> Sequence[memoryview]:
        return []

    def prepare(self, step: Step) -> Step:
        return step

    def launch(self, step: Step) -> CompletedFlight:
        return CompletedFlight(StepResult(tokens_of_step(step)))

    def prepare_adapter(self, path: Any) -> Any:
        raise ConfigError("adapters: they are not simulated")

    install_adapter = remove_adapter = prepare_adapter

    def check(self) -> None:
        """Never lost by itself."""

    def close(self) -> None:
        """Nothing to give back."""


def tokens_of_step(step: Step) -> list[int]:
    """One per row."""
    return [ANSWER] * len(step.generating) + [ANSWER if row.samples else NO_TOKEN for row in step.prefilling]


class _Dice:
    """Draws one of equally likely values for each step, the same in every run. Steps come in their order."""

    def __init__(self, values: Sequence[float], *seed: int) -> None:
        self._values = np.asarray(values)
        self.least, self.most = float(self._values.min()), float(self._values.max())
        self._random = np.random.default_rng(seed)
        #: of the newest steps, from the first one on
        self._first, self._drawn = 0, np.empty(0, np.uint16)

    def range(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Of the steps [first, last)."""
        while last > self._first + len(self._drawn):
            more = self._random.integers(len(self._values), size=_BLOCK, dtype=np.uint16)
            kept = self._drawn[-_BLOCK:]
            self._first += len(self._drawn) - len(kept)
            self._drawn = np.concatenate([kept, more])
        return self._values[self._drawn[first - self._first : last - self._first]]

    def of(self, step: int) -> float:
        return float(self.range(step, step + 1)[0])


class TwinLauncher:
    """Lands each step when it would have ended. ``number``: of the replica, in traces."""

    blocking = False
    asynchronous = True
    #: of its engine, set when that has started
    runtime: Runtime | None = None

    def __init__(
        self,
        device: TwinDevice,
        costs: Costs,
        *,
        number: int = 0,
        seed: int = 0,
        trace: VirtualTrace | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.device: Any = device
        self._step, self._host = costs.step, costs.host
        self._noise = _Dice(costs.noise, seed, number, 0)
        self._prefill_noise = _Dice(costs.prefill_noise or costs.noise, seed, number, 2)
        self._notice = _Dice(costs.host.notice, seed, number, 1)
        self._number = number
        self._trace = trace
        #: until when the host works, and the device
        self.host_until = self.device_until = 0.0
        #: launched and not read: handle, end on the device, and what wakes the host then
        self.flights: deque[tuple[StepHandle, float, asyncio.TimerHandle | None]] = deque()
        #: when the newest step is noticed
        self.due = 0.0
        #: of all steps
        self.largest = Sizes(0.0)
        #: seconds that the device computed
        self.busy = 0.0
        #: steps that were not simulated one by one
        self.skipped = 0
        self._closed = False

    async def start(self, progress: Progress | None = None) -> DeviceInfo:
        self._loop = asyncio.get_running_loop()
        self._closed = False
        info: DeviceInfo = self.device.open(progress)
        return info

    def catch_up(self) -> None:
        """Something is about to happen to the engine, or is to be read of it."""

    def occupy(self, seconds: float) -> None:
        """The host does something else for so long."""
        self.host_until = max(self.host_until, self._loop.time()) + seconds

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        handle = StepHandle(step, landed)
        fixed, row = self._host.plan
        self.occupy(fixed + row * step.num_rows)
        launched = self.host_until
        begin = self._begins(launched, self.device_until)
        sizes = Sizes.of(step)
        self.largest = Sizes(*map(max, self.largest, sizes))
        noise = self._prefill_noise if sizes.tokens else self._noise
        end = begin + self._step.seconds(sizes) * noise.of(step.id)
        if self._trace is not None:
            self._trace.step(self._number, "forward", step.id, begin, end, step.num_tokens)
        self.busy += end - begin
        self.device_until = end
        # Not before the step in front of it, however late that is noticed.
        self.due = max(self.due, end + self._notice.of(step.id))
        self.flights.append((handle, end, self._loop.call_at(self.due, self._land)))
        return handle

    def _begins(self, launched: float, free: float) -> float:
        """When a step begins on a device that is ``free`` from then on."""
        if free > launched:
            return free
        return launched + self._host.begin + self._host.cold * min(1.0, (launched - free) / IDLE)

    def _land(self) -> None:
        """The oldest step has ended, and the host reads it when it has time."""
        if self._closed:
            return
        now = self._loop.time()
        if now < self.host_until:
            self._loop.call_at(self.host_until, self._land)
            return
        self._read()

    def _read(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """The host reads the oldest step."""
        now = self._loop.time()
        handle, end, _ = self.flights.popleft()
        fixed, row = self._host.read
        self.host_until = now + fixed + row * handle.step.num_rows
        handle.settle(self.device.launch(handle.step).wait(), delay=now - end)

    async def call(self, work: Callable[[Any], _T]) -> _T:
        if self._closed:
            raise DeviceLost("the device is closed")
        return work(self.device)

    def watch(self, lost: Callable[[BaseException], None]) -> None:
        """There is no thread."""

    async def aclose(self, timeout: float = 10.0) -> bool:
        self._closed = True
        return True
