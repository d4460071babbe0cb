"""What an engine promises to the program around it: nothing is left, nothing changes, errors help."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from aioinfer import Engine, EngineConfig, errors
from aioinfer.testing import FakeEngine
from tests.tiers import PROGRAM, rest

pytest_plugins = ["pytester"]

#: Two real engines in each of three runs, on two kinds of loop; what differs from before, and what is left.
CONTRACT = """
import asyncio, gc, json, logging, os, signal, sys, threading, warnings
import uvloop
import torch  # its import is the application's
from aioinfer import Engine, EngineConfig, SamplingParams

def state():
    return {
        "signals": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "environment": dict(os.environ),
        "logging": [repr(logging.getLogger().handlers), logging.getLogger().level],
        "policy": repr(asyncio.get_event_loop_policy()),
        "torch threads": torch.get_num_threads(),
        "torch default": [str(torch.get_default_dtype()), torch.is_grad_enabled()],
        "switch interval": sys.getswitchinterval(),
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)],
        "excepthooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "threads": sorted(each.name for each in threading.enumerate()),
        "directory": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
    }

tasks, texts = [], set()

async def use():
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    async with Engine(EngineConfig(threads=1)) as first, Engine(EngineConfig(threads=1)) as second:
        params = SamplingParams(max_tokens=12, temperature=0)
        question = [{"role": "user", "content": "What is 17 + 25?"}]
        results = await asyncio.gather(
            first.generate(question, params), second.generate(question, params), first.chat(question, params)
        )
        texts.update(getattr(each, "text", None) or each.content for each in results)
        async for _ in first.map(["Once"] * 8, params):
            break
        first.generate("Once upon a time")
    tasks.append(len(asyncio.all_tasks()) - 1)
    assert loop.get_exception_handler() is handler

before, known = state(), set(threading.enumerate())
for factory in (asyncio.new_event_loop, uvloop.new_event_loop, asyncio.new_event_loop):
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(use())
for each in set(threading.enumerate()) - known:
    each.join(20)  # its work is done, but it may not have had its turn to end
after = state()
changed = [f"{key}: {after[key]}" for key in before if before[key] != after[key]]
print(json.dumps([changed, tasks, sorted(texts)]))
"""


@rest(PROGRAM)
def test_an_engine_leaves_nothing_and_changes_nothing() -> None:
    command = [sys.executable, "-W", "error", "-c", CONTRACT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    changed, tasks, texts = json.loads(done.stdout)
    assert (changed, tasks) == ([], [0, 0, 0])
    assert texts == ["17 + 25 = 42"]
    assert done.stderr == ""


def under_another_library(work: Any) -> None:
    """Run a coroutine as trio would: not on a loop of asyncio's."""
    try:
        work.send(None)
    finally:
        work.close()


def test_where_asyncio_does_not_run_the_error_says_what_to_do() -> None:
    async def enter() -> None:
        async with FakeEngine("x"):
            pass

    engine = Engine(EngineConfig(model="no such model"))
    for work in (engine.start(), enter()):
        with pytest.raises(errors.WrongLoop, match=r"asyncio event loop.* trio, .*threadsafe\(\)"):
            under_another_library(work)
    assert engine.state.value == "new"


FIXTURE = """
import pytest, pytest_asyncio
from aioinfer.testing import FakeEngine

@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine():
    async with FakeEngine("Hello!") as engine:
        yield engine

async def ask(engine):
    assert (await engine.generate("Hi")).text == "Hello!"

@pytest.mark.asyncio
async def test_on_a_loop_of_its_own(engine):
    await ask(engine)

@pytest.mark.asyncio(loop_scope="session")
async def test_on_the_loop_of_the_session(engine):
    await ask(engine)

@pytest.mark.asyncio(loop_scope="session")
async def test_there_again(engine):
    await ask(engine)
"""


@rest(PROGRAM)
def test_a_session_fixture_of_pytest_asyncio_works_or_says_how(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FIXTURE)
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*WrongLoop*with pytest-asyncio, give the fixture*the same loop_scope*"])
