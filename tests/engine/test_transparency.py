"""The same tokens with any window, launch mode, chunk and page size, on the toy and on the bundled model."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioinfer.config import EngineConfig, policy_names
from aioinfer.engine import Engine
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from examples.training.tasks import held_out
from tests.engine.conftest import MakeEngine
from tests.engine.making import make_llm
from tests.tiers import SECONDS, grid, points, rest
from tests.toys import toy_generate

ALLOWED = range(60, 400)
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


@rest(SECONDS)
@pytest.mark.parametrize("every", grid([3], [0, 7]))
@pytest.mark.parametrize("policy", policy_names())
async def test_toy_ids_do_not_depend_on_cache_policy_chunking_or_retraction(
    make_engine: MakeEngine, policy: str, every: int
) -> None:
    requests = toy_requests()
    beginning = [5] * 9
    requests += [([*beginning, *prompt], params) for prompt, params in requests]
    for changes in (
        {"prefix_cache": False},
        {"admission": "fifo", "chunk_size": 3},
        {"share_prefix_tokens": 4, "max_prefill_tokens": 8},
        {"mixed": False, "num_pages": 16},
        {"mixed": False, "step_priority": "prefill", "max_decode_rows": 2},
    ):
        async with make_engine(policy=policy, overlap_steps=2, **changes) as engine:
            retract_every(engine, every)
            results = await asyncio.gather(*[_run(engine, *request) for request in requests])
            assert not every or engine.stats().retractions > 0
        for (prompt, params), ids in zip(requests, results, strict=True):
            assert ids == toy_generate(prompt, params, seed=params.seed or 0)


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


def bundled_requests() -> list[tuple[Any, SamplingParams]]:
    greedy = SamplingParams(temperature=0, max_tokens=60)
    requests: list[tuple[Any, SamplingParams]] = []
    for task in ("add", "copy", "key_value", "json", "second_turn"):
        requests += [(item.messages, greedy) for item in held_out(task, 3)]
    story = held_out("story", 1)[0].messages
    for seed in range(4):
        requests += [
            (story, SamplingParams(temperature=1.3, seed=seed, max_tokens=40, top_p=0.95)),
            (story, SamplingParams(temperature=0.8, seed=seed, max_tokens=40, top_k=20, min_p=0.02)),
            (story, SamplingParams(temperature=1.5, seed=seed, max_tokens=40, frequency_penalty=2.0)),
            (story, SamplingParams(temperature=0, max_tokens=40, repetition_penalty=3.0, min_tokens=30)),
            (
                story,
                SamplingParams(
                    temperature=2.0,
                    seed=seed,
                    max_tokens=40,
                    presence_penalty=1.5,
                    stop_token_ids=[305],
                ),
            ),
            (
                story,
                SamplingParams(
                    seed=seed, max_tokens=40, logit_bias={75: 3, 90: -9}, allowed_token_ids=ALLOWED
                ),
            ),
        ]
    return requests


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """The bundled model in float32, one request at a time, nothing overlapped."""
    config = EngineConfig(dtype="float32", overlap_steps=0, max_running_requests=1, threads=1)
    with LLM(config) as llm:
        return [llm.generate([prompt], params)[0].token_ids for prompt, params in bundled_requests()]


@rest(SECONDS)
@pytest.mark.parametrize(("window", "mode"), points(MODES[1::3], [*MODES[::3], *MODES[2::3]]))
async def test_bundled_model_ids_do_not_depend_on_the_window_or_the_mode(
    alone: list[list[int]], window: int, mode: Any
) -> None:
    config = EngineConfig(dtype="float32", overlap_steps=window, launch_mode=mode, chunk_size=5, threads=1)
    async with Engine(config) as engine:
        assert await asyncio.gather(*[_run(engine, *request) for request in bundled_requests()]) == alone


@rest(SECONDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": False, "admission": "fifo"},
        {"policy": "lpm", "share_prefix_tokens": 16, "page_size": 4},
        {"policy": "dfs-weight", "chunk_size": 7, "mixed": False},
        {"policy": "random", "step_priority": "prefill", "max_decode_rows": 3, "max_prefill_tokens": 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("every", grid([5], [0]))
async def test_bundled_model_ids_do_not_depend_on_cache_policy_chunking_or_retraction(
    alone: list[list[int]], settings: Any, every: int
) -> None:
    async with Engine(EngineConfig(dtype="float32", threads=1, **settings)) as engine:
        for _ in range(2):  # the second time around, prompts are cached where the cache is on
            retract_every(engine, every)
            found = await asyncio.gather(*[_run(engine, *request) for request in bundled_requests()])
            assert found == alone
        assert (engine.stats().cached_tokens > 500) == engine.config.prefix_cache
        assert not every or engine.stats().retractions > 0


@rest(SECONDS)
async def test_bundled_model_ids_survive_retraction(alone: list[list[int]]) -> None:
    config = EngineConfig(
        dtype="float32", page_size=8, num_pages=40, max_model_len=320, overlap_steps=2, threads=1
    )
    async with Engine(config) as engine:
        assert await asyncio.gather(*[_run(engine, *request) for request in bundled_requests()]) == alone
        assert engine.stats().retractions > 0


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
