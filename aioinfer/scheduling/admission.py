"""StepBudget: what still fits into the step being planned, in tokens and pages."""

from __future__ import annotations

from dataclasses import dataclass

from aioinfer.cache.pages import PageAllocator
from aioinfer.request import Request

__all__ = ["Limits", "StepBudget"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step."""

    max_running_requests: int
    max_step_tokens: int
    chunk_size: int


class StepBudget:
    """Counts down the tokens of one step."""

    __slots__ = ("_chunk_size", "tokens")

    def __init__(self, limits: Limits) -> None:
        self.tokens = limits.max_step_tokens
        self._chunk_size = limits.chunk_size

    def chunk(self, remaining: int) -> int:
        """Length of the next prefill chunk of a request with ``remaining`` positions to compute."""
        return min(remaining, self._chunk_size, self.tokens)

    def spend(self, tokens: int) -> None:
        self.tokens -= tokens


def pages_to_admit(request: Request, pages: PageAllocator, num_running: int) -> int | None:
    """Pages that admission reserves for ``request``, or None if it has to wait.

    Everything known so far gets its pages at once: a prefill that started never stalls half-way. One
    page per running request stays free, so that an admission does not cause a retraction right away;
    an empty engine admits whatever fits.
    """
    need = pages.pages_for(request.length)
    headroom = num_running
    return need if need + headroom <= pages.free else None
