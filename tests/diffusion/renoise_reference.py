"""The sampler of canvases once more, in the plainest way: one canvas, lists, float64, no package code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.sampling.test_noise import written_down

__all__ = ["DEFAULTS", "CanvasRow"]

DEFAULTS: dict[str, Any] = {
    "entropy_bound": 0.1, "t_min": 0.4, "t_max": 0.8, "steps": 48, "stability_threshold": 1,
    "confidence_threshold": 0.005,
}  # fmt: skip
#: canvas and tempered logits of the last round to logits [B, V]
Forward = Callable[[list[int], "torch.Tensor | None"], torch.Tensor]


@dataclass
class CanvasRow:
    """One canvas at a position of its sequence, some of whose tokens may be given."""

    size: int
    vocab_size: int
    start: int
    seed: int
    params: dict[str, Any]
    temperature: float = 1.0
    given: Sequence[int] = ()
    ids: list[int] = field(init=False)
    written_in: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)
    rounds: int = 0

    def run(self, forward: Forward) -> None:
        """All rounds."""
        params = {**DEFAULTS, **self.params}
        canvas = [*self.given, *[self.noise(at, 2**31 - 2) for at in self.free]]
        self.ids, self.written_in = [-1] * self.size, [-1] * self.size
        tempered, same = None, 0
        while True:
            logits = forward(canvas, tempered).double()
            left = (params["steps"] - self.rounds) / params["steps"]
            temperature = (params["t_min"] + (params["t_max"] - params["t_min"]) * left) * (
                self.temperature or 1
            )
            tempered = logits / temperature
            shares = tempered.log_softmax(-1)
            entropy = [-float((line.exp() * line).sum()) for line in shares]
            best = [int(line.argmax()) for line in logits]
            canvas = self.renewed(canvas, shares, entropy, best, params["entropy_bound"])
            alike = self.rounds > 0 and all(best[at] == self.ids[at] for at in self.free)
            same = same + 1 if alike else 0
            for at in self.free:
                if best[at] != self.ids[at]:
                    self.ids[at], self.written_in[at] = best[at], self.rounds
            self.logprobs = [
                float(line[token]) for line, token in zip(logits.log_softmax(-1), best, strict=True)
            ]
            self.rounds += 1
            mean = math.fsum(entropy[at] for at in self.free) / len(self.free)
            if same >= params["stability_threshold"] and mean < params["confidence_threshold"]:
                return
            if self.rounds == params["steps"]:
                return

    @property
    def free(self) -> range:
        return range(len(self.given), self.size)

    def renewed(
        self, canvas: list[int], shares: torch.Tensor, entropy: list[float], best: list[int], bound: float
    ) -> list[int]:
        """The next canvas."""
        spent, taken = 0.0, []
        for at in sorted(self.free, key=lambda at: (entropy[at], at)):
            if spent > bound:
                break
            taken.append(at)
            spent += entropy[at]
        found = [
            (self.draw(at, shares[at]) if self.temperature else best[at])
            if at in taken
            else self.noise(at, 2**31 - 1)
            for at in self.free
        ]
        return [*self.given, *found]

    def draw(self, at: int, line: torch.Tensor) -> int:
        return max(range(self.vocab_size), key=lambda token: float(line[token]) + self.gumbel(at, token))

    def bits(self, at: int, word: int) -> int:
        return written_down(self.seed, self.start + at + self.rounds * 2**32, word)

    def gumbel(self, at: int, token: int) -> float:
        return -math.log(-math.log1p(-(self.bits(at, token) % 2**31 + 0.5) / 2**31))

    def noise(self, at: int, word: int) -> int:
        return self.bits(at, word) * self.vocab_size >> 32
