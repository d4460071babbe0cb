"""``python -m bench embed``: embeddings against plain prefill, and chats beside embeddings.

The first part takes the same prompts through the same engine in turns: as requests for one token, which is
the prefill rate, and as embeddings (last token, then mean). ``of_prefill`` is the share of that rate;
``cpu_us_per_token`` is the processor time of the whole process, which other programs disturb less.

The second part streams chats, alone and beside embeddings without end. ``itl_ms_p99`` may grow by one chunk's
time, ``chunk_ms``, which a prompt of that length takes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence

from aioinfer import Engine, EngineConfig, SamplingParams
from bench.command import BadOptions
from bench.report import Report, percentiles

__all__ = ["add_arguments", "run"]

_ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-chat", help="as of aioinfer serve")
    parser.add_argument("--load-format", default="auto", choices=["auto", "random"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--inputs", type=int, default=64, help="prompts of a round")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chats", type=int, default=8, help="streams beside embeddings")
    parser.add_argument("--output", type=int, default=128, help="tokens of a stream")
    parser.add_argument("--chunk-size", type=int, default=512)


def run(options: argparse.Namespace, report: Report) -> None:
    for name in ("inputs", "tokens", "rounds", "chats", "output", "chunk_size"):
        if getattr(options, name) < 1:
            raise BadOptions(f"--{name.replace('_', '-')} must be positive")
    asyncio.run(_run(options, report))


async def _run(options: argparse.Namespace, report: Report) -> None:
    config = EngineConfig(
        model=options.model,
        load_format=options.load_format,
        dtype=options.dtype,
        threads=options.threads,
        chunk_size=options.chunk_size,
        # Every round computes everything.
        prefix_cache=False,
        speculation="off",
    )
    async with Engine(config) as engine:
        if options.tokens + options.output >= engine.info.max_model_len:
            raise BadOptions(f"--tokens and --output must stay below {engine.info.max_model_len} together")
        report.fact("model", engine.info.description)
        await _throughput(engine, options, report.section("throughput", "embeddings and plain prefill"))
        await _beside(engine, options, report.section("beside", "chats beside embeddings"))


# -- throughput ----------------------------------------------------------------------------------------


async def _throughput(engine: Engine, options: argparse.Namespace, report: Report) -> None:
    ways = {"prefill": _prefill, "last": _last, "mean": _mean}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    prompts = _prompts(engine, options, options.inputs, 0)
    for name in ways:  # what is compiled and allocated once
        await ways[name](engine, prompts)
    order = itertools.cycle([list(ways), list(ways)[::-1]])
    for _ in range(options.rounds):
        for name in next(order):
            begin, worked = time.perf_counter(), time.process_time()
            await ways[name](engine, prompts)
            seconds[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - worked)
    tokens = options.inputs * options.tokens
    for name, each in seconds.items():
        shares = [base / own for base, own in zip(seconds["prefill"], each, strict=True)]
        report.row(
            way=name,
            tokens_per_s=tokens / statistics.median(each),
            of_prefill=statistics.median(shares),
            of_prefill_min=min(shares),
            of_prefill_max=max(shares),
            cpu_us_per_token=1e6 * statistics.median(processor[name]) / tokens,
            seconds=each,
        )


async def _prefill(engine: Engine, prompts: Sequence[list[int]]) -> None:
    async with engine.map(prompts, _ONE) as results:
        async for _ in results:
            pass


async def _last(engine: Engine, prompts: Sequence[list[int]]) -> None:
    await engine.embed(prompts, pooling="last")


async def _mean(engine: Engine, prompts: Sequence[list[int]]) -> None:
    await engine.embed(prompts, pooling="mean")


# -- beside chats --------------------------------------------------------------------------------------


async def _beside(engine: Engine, options: argparse.Namespace, report: Report) -> None:
    chunk = await _chunk(engine, options)
    alone: list[float] = []
    beside: list[float] = []
    rates: list[float] = []
    for number in range(options.rounds):
        alone += await _gaps(engine, options, number)
        async with asyncio.TaskGroup() as group:
            embedding = group.create_task(_embed_on(engine, options, rates))
            beside += await _gaps(engine, options, number)
            embedding.cancel()
    before, after = percentiles(alone), percentiles(beside)
    for name, gaps in (("alone", before), ("beside", after)):
        report.row(chats=name, **{f"itl_ms_{at}": 1e3 * gaps[at] for at in ("p50", "p95", "p99", "max")})
    report.fact("chunk_ms", 1e3 * chunk)
    report.fact("growth_of_p99_in_chunks", (after["p99"] - before["p99"]) / chunk)
    report.fact("embedded_tokens_per_s", statistics.median(rates) if rates else 0.0)


async def _chunk(engine: Engine, options: argparse.Namespace) -> float:
    """Seconds that a prompt of one chunk takes alone."""
    length = min(options.chunk_size, engine.info.max_model_len - 2)
    found = []
    for number in range(options.rounds):
        (prompt,) = _prompts(engine, options, 1, 1000 + number, length)
        begin = time.perf_counter()
        await engine.embed(prompt)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


async def _gaps(engine: Engine, options: argparse.Namespace, number: int) -> list[float]:
    """Seconds between the tokens of all streams."""
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)

    async def one(prompt: list[int]) -> list[float]:
        result = await engine.generate(prompt, params)
        assert result.metrics is not None
        return [after - before for before, after in itertools.pairwise(result.metrics.token_times)]

    prompts = _prompts(engine, options, options.chats, 2000 + number, 16)
    return [gap for gaps in await asyncio.gather(*map(one, prompts)) for gap in gaps]


async def _embed_on(engine: Engine, options: argparse.Namespace, rates: list[float]) -> None:
    for number in itertools.count(3000):
        begin = time.perf_counter()
        await engine.embed(_prompts(engine, options, 8, number))
        rates.append(8 * options.tokens / (time.perf_counter() - begin))


def _prompts(
    engine: Engine, options: argparse.Namespace, count: int, seed: int, tokens: int | None = None
) -> list[list[int]]:
    rng = random.Random(seed)
    most = engine.info.vocab_size
    return [[rng.randrange(most) for _ in range(tokens or options.tokens)] for _ in range(count)]
