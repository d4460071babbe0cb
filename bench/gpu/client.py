"""``python -m bench.gpu.client URL COUNT LONGEST ...``: the endpoint's client, a process of its own.

Sends the first COUNT requests of an offline workload, cut to outputs of LONGEST tokens, at once, each on a
connection of its own, and prints a JSON object with the figures; the other arguments are the workload's. It
counts events as they come and parses none but each stream's last, so that it costs the machine little.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from typing import Any

import aiohttp

from bench.gpu.workload import Workload, offline_workload
from bench.report import percentiles

__all__ = ["main"]


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], tokens: int
) -> tuple[list[float], int]:
    """When events of a stream arrived, and how many tokens it had. Raises RuntimeError."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    times: list[float] = []
    kept = b""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:200]}")
        async for data in response.content.iter_any():
            times += [time.perf_counter()] * data.count(b"data: ")
            kept = (kept + data)[-4096:]
    events = [line[6:] for line in kept.splitlines() if line.startswith(b"data: {")]
    usage = json.loads(events[-1]).get("usage") if events else None
    if not usage or not kept.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"a stream ended with {kept[-200:]!r}")
    # The last two events are usage and [DONE].
    return times[:-2], usage["completion_tokens"]


async def run(url: str, load: Workload) -> dict[str, Any]:
    """The figures; a request that failed has no tokens."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        start, cpu = time.perf_counter(), time.process_time()
        results = await asyncio.gather(
            *[
                ask(session, url, model, prompt, tokens)
                for prompt, tokens in zip(load.prompts, load.outputs, strict=True)
            ],
            return_exceptions=True,
        )
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    good = [result for result in results if not isinstance(result, BaseException)]
    gaps = [b - a for times, _ in good for a, b in itertools.pairwise(times)]
    return {
        "requests": len(results),
        "errors": [repr(result) for result in results if isinstance(result, BaseException)][:3],
        "seconds": seconds,
        "cpu": cpu,
        "tokens": sum(tokens for _, tokens in good),
        "ttft_ms": percentiles([1e3 * (times[0] - start) for times, _ in good]),
        "itl_ms": percentiles([1e3 * gap for gap in gaps]),
    }


def main() -> int:
    import uvloop

    url, (count, longest, *whole) = sys.argv[1], map(int, sys.argv[2:])
    load = offline_workload(*whole).first(count, longest)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(url, load))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
