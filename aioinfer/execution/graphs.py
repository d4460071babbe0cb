"""StepGraphs: steps that are captured once and replayed, so that launching one costs a call or two.

What a captured step reads lies still on the device (:class:`~aioinfer.execution.decoding.base.Captured`).
Where rows or pages changed since the step before, the host sends the difference to what it knows to be
there::

    forward     rows, pages ─► model ─► logits
    step        logits ─► sampled tokens, or blocks after a round      in a few variants

Graphs come in sizes; a step takes the next larger one. All share one pool of memory, the largest is captured
first (mini-sglang and nano-vllm do the same), and only while nothing else touches the device. What a graph
leaves for others lies outside of the pool: there, any replay may overwrite it. The results of a few steps are
kept, so that the next step need not wait for the copies of those before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from aioinfer.execution.decoding.base import Captured, Output, Send
from aioinfer.execution.packed import PackedStep

__all__ = ["Capture", "Graph", "StepGraphs", "graphs_unsupported"]


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Do it again, on the memory it was captured with."""


#: capture what a call does, on memory that was there before or is of no use after
Capture = Callable[[Callable[[], None]], Graph]


def graphs_unsupported(
    device: torch.device, attention: str, capturable: bool, experts: str | None = None
) -> str | None:
    """What keeps steps from being captured there, if anything does.

    Args:
        attention, experts: the kernels that were chosen.
        capturable: see :class:`~aioinfer.model.spec.CausalLM`.
    """
    if device.type != "cuda":
        return f"the device is a {device.type}"
    if attention not in ("triton", "flashinfer"):
        return f"{attention} attention asks the host for lengths"
    if experts not in (None, "triton"):
        return f"{experts} kernels of experts may ask the host how many tokens each has"
    return None if capturable else "the model's code is transformers' own"


class StepGraphs:
    """The captured steps of one model. Launch thread only."""

    __slots__ = ("_captured", "_forwards", "_size", "_sizes", "_steps")

    def __init__(self, captured: Captured, sizes: list[int]) -> None:
        self._captured = captured
        self._sizes = sorted(sizes)
        self._forwards: dict[int, Graph] = {}
        #: by size and variant
        self._steps: dict[tuple[int, object], Graph] = {}
        self._size = 0

    @property
    def captured(self) -> Captured:
        return self._captured

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all sizes, on padding alone. ``progress`` is called with (done, total)."""
        captured = self._captured
        captured.prepare()
        for done, size in enumerate(reversed(self._sizes), 1):
            self._forwards[size] = capture(partial(captured.forward, size))
            for variant in captured.variants():
                self._steps[size, variant] = capture(partial(captured.step, size, variant))
            if progress is not None:
                progress(done, len(self._sizes))

    def hold(self, packed: PackedStep) -> bool:
        """Whether a step can be a replay."""
        return 0 < self._captured.num_rows(packed) <= self._sizes[-1]

    def forward(self, packed: PackedStep, send: Send) -> None:
        """Compute the :meth:`logits` of the step's rows."""
        captured = self._captured
        self._size = self._sizes[bisect_left(self._sizes, captured.num_rows(packed))]
        try:
            captured.update(packed, send)
            self._forwards[self._size].replay()
        except BaseException:
            captured.forget()
            raise
        captured.moved_on()

    def logits(self, packed: PackedStep) -> torch.Tensor:
        """Of the last forward's step, valid until the next forward."""
        return self._captured.logits(packed)

    def finish(self, packed: PackedStep) -> Output | None:
        """Sample or denoise the last forward's step; None if that was not captured."""
        return self._captured.finish(packed, self._replay)

    def _replay(self, variant: object) -> None:
        self._steps[self._size, variant].replay()
