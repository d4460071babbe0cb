"""EngineStats: every counter of the scheduler is published, every gauge is read."""

from __future__ import annotations

import dataclasses

import pytest

from aioinfer import EngineStats, SamplingParams
from aioinfer.scheduling.counters import SchedulerCounters
from tests.engine.simulation import settle
from tests.observe.scrapes import toy_engine


def test_every_counter_of_the_scheduler_is_published() -> None:
    published = {item.name: item.type for item in dataclasses.fields(EngineStats)}
    for counter in dataclasses.fields(SchedulerCounters):
        assert published[counter.name] == counter.type
        gauge = EngineStats.__dataclass_fields__[counter.name].metadata
        assert not gauge, f"{counter.name} is a counter and a gauge"


async def test_a_snapshot_is_complete_and_frozen() -> None:
    async with toy_engine(launch_mode="inline") as engine:
        before = engine.stats()
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        await settle(engine)
        after = engine.stats()
    assert (before.admitted, before.output_tokens, before.state) == (0, 0, "running")
    assert (after.admitted, after.finished, after.output_tokens) == (1, 1, 4)
    assert after.steps >= 4
    assert after.pages_in_use == 0
    pages = (after.pages_free, after.pages_fenced, after.pages_private, after.pages_cached)
    assert sum(pages) == after.pages_total > 0
    assert set(dataclasses.asdict(after)) == {item.name for item in dataclasses.fields(EngineStats)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.steps = 0  # type: ignore[misc]
