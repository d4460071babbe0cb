"""How a packed step gets onto a device and its tokens back: synchronous on the CPU, streams on CUDA.

CUDA, per step::

    host      pack ─► pinned ring[i]
    forward            ├─ H2D ─ relay, model, sampler, relay ─┬─ (next step)
    copy                                                      └─ D2H into pinned ring[i] ─ event
    completion thread                                                    event.synchronize() ─► tokens

What the launch thread does per step is counted in calls that let go of the interpreter lock, for each may
cost it a turn: for a decode step whose rows are those of the step before, two replays, a copy, three events,
two waits for events on the device, and a look at one that is long over.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.device import DeviceLost, Flight, Landed, StepOutOfMemory, StepResult
from aioinfer.execution.graphs import Graph
from aioinfer.execution.runner import Link
from aioinfer.observe.timeline import DeviceLane, now

__all__ = ["Backend", "CpuBackend", "CudaBackend", "Direct", "PackedStep", "StepRunner", "lacks_memory"]

_ALIGNMENT = 16
_NO_MEMORY = ("out of memory", "can't allocate memory")
#: seconds by which a chain of events may differ from what the host saw before it is anchored anew
_DRIFT = 0.01


class PackedStep(Protocol):
    """Whatever the packer makes for the runner."""

    @property
    def step_id(self) -> int: ...


class Outcome(Protocol):
    """What a step leaves on the device."""

    @property
    def times(self) -> tuple[float, float, float, float]:
        """Seconds on the timeline's clock: the host began, was through with the forward, had the masks, and
        ended."""

    def tensors(self) -> list[torch.Tensor]:
        """Everything that has to be copied to the host."""


class StepRunner(Protocol):
    """Computes packed steps in the order of their launch: of tokens
    (:class:`~aioinfer.execution.runner.Runner`) or of blocks."""

    lane: DeviceLane

    def warm_up(self) -> None:
        """Whatever must not wait for the first step. Reads back from the device."""

    def run(self, packed: Any, link: Link) -> Outcome:
        """Enqueue one step."""

    def read(self, packed: Any, sampled: Any, tensors: Sequence[torch.Tensor]) -> StepResult:
        """The result of a step from its ``tensors``, which are on the host by now."""


class Backend(Protocol):
    """One device's way of running packed steps."""

    def launch(self, packed: PackedStep) -> Flight: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


def lacks_memory(error: Exception) -> bool:
    """Whether an error says that somebody's memory did not suffice.

    torch's allocator on CUDA and Python have classes for that; torch on the CPU, the driver, which pinned
    memory and replays ask, and Triton say it in words.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, StepOutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


class Direct:
    """Every copy is done when it returns: see :class:`~aioinfer.execution.runner.Link`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, array: npt.NDArray[Any], /) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def await_last_result(self) -> None: ...

    def order_after_last_copy(self) -> None: ...


