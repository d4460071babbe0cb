"""``python -m bench serving``: a load on OpenAI endpoints, in turns, or on an engine in this process.

    python -m bench serving --requests 200 --concurrency 32
    python -m bench serving --url http://127.0.0.1:8000 http://127.0.0.1:8001 --rate 1 --rounds 2
    python -m bench serving --beside 1x900 4x900 1x8000 --streams 8 --rounds 3

Several endpoints get the same requests at the same moments, one after the other; who begins changes from
round to round, and percentiles are those over all rounds.

Definitions, as in vLLM's bench: TTFT from sending to the first token; ITL between tokens that arrive one
after the other (tokens that arrive together share the gap); TPOT (latency - TTFT) / (tokens - 1); latency
from sending to the last token. Requests ask for exactly their output length (``ignore_eos``).

With ``--beside``, the load is streams that go on, beside which numbers of prompts arrive at once: the gaps
between tokens of the streams until the prompts have one token each, and the tokens per second of the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aioinfer.cli.flags import add_settings, read_settings
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from bench.beside import beside, groups, told
from bench.command import BadOptions
from bench.load import Load, Record, Target, engine_ask, make_load, run_load, summarise, url_target
from bench.report import Report

#: token ids asked for: above the special tokens of most models, below the size of the smallest
VOCAB = (100, 500)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", nargs="+", help="OpenAI endpoints; without it, an engine in this process")
    parser.add_argument("--key", help="bearer token for the endpoints")
    parser.add_argument("--requests", type=int, default=100)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--rate", type=float, help="arrivals per second")
    when.add_argument("--concurrency", type=int, help="requests under way at a time")
    parser.add_argument("--prompt-tokens", default="64", help="128, uniform:LO:HI, lognormal:MU:SIGMA[:MAX]")
    parser.add_argument("--output-tokens", default="32", help="likewise")
    parser.add_argument("--warmup", type=int, default=4, help="requests sent before measuring")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beside", nargs="+", metavar="NxTOKENS", help="prompts that arrive beside streams")
    parser.add_argument("--streams", type=int, default=1, help="with --beside; 0: the prompts alone")
    parser.add_argument("--load-seed", type=int, default=0)
    parser.add_argument("--config", type=Path, help="YAML settings of the engine in this process")
    parser.set_defaults(model_argument=None)
    add_settings(parser, EngineConfig)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per endpoint and metric; counts and rates as facts of a single endpoint, else in its rows."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.beside is not None:
            runner.run(_beside(options, report))
            return
        found = runner.run(measure(options))
    for name, (result, error) in found.items():
        where = {"endpoint": name} if len(found) > 1 else {}
        for metric, value in result.items():
            if isinstance(value, dict):
                report.row(**where, metric=metric, **value)
            else:
                report.fact(f"{name} {metric}" if where else metric, value)
        if error is not None:
            report.error(f"{name}: {result['failed']} requests failed; the first: {error}")


async def measure(options: argparse.Namespace) -> dict[str, tuple[dict[str, Any], str | None]]:
    """By endpoint, the figures over all rounds, and the first request's error if one failed."""
    if options.rate is None and options.concurrency is None:
        options.concurrency = 16
    names = options.url or ["engine"]
    records: dict[str, list[Record]] = {name: [] for name in names}
    seconds = dict.fromkeys(names, 0.0)
    for number in range(options.rounds):
        load = make_load(
            count=options.requests,
            rate=options.rate,
            concurrency=options.concurrency,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            vocab=VOCAB,
            seed=options.load_seed + number,
        )
        warm = Load(load.requests[: options.warmup], options.warmup or None)
        at = number % len(names)
        for name in [*names[at:], *names[:at]]:
            async with AsyncExitStack() as stack:
                ask = await _target(stack, name, options)
                if warm.requests:
                    await run_load(warm, ask)
                found, took = await run_load(load, ask)
            records[name] += found
            seconds[name] += took
    return {
        name: (summarise(each, seconds[name]), next((one.error for one in each if one.error), None))
        for name, each in records.items()
    }


async def _target(stack: AsyncExitStack, name: str, options: argparse.Namespace) -> Target:
    """What answers under that name, until the stack is left."""
    if options.url:
        return await stack.enter_async_context(url_target(name, None, options.key))
    return engine_ask(await stack.enter_async_context(Engine(read_settings(EngineConfig, options))))


async def _beside(options: argparse.Namespace, report: Report) -> None:
    """A row for each endpoint and group of prompts."""
    try:
        cases = groups(options.beside)
    except ValueError as error:
        raise BadOptions(str(error)) from error
    names = options.url or ["engine"]
    found: dict[tuple[str, str], tuple[list[dict[str, Any]], list[float]]] = {}
    async with AsyncExitStack() as stack:
        asks = {name: await _target(stack, name, options) for name in names}
        for ask in asks.values():  # to warm up
            await beside(ask, options.streams, 1, 600, VOCAB, options.load_seed)
        for number, (count, length) in itertools.product(range(options.rounds), cases):
            for name in names[:: -1 if number % 2 else 1]:
                seed = options.load_seed + number + 1
                figures, gaps = await beside(asks[name], options.streams, count, length, VOCAB, seed)
                kept = found.setdefault((name, f"{count}x{length}"), ([], []))
                kept[0].append(figures)
                kept[1].extend(gaps)
    for (name, text), kept in found.items():
        where = {"endpoint": name} if len(names) > 1 else {}
        report.row(**where, streams=options.streams, prompts=text, **told(*kept))
