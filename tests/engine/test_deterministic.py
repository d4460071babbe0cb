"""Deterministic mode: a request's ids and logprobs have the same bits alone and in any company.

``python -m tests.engine.test_deterministic --mixes 200`` goes through more mixes than the suite does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import struct
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from aioinfer import ConfigError, Engine, EngineConfig, Result, SamplingParams
from aioinfer.model.quantization import FLOAT8, Quantization
from tests.model.kernels import kernels_or_skip
from tests.tiers import SIMULATION, nightly

#: of the bundled model's vocabulary, without special tokens
VOCAB = (10, 860)
#: of weights on a CPU
WAYS = [way for way in get_args(Quantization) if way not in FLOAT8]


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    params: SamplingParams


def asks(dice: random.Random, count: int) -> list[Ask]:
    """Requests of all kinds, some of which begin alike."""
    common = [dice.randrange(*VOCAB) for _ in range(80)]
    return [Ask(_prompt(dice, common), _params(dice)) for _ in range(count)]


def _prompt(dice: random.Random, common: list[int]) -> list[int]:
    start = common[: dice.choice([0, 0, 16, 33, 80])]
    return start + [dice.randrange(*VOCAB) for _ in range(dice.choice([1, 2, 7, 30, 90]))]


def _params(dice: random.Random) -> SamplingParams:
    chosen: dict[str, Any] = {
        "temperature": dice.choice([0.0, 0.0, 0.7, 1.3]),
        "top_p": dice.choice([1.0, 0.8]),
        "top_k": dice.choice([0, 20]),
        "min_p": dice.choice([0.0, 0.05]),
        "repetition_penalty": dice.choice([1.0, 1.0, 1.2]),
        "frequency_penalty": dice.choice([0.0, 0.0, 0.5]),
        "logprobs": 3,
        "prompt_logprobs": dice.choice([None, None, 1]),
    }
    return SamplingParams(
        max_tokens=dice.randint(1, 40), ignore_eos=True, seed=dice.randrange(1 << 60), **chosen
    )


def company(dice: random.Random) -> dict[str, Any]:
    """Settings that must not matter. Pools are small: requests get retracted."""
    return {
        "overlap_steps": dice.choice([0, 1, 2]),
        "max_step_tokens": dice.choice([16, 40, 512]),
        "chunk_size": dice.choice([1, 5, 16, 61, 512]),
        "prefix_cache": dice.random() < 0.7,
        "page_size": dice.choice([4, 16, 32]),
        "num_pages": dice.choice([224, 320]),
        "max_running_requests": dice.choice([3, 16]),
        "mixed": dice.random() < 0.8,
        "policy": dice.choice(["fcfs", "lpm", "random"]),
        "new_token_ratio": 0.0,
        "min_new_token_ratio": 0.0,
        "threads": dice.choice([1, 2, 3]),
    }


def bits(result: Result) -> tuple[list[int], list[bytes]]:
    """Ids and every logprob to its last bit."""
    entries = [entry for entry in result.logprobs or [] if entry is not None]
    entries += [entry for entry in result.prompt_logprobs or [] if entry is not None]
    numbers = [
        struct.pack(f"{1 + len(entry.top)}d", entry.logprob, *(value for _, value in entry.top))
        for entry in entries
    ]
    return result.token_ids, numbers


async def alone(config: EngineConfig, wanted: list[Ask]) -> list[tuple[list[int], list[bytes]]]:
    async with Engine(config) as engine:
        return [bits(await engine.generate(ask.prompt, ask.params)) for ask in wanted]


async def together(config: EngineConfig, wanted: list[Ask], dice: random.Random) -> tuple[Any, int]:
    """Bits of all, which come in an order and at times of chance; and how often somebody was retracted."""
    order = list(range(len(wanted)))
    dice.shuffle(order)

    async def one(at: int, turns: int) -> tuple[int, Any]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return at, bits(await engine.generate(wanted[at].prompt, wanted[at].params))

    async with Engine(config) as engine:
        found = dict(await asyncio.gather(*(one(at, dice.choice([0, 0, 3, 50])) for at in order)))
        retractions = engine.stats().retractions
    return [found[at] for at in range(len(wanted))], retractions


async def mix(seed: int, dtype: str, quantization: str = "none", size: int = 12, device: str = "cpu") -> int:
    """One mix of requests, alone and together; how often somebody was retracted."""
    dice = random.Random(f"deterministic {seed} {dtype}")
    wanted = asks(dice, size)
    base: dict[str, Any] = {
        "dtype": dtype,
        "quantization": quantization,
        "deterministic": True,
        "device": device,
    }
    expected = await alone(EngineConfig(**base, overlap_steps=0, prefix_cache=False, threads=2), wanted)
    settings = company(dice)
    if seed % 2 == 0:
        # Everybody at once, and too little memory for that.
        settings |= {"max_running_requests": 16, "num_pages": 224, "max_step_tokens": 512}
    settings["num_pages"] //= settings["page_size"]
    got, retractions = await together(EngineConfig(**base, **settings), wanted, dice)
    for ask, one, other in zip(wanted, expected, got, strict=True):
        assert one == other, (seed, settings, ask)
    return retractions


@pytest.mark.native
@nightly(SIMULATION)
@pytest.mark.parametrize("quantization", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_company_changes_no_bit(dtype: str, quantization: Quantization) -> None:
    retractions = [await mix(seed, dtype, quantization) for seed in range(2)]
    assert sum(retractions), "the pools were to be too small"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
async def test_company_changes_no_bit_on_cuda(dtype: str) -> None:
    """With captured graphs, and on kernels in Triton."""
    kernels_or_skip("cuda", compiled=True)
    retractions = [await mix(seed, dtype, device="cuda") for seed in range(4)]
    assert sum(retractions), "the pools were to be too small"


@pytest.mark.parametrize("settings", [{"attention_backend": "sdpa"}, {"transformers_fallback": True}])
async def test_kernels_that_cannot_promise_it_are_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="deterministic"):
        async with Engine(EngineConfig(deterministic=True, **settings)):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    retractions = 0
    for seed in range(options.first, options.first + options.mixes):
        ways = WAYS if options.device == "cpu" else ("none",)
        dtype, way = ["bfloat16", "float32"][seed % 2], ways[seed // 2 % len(ways)]
        retractions += asyncio.run(mix(seed, dtype, way, device=options.device))
    print(f"{options.mixes} mixes of 12 requests: the same bits, {retractions} retractions")


if __name__ == "__main__":
    main()
