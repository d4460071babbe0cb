"""A stand-in for torch.cuda, so that what runs on CUDA runs somewhere without it.

The forward stream computes at once, as far ahead as it is allowed to; copies to the host are made as late as
events permit. So whatever is read or overwritten without waiting for the right event is wrong at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from aioinfer.execution import backends, build
from aioinfer.execution.device import DeviceInfo
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.observe.timeline import now
from tests.execution.recording import Recording, recorded

GIB = 1 << 30


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def wait_stream(self, other: Stream) -> None:
        other.run(len(other.work))


class Event:
    def __init__(self, **options: bool) -> None:
        self._stream: Stream | None = None
        self._end = 0
        self._timed = options.get("enable_timing", False)
        self._time = 0.0

    def record(self, stream: Stream) -> None:
        self._stream, self._end, self._time = stream, len(stream.work), now()

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.run(self._end)

    def query(self) -> bool:
        return self._stream is None or self._stream.done >= self._end

    def elapsed_time(self, other: Event) -> float:
        assert self._timed, "made without times"
        assert other._timed, "made without times"
        assert other._stream is not None, "never recorded"
        assert other._stream.done >= other._end, "not over yet"
        return 1e3 * (other._time - self._time)


class Cuda:
    """What the backend uses of torch.cuda."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.recordings: list[Recording] = []
        self.emptied = 0
        #: copies to the host, and how many there were when a graph was last captured
        self.copies = self.copies_when_captured = 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, graph: Recording, *, pool: list[Recording], stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.recordings.append(graph)
        pool.append(graph)
        graph.pool = pool
        self.copies_when_captured = self.copies
        with self.stream(stream), recorded(graph):
            yield

    def copy(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self.copies += 1
        host.fill_(-77)
        self.current.work.append(lambda: host.copy_(tensor))

    def empty_cache(self) -> None:
        self.emptied += 1


def install(patch: pytest.MonkeyPatch) -> Cuda:
    """Have the CUDA backend run on the CPU."""
    cuda, empty = Cuda(), torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)

    patch.setattr(torch, "empty", unpinned)
    patch.setattr(backends, "_copy", cuda.copy)
    patch.setattr(backends, "_send", lambda pinned, device: pinned.clone())
    for name, stand_in in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Recording,
        "stream": cuda.stream,
        "graph": cuda.graph,
        "graph_pool_handle": list,
        "current_stream": lambda device=None: cuda.current,
        "synchronize": lambda device=None: None,
        "empty_cache": cuda.empty_cache,
        "reset_peak_memory_stats": lambda: None,
        "memory_reserved": lambda: GIB,
        "max_memory_reserved": lambda: 2 * GIB,
        "mem_get_info": lambda device=None: (50 * GIB, 100 * GIB),
    }.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(build, "build", build._build_cuda)
    patch.setattr(build, "graphs_unsupported", lambda *arguments: None)
    return cuda


class FakeCudaDevice(TorchDevice):
    """A CPU that is taken for a CUDA device; see :func:`install`."""

    def open(self, progress: Any = None) -> DeviceInfo:
        info = super().open(progress)
        self.synchronous = False
        return info
