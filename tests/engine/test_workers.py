"""Worker threads: they end with their engine, and a call without end does not keep the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from tests.engine.conftest import MakeEngine, OwnThreads
from tests.joining import still_alive
from tests.tiers import PROGRAM, rest


async def test_closing_an_engine_ends_its_worker_threads(
    make_engine: MakeEngine, own_threads: OwnThreads
) -> None:
    async with make_engine() as engine:
        await asyncio.gather(*(engine.generate("text", None) for _ in range(8)))
        workers = [thread for thread in own_threads.threads() if thread.name.startswith("aioinfer-text")]
        assert workers
    assert not await asyncio.to_thread(still_alive, workers)


LOOP = """
import asyncio
from aioinfer import Engine, EngineConfig

def forever(*given, **named):
    begun.set()
    while True:
        pass

async def main():
    engine = Engine(EngineConfig(model="tiny-chat", threads=1, num_pages=64, attention_backend="sdpa"))
    await engine.start()
    engine.tokenizer._tokenizer.apply_chat_template = forever
    stream = engine.generate([{"role": "user", "content": "x"}])
    await asyncio.to_thread(begun.wait)
    await engine.aclose()
    print("closed", flush=True)

import threading
begun = threading.Event()
asyncio.run(main())
"""


@rest(PROGRAM)
def test_a_chat_template_that_loops_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=240)
    assert (ended.stdout, ended.returncode) == ("closed\n", 0), ended.stderr
