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
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aioinfer.cli.flags import add_settings, read_settings
from aioinfer.config import EngineConfig
from bench.client import Record, Target, run_load, summarise, url_target
from bench.load import Load, LoadRequest, make_load
from bench.report import Report

#: token ids asked for: above the special tokens of most models, below the size of the smallest
VOCAB = (100, 800)


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


async def measure(options: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """The figures of a load, and the first request's error if one failed."""
    if options.rate is None and options.concurrency is None:
        options.concurrency = 16
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
    errors = [record.error for record in records if record.error is not None]
    return summarise(records, seconds), errors[0] if errors else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--config", type=Path, help="YAML settings of the engine in this process")
    parser.set_defaults(model_argument=None)
    add_settings(parser, EngineConfig)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per metric; counts and rates as facts."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result, error = runner.run(measure(options))
    tell(result, error, report)


def tell(result: dict[str, Any], error: str | None, report: Report) -> None:
    for name, value in result.items():
        if isinstance(value, dict):
            report.row(metric=name, **value)
        else:
            report.fact(name, value)
    if error is not None:
        report.error(f"{result['failed']} requests failed; the first: {error}")
