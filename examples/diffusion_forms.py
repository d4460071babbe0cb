"""Watch blocks of a diffusion language model obey a schema, a choice and a template.

python -m examples.diffusion_forms "Tom is 31 years old, lives in Rome and has a black cat."
"""

import argparse
import asyncio
from typing import Any

from aioinfer import DiffusionParams, Engine, EngineConfig, Grammar, SamplingParams
from examples.diffusion_stream import Screen

WORD = {"type": "string", "maxLength": 20}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pet": {
            "type": "object",
            "properties": {"kind": WORD, "color": {"enum": ["black", "white", "brown", "gray"]}},
            "required": ["kind", "color"],
            "additionalProperties": False,
        },
        "city": WORD,
    },
    "required": ["name", "age", "pet", "city"],
    "additionalProperties": False,
}


async def show(engine: Engine, prompt: str, grammar: Grammar | dict[str, Any] | None) -> None:
    """Draw the answer and its drafts; ``grammar`` None: the model answers as it likes."""
    print(f"\n{prompt}")
    tokenizer = engine.tokenizer
    assert tokenizer is not None  # an engine has none only if the model's files have none
    screen = Screen(lambda token: tokenizer.decode([token]))
    diffusion = DiffusionParams(draft=True)
    params = SamplingParams(temperature=0, max_tokens=200, grammar=grammar, diffusion=diffusion)
    before = engine.stats()
    async for chunk in engine.generate([{"role": "user", "content": prompt}], params):
        screen.show(chunk)
    stats = engine.stats()
    tokens, rounds = stats.output_tokens - before.output_tokens, stats.rounds - before.rounds
    print(f"\n{tokens} tokens in {rounds} rounds")


async def main(options: argparse.Namespace) -> None:
    facts: str = options.facts
    async with Engine(EngineConfig(model=options.model)) as engine:
        for schema in (None, PERSON):
            await show(engine, f"Who is it? {facts}", schema)
        for choice in (None, Grammar("choice", ["animal", "color", "thing"])):
            await show(engine, "Is a cat a color, an animal or a thing?", choice)
        asked = f"{facts} Fill in: {options.template}"
        filled = await engine.fill([{"role": "user", "content": asked}], options.template)
        print(f"\n{asked}\n{filled.text}\n{filled.holes}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    facts = "Tom is 31 years old, lives in Rome and has a black cat."
    parser.add_argument("facts", nargs="?", default=facts)
    parser.add_argument("--template", default="{name} lives in {city}.")
    parser.add_argument("--model", default="tiny-diffusion")
    asyncio.run(main(parser.parse_args()))
