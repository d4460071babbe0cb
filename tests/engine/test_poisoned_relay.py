"""Relay cells are poisoned as soon as nobody may read them, and no poison ever reaches a forward.

The contract of a cell: the row that samples for a slot writes it, and the next decode row of the same tenant
reads it, once, however many steps later that is (it may be parked or paused in between, or not have its
turn). What else may be in a cell: the negative outcome of a row that sampled nothing; the rows launched
behind it are void, read it as token 0, and write their own outcome in its place. From then on the tenant
goes on from tokens that the host knows, and so does a request that was retracted: it reads no cell before
it has sampled into one. So a cell is dead after it was read, when its slot is free, and when a slot is
admitted to (again), and is then overwritten here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import StepFailed
from aioinfer.execution.decoding.relay import Relay
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.execution.packed import PackedStep
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from tests.engine.asking import bundled_requests
from tests.engine.simulation import settle
from tests.tiers import SECONDS, rest

#: no token, and not negative, so that nothing on the way makes a token of it
POISON = 1 << 40


class PoisonedRelay(Relay):
    """Overwrites what was read and what is admitted to."""

    __slots__ = ("admitted", "last_slots", "poison", "poisoned", "reads")

    def __init__(self, num_slots: int, poison: int) -> None:
        super().__init__(num_slots, torch.device("cpu"))
        self._cells.fill_(poison)
        self.poison = poison
        #: by launched step, slots that it admits to
        self.admitted: deque[list[int]] = deque()
        self.reads = 0
        #: slots of poisoned cells that were read
        self.poisoned: set[int] = set()
        self.last_slots: set[int] = set()

    def gather(
        self,
        input_ids: torch.Tensor,
        slots: torch.Tensor,
        num_decodes: int,
        verified: torch.Tensor | None = None,
    ) -> None:
        self._cells[self.admitted.popleft()] = self.poison
        super().gather(input_ids, slots, num_decodes, verified)
        read = slots[: num_decodes + (0 if verified is None else len(verified))]
        self.reads += len(read)
        self.poisoned.update(read[self._cells[read] == self.poison].tolist())
        self.last_slots = set(slots.tolist())
        self._cells[read] = self.poison

    def free(self, slots: list[int]) -> None:
        """These belong to no request now, and no other thread may touch them."""
        self._cells.numpy()[slots] = self.poison


class CheckedModel:
    """Raises before anything is computed from what is no token; and once when it is told to."""

    def __init__(self, model: Any, relay: PoisonedRelay, fail_at: int) -> None:
        self.spec = model.spec
        self._model = model
        self._relay = relay
        self._forwards = itertools.count(1)
        self._fail_at = fail_at
        self.failed_slots: set[int] = set()

    def forward(self, batch: Any, attention: Any) -> torch.Tensor:
        assert int(batch.input_ids.min()) >= 0
        assert int(batch.input_ids.max()) < self.spec.vocab_size, "poison in a forward"
        if next(self._forwards) == self._fail_at:
            self.failed_slots = self._relay.last_slots
            raise RuntimeError("injected")
        logits: torch.Tensor = self._model.forward(batch, attention)
        return logits


class PoisonedDevice(TorchDevice):
    """The bundled model behind a poisoned relay."""

    relay: PoisonedRelay
    model: CheckedModel

    def __init__(self, config: EngineConfig, poison: int, fail_at: int) -> None:
        super().__init__(config)
        self._slots = config.num_slots
        self._poison = poison
        self._fail_at = fail_at

    def open(self, progress: Any = None) -> Any:
        info = super().open(progress)
        runner = self._backend._runner  # type: ignore[union-attr]
        self.relay = runner.decoding.relay = PoisonedRelay(self._slots, self._poison)
        self.model = runner.model = CheckedModel(runner.model, self.relay, self._fail_at)  # type: ignore[assignment]
        return info

    def prepare(self, step: Step) -> PackedStep:
        self.relay.admitted.append([row.slot for row in step.prefilling if row.new_request is not None])
        return super().prepare(step)


def poison_free_slots(engine: Engine, relay: PoisonedRelay) -> None:
    """Poison the cells of free slots whenever some become free."""
    pool = engine._core.scheduler.memory.slots

    class Poisoning(type(pool)):  # type: ignore[misc]
        __slots__ = ()

        def give(self, items: Any, fence: int) -> None:
            super().give(items, fence)
            relay.free(self._free)

        def resolved(self, step_id: int) -> None:
            super().resolved(step_id)
            relay.free(self._free)

    pool.__class__ = Poisoning


def poisoned_engine(
    window: int,
    mode: str,
    *,
    poison: int = POISON,
    fail_at: int = 0,
) -> tuple[Engine, PoisonedDevice]:
    """So few pages that requests take them from each other, and masks that nobody waits for."""
    config: Any = EngineConfig(
        dtype="float32",
        threads=1,
        overlap_steps=window,
        page_size=8,
        num_pages=30,
        max_model_len=240,
        max_running_requests=6,
        chunk_size=24,
        grammar_patience=0.0,
        new_token_ratio=0.1,
        min_new_token_ratio=0.0,
        max_draft_tokens=2,
        adaptive_drafts=False,
    )
    device = PoisonedDevice(config, poison, fail_at)
    launcher = ThreadLauncher if mode == "thread" else InlineLauncher
    return Engine(config, launcher=lambda _: launcher(device)), device


async def load(engine: Engine) -> list[Any]:
    """All requests, with others that leave early, one that is not read for long, and a pause."""
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=60, ignore_eos=True)

    async def leaving(after: int) -> None:
        async with engine.generate([after] * 9, params) as stream:
            for _ in range(after):
                if await anext(stream, None) is None:
                    break

    async def pausing() -> None:
        await engine.generate([7] * 5, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        await engine.pause()
        engine.resume()

    idle = engine.generate([8] * 5, params, max_lag=2)
    streams = [engine.generate(prompt, each) for prompt, each in bundled_requests()]
    others = [leaving(after) for after in (1, 2, 5, 9, 14)]
    results = await asyncio.gather(*streams, *others, pausing(), return_exceptions=True)
    await asyncio.wait([asyncio.ensure_future(_outcome(idle))])
    await settle(engine)
    return results[: len(streams)]


async def _outcome(stream: Any) -> None:
    try:
        await stream
    except StepFailed:
        pass


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_no_poison_reaches_a_forward(window: int, mode: str, alone: list[Result]) -> None:
    engine, device = poisoned_engine(window, mode)
    async with engine:
        poison_free_slots(engine, device.relay)
        results = await load(engine)
        stats = engine.stats()
        assert stats.retractions > 0
        assert stats.parkings > 0
        assert stats.forced_tokens > 0
        assert stats.rejected_tokens > 0
        assert stats.accepted_tokens > 0
        assert stats.deferred_rows > 0
        assert stats.late_tokens > 0 or window == 0
    assert [getattr(result, "token_ids", result) for result in results] == [each.token_ids for each in alone]
    assert not device.relay.poisoned
    assert device.relay.reads > 150
    # Slot 0 has no tenant: what does not count is written there.
    assert set(device.relay._cells[1:].tolist()) == {POISON}, "a cell outlives its tenant"


@rest(SECONDS)
async def test_what_a_failed_step_leaves_behind_reaches_nobody_else(alone: list[Result]) -> None:
    """Its requests begin anew. Their rows in flight read poison, which the relay takes for token 0."""
    engine, device = poisoned_engine(2, "thread", poison=-1, fail_at=30)
    async with engine:
        poison_free_slots(engine, device.relay)
        results = await load(engine)
    assert len(device.model.failed_slots) > 1
    assert device.relay.poisoned <= device.model.failed_slots
    assert [getattr(result, "token_ids", result) for result in results] == [each.token_ids for each in alone]
