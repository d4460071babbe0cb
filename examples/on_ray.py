"""Engines on a Ray cluster, from a program that is not one of Ray's.

pip install 'aioinfer[ray]'
ray start --head
python examples/on_ray.py
"""

import asyncio
import sys

from aioinfer import EngineConfig, SamplingParams
from aioinfer.parallel import Dispatcher

PROMPTS = ["Once upon a time", "There was a king", "In a small house", "The sea was calm"]


async def main(address: str) -> None:
    config = EngineConfig(model="tiny-chat", kv_memory_gib=0.1)
    async with Dispatcher(processes=2, ray=address, config=config) as dispatcher:
        streams = [dispatcher.generate(prompt, SamplingParams(max_tokens=24)) for prompt in PROMPTS]
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            print(prompt + (await stream).text)
        for replica in dispatcher.stats().replicas:
            print(f"{replica.name}: {replica.state}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["auto"]))
