"""How a packed step gets onto a device and its tokens back: synchronous on the CPU, streams on CUDA.

CUDA, per step::

    host      pack ─► pinned ring[i]
    forward            ├─ H2D ─ relay, model, sampler, relay ─┬─ (next step)
    copy                                                      └─ D2H into pinned ring[i] ─ event
    completion thread                                                    event.synchronize() ─► tokens
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from aioinfer.execution.device import DeviceLost, Flight, Landed, StepResult
from aioinfer.execution.packing import Packed
from aioinfer.execution.runner import Runner, Sampled

__all__ = ["Backend", "CpuBackend", "CudaBackend"]


class Backend(Protocol):
    """One device's way of running packed steps."""

    def launch(self, packed: Packed) -> Flight: ...

    def check(self) -> None: ...


class CpuBackend:
    """The step is done when ``launch`` returns."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, packed: Packed) -> Flight:
        sampled = self._runner.run(
            packed, torch.from_numpy(packed.ints), torch.from_numpy(packed.roster.floats)
        )
        return Landed(self._runner.read(packed, sampled, sampled.tensors()))

    def check(self) -> None:
        """A CPU is never lost."""


class _PinnedBuffers:
    """Page-locked memory of one ring place: parameters in, tokens out, and the event between uses."""

    __slots__ = ("done", "floats", "ints", "tokens")

    def __init__(self) -> None:
        self.ints = torch.empty(0, dtype=torch.int64, pin_memory=True)
        self.floats = torch.empty(0, dtype=torch.float32, pin_memory=True)
        self.tokens = torch.empty(0, dtype=torch.int64, pin_memory=True)
        # Blocking: the waiting thread sleeps instead of spinning on a core.
        self.done = torch.cuda.Event(blocking=True)

    def reserve(self, packed: Packed) -> None:
        """Grow to the step's sizes; rare, for sizes are rounded up to powers of two."""
        if self.ints.numel() < packed.ints.size:
            self.ints = torch.empty(_round_up(packed.ints.size), dtype=torch.int64, pin_memory=True)
        if self.floats.numel() < packed.roster.floats.size:
            self.floats = torch.empty(
                _round_up(packed.roster.floats.size), dtype=torch.float32, pin_memory=True
            )
        if self.tokens.numel() < len(packed.sample_rows):
            self.tokens = torch.empty(_round_up(len(packed.sample_rows)), dtype=torch.int64, pin_memory=True)


class CudaBackend:
    """Forward stream, copy stream, and a ring of pinned buffers, each with its own event."""

    #: more than the window plus the step being resolved, so that a place is never written while read
    RING = 4

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self._runner = runner
        self._device = device
        self._forward = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._forward.wait_stream(torch.cuda.current_stream(device))
        self._ring = [_PinnedBuffers() for _ in range(self.RING)]
        self._next = 0
        self._newest: _CudaFlight | None = None

    def launch(self, packed: Packed) -> Flight:
        place = self._ring[self._next]
        self._next = (self._next + 1) % self.RING
        place.done.synchronize()
        place.reserve(packed)
        num_ints, num_floats = packed.ints.size, packed.roster.floats.size
        place.ints[:num_ints].copy_(torch.from_numpy(packed.ints))
        place.floats[:num_floats].copy_(torch.from_numpy(packed.roster.floats).reshape(-1))
        with torch.cuda.stream(self._forward):
            ints = place.ints[:num_ints].to(self._device, non_blocking=True)
            floats = place.floats[:num_floats].to(self._device, non_blocking=True)
            # The masks of this step need the tokens of the one before, whoever gets to reading them.
            before = None if self._newest is None else self._newest.wait
            sampled = self._runner.run(packed, ints, floats.view(packed.roster.floats.shape), before)
        self._copy.wait_stream(self._forward)
        with torch.cuda.stream(self._copy):
            copies = [self._to_host(place, tensor) for tensor in sampled.tensors()]
            place.done.record(self._copy)
        # ``sampled`` is kept until the copy is done: its memory belongs to the forward stream.
        self._newest = _CudaFlight(packed, copies, place.done, sampled, self._runner)
        return self._newest

    def _to_host(self, place: _PinnedBuffers, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy: tokens into the ring, logprobs, which are rare, into memory of their own."""
        if tensor.dtype == torch.int64 and tensor.dim() == 1:
            host = place.tokens[: len(tensor)]
        else:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def check(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLost(f"CUDA: {error}") from error


class _CudaFlight:
    __slots__ = ("_copies", "_done", "_lock", "_packed", "_result", "_runner", "_sampled")

    def __init__(
        self,
        packed: Packed,
        copies: list[torch.Tensor],
        done: torch.cuda.Event,
        sampled: Sampled,
        runner: Runner,
    ) -> None:
        self._runner = runner
        self._packed = packed
        self._copies = copies
        self._done = done
        self._sampled = sampled
        self._lock = threading.Lock()
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        with self._lock:
            if self._result is None:
                self._done.synchronize()
                self._result = self._runner.read(self._packed, self._sampled, self._copies)
            return self._result


def _round_up(size: int) -> int:
    return 1 << max(size - 1, 1).bit_length()
