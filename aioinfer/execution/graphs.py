"""StepGraphs: steps that are captured once and replayed, so that launching one costs a call or two.

What a captured step reads lies still on the device (:class:`~aioinfer.execution.decoding.base.Captured`).
Where rows or pages changed since the step before, the host sends the difference to what it knows to be
there::

    forward     rows, pages, chunks ─► model ─► logits               by shape: decodes, mixed, prefill
    step        logits ─► sampled tokens, or blocks after a round      by rows, in a few variants

A step takes the next larger graph (:mod:`~aioinfer.execution.graph_shapes`) and is padded. All share one pool
of memory, the largest is captured first (mini-sglang and nano-vllm do the same), and only while nothing else
touches the device. What a graph leaves for others lies outside of the pool: there, any replay may overwrite
it. The results of a few steps are kept, so that the next step need not wait for the copies of those before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from aioinfer.execution.decoding.base import Captured, Output, Send
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
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
    """Reason why steps cannot be captured; None if they can.

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

    def __init__(self, captured: Captured, shapes: GraphShapes) -> None:
        self._captured = captured
        self._shapes = shapes
        #: numbers of rows that are sampled or denoised
        self._sizes = sorted({shape.rows for shape in shapes})
        self._forwards: dict[GraphShape, Graph] = {}
        #: by size and variant
        self._steps: dict[tuple[int, object], Graph] = {}

    @torch.inference_mode()
    def capture(self, capture: Capture, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture everything, on padding alone. ``progress`` is called with (done, total)."""
        captured = self._captured
        captured.prepare()
        total = len(self._shapes) + len(self._sizes)
        for done, shape in enumerate(self._shapes, 1):
            captured.clear(shape)
            self._forwards[shape] = capture(partial(captured.forward, shape))
            if progress is not None:
                progress(done, total)
        for done, size in enumerate(reversed(self._sizes), 1 + len(self._shapes)):
            for variant in captured.variants(size):
                self._steps[size, variant] = capture(partial(captured.step, size, variant))
            if progress is not None:
                progress(done, total)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Replay everything once, on padding alone: what a device does for a graph's first replay, no request
        waits for. Before the first step."""
        for shape, graph in self._forwards.items():
            self._captured.clear(shape)
            graph.replay()
        for graph in self._steps.values():
            graph.replay()

    def forward(self, packed: PackedStep, shape: GraphShape, send: Send) -> None:
        """Compute the :meth:`logits` of a step that has this shape."""
        captured = self._captured
        try:
            captured.update(packed, shape, send)
            self._forwards[shape].replay()
        except BaseException:
            captured.forget()
            raise
        captured.moved_on()

    def logits(self, packed: PackedStep) -> torch.Tensor:
        """Logits of the last forward, valid until the next forward."""
        return self._captured.logits(packed)

    @property
    def broken(self) -> torch.Tensor:
        """See :class:`~aioinfer.execution.decoding.base.Captured`."""
        return self._captured.broken

    def finish(self, packed: PackedStep) -> Output | None:
        """Sample or denoise the last forward's step; None if that was not captured."""
        return self._captured.finish(packed, self._replay)

    def _replay(self, rows: int, variant: object) -> bool:
        at = bisect_left(self._sizes, rows)
        graph = None if at == len(self._sizes) else self._steps.get((self._sizes[at], variant))
        if graph is None:
            return False
        graph.replay()
        return True
