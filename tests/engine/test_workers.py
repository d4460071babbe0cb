"""Worker threads: they end with their engine, and a call without end does not keep the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest

from aioinfer.execution.workers import WorkerExecutor
from tests.engine.conftest import MakeEngine, OwnThreads
from tests.joining import still_alive
from tests.tiers import PROGRAM, rest


def named(prefix: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_threads_are_started_on_demand_and_end_with_the_pool() -> None:
    pool = WorkerExecutor(3, "demand")
    assert named("demand") == []
    for _ in range(20):
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
    assert len(named("demand")) <= 3
    meeting = threading.Barrier(4)
    calls = [pool.submit(meeting.wait) for _ in range(3)]
    meeting.wait()
    wait(calls)
    assert len(named("demand")) == 3
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result()
    pool.shutdown(wait=False)
    assert named("demand") == []
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)


def test_waiting_calls_are_cancelled_and_running_ones_not_waited_for() -> None:
    pool, begun, hold = WorkerExecutor(1, "held"), threading.Event(), threading.Event()
    running = pool.submit(lambda: begun.set() or hold.wait())
    waiting = pool.submit(int)
    begun.wait()
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    assert not running.done()
    hold.set()
    assert running.result()
    pool.shutdown(wait=True)
    assert named("held") == []


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
