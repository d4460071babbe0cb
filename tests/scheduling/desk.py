"""Desk: a scheduler that a test drives step by step."""

from __future__ import annotations

from collections import abc
from typing import Any

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig
from aioinfer.images.prompt import PromptImages
from aioinfer.params import SamplingParams
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.features import FeatureCache
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Outcome, Row, Step
from aioinfer.scheduling.step_time import StepTime
from tests.sequences import new_sequence

#: the id that ends every request of a desk
STOP = 7


class Desk:
    """A scheduler with a prefix cache, driven one step at a time; tokens are 42 unless a test says others."""

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
        features: FeatureCache | None = None,
        times: StepTime | None = None,
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
        self.memory.features = features
        config = EngineConfig(policy=policy, **{**options, **limits})
        self.scheduler = Scheduler(self.memory, config, times=times)
        self.flights: list[Step] = []
        self._key = 0

    def new(
        self,
        prompt: int | abc.Sequence[int],
        max_tokens: int = 4,
        images: PromptImages | None = None,
        **options: Any,
    ) -> Sequence:
        """A request that is not queued."""
        self._key += 1
        ids = [1000 * self._key + at for at in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=max_tokens)
        request = new_sequence(
            self._key,
            ids,
            params,
            stop_ids=frozenset({STOP}),
            max_length=len(ids) + max_tokens,
            **options,
        )
        request.output.images = images
        return request

    def submit(self, *arguments: Any, **options: Any) -> Sequence:
        """As :meth:`new`, and queue it."""
        request = self.new(*arguments, **options)
        self.scheduler.submit(request)
        return request

    def launch(self) -> Step:
        """The next step, which there must be; it is not among the ``flights``."""
        step = self.scheduler.plan()
        audit(self.scheduler)
        assert step is not None
        return step

    def bring(self, step: Step, token: int = 42, forced: abc.Sequence[int] = ()) -> list[Sequence]:
        """Resolve a step all of whose sampling rows bring this; the requests that have got something."""
        tokens = [token if row.samples else NO_TOKEN for row in step.rows]
        at = [index for index, row in enumerate(step.rows) if row.samples and forced]
        moved = self.scheduler.resolve(step, Outcome(tokens, {index: list(forced) for index in at}))
        audit(self.scheduler)
        return moved

    def plan(self) -> list[Sequence]:
        """Launch a step; the requests that have a row in it."""
        step = self.scheduler.plan()
        audit(self.scheduler)
        if step is None:
            return []
        self.flights.append(step)
        return [row.sequence for row in step.rows]

    def resolve(self) -> None:
        while self.flights:
            self.bring(self.flights.pop(0))

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


def only(step: Step) -> Row:
    """Of a step that has one."""
    (row,) = step.rows
    return row