class CpuBackend:
    """The step is done when ``launch`` returns."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self._link = Direct(torch.device("cpu"))

    def launch(self, packed: PackedStep) -> Flight:
        try:
            sampled = self._runner.run(packed, self._link)
        except Exception as error:
            if lacks_memory(error):
                raise StepOutOfMemory(str(error)) from error
            raise
        self._runner.lane.step(packed.step_id, *sampled.times)
        return Landed(self._runner.read(packed, sampled, sampled.tensors()))

    def check(self) -> None:
        """A CPU is never lost."""

    def close(self) -> None:
        """Nothing is kept back."""


class _Place:
    """A step's place in the ring: page-locked memory of what goes in and comes out, and its events."""

    __slots__ = ("_device", "_last", "_memory", "_outgrown", "_used", "done", "sampled", "started", "tokens")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: _CudaFlight | None = None
        self._memory = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True)
        self._used = 0
        self._outgrown: list[torch.Tensor] = []
        self.tokens = torch.empty(64, dtype=torch.int64, pin_memory=True)
        self.started = torch.cuda.Event(enable_timing=True)
        #: the forward stream is through with the step; not the copy stream
        self.sampled = torch.cuda.Event(enable_timing=True)
        # Blocking: the waiting thread sleeps instead of spinning on a core.
        self.done = torch.cuda.Event(blocking=True)

    def reuse(self, last: _CudaFlight | None) -> None:
        """For the step behind ``last``, once the one that was here is done."""
        self.done.synchronize()
        self._last = last
        self._used = 0
        self._outgrown.clear()

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """An array on the device, enqueued on the current stream; the host's own is free at once."""
        end = self._used + array.nbytes
        if end > self._memory.numel():
            # The old memory may be read still, by copies on the way.
            self._outgrown.append(self._memory)
            self._memory = torch.empty(2 * end, dtype=torch.uint8, pin_memory=True)
            self._used, end = 0, array.nbytes
        pinned = self._memory[self._used : end].view(_torch_dtype(array.dtype)).view(array.shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        np.copyto(pinned.numpy(), array)
        return pinned.to(self._device, non_blocking=True)

    def await_last_result(self) -> None:
        """Until the host has read what the step before sampled, whoever gets to reading it."""
        if self._last is not None:
            # If it failed, whoever waits for it hears of it, and this step is none the worse.
            with contextlib.suppress(Exception):
                self._last.wait()

    def order_after_last_copy(self) -> None:
        """What is enqueued from here on starts when the results of the step before are on the host."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last.place.done)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy: tokens into the ring, logprobs, which are rare, into memory of their own."""
        if tensor.dtype == torch.int64 and tensor.dim() == 1:
            if self.tokens.numel() < len(tensor):
                self.tokens = torch.empty(2 * len(tensor), dtype=torch.int64, pin_memory=True)
            host = self.tokens[: len(tensor)]
        else:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


class CudaBackend:
    """Forward stream, copy stream, and a ring of pinned buffers, each with its own events."""

    #: more than the window plus the step being resolved, so that a place is never written while read
    RING = 4

    def __init__(self, device: torch.device, lane: DeviceLane) -> None:
        self._device = device
        self.forward = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self.forward.wait_stream(torch.cuda.current_stream(device))
        self._ring = [_Place(device) for _ in range(self.RING)]
        self._next = 0
        self._newest: _CudaFlight | None = None
        self._graph_pool: Any = None
        self._clock = _Clock(lane)
        #: set before the first launch
        self.runner: StepRunner | None = None

    def capture(self, call: Callable[[], None]) -> Graph:
        """See :data:`~aioinfer.execution.graphs.Capture`. Calls once before, outside, so that kernels are
        compiled and libraries have their memory. Other threads must leave the device alone meanwhile."""
        # What the call works on may have been enqueued there just now.
        self.forward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.forward):
            call()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(
            graph, pool=self._graph_pool, stream=self.forward, capture_error_mode="thread_local"
        ):
            call()
        return graph

    def forget_graphs(self) -> None:
        """What was captured is gone; its memory may serve others."""
        self._graph_pool = None

    def launch(self, packed: PackedStep) -> Flight:
        assert self.runner is not None, "no runner"
        place = self._ring[self._next]
        self._next = (self._next + 1) % self.RING
        place.reuse(self._newest)
        try:
            self._newest = self._enqueue(packed, place, self.runner)
        except Exception as error:
            if not lacks_memory(error):
                raise
            # The error holds the frames it passed, and these what the step had come to.
            traceback.clear_frames(error.__traceback__)
            # What torch keeps for later may be in pieces that are too small.
            torch.cuda.empty_cache()
            raise StepOutOfMemory(str(error)) from error
        return self._newest

    def _enqueue(self, packed: PackedStep, place: _Place, runner: StepRunner) -> _CudaFlight:
        with torch.cuda.stream(self.forward):
            place.started.record(self.forward)
            sampled = runner.run(packed, place)
            place.sampled.record(self.forward)
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(place.sampled)
            copies = [place.fetch(tensor) for tensor in sampled.tensors()]
            place.done.record(self._copy)
        # What was sampled is kept until it is copied: its memory belongs to the forward stream.
        read = partial(runner.read, packed, sampled, copies)
        return _CudaFlight(packed.step_id, place, self._clock, read)

    def check(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLost(f"CUDA: {error}") from error

    def close(self) -> None:
        """Let go of all memory, and have torch give back what it keeps. Every flight has been waited for."""
        self.runner = self._newest = self._graph_pool = None
        self._ring.clear()
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()


class _Clock:
    """Tells the device's lane when steps ran, on the host's clock.

    From event to event and not from one origin, for CUDA counts in floats of milliseconds; and by the host's
    own look where steps do not follow each other.
    """

    def __init__(self, lane: DeviceLane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._step, self._end = -1, 0.0
        self._ended: torch.cuda.Event | None = None

    def step(self, step: int, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """A step that is over."""
        with self._lock:
            end, duration = now(), 1e-3 * started.elapsed_time(ended)
            if self._ended is not None and step == self._step + 1:
                follows = self._end + 1e-3 * self._ended.elapsed_time(started) + duration
                end = follows if abs(follows - end) < _DRIFT else end
            self._lane.step(step, end - duration, end, end, end)
            self._step, self._end, self._ended = step, end, ended


class _CudaFlight:
    __slots__ = ("_clock", "_lock", "_read", "_result", "_step", "place")

    def __init__(self, step: int, place: _Place, clock: _Clock, read: Callable[[], StepResult]) -> None:
        self._step = step
        self.place = place
        self._clock = clock
        #: until it was called: places know flights, and must not keep tensors and models alive with them
        self._read: Callable[[], StepResult] | None = read
        self._result: StepResult | None = None
        self._lock = threading.Lock()

    def wait(self) -> StepResult:
        with self._lock:
            if self._read is not None:
                self.place.done.synchronize()
                self._clock.step(self._step, self.place.started, self.place.sampled)
                self._result = self._read()
                self._read = None
            assert self._result is not None
            return self._result


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}[dtype.name]
