"""The offline workload that nano-vllm and mini-sglang publish figures of; prompts of one length."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.gpu.plan import Size

__all__ = ["Workload", "prompts_of", "workload"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the number of tokens of each output."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]


def workload(size: Size) -> Workload:
    """All requests at once: prompts and outputs of ``size.lengths``, equally likely, seed 0.

    Drawn in the order of nano-vllm's bench.py (github.com/GeeeekExplorer/nano-vllm), so with the full size
    these are its requests: 142,827 prompt tokens and 133,966 output tokens.
    """
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, size.largest_id) for _ in range(rng.randint(*size.lengths))]
        for _ in range(size.requests)
    ]
    return Workload(prompts, [rng.randint(*size.lengths) for _ in range(size.requests)])


def prompts_of(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random prompts that share no beginning."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
