"""Handovers between processes: one is killed amid them, and the directory for pages vanishes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from aioinfer import SamplingParams
from aioinfer.config import EngineConfig
from aioinfer.loop.holding import Prefix
from aioinfer.parallel import Dispatcher, exchange
from aioinfer.parallel.processes import ProcessReplica
from aioinfer.parallel.replica import Attempt, Replica, Stored
from tests.parallel.waiting import until
from tests.tiers import PROGRAM, rest

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("patient"), rest(PROGRAM)]

CONFIG = EngineConfig(model="tiny-chat", threads=1, kv_memory_gib=0.1, deterministic=True)
PARAMS = SamplingParams(max_tokens=100, temperature=0.8, seed=11, ignore_eos=True, logprobs=1)
IDS = [20 + number * 7 % 200 for number in range(600)]


@pytest.fixture(autouse=True)
def _private(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SHARED_MEMORY", directory)


def dispatcher_of(processes: int = 2) -> Dispatcher:
    roles = ["prefill"] + ["decode"] * (processes - 1)
    return Dispatcher(processes=processes, config=CONFIG, roles=roles)


def kill(replica: Any) -> None:
    os.kill(replica.pid, signal.SIGKILL)


@pytest.mark.parametrize("same_host", [True, False], ids=["files", "messages"])
async def test_a_process_may_be_killed_amid_a_handover(
    same_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That which stores pages, and that which has just been told to go on with them."""
    monkeypatch.setattr(ProcessReplica, "same_host", same_host)
    async with dispatcher_of() as dispatcher:
        source, target = dispatcher._replicas
        wanted = await dispatcher.generate(IDS, PARAMS)
        assert (dispatcher.stats().handovers, dispatcher.stats().handovers_without_pages) == (1, 0)
        store, submit = type(source).store_prefix, type(target).submit
        victims: list[Replica] = []

        async def stores(self: Any, prefix: Prefix) -> Stored:
            if victims == [source]:
                storing = asyncio.ensure_future(store(self, prefix))
                await asyncio.sleep(0)  # the order is on its way
                kill(victims.pop())
                return await storing
            return await store(self, prefix)

        def submits(self: Any, attempt: Attempt, *rest: Any) -> None:
            submit(self, attempt, *rest)
            if victims == [target] and self is target:
                asyncio.get_running_loop().call_soon(kill, victims.pop())

        monkeypatch.setattr(type(source), "store_prefix", stores)
        monkeypatch.setattr(type(target), "submit", submits)
        for number in range(2 if dispatcher._kind == "messages" else 4):
            dispatcher.flush_cache()
            victims.append((source, target)[number % 2])
            found = await dispatcher.generate(IDS, PARAMS)
            assert not victims
            assert (found.token_ids, found.text, found.logprobs, found.identical) == (
                wanted.token_ids,
                wanted.text,
                wanted.logprobs,
                True,
            )
            await until(lambda: dispatcher.stats().ready_replicas == 2)
        assert dispatcher.stats().diverged == 0


async def test_a_directory_that_vanishes_costs_time_and_nothing_else() -> None:
    async with dispatcher_of() as dispatcher:
        wanted = await dispatcher.generate(IDS, PARAMS)
        assert dispatcher._exchange is not None
        path = dispatcher._exchange.path
        assert path is not None
        assert path.stat().st_mode & 0o777 == 0o700
        assert [*path.glob("*/*.p")]
        shutil.rmtree(path)
        dispatcher.flush_cache()
        found = await dispatcher.generate(IDS, PARAMS)
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
        assert dispatcher.stats().handovers == 2
    assert not path.exists()


async def test_pages_are_cut_and_turned_around(directory: Path) -> None:
    """What a process reads is checked."""
    async with dispatcher_of() as dispatcher:
        wanted = await dispatcher.generate(IDS, PARAMS)
        assert dispatcher._exchange is not None
        path = dispatcher._exchange.path
        assert path is not None
        for number, file in enumerate(sorted(path.glob("*/*.p"))):
            data = bytearray(file.read_bytes())
            data[-1 - number] ^= 1
            file.write_bytes(data if number % 2 else data[:-10])
        dispatcher.flush_cache()
        found = await dispatcher.generate(IDS, PARAMS)
        assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
