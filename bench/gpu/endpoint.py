"""Endpoint: the offline workload through the aiohttp server, every request a connection of its own.

The client is a process of its own on the same machine. First the same engine streams the same requests to
consumers in its own process; what the endpoint loses is measured against that. The tokenizer is as large
as the model's vocabulary, so that text is made of tokens both times.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine
from bench.gpu.engines import run_async, started, stream
from bench.gpu.offline import workload
from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.report import percentiles

__all__ = ["run"]


def run(plan: Plan, report: PartReport) -> None:
    """A row each."""
    run_async(_run(plan, report))


async def _run(plan: Plan, report: PartReport) -> None:
    load = workload(plan).first(plan.size.endpoint_requests, plan.size.endpoint_output)
    tokens = sum(load.outputs)
    async with started(plan, plan.shape, tokenizer=True) as engine:
        seconds, arrivals = await stream(engine, load, 0.0)
        inside = tokens / seconds
        gaps = [b - a for times in arrivals for a, b in itertools.pairwise(times)]
        report.row(
            way="in process", requests=len(load.outputs), seconds=seconds, tokens_per_s=inside,
            itl_ms_p50=1e3 * percentiles(gaps)["p50"], itl_ms_p99=1e3 * percentiles(gaps)["p99"],
        )  # fmt: skip
        if report.remaining < 1.2 * seconds:
            report.note("HTTP: no time left")
            return
        engine.flush_cache()
        found = await _through_http(plan, engine, report.remaining)
        if found["tokens"] != tokens:
            raise ArithmeticError(
                f"{found['tokens']} tokens came, {tokens} were asked for: {found['errors']}"
            )
        outside = tokens / found["seconds"]
        report.row(
            way="HTTP", requests=found["requests"], seconds=found["seconds"], tokens_per_s=outside,
            itl_ms_p50=found["itl_ms"]["p50"], itl_ms_p99=found["itl_ms"]["p99"],
            ttft_ms_p50=found["ttft_ms"]["p50"], ttft_ms_p99=found["ttft_ms"]["p99"],
            loss=1 - outside / inside, client_cpu=found["cpu"] / found["seconds"],
        )  # fmt: skip


async def _through_http(plan: Plan, engine: Engine, seconds: float) -> dict[str, Any]:
    """What the client says. Raises RuntimeError, TimeoutError."""
    from aioinfer.server import serve

    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(engine, ServerConfig(port=0), stop=stop, ready=address.set_result))
    size = plan.size
    try:
        await asyncio.wait([server, address], return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            server.result()
        wanted = [size.endpoint_requests, size.endpoint_output, size.requests, *size.lengths, size.largest_id]
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.gpu.client", address.result(), *map(str, wanted),
            cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(seconds):
                output, _ = await client.communicate()
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
    finally:
        stop.set()
        await server
    if client.returncode != 0:
        raise RuntimeError(f"the client ended with {client.returncode}")
    result: dict[str, Any] = json.loads(output)
    return result
