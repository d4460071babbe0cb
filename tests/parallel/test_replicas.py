"""Replicas that join, leave and are restarted while streams go on, and what becomes of lost ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer import ConfigError, EngineClosed, EngineFailed, InvalidRequest, SamplingParams
from aioinfer.engine import EngineState
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.replica import ReplicaState
from aioinfer.testing import FakeEngine
from tests.parallel.toys import (
    PARAMS,
    STEP,
    Toy,
    expected,
    prompt,
    sent,
    toys,
    turn,
    virtual,
)
from tests.tiers import SECONDS, rest


class Slow(Toy):
    """Takes a second to start."""

    async def start(self, progress: Any = None) -> None:
        await asyncio.sleep(1.0)
        await super().start(progress)


class Load:
    """Requests that come one after the other until it is stopped; none may fail, and each is exact."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.open: set[asyncio.Task[None]] = set()
        self.finished = 0
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        dice = random.Random(3)
        number = 0
        while True:
            number += 1
            task = asyncio.ensure_future(self._one(number, dice.randint(2, 40)))
            self.open.add(task)
            task.add_done_callback(self.open.discard)
            await asyncio.sleep(dice.expovariate(1 / STEP))

    async def _one(self, number: int, length: int) -> None:
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
        ids = prompt(number, 10)
        found: list[int] = []
        async for chunk in self._dispatcher.generate(ids, params):
            found += chunk.token_ids
        assert found == expected(ids, params)
        self.finished += 1

    async def stop(self) -> int:
        self._task.cancel()
        if self.open:
            await asyncio.gather(*self.open)
        return self.finished


@rest(SECONDS)
@virtual
async def test_replicas_come_and_go_under_load_and_nothing_fails() -> None:
    async with Dispatcher(toys(2)) as dispatcher:
        load = Load(dispatcher)
        await asyncio.sleep(0.3)
        assert await dispatcher.add(Toy()) == "local-2"
        await asyncio.sleep(0.3)
        assert dispatcher._replicas[2].load.requests > 0
        gone = dispatcher._replicas[0]
        await dispatcher.remove("local-0")
        assert gone.engine.closed
        assert not gone.load.requests
        assert [each.name for each in dispatcher.stats().replicas] == ["local-1", "local-2"]
        await asyncio.sleep(0.3)
        await dispatcher.restart("local-1")
        await dispatcher.restart()
        assert await dispatcher.add(gone.engine) == "local-3", "names are not used again"
        await asyncio.sleep(0.3)
        assert await load.stop() > 100
        stats = dispatcher.stats()
        assert (stats.diverged, stats.ready_replicas) == (0, 3)
        assert stats.resumed > 0
        assert not dispatcher.degraded


@rest(SECONDS)
@virtual
async def test_a_restart_takes_the_time_of_a_start_and_no_stream_waits_for_it() -> None:
    engines = [Slow(), Slow()]
    async with Dispatcher(engines) as dispatcher:
        load = Load(dispatcher)
        await asyncio.sleep(0.2)
        restarting = asyncio.ensure_future(dispatcher.restart("local-0"))
        await turn()
        for wrong in (dispatcher.restart, dispatcher.remove):  # it drains
            with pytest.raises(ConfigError, match="already"):
                await wrong("local-0")
        await asyncio.sleep(0.2)
        assert dispatcher._replicas[0].state is ReplicaState.STARTING
        assert (dispatcher.ready, dispatcher.degraded) == (True, True)
        before = load.finished
        await asyncio.sleep(0.6)
        assert load.finished > before + 30
        for wrong in (dispatcher.restart, dispatcher.remove):
            with pytest.raises(ConfigError, match="already"):
                await wrong("local-0")
        await restarting
        assert await load.stop()
        assert [each.launches for each in engines] == [2, 1]


@virtual
async def test_the_last_replica_is_removed_when_its_streams_have_ended() -> None:
    engines = toys(2)
    async with Dispatcher(engines) as dispatcher:
        await dispatcher.remove("local-1")
        streams = [dispatcher.generate(prompt(number), PARAMS) for number in range(3)]
        await asyncio.sleep(3 * STEP)
        leaving = asyncio.ensure_future(dispatcher.remove("local-0"))
        await turn()
        assert not dispatcher.ready
        waiting = dispatcher.generate([1, 2], PARAMS)
        results = await asyncio.gather(*streams)
        assert [each.token_ids for each in results] == [expected(prompt(number)) for number in range(3)]
        await leaving
        assert engines[0].closed
        with pytest.raises(EngineFailed, match="no replica is left"):
            await waiting
        assert dispatcher.state is EngineState.FAILED
        assert dispatcher.stats().replicas == ()
        # Work goes on when one joins.
        assert dispatcher.info.vocab_size == 64
        await dispatcher.add(Toy())
        assert (await dispatcher.generate([1, 2], PARAMS)).token_ids == expected([1, 2])


@virtual
async def test_while_the_last_one_leaves_another_can_join() -> None:
    async with Dispatcher(toys(1)) as dispatcher:
        stream = dispatcher.generate(prompt(1), SamplingParams(max_tokens=100, ignore_eos=True))
        await asyncio.sleep(3 * STEP)
        leaving = asyncio.ensure_future(dispatcher.remove("local-0"))
        await turn()
        await dispatcher.add(Toy())
        assert (await dispatcher.generate([1, 2], PARAMS)).token_ids == expected([1, 2])
        assert len((await stream).token_ids) == 100
        await leaving
        assert dispatcher.stats().ready_replicas == 1


