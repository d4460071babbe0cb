"""Records out of texts, by a pydantic model: the grammar makes every answer one.

pip install "aioinfer[structured]" pydantic && python examples/extraction.py
"""

import asyncio
from collections.abc import Sequence
from typing import Literal

import pydantic

from aioinfer import Engine


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    kind: Literal["cat", "dog", "bird"]
    age: int = pydantic.Field(ge=0, le=99)


async def extract(engine: Engine, texts: Sequence[str]) -> list[Pet]:
    """One pet of each text; all of them are computed together."""
    ask = "Extract the pet from the text as JSON: "
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(engine.chat([{"role": "user", "content": ask + text}], response_format=Pet))
            for text in texts
        ]
    return [answer.result().parsed for answer in answers]


async def main() -> None:
    async with Engine() as engine:
        for pet in await extract(engine, ["Tom, our old cat, is 14.", "A puppy of one year, called Rex."]):
            print(pet)


if __name__ == "__main__":
    asyncio.run(main())
