"""No operation of torch runs on the loop's thread, whatever a request asks for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from aioinfer import Engine, EngineConfig, Grammar, SamplingParams
from tests.tiers import SECONDS, rest

WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"logit_bias": {40: 2.0}, "bad_words": ["the"], "min_tokens": 3},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"grammar": Grammar("regex", "[a-z ]{30}")},
    {"stop": ["e"]},
]


class Seen(TorchDispatchMode):
    """Operations of the thread that enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


async def operations(config: EngineConfig, wishes: list[dict[str, Any]]) -> list[str]:
    async with Engine(config) as engine:

        async def ask(length: int, **wish: Any) -> None:
            await engine.generate(list(range(10, 10 + length)), SamplingParams(**wish))

        with Seen() as seen:
            async with asyncio.TaskGroup() as group:
                for wish in wishes:
                    group.create_task(ask(10, max_tokens=24, **wish))
                    group.create_task(ask(40, max_tokens=24, **wish))
                leaving = group.create_task(ask(20, max_tokens=200))
                await asyncio.sleep(0)
                leaving.cancel()
    return seen.operations


@rest(SECONDS)
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
async def test_tokens_leave_torch_to_the_launch_thread(attention: str) -> None:
    assert await operations(EngineConfig(attention_backend=attention, overlap_steps=1), WISHES) == []


@pytest.mark.parametrize("window", [0, 1])
async def test_blocks_leave_torch_to_the_launch_thread(window: int) -> None:
    assert await operations(EngineConfig(model="tiny-diffusion", overlap_steps=window), WISHES[:1]) == []
