"""Watch a diffusion language model write: a block fills up in any order, each round of it in its own colour.

python examples/diffusion_stream.py "What is 17 + 25?" --algorithm factor
"""

import argparse
import asyncio
import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterable

from aioinfer import Chunk, DiffusionParams, Draft, Engine, EngineConfig, InvalidRequest

COLOURS = (203, 209, 215, 221, 191, 120, 86, 80, 75, 69, 105, 141, 177, 213)
UNKNOWN = "\x1b[2m░\x1b[0m"


class Screen:
    """Shows an answer, and the draft of what follows it, always in the same place."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        self.spell = spell
        self.text = self.painted = ""
        self.rows = 0

    def show(self, chunk: Chunk) -> None:
        draft = chunk.draft or Draft(0, ())
        self.text += chunk.text
        self.painted += self.paint(chunk.token_ids, chunk.step_map or ())
        if not sys.stdout.isatty():
            print(self.text + draft.text)
            return
        # Up to where the answer begins, and over what was there.
        up = f"\x1b[{self.rows - 1}A" if self.rows > 1 else ""
        painted = self.painted + self.paint(draft.token_ids, draft.step_map)
        print(f"\r{up}\x1b[J{painted}", end="", flush=True)
        columns = shutil.get_terminal_size().columns
        lines = (self.text + draft.text).split("\n")
        self.rows = sum(max(1, -(-len(line) // columns)) for line in lines)

    def paint(self, tokens: Iterable[int | None], rounds: Iterable[int | None]) -> str:
        return "".join(
            UNKNOWN
            if token is None or number is None
            else f"\x1b[38;5;{COLOURS[number % len(COLOURS)]}m{self.spell(token)}\x1b[0m"
            for token, number in zip(tokens, rounds, strict=True)
        )


async def main(options: argparse.Namespace) -> None:
    diffusion = DiffusionParams(algorithm=options.algorithm, threshold=options.threshold, draft=True)
    async with Engine(EngineConfig(model=options.model)) as engine:
        params = dataclasses.replace(engine.default_params, max_tokens=200, diffusion=diffusion)
        tokenizer = engine.tokenizer
        assert tokenizer is not None  # an engine has none only if the model's files have none
        screen = Screen(lambda token: tokenizer.decode([token]))
        async for chunk in engine.generate([{"role": "user", "content": options.prompt}], params):
            screen.show(chunk)
        stats = engine.stats()
        print(f"\n{stats.output_tokens} tokens in {stats.rounds} rounds", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Write a short story about Mira.")
    parser.add_argument("--model", default="tiny-diffusion")
    parser.add_argument("--algorithm", default="low_confidence")
    parser.add_argument("--threshold", type=float, help="by default the algorithm's own")
    try:
        asyncio.run(main(parser.parse_args()))
    except InvalidRequest as refused:
        sys.exit(str(refused))
