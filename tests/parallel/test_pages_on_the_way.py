"""What goes wrong between two replicas while pages are on their way from one to the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioinfer import SamplingParams
from aioinfer.loop.holding import Prefix
from aioinfer.loop.transfers import PageTransfers
from aioinfer.parallel import Dispatcher, messages
from aioinfer.parallel.placing import Placement
from aioinfer.parallel.replica import Attempt, Stored
from tests.parallel.framed import Kind, both, framed
from tests.parallel.toys import PARAMS, Toy, expected, prompt, toys, virtual
from tests.toys.adapters import write_toy_adapter

ROLES: dict[str, Any] = {"roles": ["prefill", "decode"], "prefill_tokens": 32}
LONG = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)


def two(**settings: Any) -> list[Toy]:
    return toys(2, deterministic=True, **settings)


def prefilled(engine: Toy) -> int:
    return engine.stats().prefill_tokens


@both
@virtual
async def test_the_first_replica_with_a_role_may_be_added_later(kind: Kind) -> None:
    async with kind(toys(1, deterministic=True), prefill_tokens=32) as dispatcher:
        await dispatcher.add(Toy(deterministic=True), role="prefill")
        for ids in (prompt(1, 64), prompt(2, 64)):
            assert (await dispatcher.generate(ids, LONG)).token_ids == expected(ids, LONG)
        stats = dispatcher.stats()
        assert (stats.handovers, stats.handovers_without_pages, stats.ready_replicas) == (1, 0, 2)


@virtual
async def test_pages_of_several_pieces_go_to_one_replica_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "PIECE", 20)
    engines = two()
    async with framed(engines, **ROLES) as dispatcher:
        prompts = [prompt(seed, 64) for seed in range(8)]
        found = await asyncio.gather(*[dispatcher.generate(ids, LONG) for ids in prompts])
        assert [each.token_ids for each in found] == [expected(ids, LONG) for ids in prompts]
        stats = dispatcher.stats()
        assert (stats.handovers, stats.handovers_without_pages) == (8, 0)
        await asyncio.sleep(1.0)
        assert prefilled(engines[1]) == 8


@virtual
async def test_a_replica_that_sends_nonsense_ends_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = two()
    async with framed(engines, **ROLES) as dispatcher:
        for answer in ((0, b"page"), (5, b"page" * 2)):

            async def nonsense(name: bytes, at: int, answer: tuple[int, bytes] = answer) -> tuple[int, bytes]:
                return answer

            monkeypatch.setattr(dispatcher._replicas[0], "fetch", nonsense)
            ids = prompt(answer[0], 64)
            assert (await dispatcher.generate(ids, LONG)).token_ids == expected(ids, LONG)
        assert dispatcher.stats().ready_replicas == 2


@both
@virtual
async def test_a_stream_waits_no_longer_for_a_worker_that_hangs(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = two()
    async with kind(engines, **ROLES) as dispatcher:
        run, hanging = PageTransfers._run, list[asyncio.Future[int]]()

        def hangs(self: PageTransfers, executor: Any, work: Any) -> asyncio.Future[int]:
            if executor is not engines[0]._started().transfers._writers:
                return run(self, executor, work)
            hanging.append(asyncio.get_running_loop().create_future())
            return hanging[-1]

        monkeypatch.setattr(PageTransfers, "_run", hangs)
        loop, ids = asyncio.get_running_loop(), prompt(7, 64)
        begun = loop.time()
        assert (await dispatcher.generate(ids, LONG)).token_ids == expected(ids, LONG)
        assert 5 <= loop.time() - begun < 6
        assert dispatcher.stats().handovers_without_pages == 1
        for each in hanging:
            each.set_result(0)


@virtual
async def test_a_number_of_a_hold_is_used_once() -> None:
    engines = toys(1)
    async with framed(engines) as dispatcher:
        await dispatcher.generate(ids := prompt(1, 64), PARAMS)
        replica: Any = dispatcher._replicas[0]
        for _ in range(2):
            replica._link.connection.send(messages.Hold(99, ids))
        await asyncio.sleep(0.5)
        assert replica._link.connection.closed
        assert engines[0]._started().core.scheduler.memory.held_pages == 0


@virtual
async def test_a_replica_is_restarted_though_the_place_for_pages_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aioinfer.errors import ConfigError
    from aioinfer.parallel import shared_pages

    engines = two()
    async with framed(engines, **ROLES) as dispatcher:

        def refuse(*_: Any) -> Any:
            raise ConfigError("no place")

        monkeypatch.setattr(shared_pages, "MemoryStore", refuse)
        await dispatcher.restart("local-0")
        assert dispatcher.stats().ready_replicas == 2
        ids = prompt(1, 64)
        assert (await dispatcher.generate(ids, LONG)).token_ids == expected(ids, LONG)


@virtual
async def test_no_handover_changes_the_arithmetic_of_a_stream() -> None:
    """Not even one without pages, where the replicas that keep it have much to do."""
    small: dict[str, Any] = {"max_running_requests": 4, "max_step_tokens": 64, "chunk_size": 64}
    engines = [
        Toy(deterministic=True),
        Toy(deterministic=True, **small),
        Toy(deterministic=True, quantization="int8"),
    ]
    options: dict[str, Any] = {**ROLES, "roles": ["prefill", "decode", "decode"], "exchange_gib": 1e-8}
    async with Dispatcher(engines, **options) as dispatcher:
        streams = [dispatcher.generate(prompt(seed, 256), LONG) for seed in range(12)]
        assert [(await stream).identical for stream in streams] == [True] * 12
        assert dispatcher.stats().handovers_without_pages > 1


@virtual
async def test_an_adapter_may_be_unloaded_while_pages_of_it_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = two()
    async with framed(engines, policy="prefix") as dispatcher:
        await dispatcher.load_adapter("a", write_toy_adapter(tmp_path / "adapter", "1"))
        session = dispatcher.session(adapter="a")
        await session.generate(prompt(1, 200), PARAMS)
        await asyncio.sleep(0.5)
        pages = [each._started().core.scheduler.memory.held_pages for each in engines]
        source, store = engines[pages.index(max(pages))], Toy.store_prefix

        async def unloads(*arguments: Any, **options: Any) -> int:
            found = await store(source, *arguments, **options)
            await source.unload_adapter("a")
            return found

        monkeypatch.setattr(source, "store_prefix", unloads)
        begun = asyncio.get_running_loop().time()
        assert await session.move(f"local-{pages.index(0)}") == 208
        assert asyncio.get_running_loop().time() - begun < 1


@virtual
async def test_what_was_held_when_the_connection_ended_is_held_no_longer() -> None:
    engines = toys(1)
    async with framed(engines) as dispatcher:
        dispatcher._started().when_lost = None
        replica: Any = dispatcher._replicas[0]
        link = replica._link
        answer, received = asyncio.get_running_loop().create_future(), link.received

        def ends(message: Any) -> None:
            received(message)
            if isinstance(message, messages.Held):
                link.connection.connection_lost(None)
                answer.set_result(None)

        link.received = ends
        kept = await replica.warm(Prefix(prompt(1, 64), "", None), None)
        assert answer.done()
        assert kept is None or kept.held_tokens == 0


@both
@virtual
async def test_a_replica_that_says_it_has_stored_too_much_makes_nobody_look_idle(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kind(two(), **ROLES) as dispatcher:
        source, placing = dispatcher._replicas[0], dispatcher._started().placing
        place, seen = placing.place, list[int]()

        async def boasts(prefix: Prefix) -> Stored:
            return Stored(10**6)

        def places(attempt: Attempt, placement: Placement) -> None:
            seen.append(placement.uncached)
            place(attempt, placement)

        monkeypatch.setattr(source, "store_prefix", boasts)
        monkeypatch.setattr(placing, "place", places)
        # So that those that share a store are looked at.
        monkeypatch.setattr(type(source.exchange), "by_messages", False)
        ids = prompt(1, 64)
        assert (await dispatcher.generate(ids, LONG)).token_ids == expected(ids, LONG)
        assert seen == [64, 1]
