"""Bugs in the transfers of pages that are planted, and found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aioinfer import AioInferError
from aioinfer.engine import Engine
from aioinfer.loop import transfers
from aioinfer.scheduling.arrivals import Arrival, Transfers
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.queues import RequestQueues
from tests.engine.block_worlds import make_block_world
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle, simulate
from tests.engine.storing import PARAMS, PROMPT, Gated, ask, attach, began, written
from tests.engine.worlds import make_world, with_store
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled
from tests.toys import ToyDevice, toy_generate


def _reads_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages count as arrived before they are filled."""
    begin = transfers.PageTransfers._begin

    def hurried(self: Any, executor: Any, work: Any, done: Callable[[int], None]) -> bool:
        arrival = next((each for each in getattr(done, "args", ()) if isinstance(each, Arrival)), None)
        if arrival is None:
            return begin(self, executor, work, done)
        self._loop.call_soon(done, len(arrival.names))
        return begin(self, executor, work, lambda _: None)

    monkeypatch.setattr(transfers.PageTransfers, "_begin", hurried)


def _forgets_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is named without its adapter."""
    root_of = transfers.root_of
    monkeypatch.setattr(transfers, "root_of", lambda parts: root_of([*parts][:5]))


def _takes_wrong_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives counts one page too many."""
    landed = RequestQueues.landed
    monkeypatch.setattr(
        RequestQueues,
        "landed",
        lambda self, arrival, pages: landed(self, arrival, min(pages + 1, len(arrival.pages))),
    )


@rest(SECONDS)
@pytest.mark.parametrize(
    ("plant", "first"), [(_reads_too_early, 25), (_forgets_the_adapter, 70), (_takes_wrong_pages, 130)]
)
def test_random_lifetimes_find_planted_bugs(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: of the seeds, shortly before the one that finds it."""
    plant(monkeypatch)
    with pytest.raises(BaseException, match="seed="):
        for seed in range(first, first + 200):
            simulate(seed, 60)


async def _end_while_filled(engine: Engine, store: Gated) -> None:
    """A request ends while its pages are filled, and another one computes."""
    await ask(engine)
    engine.flush_cache()
    store.open.clear()
    store.begun.clear()
    stream = engine.generate(PROMPT, PARAMS)
    await began(store)
    await stream.aclose()
    other = [7] * 30
    going = engine.generate(other, PARAMS.changed(max_tokens=100))
    await anext(going)
    store.open.set()
    assert (await going).token_ids == toy_generate(other, PARAMS.changed(max_tokens=100))


async def _evict_while_copied(engine: Engine, store: Gated) -> None:
    """A prefix is evicted, as far as it can be, while it is written."""
    store.open.clear()
    await engine.generate(PROMPT, PARAMS)
    await began(store)
    engine.flush_cache()
    for number in range(3):
        await engine.generate([7 + number] * 160, PARAMS)
    store.open.set()
    await written(engine)
    engine.flush_cache()
    assert (await ask(engine)).token_ids == toy_generate(PROMPT, PARAMS)


def _free_what_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends gives back the pages that a worker still fills."""

    def abandon(self: Transfers, arrival: Arrival) -> int:
        arrival.abandoned = True
        return 0

    monkeypatch.setattr(Transfers, "abandon", abandon)
    monkeypatch.setattr(Memory, "reclaim", lambda self, arrival: None)


def _free_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that is being written can be evicted."""
    put = transfers.PageTransfers._put

    def careless(self: Any, departure: Any, *rest: Any) -> Any:
        work = put(self, departure, *rest)
        self._memory._unlock(departure.lock, 0)
        self._memory.transfers.departures.discard(departure)
        return work

    monkeypatch.setattr(transfers.PageTransfers, "_put", careless)
    monkeypatch.setattr(Memory, "departed", lambda self, departure: None)


@pytest.mark.parametrize(
    ("course", "plant"),
    [(_end_while_filled, _free_what_is_filled), (_evict_while_copied, _free_what_is_copied)],
)
async def test_pages_are_not_freed_while_workers_have_them(
    course: Any, plant: Any, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with the bug planted, the course fails."""
    async with make_engine(device=ToyDevice(num_pages=60), page_size=4) as engine:
        store = Gated()
        attach(engine, store)
        await course(engine, store)
        await written(engine)
        await settle(engine)
    plant(monkeypatch)
    async with make_engine(device=ToyDevice(num_pages=60), page_size=4) as engine:
        store = Gated()
        attach(engine, store)
        with pytest.raises((AssertionError, AioInferError)):
            await course(engine, store)
        store.open.set()
        await written(engine)


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, 8), SIMULATION))
@pytest.mark.parametrize("make", [make_world, make_block_world])
def test_random_lifetimes_with_stores_keep_every_law(make: Any, block: int) -> None:
    """2 kinds of 8 blocks of 20 worlds of 80 lifetimes: 25,600 in all. The rest has 1,600."""
    loaded = stored = 0
    for seed in range(2000 + 20 * block, 2020 + 20 * block):
        world, _ = simulate(seed, scaled(80, 40), make=with_store(make))
        moved = world.engine._core.scheduler.memory.transfers
        loaded, stored = loaded + moved.arrived, stored + moved.stored
    assert loaded > 2
    assert stored > 20
