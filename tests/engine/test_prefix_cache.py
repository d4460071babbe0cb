"""The prefix cache as callers see it: counted hits, the same tokens, and no sharing across salts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.toys import ToyDevice, toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SYSTEM = list(range(1, 33))


async def ask(engine: Engine, prompt: Sequence[int], salt: str = "") -> int:
    """Generate; returns how many tokens were cached."""
    result = await engine.generate(list(prompt), SHORT, cache_salt=salt)
    assert result.token_ids == toy_generate(prompt, SHORT)
    return result.usage.cached_tokens


async def test_a_common_beginning_is_found_again(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4) as engine:
        assert await ask(engine, [*SYSTEM, 40]) == 0
        assert await ask(engine, [*SYSTEM, 41]) == 32
        assert await ask(engine, [*SYSTEM[:10], 42, 43]) == 8, "whole pages only"
        assert engine.stats().hit_rate == pytest.approx(40 / (33 + 33 + 12))
        await settle(engine)


async def test_one_token_is_always_left_to_compute(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4) as engine:
        await ask(engine, SYSTEM)
        assert await ask(engine, SYSTEM) == 28


async def test_a_conversation_finds_its_own_answers(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4) as engine:
        history = SYSTEM
        for turn in range(4):
            cached = await ask(engine, history)
            # The KV of the last token of an answer was never needed.
            assert cached == (len(history) - 4) // 4 * 4 * bool(turn)
            history = [*history, *toy_generate(history, SHORT), 50 + turn, 51, 52]


async def test_salts_do_not_share(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4) as engine:
        assert await ask(engine, [*SYSTEM, 40], "one") == 0
        assert await ask(engine, [*SYSTEM, 41], "two") == 0
        assert await ask(engine, [*SYSTEM, 42]) == 0
        assert await ask(engine, [*SYSTEM, 43], "one") == 32


@pytest.mark.parametrize("snapshots", [None, 8])
async def test_requests_that_arrive_together_compute_a_common_prefix_once(
    make_engine: MakeEngine, snapshots: int | None
) -> None:
    settings = {"page_size": 4, "share_prefix_tokens": 8, "state_snapshot_tokens": 1}
    async with make_engine(device=ToyDevice(snapshots=snapshots), **settings) as engine:
        cached = await asyncio.gather(*[ask(engine, [*SYSTEM, 40 + number]) for number in range(6)])
        assert sorted(cached) == [0, 32, 32, 32, 32, 32]
        assert engine.stats().prefill_tokens == 33 + 5
        assert engine.stats().held_back > 0
        assert engine.stats().snapshot_hits == (5 if snapshots else 0)
        await settle(engine)


async def test_without_the_cache_nothing_is_kept(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4, prefix_cache=False) as engine:
        assert [await ask(engine, SYSTEM) for _ in range(2)] == [0, 0]
        assert engine.stats().pages_cached == 0
        assert engine.flush_cache() == 0


async def test_a_full_pool_evicts_what_was_not_used_for_longest(make_engine: MakeEngine) -> None:
    async with make_engine(page_size=4, num_pages=20) as engine:
        for first in (1, 2, 3):
            await ask(engine, [first] * 24)
        await ask(engine, [1] * 24)
        await ask(engine, [4] * 24)  # takes pages of the twos
        assert await ask(engine, [1] * 24) == 20
        assert await ask(engine, [2] * 24) < 20
        assert engine.stats().pages_in_use == 0


async def test_a_flushed_cache_is_empty_for_those_who_come_after(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(page_size=4, fault=gate) as engine:
        gate.open = True
        await ask(engine, [*SYSTEM, 40])
        gate.open = False
        reader = engine.generate([*SYSTEM, 41], SHORT)
        await asyncio.to_thread(gate.arrived.acquire)
        before = engine.stats()
        freed = engine.flush_cache()
        assert freed == before.pages_evictable
        gate.release()
        assert (await reader).token_ids == toy_generate([*SYSTEM, 41], SHORT)
        assert await ask(engine, [*SYSTEM, 42]) == 0
        await settle(engine)
