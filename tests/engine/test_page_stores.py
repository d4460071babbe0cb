"""Pages that come from a store: the same tokens, nothing read too early, nothing freed too early."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aioinfer import AioInferError, ConfigError, EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import StepFailed
from aioinfer.loop import transfers
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.scheduling.arrivals import Arrival, Transfers
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.step import NewRequestData, Row
from aioinfer.tiers.archive import Archive, ArchiveWriter
from aioinfer.tiers.store import Views
from tests.engine.block_worlds import make_block_world
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle, simulate
from tests.engine.stores import FlakyStore
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled
from tests.toys import ToyDevice, toy_generate

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
PROMPT = [3 + number % 50 for number in range(42)]


class Gated(FlakyStore):
    """Reads and writes when it may."""

    def __init__(self) -> None:
        super().__init__(random.Random(1), 1000, 0.0)
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()

    def _pass(self) -> None:
        self.begun.set()
        assert self.open.wait(60), "nobody opened it"

    def put(self, name: bytes, page: Views, state: Views | None = None) -> bool:
        self._pass()
        return super().put(name, page, state)

    def read(
        self, names: Sequence[bytes], pages: Sequence[Views], states: Sequence[Views | None] = ()
    ) -> int:
        self._pass()
        return super().read(names, pages, states)


async def written(engine: Engine) -> None:
    """Wait until everything that was committed is in the stores."""
    runtime = engine._started()
    while runtime.transfers._fresh or runtime.transfers._working or runtime.transfers._due:
        await asyncio.sleep(0)


async def began(store: Gated) -> None:
    await asyncio.to_thread(store.begun.wait, 60)


async def ask(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> Result:
    result = await engine.generate(list(prompt), PARAMS, **options)
    await written(engine)
    return result


def attach(engine: Engine, store: FlakyStore) -> None:
    engine._started().transfers.attach(store, behind=True)


@pytest.mark.parametrize("snapshots", [None, 8])
async def test_another_engine_finds_what_one_has_computed(
    make_engine: MakeEngine, snapshots: int | None
) -> None:
    store, results = Gated(), []
    for _ in range(2):
        device = ToyDevice(snapshots=snapshots)
        async with make_engine(device=device, page_size=4, state_snapshot_tokens=1) as engine:
            attach(engine, store)
            results.append(await ask(engine))
            await settle(engine)
            stats = engine.stats()
    assert [result.usage.cached_tokens for result in results] == [0, 40]
    assert stats.loaded_pages == 10
    assert stats.prefill_tokens == 2
    assert results[0].token_ids == results[1].token_ids == toy_generate(PROMPT, PARAMS)
    assert results[0].logprobs == results[1].logprobs


async def test_what_was_flushed_comes_back(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4) as engine:
        attach(engine, Gated())
        first = await ask(engine)
        engine.flush_cache()
        again = await ask(engine)
        assert again.usage.cached_tokens == 40
        # The answer's pages are there as well.
        longer = await ask(engine, [*PROMPT, *first.token_ids, 9, 9])
        assert longer.usage.cached_tokens == 44
        assert longer.token_ids == toy_generate([*PROMPT, *first.token_ids, 9, 9], PARAMS)


async def test_neither_salts_nor_adapters_share_pages(make_engine: MakeEngine, tmp_path: Path) -> None:
    for name, key in (("a", 5), ("b", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy").write_text(str(key))
    async with make_engine(page_size=4) as engine:
        attach(engine, Gated())
        await ask(engine)
        engine.flush_cache()
        assert (await ask(engine, cache_salt="tenant")).usage.cached_tokens == 0
        engine.flush_cache()
        assert (await ask(engine, cache_salt="tenant")).usage.cached_tokens == 40


async def test_a_request_that_ends_leaves_its_pages_to_what_fills_them(make_engine: MakeEngine) -> None:
    store = Gated()
    async with make_engine(page_size=4) as engine:
        attach(engine, store)
        await ask(engine)
        engine.flush_cache()
        store.open.clear()
        store.begun.clear()
        stream = engine.generate(PROMPT, PARAMS)
        await began(store)
        assert engine.stats().loading == 1
        await stream.aclose()
        scheduler = engine._core.scheduler
        assert scheduler.memory.transfers.pages == engine.stats().pages_private == 10
        audit(scheduler)
        # Others compute meanwhile, in other pages.
        other = [7] * 30
        assert (await engine.generate(other, PARAMS)).token_ids == toy_generate(other, PARAMS)
        store.open.set()
        await written(engine)
        assert scheduler.memory.transfers.pages == engine.stats().pages_private == 0
        await settle(engine)


async def test_a_request_that_is_retracted_while_its_pages_arrive_begins_again(
    make_engine: MakeEngine,
) -> None:
    store = Gated()
    async with make_engine(page_size=4) as engine:
        attach(engine, store)
        await ask(engine)
        engine.flush_cache()
        store.open.clear()
        store.begun.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask(engine))
            await began(store)
            queues = engine._core.scheduler.queues
            (sequence,) = queues.running.values()
            queues.retract(sequence)
            audit(engine._core.scheduler)
            store.open.set()
            engine._started().driver.wake()
        assert asked.result().token_ids == toy_generate(PROMPT, PARAMS)
        assert engine.stats().retractions == 1
        await settle(engine)


async def test_a_parked_request_goes_on_when_its_pages_have_arrived(make_engine: MakeEngine) -> None:
    store = Gated()
    async with make_engine(page_size=4) as engine:
        attach(engine, store)
        await ask(engine)
        engine.flush_cache()
        store.open.clear()
        store.begun.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask(engine))
            await began(store)
            queues = engine._core.scheduler.queues
            (sequence,) = queues.running.values()
            queues.park(sequence)
            queues.unpark(sequence)
            audit(engine._core.scheduler)
            assert not queues.prefilling
            store.open.set()
        assert asked.result().token_ids == toy_generate(PROMPT, PARAMS)


async def test_closing_waits_for_what_fills_pages(make_engine: MakeEngine) -> None:
    store = Gated()
    async with make_engine(page_size=4) as engine:
        attach(engine, store)
        await ask(engine)
        engine.flush_cache()
        store.open.clear()
        store.begun.clear()
        stream = engine.generate(PROMPT, PARAMS)
        await began(store)
        closing = asyncio.ensure_future(engine.aclose())
        await asyncio.sleep(0)
        store.open.set()
        await closing
        assert stream.done


@pytest.mark.parametrize("reading", [False, True])
async def test_others_go_on_out_of_memory_while_a_disk_hangs(make_engine: MakeEngine, reading: bool) -> None:
    store = Gated()
    async with make_engine(device=ToyDevice(num_pages=40), page_size=4) as engine:
        attach(engine, store)
        await ask(engine)
        store.open.clear()
        store.begun.clear()
        if reading:
            engine.flush_cache()
            stream = engine.generate(PROMPT, PARAMS)
            await began(store)
            await stream.aclose()
        # The first ones to have a page to write; together they need more pages than there are.
        params = PARAMS.changed(max_tokens=70)
        prompts = [[7] * 20, [9] * 20]
        results = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        assert [each.token_ids for each in results] == [toy_generate(prompt, params) for prompt in prompts]
        assert engine.stats().retractions > 0
        assert engine._core.scheduler.memory.transfers.pages == (10 if reading else 0)
        store.open.set()
        await written(engine)
        await settle(engine)


async def test_an_engine_is_not_stalled_while_its_first_step_after_a_slow_store_is_computed(
    make_engine: MakeEngine, gate: Gate
) -> None:
    store, gate.open = Gated(), True
    async with make_engine(page_size=4, device=ToyDevice(fault=gate)) as engine:
        attach(engine, store)
        await ask(engine)
        engine.flush_cache()
        store.open.clear()
        store.begun.clear()
        gate.open = False
        stream = engine.generate(PROMPT, PARAMS)
        await began(store)
        driver = engine._started().driver
        driver._last_progress -= 1000.0  # so long it takes
        store.open.set()
        while not driver.steps_in_flight:
            await asyncio.sleep(0)
        assert driver.stalled < 1000
        gate.release()
        await stream


async def test_a_prefix_is_not_stored_in_the_file_of_a_session_that_is_loaded(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    ArchiveWriter(tmp_path / "session", {}).finish()
    async with make_engine(page_size=4) as engine:
        attach(engine, Gated())
        await ask(engine)
        archive, serving = Archive(tmp_path / "session"), engine._started()
        assert serving.attach(archive)
        assert await engine.store_prefix(PROMPT) == 40
        assert archive.counts().refused == {}
        serving.detach(archive)


class Overflowing(ToyDevice):
    """Computes no finite logits for a long prompt, as long as it is broken."""

    broken = True
    #: what happens before
    after: threading.Event | None = None

    def _next(self, row: Row, state: int, tenant: NewRequestData) -> int:
        if not self.broken or len(row.sequence.prompt_ids) < len(PROMPT):
            return super()._next(row, state, tenant)
        assert self.after is None or self.after.wait(60)
        return BAD_LOGITS


@pytest.mark.parametrize("copied", [False, True])
async def test_pages_with_which_a_request_failed_are_found_no_more(
    make_engine: MakeEngine, copied: bool
) -> None:
    """But for those with which others go on; also while they are being copied."""
    store, device, other = Gated(), Overflowing(), [*PROMPT[:16], *[7] * 10]
    async with make_engine(device=device, page_size=4, chunk_size=16) as engine:
        attach(engine, store)
        await ask(engine, other)
        if copied:
            store.open.clear()
            store.begun.clear()
            device.after = store.begun
        with pytest.raises(StepFailed):
            await engine.generate(PROMPT, PARAMS)
        assert engine.cached_tokens(PROMPT) == 16
        store.open.set()
        await written(engine)
        device.broken = False
        result = await ask(engine)
        assert result.usage.cached_tokens == 16
        assert result.token_ids == toy_generate(PROMPT, PARAMS)
        engine.flush_cache()
        assert (await ask(engine)).usage.cached_tokens == 40, "they are stored anew"
        await settle(engine)


async def test_looks_for_what_others_have_stored_do_not_pile_up(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_REFRESH", 0.0)
    store, looks = Gated(), list[int]()
    async with make_engine(page_size=4) as engine:
        attach(engine, store)
        store.refresh = lambda names=None, states=False: looks.append(1)  # type: ignore[method-assign]
        store.open.clear()
        await engine.generate(PROMPT, PARAMS)
        await began(store)
        for number in range(10):
            await engine.generate([number] * 9, PARAMS)
        assert len(engine._started().transfers._working) == 2, "a write, and one look"
        store.open.set()
        await written(engine)
        await ask(engine, [20] * 9)
        assert len(looks) > 1


@pytest.mark.parametrize("snapshots", [None, 8])
async def test_what_does_not_come_from_a_disk_that_hangs_is_computed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, snapshots: int | None
) -> None:
    monkeypatch.setattr(transfers, "_PATIENCE", 0.01)
    store, device = Gated(), ToyDevice(num_pages=200, snapshots=snapshots)
    other = [token + 1 for token in PROMPT]
    async with make_engine(device=device, page_size=4, state_snapshot_tokens=1) as engine:
        attach(engine, store)
        for prompt in (PROMPT, other):
            await ask(engine, prompt)
        engine.flush_cache()
        store.open.clear()
        for prompt in (PROMPT, other):
            result = await engine.generate(prompt, PARAMS)
            assert result.usage.cached_tokens == 0
            assert result.token_ids == toy_generate(prompt, PARAMS)
        assert engine.stats().retractions == 1, "the second one does not wait for the store"
        audit(engine._core.scheduler)
        store.open.set()
        await written(engine)
        engine.flush_cache()
        assert (await ask(engine)).usage.cached_tokens == 40
        await settle(engine)


async def test_a_page_that_is_missing_is_computed(make_engine: MakeEngine) -> None:
    store = FlakyStore(random.Random(3), 1000, 0.0)
    async with make_engine(page_size=4) as engine:
        attach(engine, store)
        await ask(engine)
        engine.flush_cache()
        leading = FlakyStore.leading
        store.leading = lambda names, states=False: leading(store, names, states=states)  # type: ignore[method-assign]
        del store._kept[list(store._kept)[4]]
        store.leading = lambda names, states=False: len(names)  # type: ignore[method-assign]
        result = await ask(engine)
        assert result.usage.cached_tokens == 16
        assert result.token_ids == toy_generate(PROMPT, PARAMS)
        assert engine.stats().missed_pages == 6


async def test_reading_that_is_slower_than_computing_is_left(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4) as engine:
        attach(engine, Gated())
        await ask(engine)
        engine.flush_cache()
        rates = engine._core.rates
        rates.read, rates.prefill = 2.0, 1.0
        assert (await ask(engine)).usage.cached_tokens == 0
        assert rates.read < 2.0, "it is never tried again"


async def test_pages_of_other_weights_are_neither_stored_nor_found(make_engine: MakeEngine) -> None:
    store = Gated()
    async with make_engine(page_size=4) as engine:
        attach(engine, store)
        await ask(engine)
        kept = len(store._kept)
        await engine.update_weights({"weights": 1})
        assert (await ask(engine)).usage.cached_tokens == 0
        assert len(store._kept) == kept


async def test_store_prefix_returns_when_the_pages_are_there(make_engine: MakeEngine) -> None:
    store = Gated()
    async with make_engine(page_size=4) as engine:
        engine._started().transfers.attach(store)
        await ask(engine)
        assert not store._kept, "what is not written behind is written when it is asked for"
        assert await engine.store_prefix([*PROMPT, 1, 2, 3]) == 40
        assert len(store._kept) == 10
        assert await engine.store_prefix(PROMPT, cache_salt="other") == 0
        await settle(engine)


async def test_an_engine_without_prefix_cache_or_host_pages_refuses_a_store(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4, prefix_cache=False) as engine:
        with pytest.raises(ConfigError, match="no prefix cache"):
            attach(engine, Gated())
    with pytest.raises(ConfigError, match="with prefix_cache on"):
        EngineConfig(prefix_cache=False, prefix_cache_dir="pages")


# -- planted bugs ----------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("block", grid([0], range(1, 4), SIMULATION))
@pytest.mark.parametrize("make", [None, make_block_world])
def test_random_lifetimes_with_stores_keep_every_law(make: Any, block: int) -> None:
    """The worlds of the laws have stores; here they are counted."""
    loaded = stored = 0
    for seed in range(2000 + 40 * block, 2040 + 40 * block):
        world, _ = simulate(seed, scaled(80), **({} if make is None else {"make": make}))
        moved = world.engine._core.scheduler.memory.transfers
        loaded, stored = loaded + moved.arrived, stored + moved.stored
    assert loaded > 10
    assert stored > 50
