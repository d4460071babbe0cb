"""Records out of texts, by a pydantic model: the grammar makes every answer one, with any model.

pip install "aioinfer[structured]" pydantic && python examples/extraction.py [MODEL]
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Literal

import pydantic

from aioinfer import Engine, EngineConfig, SamplingParams


class Pet(pydantic.BaseModel):
    """Answers have these members and no others; with bounds on each they end by themselves."""

    name: str = pydantic.Field(max_length=20)
    kind: Literal["cat", "dog", "bird"]
    age: int = pydantic.Field(ge=0, le=99)


async def extract(engine: Engine, texts: Sequence[str]) -> list[Pet]:
    """One pet of each text; all of them are computed together."""
    ask = "Extract the pet from the text as JSON: "
    params = SamplingParams(temperature=0)
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(
                engine.chat([{"role": "user", "content": ask + text}], params, response_format=Pet)
            )
            for text in texts
        ]
    return [answer.result().parsed for answer in answers]


async def main(model: str) -> None:
    async with Engine(EngineConfig(model=model)) as engine:
        for pet in await extract(engine, ["Tom, our old cat, is 14.", "A puppy of one year, called Rex."]):
            print(pet)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["tiny-chat"]))
