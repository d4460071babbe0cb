"""A story with several endings: one session, its forks, and a file that goes on in another process.

python examples/sessions.py                   # tells a beginning and three endings, and saves the beginning
python examples/sessions.py --load FILE       # tells another ending, later, without computing the beginning
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from aioinfer import Engine, EngineConfig, SamplingParams

BEGINNING = SamplingParams(temperature=0, max_tokens=60)


def ending(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=30)


async def tell(engine: Engine, path: Path) -> None:
    """Print a beginning and three endings; save what comes before them."""
    async with engine.session() as session:
        beginning = await session.generate("Once upon a time", BEGINNING)
        print(f"Once upon a time{beginning.text} ...")
        # Forks share the KV of the beginning, and are computed together.
        forks = [session.fork() for _ in range(3)]
        endings = [fork.generate(" But then", ending(seed)) for seed, fork in enumerate(forks)]
        for result in await asyncio.gather(*endings):
            print(f"  ... But then{result.text} ({result.usage.cached_tokens} tokens were there)")
        for fork in forks:
            fork.close()
        await session.save(path)


async def go_on(engine: Engine, path: Path) -> None:
    """Print another ending of a saved beginning."""
    async with await engine.load_session(path) as session:
        print(f"{session.num_tokens} tokens, {session.held_tokens} of them need not be computed")
        result = await session.generate(" But then", ending(7))
        print(f"  ... But then{result.text}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--load", type=Path, metavar="FILE")
    options = parser.parse_args()
    async with Engine(EngineConfig(model=options.model)) as engine:
        if options.load:
            await go_on(engine, options.load)
        else:
            path = Path(tempfile.mkdtemp()) / "story.session"
            await tell(engine, path)
            print(f"saved as {path}")


if __name__ == "__main__":
    asyncio.run(main())
