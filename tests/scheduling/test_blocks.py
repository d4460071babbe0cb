"""Blocks of diffusion models in the scheduler: random lives over a device that checks what it reads."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from typing import Any

import pytest

from aioinfer.cache.pages import PageAllocator
from aioinfer.cache.slots import SlotPool
from aioinfer.config import EngineConfig, policy_names
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.sampling.outcomes import NO_TOKEN
from aioinfer.scheduling.audit import audit, check, check_idle
from aioinfer.scheduling.block_batch import BlockBatch
from aioinfer.scheduling.block_cursor import BlockCursor
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.step import Outcome, Step
from tests.scheduling.paper import STOP, PaperDevice, Script
from tests.sequences import new_sequence
from tests.tiers import SECONDS, SIMULATION, grid, rest

SIZES = ((4, 4), (4, 8), (2, 4), (8, 8), (1, 2))


class World:
    """A scheduler, its device, and up to three steps in flight."""

    def __init__(
        self,
        script: Script,
        *,
        page_size: int | None = None,
        num_pages: int = 40,
        window: int = 1,
        policy: str = "fcfs",
        prefix_cache: bool = True,
        **limits: Any,
    ) -> None:
        page_size = script.size if page_size is None else page_size
        options = {"max_running_requests": 4, "max_step_tokens": 64, "chunk_size": 32, "max_rounds": 1}
        options.update(limits)
        options["max_step_tokens"] = max(options["max_step_tokens"], options["max_running_requests"])
        slots = options["max_running_requests"] * 3
        memory = Memory(PageAllocator(num_pages, page_size), SlotPool(slots), prefix_cache=prefix_cache)
        config = EngineConfig(policy=policy, **options)
        batch = BlockBatch(memory, config, script.size)
        self.scheduler = Scheduler(memory, config, batch)
        self.device = PaperDevice(script, num_pages=num_pages, page_size=page_size, num_slots=slots)
        self.script = script
        self.window = window
        self.flights: deque[tuple[Step, Any]] = deque()
        self.requests: list[Sequence] = []
        self.rounds: dict[int, int] = {}

    def submit(self, prompt: list[int], max_tokens: int, **options: Any) -> Sequence:
        request = new_sequence(
            len(self.requests) + 1,
            prompt,
            SamplingParams(max_tokens=max_tokens, logprobs=0, diffusion=DiffusionParams()),
            seed=0,
            stop_ids=frozenset({STOP}),
            max_length=len(prompt) + max_tokens,
            parts={
                "cursor": partial(BlockCursor, block_size=self.script.size, monotone=not self.script.edits)
            },
            **options,
        )
        self.requests.append(request)
        self.scheduler.submit(request)
        return request

    def launch(self) -> Step | None:
        if len(self.flights) > self.window:
            return None
        step = self.scheduler.plan()
        if step is not None:
            self.flights.append((step, self.device.prepare(step)))
            for row in step.rows:
                assert row.blocks or row.ids
                self.rounds[row.request.key] = self.rounds.get(row.request.key, 0) + (row.blocks > 0)
        return step

    def resolve(self) -> None:
        step, prepared = self.flights.popleft()
        outcome = Outcome([NO_TOKEN] * step.num_rows, blocks=self.device.compute(prepared))
        self.scheduler.resolve(step, outcome)

    def fail(self, *, memory: bool) -> None:
        step, prepared = self.flights.popleft()
        self.device.spoil(prepared)
        (self.scheduler.run_out if memory else self.scheduler.fail)(step, RuntimeError("injected"))

    def run(self, most: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if self.launch() is None:
                if not self.flights:
                    break
                self.resolve()
            check(self.scheduler)
            audit(self.scheduler)
        assert not self.flights, "it does not end"
        assert not self.scheduler.queues.has_unfinished, "nothing can be planned, and somebody waits"
        check_idle(self.scheduler)

    def verify(self, request: Sequence) -> None:
        """What has come is what the plainest decoder says, or the beginning of it."""
        prompt = list(request.prompt_ids)
        ids, steps = self.script.generate(prompt, request.max_length - len(prompt))
        count = len(request.output_ids)
        assert request.output_ids == ids[:count], request
        assert request.cursor.step_map == steps[:count], request
        assert len(request.output.logprobs) == count
        if request.output.finish_reason in ("stop", "length"):
            assert count == len(ids), request


@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", ["fdfo", "sync"])
@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_request_generates_what_the_plain_decoder_says(
    window: int, mode: str, fused: bool, edits: bool
) -> None:
    script = Script(4, edits=edits)
    for prompt in ([1], [1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8, 9], list(range(10, 21))):
        for max_tokens in (1, 3, 4, 5, 20):
            for mixed in (True, False):
                world = World(script, window=window, diffusion_mode=mode, fused_commit=fused, mixed=mixed)
                request = world.submit(prompt, max_tokens)
                world.run()
                world.verify(request)
                assert request.output.finish_reason in ("stop", "length")


def _world(chance: random.Random) -> World:
    size, page_size = chance.choice(SIZES)
    script = Script(size, chance.choice([1, 2, 5]), chance.choice([5, 40]), chance.random() < 0.3)
    return World(
        script,
        page_size=page_size,
        num_pages=chance.choice([30, 34, 60]) * 4 // page_size,
        window=chance.choice([0, 1, 1, 2]),
        policy=chance.choice(policy_names()),
        prefix_cache=chance.random() < 0.8,
        max_running_requests=chance.choice([1, 2, 4, 6]),
        max_step_tokens=chance.choice([2 * size, 3 * size, 16 * size, 200]),
        chunk_size=chance.choice([1, size, 2 * size + 1, 64]),
        max_prefill_tokens=chance.choice([None, None, 2, 3 * size]),
        max_decode_rows=chance.choice([None, None, 1, 2]),
        mixed=chance.random() < 0.7,
        step_priority=chance.choice(["decode", "prefill"]),
        admission=chance.choice(["fifo", "pack"]),
        share_prefix_tokens=chance.choice([0, 4, 8]),
        preemption=chance.random() < 0.3,
        new_token_ratio=chance.choice([0.0, 0.4, 1.0]),
        diffusion_mode=chance.choice(["fdfo", "fdfo", "sync"]),
        fused_commit=chance.random() < 0.7,
    )


def _live(world: World, chance: random.Random, moves: int) -> None:
    scheduler, parked = world.scheduler, list[Sequence]()
    for _ in range(moves):
        what = chance.random()
        if what < 0.25:
            base = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] if chance.random() < 0.7 else [11, 12, 13]
            prompt = (base * 3)[: chance.randint(1, 28)] + [chance.randint(20, 22)] * chance.randint(0, 2)
            world.submit(
                prompt,
                chance.choice([1, 2, 3, 4, 5, 8, 24]),
                priority=chance.randint(0, 2),
                routing_key=chance.choice([None, "a", "b"]),
            )
        elif what < 0.55:
            world.launch()
        elif what < 0.85 and world.flights:
            world.resolve()
        elif what < 0.87 and world.flights:
            world.fail(memory=chance.random() < 0.7)
        elif what < 0.90 and world.requests:
            scheduler.finish(chance.choice(world.requests), "abort")
        elif what < 0.93 and world.requests:
            request = chance.choice(world.requests)
            scheduler.queues.park(request)
            parked.append(request)
        elif what < 0.96 and parked:
            scheduler.queues.unpark(parked.pop())
        elif what < 0.98:
            running = [r for r in world.requests if r.state is SequenceState.RUNNING]
            if len(running) > 1:
                scheduler.queues.retract(chance.choice(running))
        else:
            scheduler.memory.flush()
        check(scheduler)
        audit(scheduler)
    for request in parked:
        scheduler.queues.unpark(request)


@rest(SECONDS)
@pytest.mark.parametrize("seed", grid(range(5), range(5, 40), SIMULATION))
def test_random_lives_leave_nothing_behind_and_change_no_token(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        world = _world(chance)
        _live(world, chance, 150)
        world.run()
        for request in world.requests:
            assert request.finished
            world.verify(request)
