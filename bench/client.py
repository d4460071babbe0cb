"""Clients: a load sent to an endpoint or an engine, and the figures of what came back.

Definitions, as in vLLM's bench: TTFT from sending to the first token; ITL between tokens that arrive one
after the other (tokens that arrive together share the gap); TPOT (latency - TTFT) / (tokens - 1); latency
from sending to the last token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.load import Load, LoadRequest
from bench.report import percentiles

__all__ = ["Record", "Target", "run_load", "summarise", "url_target"]


@dataclass(slots=True)
class Record:
    """What one request saw. Times in seconds on one monotonic clock."""

    sent: float = 0.0
    #: (when, how many tokens) of every arrival
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.sent

    @property
    def latency(self) -> float:
        return self.arrivals[-1][0] - self.sent

    def itl(self) -> list[float]:
        gaps = []
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


Target = Callable[[LoadRequest, Record], Any]


@asynccontextmanager
async def url_target(url: str, model: str | None, api_key: str | None) -> AsyncIterator[Target]:
    """Any server with OpenAI's streaming completions. One event counts as one token unless usage says
    that there were more; then they are spread over the events."""
    import aiohttp

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        if model is None:
            async with session.get(f"{base}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]

        async def ask(request: LoadRequest, record: Record) -> None:
            body = {
                "model": model,
                "prompt": request.prompt,
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with session.post(f"{base}/v1/completions", json=body) as response:
                if response.status != 200:
                    record.error = f"{response.status}: {(await response.text())[:200]}"
                    return
                await _read_events(response, record)

        yield ask


async def _read_events(response: Any, record: Record) -> None:
    times: list[float] = []
    completion_tokens: int | None = None
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            record.error = str(event["error"])
            return
        if event.get("usage"):
            completion_tokens = event["usage"]["completion_tokens"]
        if event["choices"]:
            times.append(time.perf_counter())
    total = len(times) if completion_tokens is None else completion_tokens
    each, more = divmod(total, max(1, len(times)))
    for at, when in enumerate(times):
        count = each + (at < more)
        if count:
            record.arrivals.append((when, count))


async def run_load(load: Load, ask: Target) -> tuple[list[Record], float]:
    """Send all requests; returns their records and the seconds it took."""
    gate = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    started = time.perf_counter()

    async def one(request: LoadRequest) -> Record:
        record = Record(prompt_tokens=len(request.prompt))
        delay = started + request.at - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        if gate is not None:
            await gate.acquire()
        try:
            record.sent = time.perf_counter()
            await ask(request, record)
        except Exception as error:
            record.error = repr(error)
        finally:
            if gate is not None:
                gate.release()
        return record

    records = await asyncio.gather(*[one(request) for request in load.requests])
    return records, time.perf_counter() - started


def summarise(records: list[Record], seconds: float) -> dict[str, Any]:
    """The figures of a run; times in milliseconds."""
    good = [record for record in records if record.error is None and record.arrivals]
    tokens = sum(record.tokens for record in good)
    several = [record for record in good if record.tokens > 1]
    metrics = {
        "ttft": [1e3 * record.ttft for record in good],
        "tpot": [1e3 * (record.latency - record.ttft) / (record.tokens - 1) for record in several],
        "itl": [1e3 * gap for record in several for gap in record.itl()],
        "latency": [1e3 * record.latency for record in good],
    }
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(good) / seconds,
        **{f"{name}_ms": percentiles(values) for name, values in metrics.items()},
    }
