"""Desk: a scheduler that a test drives step by step."""

from __future__ import annotations

from collections import abc
from typing import Any

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.params import SamplingParams
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Outcome, Step
from tests.sequences import new_sequence


class Desk:
    """A scheduler with a prefix cache, driven one step at a time; every token is 42."""

    def __init__(
        self,
        policy: str = "fcfs",
        *,
        page_size: int = 4,
        pages: int = 64,
        running: int = 4,
        prefix_cache: bool = True,
        snapshots: int | None = None,
        snapshot_tokens: int = 1,
        **limits: Any,
    ) -> None:
        options: dict[str, Any] = {
            "max_running_requests": running,
            "max_step_tokens": 64,
            "chunk_size": 64,
            "new_token_ratio": 0.0,
            "min_new_token_ratio": 0.0,
            "share_prefix_tokens": 8,
            "admission": "fifo",
        }
        self.memory = Memory(
            PageAllocator(pages, page_size),
            SlotPool(3 * running),
            prefix_cache=prefix_cache,
            snapshots=snapshots,
            snapshot_tokens=snapshot_tokens,
        )
        self.scheduler = Scheduler(self.memory, EngineConfig(policy=policy, **{**options, **limits}))
        self.flights: list[Step] = []
        self._key = 0

    def submit(self, prompt: int | abc.Sequence[int], max_tokens: int = 4, **options: Any) -> Sequence:
        self._key += 1
        ids = [1000 * self._key + at for at in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=max_tokens)
        request = new_sequence(
            self._key, ids, params, seed=0, stop_ids=frozenset(), max_length=len(ids) + max_tokens, **options
        )
        self.scheduler.submit(request)
        return request

    def plan(self) -> list[Sequence]:
        """Launch a step; the requests that have a row in it."""
        step = self.scheduler.plan()
        audit(self.scheduler)
        if step is None:
            return []
        self.flights.append(step)
        return [row.request for row in step.rows]

    def resolve(self) -> None:
        while self.flights:
            step = self.flights.pop(0)
            self.scheduler.resolve(step, Outcome([42 if row.samples else NO_TOKEN for row in step.rows]))
        audit(self.scheduler)

    def round(self) -> list[Sequence]:
        """One step from plan to resolve."""
        rows = self.plan()
        self.resolve()
        return rows

    def finish(self, most: int = 300) -> int:
        """Run to the end; how many steps it took."""
        for steps in range(most):
            if not self.scheduler.queues.has_work:
                return steps
            assert self.round(), "nothing is in flight, nothing is planned, and a request waits"
        raise AssertionError("the requests keep each other from ending")
