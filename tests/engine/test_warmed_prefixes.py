"""Warmed prefixes: computed before a request needs them, held until released, found by those who may."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer import SamplingParams, errors
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.parallel.toys import Toy, virtual

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
#: on pages of 4
PREFIX = list(range(1, 22))


async def test_a_warmed_prefix_is_found_by_those_who_may_share_it(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        async with await engine.warm(PREFIX, cache_salt="a") as prefix:
            assert (prefix.num_tokens, prefix.held_tokens) == (21, 20)
            assert (await engine.generate([*PREFIX, 1], PARAMS, cache_salt="a")).usage.cached_tokens == 20
            assert (await engine.generate([*PREFIX, 1], PARAMS)).usage.cached_tokens == 0
            again = await engine.warm(PREFIX, cache_salt="a")
            assert engine.stats().held_tokens == 20
        assert (prefix.held_tokens, again.held_tokens) == (0, 20)
        again.release()
        again.release()
        assert engine.stats().held_tokens == 0
        short = await engine.warm([1, 2])
        assert (short.num_tokens, short.held_tokens) == (2, 0)
        await settle(engine)


@virtual
async def test_a_warmed_prefix_is_held_until_it_is_released_unless_it_has_a_time() -> None:
    async with Toy(session_timeout=1.0) as engine:
        for_good, for_a_time = await engine.warm(PREFIX), await engine.warm([40, 41] * 4, ttl=2.0)
        await asyncio.sleep(1.9)
        assert (for_good.held_tokens, for_a_time.held_tokens) == (20, 8)
        await asyncio.sleep(1000)
        assert (for_good.held_tokens, for_a_time.held_tokens) == (20, 0)


async def test_warming_that_is_cut_short_holds_nothing(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(fault=gate) as engine:
        warming = asyncio.ensure_future(engine.warm(PREFIX))
        await asyncio.to_thread(gate.arrived.acquire)
        warming.cancel()
        gate.release()
        await asyncio.wait([warming])
        assert warming.cancelled()
        with pytest.raises(errors.InvalidRequest, match="prompt: "):
            await engine.warm([1] * 1000)
        with pytest.raises(errors.InvalidRequest, match="ttl: "):
            await engine.warm(PREFIX, ttl=-1)
        assert engine.stats().held_tokens == 0
        await settle(engine)
