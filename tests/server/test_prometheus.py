"""A Prometheus server scrapes a server under load, with a key, as the documentation says; and the queries of
the board for Grafana have answers."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.examples.test_grafana import QUERIES
from tests.ports import free_port
from tests.server.conftest import Served, Serving
from tests.tiers import PROGRAM, nightly

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: aioinfer
    authorization: {{credentials_file: {key}}}
    static_configs: [{{targets: ["{target}"]}}]
"""
SCRAPES = 6
KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
#: of what happens to other requests and models
EMPTY = ("aioinfer_diffusion_rounds_total", "aioinfer_aborts_total")


@asynccontextmanager
async def prometheus(served: Served, directory: Path) -> AsyncIterator[Any]:
    """A function that asks a Prometheus for what a query says, while it scrapes this server."""
    (directory / "key").write_text(KEY)
    config = directory / "prometheus.yml"
    target = served.url.removeprefix("http://")
    config.write_text(CONFIG.format(key=directory / "key", target=target))
    address = f"127.0.0.1:{free_port()}"
    program = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(f"http://{address}") as session:
            while True:
                assert program.returncode is None, "it has ended"
                try:
                    async with session.get("/-/ready") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.05)

            async def ask(query: str) -> list[Any]:
                async with session.get("/api/v1/query", params={"query": query}) as response:
                    answer = await response.json()
                assert answer["status"] == "success", (query, answer)
                found: list[Any] = answer["data"]["result"]
                return found

            yield ask
    finally:
        if program.returncode is None:
            program.terminate()
        await program.wait()


async def load(served: Served) -> None:
    """Requests one behind the other."""
    async with aiohttp.ClientSession(served.url, headers=HEADERS) as session:
        for number in range(1_000_000):
            body = {
                "messages": [{"role": "user", "content": f"hello {number % 7}"}],
                "max_tokens": 4 + number % 20,
                "ignore_eos": True,
                "stream": number % 2 == 0,
            }
            async with session.post("/v1/chat/completions", json=body) as response:
                assert response.status == 200
                await response.read()


@nightly(PROGRAM)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus, which Debian has")
async def test_prometheus_scrapes_and_answers_the_board(serving: Serving, tmp_path: Path) -> None:
    async with (
        serving(server={"api_key": KEY, "served_model_name": "a/b"}) as served,
        prometheus(served, tmp_path) as ask,
    ):
        tasks = [asyncio.create_task(load(served)) for _ in range(4)]
        try:
            # A busy machine may be late for a scrape.
            while not (up := await ask("sum_over_time(up[1m])")) or int(up[0]["value"][1]) < SCRAPES:
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.1)
            for query in QUERIES:
                for name, value in (("model_name", "a/b"), ("engine", "0")):
                    query = query.replace(f'{name}=~"${name}"', f'{name}=~"{value}"')
                found = await ask(query.replace("$__rate_interval", "1m"))
                assert all(math.isfinite(float(each["value"][1])) for each in found), (query, found)
                assert found or any(name in query for name in EMPTY), query
            # The names of vLLM have kept their colons, in whatever format was asked for.
            for name in ("vllm:time_to_first_token_seconds", "aioinfer_time_to_first_token_seconds"):
                (p95,) = await ask(f"histogram_quantile(0.95, sum by (le) (rate({name}_bucket[1m])))")
                assert 0 < float(p95["value"][1]) < math.inf
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
