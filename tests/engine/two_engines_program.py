"""Engines in a control group that leaves them little memory, and a load that fills their pools.

Run as ``python -m tests.engine.two_engines_program GROUP HOW``: engines start one by one, at once, or with
ever smaller pools until one is not refused. Prints how many were started and have filled their pools.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from aioinfer import ConfigError, Engine, EngineConfig, EngineError, SamplingParams
from aioinfer.ledger import LEDGER
from aioinfer.system.memory import memory_available

MIB = 1 << 20
#: MiB that the group leaves for pools and caches, and those of each of three engines
LEFT, POOL = 448, 256
_PAGE = 48 << 10  # bytes of a page of tiny-chat


def with_pool(size: int) -> EngineConfig:
    return EngineConfig(threads=1, num_pages=size * MIB // _PAGE)


async def fill(engine: Engine) -> None:
    """Touch every page of the pool: prompts stay in the prefix cache."""
    longest, chance = engine.info.max_model_len - 2, random.Random(0)
    page_size = engine.info.page_size or 1
    for _ in range(2 + engine.info.num_pages * page_size // longest):
        ids = [chance.randrange(256) for _ in range(longest)]
        await engine.generate(ids, SamplingParams(max_tokens=1, ignore_eos=True))


async def started(engine: Engine) -> Engine | None:
    try:
        await engine.start()
    except (ConfigError, EngineError) as error:
        print("refused:", error)
        return None
    return engine


async def main(group: Path, how: str) -> None:
    async with Engine(EngineConfig(threads=1, num_pages=64)) as engine:  # libraries are loaded
        await engine.generate("x", SamplingParams(max_tokens=2))
    (group / "cgroup.procs").write_text("0")
    # What was charged before stays with the other group.
    first = (group / "memory.limit_in_bytes").exists()  # version 1
    usage, limit = ("usage_in_bytes", "limit_in_bytes") if first else ("current", "max")
    used = int((group / f"memory.{usage}").read_text())
    (group / f"memory.{limit}").write_text(str(used + LEFT * MIB))
    left = memory_available()
    assert left is not None
    assert left.source == "control group"
    print("left:", left.bytes // MIB)
    engines = [Engine(with_pool(POOL)) for _ in range(3)]
    if how == "tight":
        engines = [Engine(with_pool(size)) for size in range(LEFT, 0, -4)]
    found = []
    if how == "at once":
        found += await asyncio.gather(*map(started, engines))
    else:
        for each in engines:
            found.append(await started(each))
            if how == "tight" and found[-1] is not None:
                break
    serving = [each for each in found if each is not None]
    await asyncio.gather(*map(fill, serving))
    print("filled:", len(serving))
    for each in serving:
        print("taken:", {name: entry.taken // MIB for name, entry in LEDGER.entries().items()})
        await each.aclose()
    # What was closed is given back.
    if how == "one by one":
        again = await started(Engine(with_pool(POOL)))
        assert again is not None
        await fill(again)
        await again.aclose()
        print("again")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
