"""``python -m bench serving``: a load on any OpenAI endpoint, or on an engine in this process.

    python -m bench serving --requests 200 --concurrency 32
    python -m bench serving --url http://127.0.0.1:8000 --rate 8 --prompt-tokens uniform:50:200

Definitions, as in vLLM's bench: TTFT from sending to the first token; ITL between tokens that arrive one
after the other (tokens that arrive together share the gap); TPOT (latency - TTFT) / (tokens - 1); latency
from sending to the last token. Requests ask for exactly their output length (``ignore_eos``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioinfer.cli.main import add_settings, read_settings
from aioinfer.config import EngineConfig
from bench.load import Load, LoadRequest, make_load
from bench.report import environment, percentiles, print_table, write_line

#: token ids asked for: above the special tokens of most models, below the size of the smallest
VOCAB = (100, 800)


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
async def engine_target(config: EngineConfig) -> AsyncIterator[Target]:
    """An engine on this loop."""
    from aioinfer.engine import Engine
    from aioinfer.params import SamplingParams

    async with Engine(config) as engine:

        async def ask(request: LoadRequest, record: Record) -> None:
            params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
            async with engine.generate(request.prompt, params) as stream:
                async for chunk in stream:
                    if chunk.token_ids:
                        record.arrivals.append((time.perf_counter(), len(chunk.token_ids)))

        yield ask


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


async def bench(options: argparse.Namespace) -> dict[str, Any]:
    load = make_load(
        count=options.requests,
        rate=options.rate,
        concurrency=options.concurrency,
        burstiness=options.burstiness,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        distinct_prompts=options.distinct_prompts,
        vocab=VOCAB,
        seed=options.load_seed,
    )
    if options.url is not None:
        target = url_target(options.url, options.served_model, options.key)
    else:
        target = engine_target(read_settings(EngineConfig, options))
    async with target as ask:
        warm = Load(load.requests[: options.warmup], options.warmup or None)
        if warm.requests:
            await run_load(warm, ask)
        records, seconds = await run_load(load, ask)
    for record in records:
        if record.error is not None:
            print(f"a request failed: {record.error}", file=sys.stderr)
            break
    return summarise(records, seconds)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="an OpenAI endpoint; without it, an engine in this process")
    parser.add_argument("--served-model", help="model name to ask the endpoint for; default: its first")
    parser.add_argument("--key", help="bearer token for the endpoint")
    parser.add_argument("--requests", type=int, default=100)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--rate", type=float, help="arrivals per second")
    when.add_argument("--concurrency", type=int, help="requests under way at a time")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson, less comes in bursts")
    parser.add_argument(
        "--prompt-tokens", default="64", help="128, uniform:LO:HI, lognormal:MU:SIGMA[:MAX], ..."
    )
    parser.add_argument("--output-tokens", default="32", help="likewise")
    parser.add_argument("--distinct-prompts", type=int, help="repeat so many prompts; default: all unique")
    parser.add_argument("--warmup", type=int, default=4, help="requests sent before measuring")
    parser.add_argument("--load-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    parser.add_argument("--config", type=Path, help="YAML settings of the engine in this process")
    parser.set_defaults(model_argument=None)
    add_settings(parser, EngineConfig)
    options = parser.parse_args(arguments)
    if options.rate is None and options.concurrency is None:
        options.concurrency = 16
    return options


def main() -> int:
    import uvloop

    options = parse()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(bench(options))
    how = f"rate {options.rate}/s" if options.rate else f"concurrency {options.concurrency}"
    print(
        f"{result['requests']} requests ({result['failed']} failed), {how}, prompts {options.prompt_tokens}, "
        f"outputs {options.output_tokens}: {result['seconds']:.2f} s, "
        f"{result['output_tokens_per_s']:.1f} tokens/s, {result['requests_per_s']:.2f} requests/s"
    )
    names = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "latency": "latency_ms"}
    print_table("", {name: result[key] for name, key in names.items()}, "ms")
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key not in ("key", "json")
    }
    write_line(
        {"bench": "serving", **result, "options": settings, "environment": environment()}, options.json
    )
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
