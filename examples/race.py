"""The first answer that passes a check wins, and the others are aborted in the same moment.

python examples/race.py
"""

import asyncio
from collections.abc import Callable

from aioinfer import Engine, SamplingParams


async def race(engine: Engine, prompt: str, good: Callable[[str], bool], n: int = 4) -> str | None:
    """The first of ``n`` answers that is good; None if none is."""
    streams = engine.choices(prompt, SamplingParams(seed=1, temperature=1.0, max_tokens=32), n=n)
    answers = [asyncio.ensure_future(stream) for stream in streams]
    try:
        for answer in asyncio.as_completed(answers):
            if good(text := (await answer).text):
                return text
        return None
    finally:
        for stream in streams:
            stream.close()
        await asyncio.wait(answers)


async def main() -> None:
    async with Engine() as engine:
        print(await race(engine, "Once upon a time", lambda text: "the" in text))


if __name__ == "__main__":
    asyncio.run(main())
