"""The seed law: same prompt, parameters and seed give the same tokens, alone or under load."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import Grammar, SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.tiers import SECONDS, rest
from tests.toys import toy_generate

OTHERS = 7
PROMPT = list(range(100, 121))


class Crowd:
    """A request and others that arrive one after the other while earlier ones run, and some of which leave.

    Who comes when and leaves when is counted in tokens, by dice: nothing is left to the clock.
    """

    def __init__(self, engine: Engine, seed: int, vocab: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._vocab = vocab
        self.left = 0

    async def around(self, prompt: list[int], params: SamplingParams) -> list[list[int]]:
        """Token ids of the request, and of its twin that comes at another time."""
        places = self._rng.sample(range(OTHERS + 1), 2)
        self._arrivals = [asyncio.Event() for _ in range(OTHERS + 2)]
        self._arrivals[0].set()
        runs = []
        for number in range(OTHERS + 1):
            if number in places:
                runs.append(self._run(number, prompt, params, leave_after=None))
                continue
            other = [self._rng.randrange(self._vocab) for _ in range(self._rng.randint(1, 40))]
            if self._rng.random() < 0.3:
                other = [*prompt, *other]  # and meets its prefix in the cache
            wishes = SamplingParams(
                temperature=self._rng.choice([0.0, 1.0, 1.8]),
                seed=self._rng.randrange(1000),
                top_k=self._rng.choice([0, 0, 7]),
                frequency_penalty=self._rng.choice([0.0, 0.0, 1.0]),
                max_tokens=self._rng.randint(10, 40),
                ignore_eos=True,
            )
            leave_after = self._rng.randint(1, 9) if self._rng.random() < 0.5 else None
            runs.append(self._run(number, other, wishes, leave_after))
        results = await asyncio.gather(*runs)
        return [results[place] for place in places]

    async def _run(
        self, number: int, prompt: list[int], params: SamplingParams, leave_after: int | None
    ) -> list[int]:
        call_next_after = self._rng.randint(1, 4)
        await self._arrivals[number].wait()
        ids: list[int] = []
        async with self._engine.generate(prompt, params) as stream:
            async for chunk in stream:
                ids += chunk.token_ids
                if len(ids) >= call_next_after:
                    self._arrivals[number + 1].set()
                if leave_after is not None and len(ids) >= leave_after:
                    self.left += 1
                    break
        self._arrivals[number + 1].set()
        return ids


@rest(SECONDS)
@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("num_pages", [64, 24])
async def test_on_the_toy(make_engine: MakeEngine, window: int, num_pages: int) -> None:
    """With pages for all, and with so few that requests take them from each other."""
    prompt = [number % 64 for number in PROMPT]
    async with make_engine(overlap_steps=window, num_pages=num_pages) as engine:
        for seed in range(12):
            params = SamplingParams(seed=seed * 7919, temperature=1.0, max_tokens=30)
            alone = (await engine.generate(prompt, params)).token_ids
            assert alone == toy_generate(prompt, params, seed=seed * 7919)
            crowd = Crowd(engine, seed, 64)
            assert await crowd.around(prompt, params) == [alone, alone], f"crowd {seed}"
            await settle(engine)
        assert num_pages == 64 or engine.stats().retractions > 0


KINDS = {
    "plain": SamplingParams(temperature=1.0, max_tokens=25, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=1.6, top_k=40, top_p=0.9, min_p=0.01, max_tokens=25, ignore_eos=True
    ),
    "penalised": SamplingParams(
        temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.8, max_tokens=25, ignore_eos=True
    ),
    "steered": SamplingParams(
        temperature=1.5, logit_bias={75: 3.0, 90: -9.0}, allowed_token_ids=range(60, 400), max_tokens=25
    ),
    "constrained": SamplingParams(
        temperature=1.3, grammar=Grammar("regex", "(red|green|blue)?[a-z ]{30}"), max_tokens=25
    ),
}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], list[int]]:
    """By kind and seed, the tokens of the bundled model in float32 with nobody else there."""
    found: dict[tuple[str, int], list[int]] = {}

    async def generate() -> None:
        config = EngineConfig(dtype="float32", threads=1, overlap_steps=0, prefix_cache=False)
        async with Engine(config) as engine:
            for kind, params in KINDS.items():
                for seed in (1, 2):
                    found[kind, seed] = (await engine.generate(PROMPT, with_seed(params, seed))).token_ids

    with asyncio.Runner() as runner:
        runner.run(generate())
    return found


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return dataclasses.replace(params, seed=seed)


@rest(SECONDS)
@pytest.mark.parametrize(("window", "pages"), [(1, None), (2, 20)])
async def test_on_the_bundled_model(
    alone: dict[tuple[str, int], list[int]], window: Any, pages: int | None
) -> None:
    """And another seed gives other tokens, so that all this says something."""
    few: dict[str, Any] = {"page_size": 8, "num_pages": pages, "max_model_len": 160} if pages else {}
    config = EngineConfig(dtype="float32", threads=1, overlap_steps=window, chunk_size=16, **few)
    left = 0
    async with Engine(config) as engine:
        for number, kind in enumerate(KINDS):
            wanted = alone[kind, 1]
            crowd = Crowd(engine, 100 * window + number, 800)
            found = await crowd.around(PROMPT, with_seed(KINDS[kind], 1))
            assert found == [wanted, wanted], f"{kind}, crowd {100 * window + number}"
            assert wanted != alone[kind, 2]
            left += crowd.left
        await settle(engine)
        assert left > 5
        assert not pages or engine.stats().retractions > 0
