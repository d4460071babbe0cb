"""``python -m bench embed``: embeddings against plain prefill, and chats beside embeddings.

The first part takes the same prompts through the same engine in turns: as requests for one token, which is
the prefill rate, and as embeddings (last token, then mean). ``of_prefill`` is the share of that rate.

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

from aioinfer import Engine, EngineConfig, SamplingParams
from bench.command import BadOptions
from bench.report import Report, percentiles

_ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
#: streams beside embeddings, and tokens of a chunk
_CHATS, _CHUNK = 8, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-chat", help="as of aioinfer serve")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--inputs", type=int, default=64, help="prompts of a round")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=int, default=128, help="tokens of a stream")


def run(options: argparse.Namespace, report: Report) -> None:
    """Two sections, embeddings alone and beside chats."""
    asyncio.run(_run(options, report))


async def _run(options: argparse.Namespace, report: Report) -> None:
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        chunk_size=_CHUNK,
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


async def _throughput(engine: Engine, options: argparse.Namespace, report: Report) -> None:
    prompts = _prompts(engine, options.inputs, options.tokens, 0)
    seconds: dict[str, list[float]] = {way: [] for way in ("prefill", "last", "mean")}
    ways = list(seconds)
    for number in range(options.rounds + 1):
        for way in ways if number % 2 else ways[::-1]:
            begin = time.perf_counter()
            if way == "prefill":
                async with engine.map(prompts, _ONE) as results:
                    async for _ in results:
                        pass
            else:
                await engine.embed(prompts, pooling=way)  # type: ignore[call-overload]
            if number:  # the first round warms up
                seconds[way].append(time.perf_counter() - begin)
    for way, each in seconds.items():
        shares = [base / own for base, own in zip(seconds["prefill"], each, strict=True)]
        report.row(
            way=way,
            tokens_per_s=options.inputs * options.tokens / statistics.median(each),
            of_prefill=statistics.median(shares),
            of_prefill_min=min(shares),
            of_prefill_max=max(shares),
        )


async def _beside(engine: Engine, options: argparse.Namespace, report: Report) -> None:
    chunks: list[float] = []
    gaps: dict[str, list[float]] = {"alone": [], "beside": []}
    rates: list[float] = []
    length = min(_CHUNK, engine.info.max_model_len - 2)
    for number in range(options.rounds):
        (prompt,) = _prompts(engine, 1, length, 1000 + number)
        begin = time.perf_counter()
        await engine.embed(prompt)
        chunks.append(time.perf_counter() - begin)
        gaps["alone"] += await _gaps(engine, options, number)
        async with asyncio.TaskGroup() as group:
            embedding = group.create_task(_embed_on(engine, options, rates))
            gaps["beside"] += await _gaps(engine, options, number)
            embedding.cancel()
    found = {name: percentiles(each) for name, each in gaps.items()}
    for name, each in found.items():
        report.row(chats=name, **{f"itl_ms_{at}": 1e3 * each[at] for at in ("p50", "p95", "p99", "max")})
    chunk = statistics.median(chunks)
    report.fact("chunk_ms", 1e3 * chunk)
    report.fact("growth_of_p99_in_chunks", (found["beside"]["p99"] - found["alone"]["p99"]) / chunk)
    report.fact("embedded_tokens_per_s", statistics.median(rates) if rates else 0.0)


async def _gaps(engine: Engine, options: argparse.Namespace, number: int) -> list[float]:
    """Seconds between the tokens of all streams."""
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)

    async def one(prompt: list[int]) -> list[float]:
        result = await engine.generate(prompt, params)
        assert result.metrics is not None
        return [after - before for before, after in itertools.pairwise(result.metrics.token_times)]

    prompts = _prompts(engine, _CHATS, 16, 2000 + number)
    return [gap for gaps in await asyncio.gather(*map(one, prompts)) for gap in gaps]


async def _embed_on(engine: Engine, options: argparse.Namespace, rates: list[float]) -> None:
    for number in itertools.count(3000):
        begin = time.perf_counter()
        await engine.embed(_prompts(engine, 8, options.tokens, number))
        rates.append(8 * options.tokens / (time.perf_counter() - begin))


def _prompts(engine: Engine, count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    most = engine.info.vocab_size
    return [[rng.randrange(most) for _ in range(tokens)] for _ in range(count)]
