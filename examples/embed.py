"""An engine inside an asyncio program: two generations side by side, one of them cut short.

python examples/embed.py
"""

import asyncio

from aioinfer import Engine, SamplingParams


async def main() -> None:
    async with Engine() as engine:
        story = [{"role": "user", "content": "Write a long story about Mira."}]
        sums = [engine.generate([{"role": "user", "content": f"What is {n} + {n}?"}]) for n in range(40, 45)]

        async with engine.generate(story, SamplingParams(temperature=0, max_tokens=200)) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
                if "found" in chunk.text:
                    break  # the request is aborted; its memory is free at most two steps later
        print(" ...")

        for result in await asyncio.gather(*sums):
            print(result.text, result.usage)


asyncio.run(main())
