"""Loads: the offline workload that nano-vllm and mini-sglang publish figures of; prompts of one length."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Workload", "offline_workload", "prompts_of"]

#: the ids that nano-vllm draws from, both included
_LARGEST_ID = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and how many tokens each is to be answered with."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    def first(self, count: int, longest: int) -> Workload:
        """So many of the requests, with outputs of ``longest`` tokens at most."""
        return Workload(self.prompts[:count], [min(output, longest) for output in self.outputs[:count]])


def offline_workload(
    requests: int = 256, shortest: int = 100, longest: int = 1024, largest_id: int = _LARGEST_ID
) -> Workload:
    """256 requests at once, prompts and outputs of 100 to 1024 tokens, equally likely, seed 0.

    Drawn in the order of nano-vllm's bench.py (github.com/GeeeekExplorer/nano-vllm), so with the defaults
    these are its requests: 142,827 prompt tokens and 133,966 output tokens.
    """
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, largest_id) for _ in range(rng.randint(shortest, longest))] for _ in range(requests)
    ]
    return Workload(prompts, [rng.randint(shortest, longest) for _ in range(requests)])


def prompts_of(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random prompts that share no beginning."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
