"""Backends: carry packed steps to a device and tokens back, synchronously on the CPU, by streams on CUDA.

CUDA, per step::

    host      pack ─► pinned ring[i]
    forward            ├─ H2D ─ relay, model, sampler, relay ─┬─ (next step)
    copy                                                      └─ D2H into pinned ring[i] ─ event
    completion thread                                                    event.synchronize() ─► tokens

What the launch thread does per step is counted in calls that let go of the interpreter lock, for each may
cost it a turn. For a plain decode step whose rows are those of the step before, and which is launched while
that one runs, there are six: two replays, an event, a wait for it on the copy stream, a copy, and the event
that the completion thread waits for. On a device that has come to rest there is one more, an event for its
clock. Where rows or pages changed there are five more: a view of the ring's memory takes two, its copy to the
device one, and to have that sorted in takes two.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.cuda_device import current
from aioinfer.execution.decoding.mirror import KEPT
from aioinfer.execution.device import CompletedFlight, DeviceLost, Flight, StepOutOfMemory, StepResult
from aioinfer.execution.graph_shapes import GraphShapes
from aioinfer.execution.graphs import Graph
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.page_memory import PageMemory
from aioinfer.execution.runner import Runner
from aioinfer.ledger import Share
from aioinfer.observe.timeline import DeviceLane, now

__all__ = ["Backend", "CpuBackend", "CudaBackend", "Direct", "lacks_memory"]

_ALIGNMENT = 16
_NO_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")


class Backend(Protocol):
    """One device's way of running packed steps."""

    #: of the steps that are replayed
    graphs: GraphShapes
    #: None: not in the memory of the host
    pages: PageMemory | None

    def launch(self, packed: PackedStep) -> Flight: ...

    def synchronize(self) -> None:
        """Wait for what was enqueued elsewhere than by :meth:`launch`, so that later steps find it done."""

    def check(self) -> None: ...

    def close(self) -> None: ...


def lacks_memory(error: Exception) -> bool:
    """True if an error says that memory did not suffice.

    torch's allocator on CUDA and Python have classes for that; torch on the CPU, the driver, which pinned
    memory and replays ask, Triton, and the libraries of CUDA, which allocate for themselves, say it in words.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, StepOutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


class Direct:
    """Every copy is done when it returns: see :class:`~aioinfer.execution.decoding.base.Transfer`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, array: npt.NDArray[Any], /) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def await_last_result(self) -> None: ...


class CpuBackend:
    """The step is done when ``launch`` returns."""

    def __init__(self, runner: Runner, steps: Share | None = None) -> None:
        """``steps``: what they take of the memory; it is kept as long as the backend."""
        self.graphs = GraphShapes()
        self._runner = runner
        self._steps = steps
        self._transfer = Direct(torch.device("cpu"))
        tensors = getattr(runner.attention, "page_tensors", None)
        states = [] if runner.states is None else runner.states.tensors
        kind = type(runner.attention).__name__
        self.pages = None if tensors is None else PageMemory(kind, tensors, states)

    def launch(self, packed: PackedStep) -> Flight:
        try:
            output = self._runner.run(packed, self._transfer)
        except Exception as error:
            if lacks_memory(error):
                raise StepOutOfMemory(str(error)) from error
            raise
        self._runner.lane.step(packed.step_id, *output.times)
        return CompletedFlight(self._runner.read(packed, output, output.tensors))

    def synchronize(self) -> None:
        """Everything is done when it returns."""

    def check(self) -> None:
        """A CPU is never lost."""

    def close(self) -> None:
        """There is nothing to release."""


