"""``python -m bench admission``: long prompts before short ones, with fifo and with packing.

128 requests at once, prompts of 515, 4, 4, 4 tokens in turn, 32 new tokens each, a prefill budget of 256
tokens, eight decodes at a time, forced fifo every eighth round, no prefix cache.

Each row is one way to run it: ``fifo`` or ``pack``; prefill ``alone`` in its steps, a prompt beyond the
budget as
a whole, or ``mixed`` with decodes. It runs in virtual time with a cost model (``--step-ms`` per step,
``--token-us`` per token) and for real on the bundled model. Rows with ``against`` hold multiples of another
way; ``long_ttft`` is the largest of the long prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from bench.report import Report, percentiles

REQUESTS = 128
NEW_TOKENS = 32
#: tokens of prompts, in turn
PROMPTS = (515, 4, 4, 4)
VOCAB = (100, 800)
WAYS: dict[str, dict[str, Any]] = {
    "fifo alone": {"admission": "fifo", "mixed": False},
    "pack alone": {"admission": "pack", "mixed": False},
    "fifo mixed": {"admission": "fifo", "mixed": True},
    "pack mixed": {"admission": "pack", "mixed": True},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--step-ms", type=float, default=8.5, help="cost of a step in virtual time")
    parser.add_argument("--token-us", type=float, default=4.0, help="cost of a token in virtual time")
    parser.add_argument("--model", default="tiny-chat", help="model of the real runs")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3, help="real runs of every way, in turns; 0: none")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))


def run(options: argparse.Namespace, report: Report) -> None:
    """In virtual time, then for real: the run with the median throughput of every way."""
    import uvloop

    tell(report, "virtual", {way: virtual(options, way) for way in options.ways})
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            runs[way].append(_run(uvloop.new_event_loop, _run_real(options, way)))
    if options.rounds:
        median = options.rounds // 2
        tell(report, "real", {
            way: sorted(each, key=lambda line: float(line["tokens_per_s"]))[median]
            for way, each in runs.items()
        })  # fmt: skip


def virtual(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """The figures of one way in virtual time."""
    from aioinfer.testing import VirtualLoop

    return _run(lambda: VirtualLoop(0), _run_virtual(options, way))


def tell(report: Report, clock: str, lines: dict[str, dict[str, Any]]) -> None:
    """Report a row per way; then the change against the first way, and against the fifo of the same kind."""
    for way, line in lines.items():
        report.row(
            clock=clock,
            way=way,
            tokens_per_s=line["tokens_per_s"],
            ttft_ms_p50=line["ttft_ms"]["p50"],
            ttft_ms_p99=line["ttft_ms"]["p99"],
            short_ttft_ms_p99=line["short_ttft_ms"]["p99"],
            itl_ms_p99=line["itl_ms"]["p99"],
            long_ttft_ms=max(line["long_ttft_ms"]),
        )
    first = next(iter(lines))
    for way, line in lines.items():
        for name in dict.fromkeys((first, way.replace("pack", "fifo"))):
            if name == way or name not in lines:
                continue
            base = lines[name]
            change = {
                f"{metric}_p99": line[f"{metric}_ms"]["p99"] / base[f"{metric}_ms"]["p99"]
                for metric in ("ttft", "short_ttft", "itl")
            }
            pairs = zip(line["long_ttft_ms"], base["long_ttft_ms"], strict=True)
            change["long_ttft"] = max(mine / theirs for mine, theirs in pairs)
            change["tokens_per_s"] = line["tokens_per_s"] / base["tokens_per_s"]
            report.row(clock=clock, way=way, against=name, **change)


def _run(
    factory: Callable[[], asyncio.AbstractEventLoop], work: Coroutine[Any, Any, list[Result]]
) -> dict[str, Any]:
    with asyncio.Runner(loop_factory=factory) as runner:
        return _figures(runner.run(work))


async def _run_real(options: argparse.Namespace, way: str) -> list[Result]:
    config = EngineConfig(model=options.model, threads=options.threads, **_settings(options, way))
    async with Engine(config) as engine:
        warm = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for _ in range(2):
            await asyncio.gather(*[_result(engine, [VOCAB[0]] * 64, warm) for _ in range(8)])
        return await _ask_all(engine, options)


async def _run_virtual(options: argparse.Namespace, way: str) -> list[Result]:
    from aioinfer.scheduling.step import Step
    from aioinfer.testing import TimedLauncher
    from tests.toys import ToyDevice

    config = EngineConfig(model="toy", num_pages=4096, overlap_steps=1, **_settings(options, way))
    device = ToyDevice(
        num_pages=4096, page_size=config.page_size, num_slots=config.num_slots, vocab_size=VOCAB[1]
    )

    def seconds(step: Step) -> float:
        return float(1e-3 * options.step_ms + 1e-6 * options.token_us * step.num_tokens)

    launcher = TimedLauncher(device, seconds)
    async with Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None) as engine:
        return await _ask_all(engine, options)


def _settings(options: argparse.Namespace, way: str) -> dict[str, Any]:
    return {
        "max_running_requests": options.requests,
        "max_decode_rows": 8,
        "max_prefill_tokens": 256,
        "max_step_tokens": max(PROMPTS) + options.requests,
        "chunk_size": max(PROMPTS),
        "lookahead": 64,
        "force_fifo_every": 8,
        "prefix_cache": False,
        **WAYS[way],
    }


async def _ask_all(engine: Engine, options: argparse.Namespace) -> list[Result]:
    low, high = VOCAB
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    streams = []
    for number in range(options.requests):
        unique = [low + number // high, low + number % high, low + 7]
        prompt = unique + [low + 1] * (PROMPTS[number % len(PROMPTS)] - len(unique))
        streams.append(engine.generate(prompt, params))
    return [await stream for stream in streams]


async def _result(engine: Engine, prompt: list[int], params: SamplingParams) -> Result:
    return await engine.generate(prompt, params)


def _figures(results: list[Result]) -> dict[str, Any]:
    """Throughput and latencies of a run; times in milliseconds."""
    times = [(result.metrics.arrival, result.metrics.token_times) for result in results if result.metrics]
    ttft = [1e3 * (tokens[0] - arrival) for arrival, tokens in times]
    itl = [1e3 * (after - before) for _, tokens in times for before, after in itertools.pairwise(tokens)]
    seconds = max(tokens[-1] for _, tokens in times) - min(arrival for arrival, _ in times)
    return {
        "tokens_per_s": sum(len(result.token_ids) for result in results) / seconds,
        "ttft_ms": percentiles(ttft),
        "short_ttft_ms": percentiles([value for at, value in enumerate(ttft) if at % len(PROMPTS)]),
        "itl_ms": percentiles(itl),
        "long_ttft_ms": ttft[:: len(PROMPTS)],
    }
