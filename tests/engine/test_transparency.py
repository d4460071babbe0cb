"""The same tokens with any window, launch mode, chunk and page size, on the toy and on the bundled model."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from tests.engine.asking import bundled_requests
from tests.engine.conftest import MakeEngine
from tests.engine.making import make_llm
from tests.tiers import SECONDS, grid, points, rest
from tests.toys import toy_generate

MODES = [(window, mode) for window in (0, 1, 2) for mode in ("thread", "inline")]


def toy_requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(11)
    return [
        (
            [rng.randrange(64) for _ in range(rng.randint(1, 20))],
            SamplingParams(temperature=float(at % 2), seed=at, max_tokens=rng.randint(1, 30)),
        )
        for at in range(12)
    ]


@pytest.mark.parametrize(("window", "mode"), MODES)
async def test_toy_ids_do_not_depend_on_the_window_or_the_mode(
    make_engine: MakeEngine, window: int, mode: str
) -> None:
    requests = toy_requests()
    for changes in ({}, {"chunk_size": 1}, {"page_size": 1}, {"num_pages": 14}, {"max_running_requests": 2}):
        async with make_engine(overlap_steps=window, launch_mode=mode, **changes) as engine:
            results = await asyncio.gather(*[_run(engine, *request) for request in requests])
        for (prompt, params), ids in zip(requests, results, strict=True):
            assert ids == toy_generate(prompt, params, seed=params.seed or 0)


def test_the_synchronous_twin_gives_the_same() -> None:
    requests = toy_requests()
    for window in (0, 1, 2):
        with make_llm(overlap_steps=window) as llm:
            keys = [llm.add_request(prompt, params) for prompt, params in requests]
            results = {}
            while llm.has_unfinished():
                results.update(llm.step())
        for key, (prompt, params) in zip(keys, requests, strict=True):
            assert results[key].token_ids == toy_generate(prompt, params, seed=params.seed or 0)


def retract_every(engine: Engine, every: int) -> None:
    """Take the pages of a running request away before every so many steps."""
    scheduler = engine._core.scheduler

    class Retracting(type(scheduler)):  # type: ignore[misc]
        __slots__ = ()

        def plan(self) -> Any:
            steps = self.queues.counters.steps
            if every and steps % every == every - 1 and (victim := self._victim()) is not None:
                self.queues.retract(victim)
            return super().plan()

    scheduler.__class__ = Retracting


@rest(SECONDS)
@pytest.mark.parametrize(("window", "mode"), points(MODES[1::3], [*MODES[::3], *MODES[2::3]]))
async def test_bundled_model_ids_do_not_depend_on_the_window_or_the_mode(
    alone: list[Result], window: int, mode: Any
) -> None:
    config = EngineConfig(dtype="float32", overlap_steps=window, launch_mode=mode, chunk_size=5, threads=1)
    async with Engine(config) as engine:
        found = await asyncio.gather(*[_run(engine, *request) for request in bundled_requests()])
    assert found == [each.token_ids for each in alone]


@rest(SECONDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": False, "admission": "fifo"},
        {"policy": "lpm", "share_prefix_tokens": 16, "page_size": 4},
        {"policy": "dfs-weight", "chunk_size": 7, "mixed": False},
        {"itl_target": 1e-4},
        {"policy": "random", "step_priority": "prefill", "max_decode_rows": 3, "max_prefill_tokens": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("every", grid([5], [0]))
async def test_bundled_model_ids_do_not_depend_on_cache_policy_chunking_or_retraction(
    alone: list[Result], settings: Any, every: int
) -> None:
    requests = bundled_requests()
    async with Engine(EngineConfig(dtype="float32", threads=1, **settings)) as engine:
        for _ in range(2):  # the second time around, prompts are cached where the cache is on
            retract_every(engine, every)
            found = await asyncio.gather(*[engine.generate(*request) for request in requests])
            assert [each.token_ids for each in found] == [each.token_ids for each in alone]
        size = engine.info.page_size
        assert size is not None
        for (_, params), result in zip(requests, found, strict=True):
            # The last token is always computed, and so is all of a prompt whose logprobs are asked for.
            cached = engine.config.prefix_cache and params.prompt_logprobs is None
            whole = (len(result.prompt_token_ids) - 1) // size * size
            assert result.usage.cached_tokens == (whole if cached else 0)
        assert not every or engine.stats().retractions > 0


async def _run(engine: Engine, prompt: Any, params: SamplingParams) -> list[int]:
    return (await engine.generate(prompt, params)).token_ids


@pytest.mark.parametrize("most", [0, 5, 256])
async def test_prefills_follow_one_another_only_if_they_may_overlap(
    make_engine: MakeEngine, most: int
) -> None:
    requests = toy_requests()
    behind: list[tuple[int, bool]] = []
    async with make_engine(
        overlap_steps=2, chunk_size=3, max_step_tokens=8, max_overlapped_prefill=most
    ) as engine:
        core = engine._core

        class Watched(type(core)):  # type: ignore[misc]
            __slots__ = ()

            def plan(self, before: Any = None) -> Any:
                step = super().plan(before)
                if step is not None and before is not None and before.prefilling:
                    behind.append((before.num_tokens - before.num_generating, bool(step.prefilling)))
                return step

        core.__class__ = Watched
        results = await asyncio.gather(*[_run(engine, *request) for request in requests])
    for (prompt, params), ids in zip(requests, results, strict=True):
        assert ids == toy_generate(prompt, params, seed=params.seed or 0)
    assert any(not prefills for _, prefills in behind), "decodes go on"
    assert all(tokens <= most for tokens, prefills in behind if prefills)
    assert most == 0 or any(prefills for _, prefills in behind)
