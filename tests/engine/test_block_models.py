"""Real small diffusion models: the same in every way, and what a plain decoder without a cache says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from aioinfer.checkpoint.locate import bundled_models
from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import algorithm_names
from aioinfer.engine import Engine
from aioinfer.llm import LLM
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams
from tests.diffusion import reference
from tests.engine.block_parity import (
    WAYS,
    Asked,
    answers,
    edge_requests,
    ending_requests,
    logprobs,
    seen,
    to_the_end,
)
from tests.model.block_models import MASK, VOCAB, Plain, block_config, write_checkpoint
from tests.tiers import SECONDS, grid, rest

#: what makes blocks of random models, which are sure of nothing, take some rounds and not always as many
DIFFUSION: dict[str, dict[str, Any]] = {
    "low_confidence": {"threshold": 0.13},
    "joint_threshold": {"threshold": 0.13, "edit_threshold": 0.15, "max_post_edits": 3},
    "static_steps": {"steps": 3},
    "factor": {"factor": 4.0},
    "entropy_bound": {"entropy_bound": 7.0},
}
BUNDLED = [name for name in ("tiny-diffusion",) if name in bundled_models()]


@dataclass
class Model:
    path: str
    size: int
    mask_id: int
    vocab_size: int
    diffusion: dict[str, dict[str, Any]]
    #: its description, if that is short
    plain: Plain | None = None
    #: every so many of the requests are enough
    thin: int = 1

    def config(self, **settings: Any) -> EngineConfig:
        options = {"page_size": self.size, "num_pages": 800, "max_model_len": 12 * self.size, **settings}
        return EngineConfig(model=self.path, dtype="float32", device="cpu", threads=1, **options)

    def requests(self, algorithm: str) -> list[Asked]:
        given = self.diffusion.get(algorithm, {})
        requests = edge_requests(algorithm, self.size, self.vocab_size, self.mask_id, **given)
        return requests[:: self.thin]


@pytest.fixture(scope="module", params=["llada2", "sdar", *BUNDLED])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name = request.param
    if name in BUNDLED:
        with LLM(EngineConfig(model=name, dtype="float32", device="cpu")) as llm:
            info = llm._core.info
        assert info.block_size is not None
        assert info.mask_token_id is not None
        return Model(name, info.block_size, info.mask_token_id, info.vocab_size, {}, thin=5)
    size = {"llada2": 8, "sdar": 4}[name]
    config = block_config(name, num_hidden_layers=2, block_size=size)
    path = tmp_path_factory.mktemp(name)
    return Model(str(path), size, MASK, VOCAB, DIFFUSION, Plain(config, write_checkpoint(path, config), size))


def ask(model: Model, asked: Sequence[Asked], **settings: Any) -> list[Result]:
    async def run() -> list[Result]:
        async with Engine(model.config(**settings)) as engine:
            return await answers(engine, asked)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def alone(model: Model) -> list[tuple[Asked, Result]]:
    """Requests of all algorithms, each by itself in the plainest way."""
    every = [each for algorithm in algorithm_names() for each in model.requests(algorithm)]
    longest = [each for each in every if each[1].max_tokens == model.size + 1]
    first = [result.token_ids for result in ask(model, longest, max_running_requests=48)]
    asked = ending_requests(longest, first, model.size)[::2] + model.requests("low_confidence")
    # Of other algorithms, short outputs say nothing new.
    for algorithm in algorithm_names():
        asked += model.requests(algorithm)[2::4]
    plainest = {**WAYS["sync"], "max_running_requests": 1, "prefix_cache": False}
    return list(zip(asked, ask(model, asked, **plainest), strict=True))


def assert_same(found: Sequence[Result], wanted: Sequence[tuple[Asked, Result]]) -> None:
    for mine, (asked, theirs) in zip(found, wanted, strict=True):
        assert seen(mine) == seen(theirs), asked
        assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-5, rel=1e-5), asked


@rest(SECONDS)
@pytest.mark.parametrize("way", grid(["everything"], [way for way in WAYS if way != "everything"]))
def test_real_models_give_the_same_in_every_way(
    way: str, model: Model, alone: list[tuple[Asked, Result]]
) -> None:
    found = ask(model, [asked for asked, _ in alone], max_running_requests=48, **WAYS[way])
    assert_same(found, alone)


@rest(SECONDS)
@pytest.mark.parametrize("way", grid(["re-loop"], ["fused", "everything"]))
def test_real_models_give_the_same_one_request_at_a_time(
    way: str, model: Model, alone: list[tuple[Asked, Result]]
) -> None:
    some = alone[list(WAYS).index(way) :: 9]
    assert_same(ask(model, [asked for asked, _ in some], max_running_requests=1, **WAYS[way]), some)


def decode(model: Model, asked: Asked) -> tuple[list[int], list[int], list[float]]:
    """Ids, steps and logprobs by the description of the algorithm, over a forward of everything each time."""
    prompt, params = asked
    assert model.plain is not None
    assert params.diffusion is not None
    assert params.max_tokens is not None
    diffusion, size = params.diffusion, model.size
    given = {name: getattr(diffusion, name) for name in diffusion.given()}
    sampling = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    ids, steps, found = list(prompt), [-1] * len(prompt), [0.0] * len(prompt)
    while len(ids) < len(prompt) + params.max_tokens:
        start = len(ids) // size * size
        row = reference.Row(
            diffusion.algorithm, ids[start:], size, model.mask_id, start, given, sampling=sampling
        )
        while not row.done:
            row.step(model.plain.logits([*ids[:start], *row.ids])[start:])
        first = len(ids) - start
        ids += row.ids[first:]
        steps += row.written_in[first:]
        found += row.logprobs[first:]
    stop = len(prompt) + params.max_tokens
    return ids[len(prompt) : stop], steps[len(prompt) : stop], found[len(prompt) : stop]


def reference_requests(model: Model) -> list[Asked]:
    """Of every algorithm, greedy, and one of each of these that is drawn."""
    asked = []
    for at, algorithm in enumerate(algorithm_names()):
        diffusion = DiffusionParams(algorithm=algorithm, **model.diffusion[algorithm])
        for number, (prompt, _) in enumerate(model.requests(algorithm)[at % 4 :: 6]):
            drawn = {"temperature": 0.7, "seed": at, "top_k": 20} if number == 1 else {}
            asked.append((prompt, to_the_end(diffusion, 2 * model.size + 1, **drawn)))
    return asked


@pytest.fixture(scope="module")
def described(model: Model) -> list[tuple[Asked, tuple[list[int], list[int], list[float]]]]:
    if model.plain is None:
        return []
    return [(asked, decode(model, asked)) for asked in reference_requests(model)]


def assert_described(result: Result, wanted: tuple[list[int], list[int], list[float]]) -> None:
    ids, steps, found = wanted
    assert result.token_ids == ids
    assert result.step_map == steps
    assert logprobs(result) == pytest.approx(found, abs=1e-4, rel=1e-4)


@rest(SECONDS)
def test_a_plain_decoder_without_a_cache_says_the_same_of_one_alone(model: Model, described: Any) -> None:
    found = ask(model, [asked for asked, _ in described], max_running_requests=1)
    for result, (_, wanted) in zip(found, described, strict=True):
        assert_described(result, wanted)
    rounds = {max(steps) for _, (_, steps, _) in described}
    assert model.plain is None or len(rounds) > 2, "blocks differ in how long they take"
