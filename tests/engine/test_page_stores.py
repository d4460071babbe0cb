"""Pages that come from a store: the same tokens, nothing read too early, nothing freed too early."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest

from aioinfer import ConfigError, EngineConfig
from aioinfer.errors import StepFailed
from aioinfer.loop import transfers
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.costs import Costs, StepCosts
from aioinfer.scheduling.rates import TransferRates
from aioinfer.scheduling.step import NewRequestData, Row
from aioinfer.scheduling.step_time import StepTime
from aioinfer.tiers.archive import Archive, ArchiveWriter
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.engine.stores import FlakyStore
from tests.engine.storing import PARAMS, PROMPT, Gated, ask, attach, began, written
from tests.toys import ToyDevice, toy_generate
from tests.toys.adapters import write_toy_adapter


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
    device = ToyDevice(max_adapters=3)
    async with make_engine(device=device, page_size=4, max_adapters=2) as engine:
        attach(engine, Gated())
        ways: list[dict[str, str]] = [{}, {"cache_salt": "tenant"}]
        for name in ("a", "b"):
            await engine.load_adapter(name, write_toy_adapter(tmp_path / name, name))
            ways.append({"adapter": name})
        for hits in (0, 40):
            for way in ways:
                assert (await ask(engine, **way)).usage.cached_tokens == hits
                engine.flush_cache()
        # What a name stands for now has its own pages; the same files loaded again have theirs.
        await engine.load_adapter("a", write_toy_adapter(tmp_path / "c", "other"))
        assert (await ask(engine, adapter="a")).usage.cached_tokens == 0
        engine.flush_cache()
        await engine.load_adapter("a", tmp_path / "a")
        assert (await ask(engine, adapter="a")).usage.cached_tokens == 40


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
async def test_others_go_on_out_of_memory_while_a_disk_hangs(
    make_engine: MakeEngine, reading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_PATIENCE", 0.01)
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


async def test_nobody_is_retracted_for_pages_that_come_back_soon(make_engine: MakeEngine) -> None:
    store, nothing = Gated(), {"new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    async with make_engine(device=ToyDevice(num_pages=36), page_size=4, **nothing) as engine:
        attach(engine, store)
        await ask(engine)
        engine.flush_cache()
        store.open.clear()
        store.begun.clear()
        stream = engine.generate(PROMPT, PARAMS)
        await began(store)
        await stream.aclose()
        params = PARAMS.changed(max_tokens=41)
        prompts = [[7] * 20, [9] * 20]
        streams = [engine.generate(prompt, params) for prompt in prompts]
        stats = engine.stats()
        while stats.steps_in_flight or stats.pages_free:
            await asyncio.sleep(0)
            stats = engine.stats()
        store.open.set()
        results = await asyncio.gather(*streams)
        assert [each.token_ids for each in results] == [toy_generate(prompt, params) for prompt in prompts]
        assert engine.stats().retractions == 0
        await written(engine)
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
        times = StepTime(0.0, Costs(step=StepCosts(0.01, 0.0, 0.0, 0.0, (1.0,))))
        rates = engine._core.rates = TransferRates(times)
        rates.read = 2.0
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
