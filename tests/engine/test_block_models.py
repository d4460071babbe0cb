"""Small random diffusion models give what a plain decoder without a cache gives, in every way to compute."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams
from tests.diffusion import reference
from tests.engine.block_parity import WAYS, Asked, answers, edge_requests, logprobs, to_the_end
from tests.model.block_models import MASK, VOCAB, Plain, block_config, write_checkpoint
from tests.tiers import SECONDS, grid, rest

#: what makes blocks of random models, which are sure of nothing, take some rounds and not always as many
DIFFUSION: dict[str, dict[str, Any]] = {
    "low_confidence": {"threshold": 0.13},
    "joint_threshold": {"threshold": 0.13, "edit_threshold": 0.15, "max_post_edits": 3},
    "joint_threshold_indel": {"threshold": 0.13, "edit_threshold": 0.1, "max_post_edits": 5},
    "static_steps": {"steps": 3},
    "factor": {"factor": 4.0},
    "entropy_bound": {"entropy_bound": 7.0},
}
#: ids, steps and logprobs
Described = tuple[list[int], list[int], list[float]]


#: of LLaDA2.2
_EDITS = {"delete_token_id": reference.DELETE, "split_token_id": reference.SPLIT}
#: name, family, size of a block, changes to the config
_MODELS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("llada2", "llada2", 8, {}),
    ("llada2.2", "llada2", 8, {"expert_capacity": 5, **_EDITS}),
    ("sdar", "sdar", 4, {}),
    ("sdar_moe", "sdar_moe", 4, {}),
]


@pytest.fixture(scope="module", params=_MODELS, ids=lambda param: param[0])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[tuple[Asked, Described]]]:
    """Settings of an engine, and requests with what the description of their algorithms gives."""
    name, family, size, changes = request.param
    config = block_config(family, num_hidden_layers=2, block_size=size, **changes)
    path = tmp_path_factory.mktemp(name)
    plain = Plain(config, write_checkpoint(path, config), size)
    shared: dict[str, Any] = {"page_size": size, "num_pages": 800, "max_model_len": 12 * size, "threads": 1}
    settings = {"model": str(path), "dtype": "float32", "device": "cpu", **shared}
    names = usable_algorithms((1, 2) if changes else None)
    return settings, [(asked, decode(plain, size, asked)) for asked in requests(size, names)]


def requests(size: int, names: Sequence[str]) -> list[Asked]:
    """Of every algorithm, greedy, and one of each of these that is drawn."""
    found = []
    for at, algorithm in enumerate(names):
        edges = edge_requests(algorithm, size, VOCAB, MASK)
        diffusion = DiffusionParams(algorithm=algorithm, **DIFFUSION[algorithm])
        for number, (prompt, _) in enumerate(edges[at % 4 :: 6]):
            drawn = {"temperature": 0.7, "seed": at, "top_k": 20} if number == 1 else {}
            found.append((prompt, to_the_end(diffusion, 2 * size + 1, **drawn)))
    return found


def decode(plain: Plain, size: int, asked: Asked) -> Described:
    """By the description of the algorithm, over a forward of everything each time."""
    prompt, params = asked
    assert params.diffusion is not None
    assert params.max_tokens is not None
    diffusion = params.diffusion
    given = {name: getattr(diffusion, name) for name in diffusion.given()}
    sampling = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    ids, steps, found = list(prompt), [-1] * len(prompt), [0.0] * len(prompt)
    stop = len(prompt) + params.max_tokens
    while len(ids) < stop:
        start = len(ids) // size * size
        row = reference.Row(diffusion.algorithm, ids[start:], size, MASK, start, given, sampling=sampling)
        while not row.done:
            row.step(plain.logits([*ids[:start], *row.ids])[start:])
        first = len(ids) - start
        ids += row.ids[first:]
        steps += row.written_in[first:]
        found += row.logprobs[first:]
    return ids[len(prompt) : stop], steps[len(prompt) : stop], found[len(prompt) : stop]


def check(model: Any, **settings: Any) -> None:
    base, described = model

    async def run() -> list[Result]:
        async with Engine(EngineConfig(**base, **settings)) as engine:
            return await answers(engine, [asked for asked, _ in described])

    for result, (asked, (ids, steps, found)) in zip(asyncio.run(run()), described, strict=True):
        assert (result.token_ids, result.step_map, result.finish_reason) == (ids, steps, "length"), asked
        assert logprobs(result) == pytest.approx(found, abs=1e-4, rel=1e-4), asked
    rounds = {max(steps) for _, (_, steps, _) in described}
    assert len(rounds) > 2, "blocks differ in how long they take"


@rest(SECONDS)
@pytest.mark.parametrize("way", grid(["everything"], [way for way in WAYS if way != "everything"]))
def test_models_give_what_a_plain_decoder_does_in_every_way(way: str, model: Any) -> None:
    check(model, max_running_requests=48, **WAYS[way])


@rest(SECONDS)
@pytest.mark.parametrize("way", grid(["re-loop"], ["sync", "fused"]))
def test_so_do_they_one_request_at_a_time(way: str, model: Any) -> None:
    check(model, max_running_requests=1, **WAYS[way])