@virtual
async def test_requests_wait_while_the_only_replica_restarts() -> None:
    async with Dispatcher(toys(1)) as dispatcher:
        restarting = asyncio.ensure_future(dispatcher.restart())
        stream = dispatcher.generate([1, 2], PARAMS)
        assert (await stream).token_ids == expected([1, 2])
        await restarting


class Unsteady(Toy):
    """Starts once."""

    async def start(self, progress: Any = None) -> None:
        if self.launches:
            raise ConfigError("the checkpoint is gone")
        await super().start(progress)


@virtual
async def test_a_restart_that_fails_is_a_loss() -> None:
    async with Dispatcher([Unsteady(), Toy()]) as dispatcher:
        load = Load(dispatcher)
        await asyncio.sleep(0.2)
        with pytest.raises(ConfigError, match="checkpoint is gone"):
            await dispatcher.restart()
        first = dispatcher.stats().replicas[0]
        assert first.state == "lost"
        assert "the checkpoint is gone" in (first.cause or "")
        assert dispatcher.ready
        assert await load.stop()
        await dispatcher.remove("local-0")
        assert not dispatcher.degraded


@virtual
async def test_streams_wait_for_a_restart_when_the_others_are_lost_meanwhile() -> None:
    engines = [Slow(), Toy()]
    async with Dispatcher(engines) as dispatcher:
        params = SamplingParams(max_tokens=50, ignore_eos=True, temperature=0)
        stream = dispatcher.generate(prompt(1), params)
        await asyncio.sleep(5 * STEP)
        restarting = asyncio.ensure_future(dispatcher.restart("local-0"))
        await asyncio.sleep(5 * STEP)
        engines[1].lose()
        assert not dispatcher.ready
        await restarting
        found = await stream
        assert found.token_ids == expected(prompt(1), params)
        assert dispatcher.stats().resumed >= 1


@virtual
async def test_closing_while_a_replica_starts_leaves_no_engine_behind() -> None:
    for action in ("restart", "add", "cancel"):
        engines: Sequence[Toy] = [Slow(), Toy()]
        dispatcher = Dispatcher(engines)
        await dispatcher.start()
        added = Slow()
        call = dispatcher.add(added) if action == "add" else dispatcher.restart("local-0")
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0.5)
        if action == "cancel":
            task.cancel()
            await asyncio.wait([task])
            assert dispatcher.stats().replicas[0].state == "lost"
        await dispatcher.aclose()
        if action != "cancel":
            with pytest.raises(EngineClosed, match="the dispatcher was closed"):
                await task
        assert all(each.closed for each in [*engines, added]), action


@pytest.mark.parametrize("busy", [False, True])
@virtual
async def test_an_engine_that_somebody_else_closes_is_lost(busy: bool) -> None:
    engines = toys(2)
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        streams = [dispatcher.generate(prompt(number), PARAMS) for number in range(4 * busy)]
        await asyncio.sleep(3 * STEP)
        await engines[0].aclose()
        assert dispatcher.degraded
        assert (dispatcher.stats().replicas[0].state, dispatcher.ready) == ("lost", True)
        assert "engine was closed" in (dispatcher.stats().replicas[0].cause or "")
        results = await asyncio.gather(*streams)
        assert [each.token_ids for each in results] == [expected(prompt(n)) for n in range(len(streams))]
        await dispatcher.restart("local-0")
        assert not dispatcher.degraded


@virtual
async def test_what_is_wrong_is_refused_before_anything_changes() -> None:
    engines = toys(2)
    async with Dispatcher(engines) as dispatcher:
        for call in (dispatcher.remove, dispatcher.restart):
            with pytest.raises(ConfigError, match="no replica 'local-7'; there are local-0, local-1"):
                await call("local-7")
        with pytest.raises(ConfigError, match="belongs to the dispatcher already"):
            await dispatcher.add(engines[0])
        for wrong in (None, "engine", Dispatcher(toys(1))):
            with pytest.raises(ConfigError, match="must be an Engine"):
                await dispatcher.add(wrong)  # type: ignore[arg-type]
        failing = Unsteady()
        failing.launches = 1
        with pytest.raises(ConfigError, match="checkpoint is gone"):
            await dispatcher.add(failing)
        lost = Toy()
        await lost.start()
        lost.lose()
        with pytest.raises(EngineFailed):
            await dispatcher.add(lost)
        assert len(dispatcher.stats().replicas) == 2
        assert not dispatcher.degraded
        same = Toy()
        adding = [dispatcher.add(same), dispatcher.add(same)]
        results = await asyncio.gather(*adding, return_exceptions=True)
        assert isinstance(results[1], ConfigError)
        assert dispatcher.stats().ready_replicas == 3
    for ask in (dispatcher.restart, lambda: dispatcher.remove("local-0"), lambda: dispatcher.add(Toy())):
        with pytest.raises(EngineClosed):
            await ask()
    assert all(each.closed for each in engines)


# -- losses --------------------------------------------------------------------------------------------


async def test_scripted_engines_fail_over_in_the_tests_of_an_application() -> None:
    engines = [FakeEngine("abcdefghij", pace=0.001), FakeEngine("abcdefghij", pace=0.001)]
    async with Dispatcher(engines) as dispatcher:
        text = ""
        async for chunk in dispatcher.generate("say it"):
            text += chunk.text
            if len(text) == 4:
                next(each for each in engines if each.ready and each.stats().running).lose_device()
        assert text == "abcdefghij"
        with pytest.raises(InvalidRequest):
            await dispatcher.generate([1] * 100_000)
        assert sent(dispatcher, []) == {}
