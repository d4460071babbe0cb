"""Counters of a dispatcher never fall, and lose nothing of replicas that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from aioinfer import EngineConfig, SamplingParams
from aioinfer.errors import EngineError
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.connection import BEAT
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.stats import add_counts, counts_of
from tests.parallel.framed import Kind, both
from tests.parallel.served import Served, Told
from tests.parallel.toys import PARAMS, Toy, lose_engine, prompt, toys, virtual
from tests.parallel.waiting import until
from tests.tiers import PROGRAM, rest


class Scrapes:
    """Counters and histograms of a dispatcher, which must not fall from one look to the next."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()
        self._last: dict[Any, float] = {}
        self.looks = 0
        dispatcher.register(self.registry)

    def look(self) -> None:
        self.looks += 1
        for family in self.registry.collect():
            for sample in family.samples if family.type in ("counter", "histogram") else ():
                key = sample.name, tuple(sample.labels.items())
                before = self._last.get(key, 0.0)
                assert sample.value >= before, f"{key} fell from {before} to {sample.value}"
                self._last[key] = sample.value

    async def forever(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.001)


async def restart(dispatcher: Dispatcher, engines: list[Toy]) -> None:
    await dispatcher.restart("local-0")


async def restart_all(dispatcher: Dispatcher, engines: list[Toy]) -> None:
    await dispatcher.restart()


async def remove(dispatcher: Dispatcher, engines: list[Toy]) -> None:
    await dispatcher.remove("local-0")


async def lose_and_restart(dispatcher: Dispatcher, engines: list[Toy]) -> None:
    lose_engine(engines[0])
    await asyncio.sleep(1.0)
    await dispatcher.restart("local-0")


async def lose_and_remove(dispatcher: Dispatcher, engines: list[Toy]) -> None:
    lose_engine(engines[0])
    await asyncio.sleep(1.0)
    await dispatcher.remove("local-0")


async def replace(dispatcher: Dispatcher, engines: list[Toy]) -> None:
    await dispatcher.remove("local-0")
    await dispatcher.add(Toy())
    await dispatcher.remove("local-1")


async def add_what_does_not_start(dispatcher: Dispatcher, engines: list[Toy]) -> None:
    with contextlib.suppress(EngineError, ValueError):
        await dispatcher.add(Toy(num_pages=1))


CHANGES = [restart, restart_all, remove, lose_and_restart, lose_and_remove, replace, add_what_does_not_start]


@both
@pytest.mark.parametrize("change", CHANGES)
@virtual
async def test_no_counter_falls_whatever_becomes_of_a_replica(kind: Kind, change: Any) -> None:
    engines = toys(2)
    dispatcher = kind(engines)
    scrapes = Scrapes(dispatcher)
    async with dispatcher:
        first = [dispatcher.generate(prompt(number), PARAMS) for number in range(6)]
        await asyncio.gather(*first)
        await asyncio.sleep(2 * BEAT)  # remote ones have reported that
        before = dispatcher.stats()
        assert before.output_tokens == 6 * 8
        looking = asyncio.ensure_future(scrapes.forever())
        await change(dispatcher, engines)
        more = [dispatcher.generate(prompt(number), PARAMS) for number in range(6)]
        await asyncio.gather(*more)
        await asyncio.sleep(2 * BEAT)
        looking.cancel()
        scrapes.look()
        after = dispatcher.stats()
        assert after.output_tokens == 2 * before.output_tokens
        assert after.device_busy > before.device_busy
    assert scrapes.looks > 20


@virtual
async def test_a_dispatcher_that_is_started_again_counts_from_zero() -> None:
    dispatcher = Dispatcher(toys(2))
    for _ in range(2):
        async with dispatcher:
            assert dispatcher.stats().output_tokens == 0
            await dispatcher.generate(prompt(1), PARAMS)
            await dispatcher.restart()
            assert dispatcher.stats().output_tokens == 8


async def test_an_engine_that_is_connected_to_again_is_not_counted_twice(served: Served) -> None:
    for _ in range(3):
        await served.launch()
        await served.start(Told())
        stream = served.engine.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, seed=1))
        await stream
        await until(lambda: served._stats is not None and not served._stats.running)
        await SocketReplica.aclose(served)
    await served.launch()
    assert counts_of(served)["output_tokens"] == 15
    assert not served.past


async def test_an_agent_that_is_closed_reports_what_was_counted_last(served: Served) -> None:
    await served.launch()
    await served.start(Told())
    assert served._link is not None
    served._link.closing = True
    await served.engine.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, seed=1))
    await served.agent.aclose()
    await asyncio.wait([served._link.connection.gone])
    assert counts_of(served)["output_tokens"] == 5


def test_mappings_are_added_by_their_keys() -> None:
    counts: dict[str, Any] = {}
    for parts in ({"mlp": 1.0, "none": 0.0}, {"mlp": 0.5, "attention": 2.0}):
        add_counts(counts, {"forward_seconds": parts, "steps": 3})
    assert counts == {"forward_seconds": {"mlp": 1.5, "none": 0.0, "attention": 2.0}, "steps": 6}


@rest(PROGRAM)
@pytest.mark.usefixtures("directory", "patient")
@pytest.mark.native
async def test_counters_of_child_processes_are_exact_after_a_restart() -> None:
    config = EngineConfig(model="tiny-chat", threads=1, kv_memory_gib=0.1)
    dispatcher = Dispatcher(processes=2, config=config)
    scrapes = Scrapes(dispatcher)
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)
    async with asyncio.timeout(240), dispatcher:
        looking = asyncio.ensure_future(scrapes.forever())
        await asyncio.gather(*[dispatcher.generate(f"Story {number}", params) for number in range(4)])
        await dispatcher.restart("process-0")
        assert dispatcher.stats().output_tokens == 200
        assert sum(dispatcher.stats().forward_seconds.values()) > 0
        os.kill(dispatcher._replicas[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        await until(lambda: dispatcher.stats().ready_replicas == 1)
        await dispatcher.remove("process-1")
        looking.cancel()
        scrapes.look()
        assert dispatcher.stats().output_tokens == 200
