"""A conversation that branches, and goes on in another process: sessions, forks and files.

python examples/sessions.py                   # asks, asks three things at once about it, and saves
python examples/sessions.py --load FILE       # goes on there, without computing what was said before
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from aioinfer import Engine, EngineConfig, SamplingParams, Session

GREEDY = SamplingParams(temperature=0, max_tokens=200)


async def ask(session: Session, question: str) -> str:
    """The question, the answer, and how many tokens of the conversation were there already."""
    result = await session.chat(question, GREEDY)
    return f"{question} {result.content} ({result.usage.cached_tokens} of {result.usage.prompt_tokens})"


async def begin(engine: Engine, path: Path) -> None:
    """Talk; branch into three, which share the KV of what was said and are computed together; save."""
    async with engine.session() as session:
        print(await ask(session, "Write a short story about Mira."))
        forks = [session.fork() for _ in range(3)]
        questions = [f"What is {number} + {number}?" for number in range(19, 22)]
        for answer in await asyncio.gather(*map(ask, forks, questions)):
            print(" ", answer)
        for fork in forks:
            fork.close()
        await session.save(path)


async def go_on(engine: Engine, path: Path) -> None:
    """Load a session and ask more."""
    async with await engine.load_session(path) as session:
        print(f"{session.num_tokens} tokens, {session.held_tokens} of them need not be computed")
        print(await ask(session, "What is 30 + 12?"))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--load", type=Path, metavar="FILE")
    options = parser.parse_args()
    async with Engine(EngineConfig(model=options.model)) as engine:
        if options.load:
            await go_on(engine, options.load)
        else:
            path = Path(tempfile.mkdtemp()) / "talk.session"
            await begin(engine, path)
            print(f"saved as {path}")


if __name__ == "__main__":
    asyncio.run(main())
