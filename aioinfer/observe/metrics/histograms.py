"""Histograms: counts of observations by bucket, in plain lists.

Those of ``prometheus_client`` take a lock and several calls per observation, and belong to one registry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "GAP",
    "LAG",
    "LATENCY",
    "STEP_TOKENS",
    "TTFT",
    "VLLM_GAP",
    "VLLM_LATENCY",
    "VLLM_TTFT",
    "Counts",
    "Histogram",
    "N",
    "token_bounds",
]

# Boards for vLLM compare with and sum over its own bounds. Ours are these and finer ones: vLLM's first bound
# of the time in the queue is 0.3 s, and that of the gap between tokens 10 ms.
VLLM_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
VLLM_GAP = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
VLLM_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
TTFT = VLLM_TTFT
GAP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, *VLLM_GAP)
LATENCY = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *VLLM_LATENCY)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N = (1, 2, 5, 10, 20)
LAG = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


def token_bounds(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``most``, as vLLM has them for counts of tokens."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= most)


class Counts(NamedTuple):
    """A histogram at one moment. ``counts`` has one entry more than ``bounds``: above the last one."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float

    def cumulative(self, bounds: Sequence[float] | None = None) -> list[tuple[float, int]]:
        """(bound, observations up to it), without infinity; for some of the bounds only if they are given."""
        wanted = self.bounds if bounds is None else set(bounds)
        found, so_far = [], 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            so_far += count
            if bound in wanted:
                found.append((bound, so_far))
        return found


class Histogram:
    """Observations by bucket, and their sum. A bound belongs to the bucket below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value. O(log buckets)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Count many values: ``counts`` by bucket, and their sum."""
        for index, count in enumerate(counts):
            self.counts[index] += count
        self.total += total

    def read(self) -> Counts:
        """A copy, whole from any thread."""
        return Counts(self.bounds, tuple(self.counts), self.total)
