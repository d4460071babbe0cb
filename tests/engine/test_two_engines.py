"""Several engines in one process: what one was promised is not promised to another one."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioinfer import ConfigError, Engine, EngineConfig, OutOfMemory, SamplingParams
from aioinfer.ledger import LEDGER
from aioinfer.system.memory import Available
from tests.tiers import PROGRAM, grid, rest

# What a pool has taken is counted in pages, by what Linux says of them.
pytestmark = pytest.mark.linux

MIB = 1 << 20
#: bytes of a page of tiny-chat
PAGE = 48 << 10


def pool(size: int) -> EngineConfig:
    """With a pool of ``size`` MiB."""
    return EngineConfig(threads=1, num_pages=size * MIB // PAGE)


@pytest.fixture
async def leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system leaves room for pools of 330 MiB, and for what two engines are promised beside theirs. What
    engines take of it is left out: this process had it before."""
    monkeypatch.setattr(LEDGER, "_shares", weakref.WeakSet())  # of this test alone
    async with Engine(pool(1)):
        beside = LEDGER.untaken()
    monkeypatch.setattr(LEDGER, "available", lambda: Available(330 * MIB + 2 * beside, "control group"))


@pytest.mark.usefixtures("leave")
async def test_a_second_engine_whose_pool_was_promised_to_the_first_is_refused() -> None:
    async with Engine(pool(240)) as first:
        second = Engine(pool(240))
        with pytest.raises(ConfigError, match=r"num_pages is 5120: .* control group has .* left beside 0\."):
            await second.start()
        async with Engine(pool(60)):
            with pytest.raises(ConfigError, match="num_pages"):
                await Engine(pool(60)).start()
        await first.generate("x", SamplingParams(max_tokens=2))
    async with second:  # the first was closed
        await second.generate("x", SamplingParams(max_tokens=2))


@pytest.mark.usefixtures("leave")
async def test_of_engines_that_start_at_once_those_that_fit_are_started() -> None:
    engines = [Engine(pool(164)) for _ in range(3)]
    found = await asyncio.gather(*(each.start() for each in engines), return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["ConfigError", "NoneType", "NoneType"]
    for each in engines:
        await each.aclose()


@pytest.mark.usefixtures("leave")
async def test_a_start_that_fails_gives_back_what_it_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: object) -> None:
        raise ConfigError("made up, behind the pool")

    before = LEDGER.untaken()
    for _ in range(3):
        with pytest.raises(ConfigError, match="num_pages"):
            await Engine(pool(800)).start()
    monkeypatch.setattr("aioinfer.execution.build.CpuBackend", failing)
    with pytest.raises(ConfigError, match="made up"):
        await Engine(pool(240)).start()
    gc.collect()
    assert LEDGER.untaken() <= before


@pytest.mark.usefixtures("leave")
async def test_weights_do_not_take_what_a_pool_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine(pool(240)):
        left = LEDGER.untaken() + MIB
        monkeypatch.setattr(LEDGER, "available", lambda: Available(left, "control group"))
        with pytest.raises(OutOfMemory, match=r"weights: .* are needed, and the control group has 0\.00 GiB"):
            await Engine(pool(1)).start()


@pytest.mark.usefixtures("leave")
async def test_an_engine_that_was_dropped_promises_nothing() -> None:
    before = set(threading.enumerate())
    engine = Engine(pool(240))
    await engine.start()
    await engine.generate("x", SamplingParams(max_tokens=2))
    del engine
    while set(threading.enumerate()) - before:  # its threads end in their own time, and hold its pool
        gc.collect()
        await asyncio.sleep(0)
    async with Engine(pool(240)):
        pass


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of our own, of version 1 or 2."""
    root = Path("/sys/fs/cgroup/memory")
    made = (root if root.is_dir() else root.parent) / f"aioinfer-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError:
        pytest.skip("control groups cannot be made here")
    yield made
    made.rmdir()


@rest(PROGRAM)
@pytest.mark.parametrize("how", grid(["tight"], ["one by one", "at once"]))
def test_in_a_control_group_engines_are_refused_or_survive_a_load_that_fills_their_pools(
    group: Path, how: str
) -> None:
    command = [sys.executable, "-m", "tests.engine.two_engines_program", str(group), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "refused: num_pages is" in said
    assert "filled: 1" in said
    assert ("again" in said) == (how == "one by one")
