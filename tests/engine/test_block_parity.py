"""The same ids, steps and logprobs whatever way blocks are computed, on a scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.engine import Engine
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.outputs import Result
from tests.engine.block_parity import (
    WAYS,
    Asked,
    answers,
    edge_requests,
    ending_requests,
    logprobs,
    seen,
)
from tests.engine.block_worlds import Plain, decode
from tests.tiers import SECONDS, rest, thinned
from tests.toys.blocks import ScriptedDevice

SIZE, VOCAB, MASK, LONGEST = 8, 64, 5, 64
Expected = list[tuple[Asked, Plain]]


def make_device(config: EngineConfig) -> ScriptedDevice:
    return ScriptedDevice(
        num_pages=20 * 8,
        page_size=config.page_size,
        num_slots=config.num_slots,
        max_model_len=LONGEST,
        vocab_size=VOCAB,
        mask_token_id=MASK,
        edits=2,
    )


def make_engine(**settings: Any) -> Engine:
    config = EngineConfig(**{"model": "scripted", "page_size": SIZE, **settings})
    launcher = InlineLauncher if config.launch_mode == "inline" else ThreadLauncher
    return Engine(config, launcher=lambda _: launcher(make_device(config)), tokenizer=lambda _: None)


@pytest.fixture(scope="module")
def expected() -> dict[str, Expected]:
    """By algorithm, requests and what the algorithm alone makes of them."""
    device = make_device(EngineConfig(page_size=SIZE))
    found = {}
    for algorithm in usable_algorithms((1, 2)):
        diffusion = {"threshold": 0.9} if "threshold" in algorithm or "confidence" in algorithm else {}
        asked = edge_requests(algorithm, SIZE, VOCAB, MASK, **diffusion)
        first = [plain.ids for plain in decode(device, device.script, asked, LONGEST)]
        longest = [(ask, ids) for ask, ids in zip(asked, first, strict=True) if len(ids) == SIZE + 1]
        asked += ending_requests(*zip(*longest, strict=True), SIZE)
        found[algorithm] = list(zip(asked, decode(device, device.script, asked, LONGEST), strict=True))
    return found


def check(expected: Expected, **settings: Any) -> int:
    """Every answer is what is expected; returns how many forwards that took."""

    async def run() -> tuple[list[Result], int]:
        async with make_engine(**settings) as engine:
            results = await answers(engine, [asked for asked, _ in expected])
            assert engine._core is not None
            return results, engine._core.scheduler.queues.counters.forwards

    results, forwards = asyncio.run(run())
    for result, (asked, plain) in zip(results, expected, strict=True):
        assert result.token_ids == plain.ids, asked
        assert result.step_map == plain.steps, asked
        assert logprobs(result) == plain.logprobs, asked
        stopped = plain.ids[-1] in asked[1].stop_token_ids
        assert seen(result)[2:] == (("stop", plain.ids[-1]) if stopped else ("length", None))
    return forwards


@rest(SECONDS)
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_every_algorithm_gives_the_same_in_every_way(way: str, expected: dict[str, Expected]) -> None:
    check([each for some in expected.values() for each in some], max_running_requests=48, **WAYS[way])


@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_one_request_at_a_time_gives_the_same_in_every_way(
    way: str, algorithm: str, expected: dict[str, Expected]
) -> None:
    # With each way another fifth of the lengths and ends.
    some = expected[algorithm][list(WAYS).index(way) % 5 :: 5]
    check(some, max_running_requests=1, prefix_cache=False, **WAYS[way])


@rest(SECONDS)
def test_ways_differ_in_the_forwards_that_they_take(expected: dict[str, Expected]) -> None:
    some = expected["low_confidence"]
    sync, fdfo, fused = (
        check(some, max_running_requests=8, **WAYS[way]) for way in ("sync", "fdfo", "fused")
    )
    assert fused < fdfo < sync
