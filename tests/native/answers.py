"""Ids and logprobs of a model, as JSON: ``python -m tests.native.answers MODEL [SETTING=VALUE ...]``.

Run here and by an emulated interpreter: see ``test_arm``.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aioinfer import Engine, EngineConfig, SamplingParams

_PROMPTS = ("Say hello", "Once upon a time", "The capital of France is")


async def answers(model: str, **settings: str) -> list[object]:
    config = EngineConfig(model=model, deterministic=True, threads=1, max_model_len=256, **settings)  # type: ignore[arg-type]
    found: list[object] = []
    async with Engine(config) as engine:
        for at, prompt in enumerate(_PROMPTS):
            for temperature in (0.0, 1.0):
                params = SamplingParams(max_tokens=8, temperature=temperature, seed=at, logprobs=3)
                output = await engine.generate(prompt, params)
                found.append([list(output.token_ids), repr(output.logprobs)])
        found.append(engine.info.numerics)
    return found


if __name__ == "__main__":
    chosen = dict(each.split("=") for each in sys.argv[2:])
    sys.stdout.write(json.dumps(asyncio.run(answers(sys.argv[1], **chosen))))
