"""Models with recurrent state: the same tokens as ever, on a toy that knows whose state each cell holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.params import Grammar, SamplingParams
from aioinfer.scheduling.step import Row
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_transparency import retract_every, toy_requests
from tests.tiers import SECONDS, grid, rest
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SYSTEM = list(range(1, 33))


def toy(
    config: dict[str, Any], snapshots: int, defer: Callable[[Row], int | None] | None = None
) -> ToyDevice:
    slots = EngineConfig(model="toy", **{"max_running_requests": 8, **config}).num_slots
    return ToyDevice(
        num_pages=config.get("num_pages", 64),
        page_size=config.get("page_size", 4),
        num_slots=slots,
        snapshots=snapshots,
        defer=defer,
    )


@rest(SECONDS)
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("snapshots", grid([0, 1, 3], [2, 50]))
async def test_toy_ids_do_not_depend_on_snapshots(
    make_engine: MakeEngine, snapshots: int, every: int
) -> None:
    requests = toy_requests()
    beginning = [5] * 9
    requests += [([*beginning, *prompt], params) for prompt, params in requests]
    for number, changes in enumerate(
        (
            {"overlap_steps": 2},
            {"overlap_steps": 0, "chunk_size": 3, "state_snapshot_tokens": 7},
            {"page_size": 1, "share_prefix_tokens": 4},
            {"num_pages": 16, "max_prefill_tokens": 8},
            {"prefix_cache": False, "overlap_steps": 1},
            {"mixed": False, "step_priority": "prefill", "max_decode_rows": 2},
        )
    ):
        dice = random.Random(number)

        def defer(row: Row, dice: random.Random = dice) -> int | None:
            return dice.choice([0, 1, 9]) if dice.random() < 0.1 else None

        changes = {"state_snapshot_tokens": 1, **changes}
        async with make_engine(device=toy(changes, snapshots, defer), **changes) as engine:
            retract_every(engine, every)
            results = await asyncio.gather(*[engine.generate(*request) for request in requests])
            await settle(engine)
        for (prompt, params), result in zip(requests, results, strict=True):
            assert result.token_ids == toy_generate(prompt, params, seed=params.seed or 0), (number, prompt)


async def test_requests_that_arrive_together_compute_a_common_prefix_once(make_engine: MakeEngine) -> None:
    settings: dict[str, Any] = {"page_size": 4, "share_prefix_tokens": 8, "state_snapshot_tokens": 1}
    async with make_engine(device=toy(settings, 8), **settings) as engine:
        answers = [engine.generate([*SYSTEM, 40 + number], SHORT) for number in range(6)]
        cached = [(await answer).usage.cached_tokens for answer in answers]
        assert sorted(cached) == [0, 32, 32, 32, 32, 32]
        assert engine.stats().prefill_tokens == 33 + 5
        assert engine.stats().snapshot_hits == 5
        await settle(engine)


@pytest.mark.parametrize("snapshots", [0, 8])
async def test_forced_tokens_are_sampled_where_a_rewind_would_begin_anew(
    make_engine: MakeEngine, snapshots: int
) -> None:
    pytest.importorskip("llguidance")
    settings: dict[str, Any] = {"page_size": 4, "state_snapshot_tokens": 1}
    params = SamplingParams(temperature=0, grammar=Grammar("regex", "[d-h]vwxyzvwxyzvwxyz"), max_tokens=30)
    async with make_engine(device=toy(settings, snapshots), tokenizer=ToyTokenizer, **settings) as engine:
        result = await engine.generate(SYSTEM, params)
        assert result.text[1:] == "vwxyzvwxyzvwxyz"
        assert (engine.stats().forced_tokens > 0) == (snapshots > 0)
        await settle(engine)


async def test_the_log_says_how_many_states_are_kept(make_engine: MakeEngine) -> None:
    async with make_engine(device=toy({}, 7)) as engine:
        assert "7 snapshots of recurrent state" in engine.info.decisions
    async with make_engine() as engine:
        assert engine.info.num_snapshots is None
        assert "recurrent" not in engine.info.decisions
