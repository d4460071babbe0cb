"""Ways to run a diffusion model that must not show, and requests at which they might."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, SamplingParams

#: settings by name. The first is the plainest: block by block, all of a batch together, nothing ahead
WAYS: dict[str, dict[str, Any]] = {
    "sync": {"diffusion_mode": "sync", "fused_commit": False, "overlap_steps": 0, "launch_mode": "inline"},
    "fdfo": {"fused_commit": False, "overlap_steps": 0, "launch_mode": "inline"},
    "re-loop": {"fused_commit": False, "overlap_steps": 0, "max_rounds": 8, "launch_mode": "inline"},
    "fused": {"overlap_steps": 0, "launch_mode": "inline"},
    "sync-fused": {"diffusion_mode": "sync", "overlap_steps": 1},
    "overlap-1": {"overlap_steps": 1},
    "overlap-2": {"overlap_steps": 2},
    "overlap-not-fused": {"overlap_steps": 1, "fused_commit": False},
    "everything": {"overlap_steps": 2, "max_rounds": 4},
    "not-mixed": {"overlap_steps": 1, "mixed": False},
}
Asked = tuple[list[int], SamplingParams]


def edge_requests(algorithm: str, size: int, vocab_size: int, mask_id: int, **diffusion: Any) -> list[Asked]:
    """Prompts that end around a block's end, or in the first block, some with a literal mask; outputs that
    do."""
    rng = random.Random(algorithm)
    asked = []
    for length in (1, size - 1, size, size + 1, 2 * size - 1, 3 * size):
        prompt = rng.choices(range(vocab_size), k=length)
        if length > 1 and length % 2:
            # (A block of nothing but masks that has nothing before it says the same everywhere.)
            prompt[-1] = mask_id
        for max_tokens in (1, size - 1, size, size + 1):
            params = DiffusionParams(algorithm=algorithm, **diffusion)
            asked.append((prompt, to_the_end(params, max_tokens)))
    return asked


def to_the_end(diffusion: DiffusionParams, max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy, and ended by nothing but the length, unless told otherwise."""
    options = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0, "seed": 0, **options}
    return SamplingParams(max_tokens=max_tokens, diffusion=diffusion, **options)


def ending_requests(asked: Sequence[Asked], answers: Sequence[list[int]], size: int) -> list[Asked]:
    """The same, ended by the token that comes first in the second block, or last in the first."""
    ending = []
    for (prompt, params), answer in zip(asked, answers, strict=True):
        last = -len(prompt) % size or size
        assert params.diffusion is not None
        for at in (last - 1, last):
            if at < len(answer):
                stopped = to_the_end(params.diffusion, 2 * size, stop_token_ids=[answer[at]])
                ending.append((prompt, stopped))
    return ending


async def answers(engine: Engine, asked: Sequence[Asked]) -> list[Result]:
    """All at once."""
    return await asyncio.gather(*[_answer(engine, *each) for each in asked])


async def _answer(engine: Engine, prompt: list[int], params: SamplingParams) -> Result:
    return await engine.generate(prompt, params)


def seen(result: Result) -> tuple[list[int], list[int] | None, str, str | int | None]:
    """What must be the same whatever the way."""
    return result.token_ids, result.step_map, result.finish_reason, result.stop_reason


def logprobs(result: Result) -> list[float]:
    assert result.logprobs is not None
    assert [each.token_id for each in result.logprobs] == result.token_ids
    return [each.logprob for each in result.logprobs]
