"""Programs without a loop, and with several processes, run as they are run: servers of WSGI applications,
process pools, forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.tiers import PROGRAM, grid, nightly, rest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
#: seconds, to tell "never" from "soon" on a busy machine
NEVER = 240.0


@contextmanager
def serving(*command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server until it is told to end, which it does."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env={**os.environ, **variables})
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(NEVER)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def get(port: int, path: str) -> dict[str, Any]:
    """The answer of a server, once it listens."""
    end = time.monotonic() + NEVER
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=NEVER) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.URLError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def sums(port: int, count: int) -> set[int]:
    """Ask for as many sums at the same time, all of which are right; the processes that have answered."""
    get(port, "1+1")
    asked = [(10 + number, 20 + number) for number in range(count)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda each: get(port, f"{each[0]}+{each[1]}"), asked))
    assert [each["text"] for each in found] == [f"{a} + {b} = {a + b}" for a, b in asked]
    return {each["pid"] for each in found}


def gunicorn(port: int, *options: str) -> list[str]:
    application = "tests.engine.programs.wsgi_app:application"
    return ["-m", "gunicorn", "--bind", f"127.0.0.1:{port}", "--timeout", "0", *options, application]


@nightly(PROGRAM)
@pytest.mark.parametrize(
    "options",
    [
        ("--worker-class", "gthread", "--threads", "8"),
        ("--workers", "2", "--worker-class", "gthread", "--threads", "4", "--preload"),
        ("--workers", "2"),  # each worker has one thread
    ],
    ids=["gthread", "preload", "prefork"],
)
def test_gunicorn_serves_an_engine_in_each_worker(options: tuple[str, ...]) -> None:
    port = free_port()
    with serving(*gunicorn(port, *options)) as server:
        assert server.pid not in sums(port, 24)


@nightly(PROGRAM)
def test_gunicorn_says_that_the_engine_was_started_before_its_forks() -> None:
    port = free_port()
    command = gunicorn(port, "--worker-class", "gthread", "--threads", "2", "--preload")
    with serving(*command, ENGINE="early"):
        assert (
            "EngineClosed: the engine was started in another process, before a fork"
            in get(port, "1+1")["text"]
        )


@nightly(PROGRAM)
def test_flask_under_waitress_shares_one_llm() -> None:
    port = free_port()
    with serving("-m", "tests.engine.programs.flask_under_waitress", str(port)) as server:
        assert sums(port, 24) == {server.pid}


def printed(name: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(PROGRAMS / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=NEVER)
    assert done.returncode == 0, done.stderr
    return done.stdout


@rest(PROGRAM)
@pytest.mark.parametrize("method", grid(["fork"], ["spawn", "forkserver"]))
def test_workers_of_a_pool_have_models_of_their_own(method: str) -> None:
    told = json.loads(printed("forking.py", method))
    assert (told["before"], told["after"]) == ("11 + 30 = 41", "11 + 31 = 42")
    assert [text for _, text, _ in told["found"]] == [f"11 + {b} = {11 + b}" for b in range(20, 28)]
    for _, _, said in told["found"]:
        assert len(said) == (3 if method == "fork" else 0)
        assert all("before a fork" in each for each in said)


@rest(PROGRAM)
def test_a_fork_of_the_thread_that_computed_computes_alone() -> None:
    assert printed("inline_fork.py").split("\n") == ["11 + 12 = 23", "11 + 12 = 23", ""]


TRIO = """
import trio
from aioinfer import Engine, EngineConfig, WrongLoop

async def main():
    with Engine.in_thread(EngineConfig(threads=1)) as engine:
        stream = engine.generate([{"role": "user", "content": "What is 11 + 12?"}])
        try:
            await stream
        except WrongLoop as error:
            assert "trio.to_thread.run_sync(stream.result)" in str(error)
        print((await trio.to_thread.run_sync(stream.result)).text)
        async with engine.generate("Once upon a time") as left:
            assert await trio.to_thread.run_sync(next, iter(left))

trio.run(main)
"""


@nightly(PROGRAM)
def test_trio_has_an_engine_in_a_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRIO], capture_output=True, text=True, timeout=NEVER, cwd=ROOT
    )
    assert done.stdout == "11 + 12 = 23\n", done.stderr


TOGETHER = """
from concurrent.futures import ThreadPoolExecutor
from aioinfer import LLM, Engine, EngineConfig

kinds = [Engine.in_thread, Engine.in_thread, LLM]
with ThreadPoolExecutor(3) as threads:
    first, second, llm = threads.map(lambda kind: kind(EngineConfig(threads=1)), kinds)
chat = [{"role": "user", "content": "What is 11 + 12?"}]
print([each.generate(chat).result().text for each in (first, second)])
left = first.generate("Once upon a time")
next(iter(left))
"""


@rest(PROGRAM)
def test_what_starts_on_several_threads_at_once_ends_with_the_program() -> None:
    """The libraries that they import are not made for that. Nobody closes the engines."""
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER], capture_output=True, text=True, timeout=NEVER, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, f"{['11 + 12 = 23'] * 2}\n"), done.stderr
    assert "Traceback" not in done.stderr


AMID_A_START = """
import threading
from aioinfer import LLM, EngineClosed, EngineConfig

begun = threading.Event()

def tokenizer(config):
    begun.set()
    threading.Event().wait(1)

def start():
    try:
        LLM(EngineConfig(threads=1), tokenizer=tokenizer)
    except EngineClosed:
        pass

threading.Thread(target=start, daemon=True).start()
begun.wait()
"""


@rest(PROGRAM)
def test_a_program_may_end_while_a_thread_of_it_starts_an_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AMID_A_START], capture_output=True, text=True, timeout=NEVER, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
