"""Warm-up: the largest steps that a configuration allows, so that kernels are compiled before the first
request waits for them, and what a step takes of the memory is known before the KV pages take the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.execution.graph_shapes import GraphShapes
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import NewRequestData, Row

if TYPE_CHECKING:
    from aioinfer.execution.backends import CudaBackend
    from aioinfer.execution.graphs import StepGraphs
    from aioinfer.execution.packed import PackedStep

__all__ = ["COSTLY", "SCORED", "filled_slots", "measure"]

#: everything that costs memory to sample
COSTLY = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
#: logits of every position, not of the last alone
SCORED = SamplingParams(temperature=0.0, logprobs=20, prompt_logprobs=20)


def filled_slots(
    rows: int, length: int, params: SamplingParams, *, samples: bool, scored: bool = False
) -> tuple[Row, ...]:
    """Prefill rows of new requests in slots 1 to ``rows``, on the null page; ``scored``: all positions."""
    output = SimpleNamespace(images=None)
    request: Any = SimpleNamespace(prompt_ids=[0] * (length + 1), params=params, output=output)
    new = NewRequestData(params, 0, frozenset(), [0] * length, [])
    scores = (0, length) if scored else None
    return tuple(
        Row(request, slot, 0, length, [0] * length, samples, (), 0, new, scores, state_write=slot)
        for slot in range(1, rows + 1)
    )


def measure(
    backend: CudaBackend,
    steps: Iterable[PackedStep],
    graphs: Callable[[GraphShapes], StepGraphs],
    shapes: GraphShapes,
) -> int:
    """Bytes that the largest steps and the graphs of all ``shapes`` take, at least about.

    ``graphs`` makes the graphs of given shapes. Two are captured for trial: all share one pool of memory, so
    the largest decides, and what the second adds is taken for what each of the others adds.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    for packed in steps:
        backend.launch(packed).wait()
    activations = torch.cuda.max_memory_reserved() - before
    torch.cuda.empty_cache()
    free = [torch.cuda.mem_get_info()[0]]
    trial = [graphs(GraphShapes([shape])) for shape in itertools.islice(shapes, 2)]
    for each in trial:
        each.capture(backend.capture)
        free.append(torch.cuda.mem_get_info()[0])
    taken = [max(0, before - after) for before, after in itertools.pairwise(free)]
    backend.forget_graphs()
    return activations + sum(taken[:1]) + sum(taken[1:]) * (len(shapes) - 1)
