"""What is measured, and what follows from the seconds it took."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "Turn", "agreement", "figures", "prompts", "ratio", "schedule", "spread"]


@dataclass(frozen=True, slots=True)
class Cell:
    """So many sequences at once; with one new token it is a prefill."""

    concurrency: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"c={self.concurrency}" if self.output > 1 else f"prefill {self.concurrency}x{self.prompt}"

    @property
    def metric(self) -> str:
        """The figure that stands for it."""
        return "decode_tokens_per_s" if self.output > 1 else "prefill_tokens_per_s"


def figures(cell: Cell, first: float, whole: float | None) -> dict[str, float]:
    """Rates in tokens/s from the seconds of one new token and of all; ``whole`` is None for a prefill.

    There is no decode rate where more tokens took no longer than one: something else was in the way.
    """
    rates = {"t1": first, "prefill_tokens_per_s": cell.concurrency * cell.prompt / first}
    if whole is not None:
        rates["tn"] = whole
        rates["end_to_end_tokens_per_s"] = cell.concurrency * cell.output / whole
        if whole > first:
            rates["decode_tokens_per_s"] = cell.concurrency * (cell.output - 1) / (whole - first)
    return rates


def prompts(cell: Cell, vocab: int, *seed: Any) -> list[list[int]]:
    """Random ids, the same for the same seed."""
    rng = random.Random(":".join(map(str, (cell.name, *seed))))
    return [[rng.randrange(vocab) for _ in range(cell.prompt)] for _ in range(cell.concurrency)]


def agreement(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> dict[str, float]:
    """Shares of sequences with the same first token, and of tokens that are the same up to a difference.

    With random weights in bf16 the likeliest tokens lie close together, and sequences that part stay apart:
    the first share says whether it is the same model.
    """
    same = total = 0
    for left, right in zip(ours, theirs, strict=True):
        total += len(left)
        for a, b in zip(left, right, strict=True):
            if a != b:
                break
            same += 1
    firsts = sum(left[:1] == right[:1] for left, right in zip(ours, theirs, strict=True))
    return {"first": firsts / len(ours), "prefix": same / total}


@dataclass(frozen=True, slots=True)
class Turn:
    """An engine and the cells that it computes before the next engine's turn."""

    round: int
    engine: str
    cells: tuple[Cell, ...]


def schedule(engines: Sequence[str], cells: Sequence[Cell], rounds: int, together: bool) -> Iterator[Turn]:
    """Turns of a cell each where all engines are loaded ``together``, and of all cells where each has to be
    loaded for it. Who begins changes every round."""
    for round in range(rounds):
        at = round % len(engines)
        order = [*engines[at:], *engines[:at]]
        for group in [(cell,) for cell in cells] if together else [tuple(cells)]:
            for engine in order:
                yield Turn(round, engine, group)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes; empty for no values."""
    if not values:
        return {}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(ours: dict[int, float], theirs: dict[str, dict[int, float]]) -> dict[str, Any] | None:
    """One engine's figure over the best of the others', by round.

    The best is who has the highest median; the ratio is taken round by round, where what else went on was
    the same for both. None if there is no round that both have.
    """
    medians = {name: statistics.median(values.values()) for name, values in theirs.items() if values}
    if not medians or not ours:
        return None
    best = max(medians, key=lambda name: medians[name])
    shared = [value / theirs[best][round] for round, value in ours.items() if round in theirs[best]]
    return {"best": best, **spread(shared)} if shared else None
