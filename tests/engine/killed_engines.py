"""Engines that share a directory of pages, and are killed at any time.

::

    python -m tests.engine.killed_engines --kills 1000 --seed 44

In each round two engines serve: their pages are written behind, read and evicted, and sessions are saved,
replaced and loaded. Most of them are killed amid that. Every later start serves, and no token is wrong: a
page of other tokens, or half of one, is an error of the toy device.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import InvalidRequest
from aioinfer.execution.launcher import InlineLauncher
from aioinfer.params import SamplingParams
from aioinfer.tiers.archive import remove_unfinished
from aioinfer.tiers.records import HEADER
from tests.pages.killing import KILLED, killed_at
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
#: bytes of a page of the toy, and pages in the directory
_PAGE, _MOST = 16 * 4, 60
_GIB = 2**30


async def serve(path: Path, sessions: Path, draw: random.Random) -> int:
    """Serve some requests; how many pages were loaded for them."""
    config = EngineConfig(
        model="toy",
        page_size=4,
        prefix_cache_dir=str(path),
        prefix_cache_disk_gib=_MOST * (_PAGE + HEADER) / _GIB,
        launch_mode="inline",
        prepare_grammars=False,
    )
    device = ToyDevice(num_pages=60)
    engine = Engine(config, launcher=lambda _: InlineLauncher(device), tokenizer=lambda _: ToyTokenizer(64))
    async with engine:
        for _ in range(8):
            base = draw.choice([1, 2, 3])
            prompt = [base + number % 40 for number in range(draw.choice([20, 60, 90]))]
            result = await engine.generate(prompt, PARAMS)
            assert result.token_ids == toy_generate(prompt, PARAMS), "a token is wrong"
            engine.flush_cache()
            await take_turns(engine, sessions / str(base), prompt)
        return engine.stats().loaded_pages


async def take_turns(engine: Engine, file: Path, prompt: list[int]) -> None:
    """Go on with the session in a file, or begin it, and save it there."""
    session = engine.session()
    with suppress(InvalidRequest):  # there is none yet
        loaded = await engine.load_session(file)
        session.close()
        session = loaded
    if session.num_tokens > 150:
        session.close()
        session = engine.session()
    before = [*session.token_ids]
    new = prompt[:7]
    result = await session.generate(new, PARAMS)
    assert result.token_ids == toy_generate([*before, *new], PARAMS), "a token of a session is wrong"
    with suppress(InvalidRequest):  # another engine writes it
        await session.save(file)
    session.close()


def work(path: Path, sessions: Path, seed: int) -> NoReturn:
    draw = random.Random(seed)
    match draw.randrange(4):
        case 0 | 1:
            killed_at(draw.randint(1, 2500), draw)
        case 2:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 0.4))
    asyncio.run(serve(path, sessions, draw))
    os._exit(0)


def started(path: Path, sessions: Path, seed: int) -> int:
    if pid := os.fork():
        return pid
    try:
        work(path, sessions, seed)
    except BaseException as error:
        sys.stderr.write(f"seed {seed}: {error!r}\n")
        os._exit(1)


def judge(path: Path, sessions: Path, seed: int) -> None:
    """A start after the kills serves, and leaves nothing of the others."""
    pid = os.fork()
    if not pid:
        try:
            draw = random.Random(seed)
            remove_unfinished(sessions)
            asyncio.run(serve(path, sessions, draw))
        except BaseException as error:
            sys.stderr.write(f"seed {seed}, behind the kills: {error!r}\n")
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a start after kills does not serve"
    left = [each for each in path.rglob("*") if each.is_file() and each.parent != path]
    assert all(each.suffix in (".p", ".s") for each in left), left
    assert sum(each.stat().st_size for each in left) <= _MOST * (_PAGE + HEADER) * 17 // 16
    assert not [each for each in sessions.iterdir() if not each.name.isdigit()], "an unfinished file is left"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="aioinfer-killed-"))
    path, sessions = folder / "pages", folder / "sessions"
    sessions.mkdir()
    os.fsync = lambda fd: None  # what the system has taken outlives a process
    gc.freeze()
    kills = rounds = 0
    try:
        while kills < options.kills:
            seed = draw.randrange(1 << 32)
            rounds += 1
            sys.stderr.write(f"round {rounds}: seed {seed}\n")
            running = [started(path, sessions, seed + at) for at in range(2)]
            for pid in running:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                assert status in (0, *KILLED), f"an engine ended with {status}"
                kills += status in KILLED
            judge(path, sessions, seed + 9)
    finally:
        shutil.rmtree(folder)
    sys.stdout.write(f"{kills} kills in {rounds} rounds; every start served\n")


if __name__ == "__main__":
    main()
