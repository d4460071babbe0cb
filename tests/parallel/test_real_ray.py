"""Replicas on a real Ray cluster, of one node on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from aioinfer import EngineConfig, SamplingParams
from aioinfer.errors import EngineFailed
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.launched import HostUnavailable
from aioinfer.parallel.on_ray import cluster
from tests.joining import arguments
from tests.model.harness import require
from tests.parallel.kills import run
from tests.parallel.ray_cluster import RayHead, ray_head
from tests.parallel.waiting import until
from tests.tiers import PROGRAM, nightly

pytestmark = pytest.mark.usefixtures("nothing_left")

CONFIG = EngineConfig(model="tiny-chat", deterministic=True, threads=1, kv_memory_gib=0.1)
PARAMS = SamplingParams(max_tokens=300, temperature=0.8, seed=11, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    require("native")
    with ray_head() as found:
        yield found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Keepers are gone afterwards; their actors end with them."""
    yield
    children = psutil.Process().children(recursive=True)
    assert not [each for each in children if "aioinfer.parallel.on_ray" in arguments(each)]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    """Where a machine is busy, its cluster may answer late."""
    monkeypatch.setattr(cluster, "_CONNECTING", 60.0)


@asynccontextmanager
async def placed(head: RayHead, processes: int, *, direct: bool = True) -> AsyncIterator[Dispatcher]:
    async with asyncio.timeout(240):
        dispatcher = Dispatcher(processes=processes, ray=head.address, config=CONFIG)
        for replica in dispatcher._replicas:
            replica.direct = direct  # type: ignore[attr-defined]
        await dispatcher.start()
        try:
            yield dispatcher
        finally:
            await dispatcher.aclose()


@nightly(PROGRAM)
@pytest.mark.usefixtures("patience")
async def test_a_stream_goes_on_when_its_actor_is_killed(head: RayHead) -> None:
    """Also where Ray carries the frames."""
    async with placed(head, 2, direct=False) as dispatcher:
        expected = await dispatcher.generate("Once upon a time", PARAMS)
        ids: list[int] = []
        text = ""
        async for chunk in dispatcher.generate("Once upon a time", PARAMS, max_lag=20):
            if len(ids) <= 30 < len(ids) + len(chunk.token_ids):
                (replica,) = [each for each in dispatcher._replicas if each.load.requests]
                os.kill(replica.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            ids += chunk.token_ids
            text += chunk.text
        assert (ids, text) == (expected.token_ids, expected.text)
        assert (dispatcher.stats().resumed, dispatcher.stats().diverged) == (1, 0)
        await until(lambda: dispatcher.stats().ready_replicas == 2)
        assert await dispatcher.generate("Once upon a time", PARAMS) == expected


@nightly(PROGRAM)
@pytest.mark.usefixtures("patience")
async def test_a_cluster_that_is_lost_ends_no_process_and_may_come_back(head: RayHead) -> None:
    async with placed(head, 1) as dispatcher:
        stream = dispatcher.generate("Once upon a time", PARAMS)
        await anext(stream)
        head.kill()
        with pytest.raises(EngineFailed, match="no replica is left: ray-0"):
            await stream
        assert not dispatcher.ready
        head.start()
        await until(lambda: dispatcher.ready)
        assert len((await dispatcher.generate("Once upon a time", PARAMS)).token_ids) == 300


@nightly(PROGRAM)
async def test_where_there_is_no_cluster_it_is_an_error(head: RayHead) -> None:
    """Nobody listens; somebody does who is no cluster; nothing comes back."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for address in ("127.0.0.1:1", f"127.0.0.1:{port}"):
            dispatcher: Any = Dispatcher(processes=2, ray=address, config=CONFIG)
            async with asyncio.timeout(120):
                with pytest.raises(HostUnavailable, match=f"Ray cluster at {address}"):
                    await dispatcher.start()


@nightly(PROGRAM)
def test_the_example_runs(head: RayHead) -> None:
    done = subprocess.run(
        [sys.executable, "examples/on_ray.py", head.address], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert "ray-1: ready" in done.stderr


@nightly(PROGRAM)
@pytest.mark.usefixtures("patience")
def test_no_answer_shows_that_actors_were_killed(head: RayHead) -> None:
    found = asyncio.run(run("tiny-chat", 40, clients=12, every=1.0, rolling=False, seed=0, ray=head.address))
    assert found["failed"] == found["differing"] == found["diverged"] == 0, found
    assert found["streams"] >= 40
    assert found["kills"]
