"""A loop that computes with torch's own threads forks, and its child does the same. Prints both answers."""

from __future__ import annotations

import asyncio
import os

from aioinfer import Engine, EngineConfig, SamplingParams


async def answer() -> str:
    async with Engine(EngineConfig(threads=2, launch_mode="inline")) as engine:
        chat = [{"role": "user", "content": "What is 11 + 12?"}]
        return (await engine.generate(chat, SamplingParams(temperature=0, max_tokens=16))).text


print(asyncio.run(answer()), flush=True)
child = os.fork()
if not child:
    print(asyncio.run(answer()), flush=True)
    os._exit(0)
os.waitpid(child, 0)
