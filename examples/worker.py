"""Ten thousand prompts through one engine, with a progress bar; a bad prompt is one line of the output.

python examples/worker.py > results.txt
"""

import asyncio
import sys
from collections.abc import Iterable
from typing import TextIO

from aioinfer import Engine, SamplingParams


def bar(done: int, total: int | None) -> None:
    share = done / (total or done)
    filled = "#" * int(40 * share)
    sys.stderr.write(f"\r[{filled:40}] {done}/{total or '?'}")


async def work(engine: Engine, prompts: Iterable[str], output: TextIO) -> int:
    """Write one line per prompt, in their order; returns how many failed."""
    failed = 0
    params = SamplingParams(max_tokens=16, temperature=0)
    async with engine.map(prompts, params, concurrency=128, progress=bar, on_error="return") as results:
        async for result in results:
            failed += isinstance(result, Exception)
            line = f"failed: {result}" if isinstance(result, Exception) else result.text
            output.write(line.replace("\n", " ") + "\n")
    return failed


async def main() -> None:
    async with Engine() as engine, asyncio.TaskGroup() as group:
        # Other work goes on beside it, and its requests do not wait for ten thousand others.
        group.create_task(engine.generate("Meanwhile", SamplingParams(max_tokens=16)))
        group.create_task(work(engine, [f"Number {n} is" for n in range(10_000)], sys.stdout))


if __name__ == "__main__":
    asyncio.run(main())