class _Place:
    """A step's place in the ring: page-locked memory of what goes in and comes out, and its events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: _CudaFlight | None = None
        self._allot(1 << 16)
        self._outgrown: list[torch.Tensor] = []
        self._tokens = self._tokens_of_step = torch.empty(64, dtype=torch.int64, pin_memory=True)
        #: the newest that was launched from here
        self.flight: _CudaFlight | None = None
        #: recorded where the step before may be long over
        self.started = torch.cuda.Event(enable_timing=True)
        #: the forward stream is through with the step; not the copy stream
        self.sampled = torch.cuda.Event(enable_timing=True)
        # Blocking: the waiting thread sleeps instead of spinning on a core.
        self.done = torch.cuda.Event(blocking=True)

    def _allot(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        #: the same
        self._bytes: npt.NDArray[np.uint8] = self._memory.numpy()
        self._used = 0

    def reuse(self, last: _CudaFlight | None) -> None:
        """Prepare for the step after ``last``; all results of steps launched from here have been read."""
        self._last = last
        self._used = 0
        self._outgrown.clear()

    def close(self) -> None:
        """Flights and places know each other."""
        self._last = self.flight = None

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """An array on the device, enqueued on the current stream; the host's own is free at once."""
        end = self._used + array.nbytes
        if end > self._memory.numel():
            # The old memory may be read still, by copies on the way.
            self._outgrown.append(self._memory)
            self._allot(2 * end)
            end = array.nbytes
        np.copyto(self._bytes[self._used : end].view(array.dtype).reshape(array.shape), array)
        pinned = self._memory[self._used : end].view(_torch_dtype(array.dtype))
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return _send(pinned if array.ndim == 1 else pinned.view(array.shape), self.device)

    def await_last_result(self) -> None:
        """Wait until the host has read the samples of the step before, on any thread."""
        if self._last is not None:
            self._last.settle()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy: tokens into the ring, logprobs, which are rare, into memory of their own."""
        if tensor.dtype == torch.int64 and tensor.dim() == 1:
            if len(self._tokens) < len(tensor):
                self._tokens = torch.empty(2 * len(tensor), dtype=torch.int64, pin_memory=True)
            if len(self._tokens_of_step) != len(tensor):
                self._tokens_of_step = self._tokens[: len(tensor)]
            host = self._tokens_of_step
        else:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        _copy(host, tensor)
        return host


class CudaBackend:
    """Forward stream, copy stream, and a ring of pinned buffers, each with its own events."""

    pages: PageMemory | None = None
    #: two more than the steps in flight, so that launching never waits for a place
    RING = KEPT

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
        self.graphs = GraphShapes()
        #: set before the first launch
        self.runner: Runner | None = None

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

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

    def rehearse(self, replay: Callable[[], None]) -> None:
        """Replay graphs on the stream of steps, and wait for the end."""
        with torch.cuda.stream(self.forward):
            replay()
        torch.cuda.synchronize(self._device)

    def forget_graphs(self) -> None:
        """Drop the captured graphs; their memory may be used again."""
        self._graph_pool = None

    def launch(self, packed: PackedStep) -> Flight:
        with current(self._device):
            return self._launch(packed)

    def _launch(self, packed: PackedStep) -> Flight:
        assert self.runner is not None, "no runner"
        place = self._ring[self._next]
        self._next = (self._next + 1) % self.RING
        self._await(place)
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

    def _await(self, place: _Place) -> None:
        """Wait until the step launched from there has been read, and the one after it, whose time is counted
        from an event of that place. The next place is that one's: ``_next`` has moved on."""
        for each in (place, self._ring[self._next]):
            if each.flight is not None:
                each.flight.settle()

    def _enqueue(self, packed: PackedStep, place: _Place, runner: Runner) -> _CudaFlight:
        launched, began = now(), self._begins_with(packed.step_id)
        with torch.cuda.stream(self.forward):
            if began is None:
                began = place.started
                began.record(self.forward)
            output = runner.run(packed, place)
            place.sampled.record(self.forward)
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(place.sampled)
            copies = [place.fetch(tensor) for tensor in output.tensors]
            place.done.record(self._copy)
        # What was sampled is kept until it is copied: its memory belongs to the forward stream.
        read = partial(runner.read, packed, output, copies)
        clock = partial(self._clock.step, packed.step_id, launched, began, place.sampled)
        place.flight = _CudaFlight(packed.step_id, place, clock, read, self._newest)
        return place.flight

    def _begins_with(self, step: int) -> torch.cuda.Event | None:
        """The end of the step before, if that is to come; a look at an event keeps the interpreter's lock."""
        last = self._newest
        if last is None or last.step != step - 1 or last.landed or last.place.sampled.query():
            return None
        return last.place.sampled

    def check(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLost(f"CUDA: {error}") from error

    def close(self) -> None:
        """Let go of all memory, and have torch give back what it keeps. Every flight has been waited for."""
        self.runner = self._newest = self._graph_pool = None
        for place in self._ring:
            place.close()
        self._ring.clear()
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()


class _Clock:
    """Tells the device's lane when steps ran, on the host's clock.

    How long a step took is what events say; from one to the next and not from one origin, for CUDA counts in
    floats of milliseconds. When that was lies between its launch, or the end of the step before, and the
    host's look at its end. An error there, of a clock or of a host that is late, moves time from one pause
    to another.
    """

    def __init__(self, lane: DeviceLane) -> None:
        self._lane = lane
        self._end = 0.0

    def step(self, step: int, launched: float, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """A step that is over; in the order of their launch. It was launched before it ``began``."""
        duration = 1e-3 * began.elapsed_time(ended)
        self._end = end = min(max(launched, self._end) + duration, now())
        self._lane.step(step, end - duration, end, end, end)


class _CudaFlight:
    """Read once, by the first thread that asks, and after those launched before."""

    __slots__ = ("_clock", "_error", "_last", "_lock", "_read", "_result", "place", "step")

    def __init__(
        self,
        step: int,
        place: _Place,
        clock: Callable[[], None],
        read: Callable[[], StepResult],
        last: _CudaFlight | None,
    ) -> None:
        self.step = step
        self.place = place
        self._clock = clock
        #: until it was called: places know flights, and must not keep tensors and models alive with them
        self._read: Callable[[], StepResult] | None = read
        self._result: StepResult | None = None
        self._error: Exception | None = None
        #: until it was waited for
        self._last = last
        self._lock = threading.Lock()

    @property
    def landed(self) -> bool:
        """True if the result has been read, or that failed."""
        return self._read is None

    def settle(self) -> None:
        """Read the result. If that fails, :meth:`wait` raises, and later steps are not affected."""
        with self._lock:
            if self._read is None:
                return
            if self._last is not None:
                self._last.settle()
                self._last = None
            try:
                # A completion thread knows of no device, and would make itself one.
                with current(self.place.device):
                    self.place.done.synchronize()
                    self._clock()
                    self._result = self._read()
            except Exception as error:
                self._error = error
            self._read = None

    def wait(self) -> StepResult:
        self.settle()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def _send(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    return pinned.to(device, non_blocking=True)


def _copy(host: torch.Tensor, tensor: torch.Tensor) -> None:
    host.copy_(tensor, non_blocking=True)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}[dtype.name]
