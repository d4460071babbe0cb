"""Loads: requests with their arrival times, sent to an endpoint or an engine, and the figures that result.

Definitions, as in vLLM's bench: TTFT from sending to the first token; ITL between tokens that arrive one
after the other (tokens that arrive together share the gap); TPOT (latency - TTFT) / (tokens - 1); latency
from sending to the last token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from aioinfer.client.engine_like import EngineLike
from aioinfer.params import SamplingParams
from aioinfer.twin.synthesis import length_distribution
from bench.report import percentiles

__all__ = [
    "Load", "LoadRequest", "Record", "engine_ask", "length_distribution", "make_load", "run_load",
    "summarise", "url_target",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: seconds from the start until it arrives, prompt, and tokens of its output."""

    at: float
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the order of their arrival; ``concurrency`` instead of times when it is closed."""

    requests: list[LoadRequest]
    concurrency: int | None


def make_load(
    *,
    count: int,
    rate: float | None,
    concurrency: int | None,
    prompt_tokens: str,
    output_tokens: str,
    vocab: tuple[int, int],
    seed: int,
) -> Load:
    """Seeded requests: arrivals of a Poisson process of ``rate`` per second, or as fast as ``concurrency``
    allows. Every prompt is new; ``vocab`` is its least and largest token id."""
    rng = random.Random(seed)
    prompt_length, output_length = length_distribution(prompt_tokens), length_distribution(output_tokens)
    at = 0.0
    requests = []
    for _ in range(count):
        if rate is not None:
            at += rng.expovariate(rate)
        prompt = [rng.randint(*vocab) for _ in range(prompt_length(rng))]
        requests.append(LoadRequest(at, prompt, output_length(rng)))
    return Load(requests, concurrency)


@dataclass(slots=True)
class Record:
    """Arrivals of one request's tokens. Times in seconds on one monotonic clock."""

    sent: float = 0.0
    #: (time, number of tokens) of every arrival
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
        for (before, _), (now, count) in itertools.pairwise(self.arrivals):
            gaps += [(now - before) / count] * count
        return gaps


Target = Callable[[LoadRequest, Record], Awaitable[None]]


def engine_ask(engine: EngineLike) -> Target:
    """A target that asks an engine on this loop."""

    async def ask(request: LoadRequest, record: Record) -> None:
        params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        async with engine.generate(request.prompt, params) as stream:
            async for chunk in stream:
                if chunk.token_ids:
                    record.arrivals.append((time.perf_counter(), len(chunk.token_ids)))

    return ask


@asynccontextmanager
async def url_target(url: str, model: str | None = None, api_key: str | None = None) -> AsyncIterator[Target]:
    """A server with OpenAI's streaming completions. One event counts as one token unless usage says that
    there were more; then they are spread over the events."""
    import aiohttp

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
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
    """Read a stream to its end. Events are counted as they come, and only the last one but [DONE] is parsed,
    so that a client costs the machine little."""
    times: list[float] = []
    kept = b""
    try:
        async for data in response.content.iter_any():
            times += [time.perf_counter()] * data.count(b"data: ")
            kept = (kept + data)[-4096:]
    except asyncio.CancelledError:
        record.arrivals += [(when, 1) for when in times]
        raise
    events = [line[6:] for line in kept.splitlines() if line.startswith(b"data: {")]
    last = json.loads(events[-1]) if events else {}
    if "error" in last or not last.get("usage") or not kept.rstrip().endswith(b"data: [DONE]"):
        record.error = f"a stream ended with {kept[-200:]!r}"
        return
    del times[-2:]  # usage and [DONE]
    each, more = divmod(last["usage"]["completion_tokens"], max(1, len(times)))
    for at, when in enumerate(times):
        if count := each + (at < more):
            record.arrivals.append((when, count))


async def run_load(load: Load, ask: Target) -> tuple[list[Record], float]:
    """Send all requests; returns their records and the seconds until the last one has ended."""
    gate: Any = asyncio.Semaphore(load.concurrency) if load.concurrency else nullcontext()
    started = time.perf_counter()

    async def one(request: LoadRequest) -> Record:
        record = Record(prompt_tokens=len(request.prompt))
        await asyncio.sleep(started + request.at - time.perf_counter())
        async with gate:
            record.sent = time.perf_counter()
            try:
                await ask(request, record)
            except Exception as error:
                record.error = repr(error)
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
