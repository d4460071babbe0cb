"""Endpoint: the offline workload's lengths through the aiohttp server, every request on its own connection.

The client is a process of its own on the same machine. First the same engine streams the same requests to
consumers in its own process; what the endpoint loses is measured against that. The tokenizer is as large
as the model's vocabulary, so that text is made of tokens both times.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine
from aioinfer.server import serve
from bench.gpu.engines import started
from bench.gpu.plan import Plan
from bench.load import engine_ask, make_load, run_load, summarise
from bench.report import Report
from bench.serving import VOCAB

__all__ = ["run"]


async def run(plan: Plan, report: Report) -> None:
    """A row for consumers in the process, and one for the endpoint."""
    count, lengths = plan.size.requests, f"uniform:{plan.size.lengths[0]}:{plan.size.lengths[1]}"
    load = make_load(
        count=count, rate=None, concurrency=None, prompt_tokens=lengths, output_tokens=lengths,
        vocab=VOCAB, seed=0,
    )  # fmt: skip
    async with started(plan, tokenizer=True) as engine:
        inside = summarise(*await run_load(load, engine_ask(engine)))
        engine.flush_cache()
        arguments = f"--requests {count} --concurrency {count} --warmup 0 --prompt-tokens {lengths}"
        outside = await _through_http(engine, [*arguments.split(), "--output-tokens", lengths])
    for way, found in (("in process", inside), ("HTTP", outside)):
        report.row(
            way=way, requests=found["requests"], failed=found["failed"], seconds=found["seconds"],
            tokens_per_s=found["output_tokens_per_s"],
            loss=1 - found["output_tokens_per_s"] / inside["output_tokens_per_s"],
            **{f"{name}_p{at}": found[name][f"p{at}"] for name in ("itl_ms", "ttft_ms") for at in (50, 99)},
        )  # fmt: skip


async def _through_http(engine: Engine, arguments: list[str]) -> dict[str, Any]:
    """Figures of ``bench serving`` with these arguments. Raises RuntimeError."""
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(engine, ServerConfig(port=0), stop=stop, ready=address.set_result))
    try:
        await asyncio.wait([server, address], return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            server.result()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "line"
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench", "serving", "--url", address.result(), *arguments,
                "--json", str(file), cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            if status := await client.wait():
                raise RuntimeError(f"the client ended with {status}")
            line = json.loads(file.read_text())
    finally:
        stop.set()
        await server
    rows = {row.pop("metric"): row for row in line["rows"]}
    found: dict[str, Any] = {**line["facts"], **rows}
    return found
