"""Monte Carlo tree search over thoughts: sentences are tried and judged, and the best ones gone on with.

python examples/tree_search.py "Write a short story about Mira."
"""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aioinfer import Engine, SamplingParams, Stream

PARAMS = SamplingParams(temperature=1.8, seed=7, max_tokens=200)
#: thoughts that are begun together; of these, the first different ones are kept; and tokens of the longest
WIDTH, KEPT, LONGEST = 5, 3, 32


@dataclass(eq=False)
class Thought:
    """The output up to the end of a sentence. Its stream is closed; others fork from there."""

    stream: Stream | None = None
    parent: "Thought | None" = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    children: "list[Thought]" = field(default_factory=list)
    total: float = 0.0
    visits: int = 0

    def promise(self) -> float:
        """The mean of what was found behind it, and more if it was tried less: UCT (Kocsis, 2006)."""
        tried = self.parent.visits if self.parent else 1
        return self.total / self.visits + 0.1 * math.sqrt(math.log(tried) / self.visits)

    def credit(self, score: float) -> None:
        self.total, self.visits = self.total + score, self.visits + 1
        if self.parent is not None:
            self.parent.credit(score)


Score = Callable[[list[int]], Awaitable[float]]


async def search(engine: Engine, prompt: list[int], score: Score, rounds: int) -> Thought:
    """The end of the most visited way. ``score``: how good an output is, from 0 to 1."""
    root = Thought()
    for _ in range(rounds):
        leaf = root
        while leaf.children:
            leaf = max(leaf.children, key=Thought.promise)
        if leaf.ended:
            leaf.credit(leaf.total / leaf.visits)
        else:
            await expand(engine, prompt, score, leaf)
    while root.children:
        root = max(root.children, key=lambda child: child.visits)
    return root


async def expand(engine: Engine, prompt: list[int], score: Score, parent: Thought) -> None:
    begin = parent.stream.fork(WIDTH) if parent.stream else engine.choices(prompt, PARAMS, n=WIDTH)
    thinking = {asyncio.create_task(think(stream, parent, score)) for stream in begin}
    try:
        while thinking and len(parent.children) < KEPT:
            done, thinking = await asyncio.wait(thinking, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                child, found = task.result()
                if child.text not in {each.text for each in parent.children}:
                    parent.children.append(child)
                    child.credit(found)
    finally:
        for task in thinking:  # pruned: a request ends at once when its reader is cancelled
            task.cancel()
        await asyncio.gather(*thinking, return_exceptions=True)


async def think(stream: Stream, parent: Thought, score: Score) -> tuple[Thought, float]:
    thought = Thought(stream, parent, [*parent.token_ids], parent.text)
    async with stream:
        async for chunk in stream:
            thought.text += chunk.text
            thought.token_ids += chunk.token_ids
            thought.ended = chunk.finish_reason is not None
            if "." in chunk.text or len(thought.token_ids) - len(parent.token_ids) >= LONGEST:
                break
    return thought, await score(thought.token_ids)


async def fluency(engine: Engine, prompt: list[int], output: list[int]) -> float:
    """How likely the model thinks each token of an output is: the geometric mean."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=len(prompt))
    known = (await engine.generate([*prompt, *output], params)).prompt_logprobs or []
    found = [each.logprob for each in known if each is not None]
    return math.exp(sum(found) / len(found))


async def main(question: str) -> None:
    async with Engine() as engine:
        prompt = await engine.tokenize([{"role": "user", "content": question}])
        best = await search(engine, prompt, lambda output: fluency(engine, prompt, output), rounds=16)
        print(f"{best.text}\n({best.total / best.visits:.2f} after {best.visits} visits)")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["Write a short story about Mira."]))
