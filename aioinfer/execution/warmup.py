"""Warm-up: the largest steps that a configuration allows, so that kernels are compiled before anybody waits
for them, and what a step takes of the memory is known before the KV pages take the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from aioinfer.config import EngineConfig
from aioinfer.execution.block_packing import BlockPacked, BlockPacker
from aioinfer.execution.graphs import Capture
from aioinfer.execution.packing import Packed, Packer
from aioinfer.execution.streams import CudaBackend, PackedStep
from aioinfer.model.spec import ModelSpec
from aioinfer.params import SamplingParams
from aioinfer.scheduling.decode_batch import NO_DECODES, Decodes
from aioinfer.scheduling.step import Admission, Row, Step

__all__ = ["Graphs", "largest_block_steps", "largest_steps", "measure"]


class Graphs(Protocol):
    """Steps to be captured."""

    def capture(self, capture: Capture, /) -> None: ...


#: everything that costs memory
_PARAMS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)


def largest_steps(config: EngineConfig, max_len: int) -> Iterator[Packed]:
    """A step of prefill only and one of decodes only, as large as may be, on the null page alone.

    ``max_len``: positions that the model has, or a request may have.
    """
    packer = Packer(config.num_slots, -(-max_len // config.page_size), config.page_size)
    rows = config.max_running_requests
    length = max(1, min(config.max_step_tokens // rows, max_len - 1))
    nobody: Any = None
    admission = Admission(_PARAMS, 0, frozenset(), [0] * length, [])
    prefills = tuple(
        Row(nobody, slot, 0, length, [0] * length, True, (), 0, admission) for slot in range(1, rows + 1)
    )
    yield packer.pack(Step(-2, NO_DECODES, prefills, rows * length))
    decodes = Decodes([nobody] * rows, np.arange(1, rows + 1), np.full(rows, length), [], [])
    yield packer.pack(Step(-1, decodes, (), rows))


def largest_block_steps(config: EngineConfig, spec: ModelSpec, max_len: int) -> Iterator[BlockPacked]:
    """A step of known tokens only and one of blocks only, of a diffusion model, likewise."""
    size, mask_id = spec.block_size, spec.mask_token_id
    assert size is not None, "not a diffusion model"
    assert mask_id is not None, "a diffusion model has a mask"
    pages = -(-max_len // config.page_size)
    packer = BlockPacker(config.num_slots, pages, config.page_size, size, mask_id)
    rows = min(config.max_running_requests, config.max_step_tokens // size)
    length = min(config.max_step_tokens // rows, max_len) // size * size
    nobody: Any = None
    slots = range(1, rows + 1)
    admission = Admission(_PARAMS, 0, frozenset(), [0] * length, [])
    known = (Row(nobody, slot, 0, length, [0] * length, False, (), 0, admission) for slot in slots)
    yield packer.pack(Step(-2, NO_DECODES, tuple(known), rows * length))
    start = min(length, max_len // size * size - size)
    blocks = (Row(nobody, slot, start, size, (), False, (), 0, None, blocks=1) for slot in slots)
    yield packer.pack(Step(-1, NO_DECODES, tuple(blocks), rows * size))


def measure(
    backend: CudaBackend,
    steps: Iterator[PackedStep],
    graphs: Callable[[list[int]], Graphs],
    sizes: list[int],
) -> int:
    """Bytes that the largest steps and the graphs of all ``sizes`` take, at least about.

    ``graphs`` makes the graphs of given sizes. Two are captured for trial: all share one pool of memory, so
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
    trial = [graphs([size]) for size in sorted(sizes)[-2:]]
    for each in reversed(trial):
        each.capture(backend.capture)
        free.append(torch.cuda.mem_get_info()[0])
    taken = [max(0, before - after) for before, after in itertools.pairwise(free)]
    backend.forget_graphs()
    return activations + sum(taken[:1]) + sum(taken[1:]) * (len(sizes) - 1)
