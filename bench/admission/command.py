"""``python -m bench admission``: long prompts before short ones, with fifo and with packing.

The workload of a well-known comparison (seed 002): 128 requests at once, prompts of 512, 1, 1, 1 words in
turn and three tokens that make each one its own, 32 new tokens each, a prefill budget of 256 tokens, eight
decodes at a time, forced fifo every eighth round, no prefix cache. There, packing brought TTFT p99 down by
39.7 % at 1.6 % more throughput.

Each row is one way to run it: ``fifo`` or ``pack``; prefill ``alone`` in its steps, a prompt beyond the
budget as a whole (as there), or ``mixed`` with decodes; ``chunked`` cuts prompts to the budget. It runs in
virtual time with a cost model (``--step-ms`` per step, ``--token-us`` per token, which gives fifo the times
measured there) and for real on the bundled model. Rows with ``against`` hold multiples; ``long_ttft`` is
the worst of a long prompt's first token. ``prefill only`` asks for one token each: the time that no order
can beat. ``submit_ms`` is the time in which all requests were submitted, ``generate_us`` that of one call;
both are real times, in virtual runs too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from bench.report import Report, percentiles

WORDS = (512, 1, 1, 1)
UNIQUE = 3
VOCAB = (100, 800)

#: name -> what differs; the first is how the comparison's own fifo worked
PREFILL_ONLY = "prefill only"
WAYS: dict[str, dict[str, Any]] = {
    "fifo alone": {"admission": "fifo", "mixed": False},
    "pack alone": {"admission": "pack", "mixed": False},
    "fifo mixed": {"admission": "fifo", "mixed": True},
    "pack mixed": {"admission": "pack", "mixed": True},
    "fifo mixed chunked": {"admission": "fifo", "mixed": True, "chunk_size": 256},
    "pack mixed chunked": {"admission": "pack", "mixed": True, "chunk_size": 256},
    PREFILL_ONLY: {"admission": "pack", "mixed": True},
}


def make_prompts(count: int) -> list[list[int]]:
    low, high = VOCAB
    return [
        [low + number // high, low + number % high, low + 7] + [low + 1] * WORDS[number % len(WORDS)]
        for number in range(count)
    ]


def settings(options: argparse.Namespace, way: str) -> dict[str, Any]:
    return {
        "max_running_requests": options.requests,
        "max_decode_rows": options.batch,
        "max_prefill_tokens": options.budget,
        "max_step_tokens": max(WORDS) + UNIQUE + options.requests,
        "chunk_size": max(WORDS) + UNIQUE,
        "lookahead": options.lookahead,
        "force_fifo_every": options.force_fifo_every,
        "prefix_cache": False,
        **WAYS[way],
    }


@dataclass(frozen=True)
class Answers:
    results: list[Result]
    #: seconds of each call of ``generate``
    calls: list[float]


async def ask_all(engine: Engine, options: argparse.Namespace, way: str) -> Answers:
    tokens = 1 if way == PREFILL_ONLY else options.new_tokens
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    streams, calls = [], []
    for prompt in make_prompts(options.requests):
        start = time.perf_counter()
        streams.append(engine.generate(prompt, params))
        calls.append(time.perf_counter() - start)
    return Answers([await stream for stream in streams], calls)


async def run_real(options: argparse.Namespace, way: str) -> Answers:
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        overlap_steps=options.overlap_steps,
        **settings(options, way),
    )
    async with Engine(config) as engine:
        for size in (1, 8):
            warm = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            await asyncio.gather(*[_result(engine, [VOCAB[0]] * 64, warm) for _ in range(size)])
        return await ask_all(engine, options, way)


async def _result(engine: Engine, prompt: list[int], params: SamplingParams) -> Result:
    return await engine.generate(prompt, params)


async def run_virtual(options: argparse.Namespace, way: str) -> Answers:
    from aioinfer.scheduling.step import Step
    from aioinfer.testing import TimedLauncher
    from tests.toys import ToyDevice

    config = EngineConfig(
        model="toy", num_pages=4096, overlap_steps=options.overlap_steps, **settings(options, way)
    )
    device = ToyDevice(
        num_pages=4096, page_size=config.page_size, num_slots=config.num_slots, vocab_size=VOCAB[1]
    )

    def seconds(step: Step) -> float:
        return float(1e-3 * options.step_ms + 1e-6 * options.token_us * step.num_tokens)

    launcher = TimedLauncher(device, seconds)
    async with Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None) as engine:
        return await ask_all(engine, options, way)


def summarise(answers: Answers) -> dict[str, Any]:
    """Figures of one run; times in milliseconds."""
    results = answers.results
    times = [(result.metrics.arrival, result.metrics.token_times) for result in results if result.metrics]
    ttft = [1e3 * (tokens[0] - arrival) for arrival, tokens in times]
    itl = [1e3 * (after - before) for _, tokens in times for before, after in itertools.pairwise(tokens)]
    tpot = [1e3 * (tokens[-1] - tokens[0]) / (len(tokens) - 1) for _, tokens in times if len(tokens) > 1]
    start = min(arrival for arrival, _ in times)
    seconds = max(tokens[-1] for _, tokens in times) - start
    return {
        "tokens_per_s": sum(len(result.token_ids) for result in results) / seconds,
        "ttft_ms": percentiles(ttft),
        "short_ttft_ms": percentiles([value for at, value in enumerate(ttft) if at % len(WORDS)]),
        "itl_ms": percentiles(itl),
        "tpot_ms": percentiles(tpot),
        "submit_ms": 1e3 * sum(answers.calls),
        "generate_us": percentiles([1e6 * seconds for seconds in answers.calls]),
        "latency_ms": percentiles([1e3 * (tokens[-1] - arrival) for arrival, tokens in times]),
        "long_ttft_ms": ttft[:: len(WORDS)],
    }


def tell(report: Report, clock: str, lines: dict[str, dict[str, Any]]) -> None:
    """A row per way; then what changes against the first, and against the fifo of the same kind."""
    for way, line in lines.items():
        ttft, itl = line["ttft_ms"], line["itl_ms"]
        report.row(
            clock=clock,
            way=way,
            tokens_per_s=None if way == PREFILL_ONLY else line["tokens_per_s"],
            ttft_ms_p50=ttft["p50"],
            ttft_ms_p99=ttft["p99"],
            short_ttft_ms_p99=line["short_ttft_ms"]["p99"],
            itl_ms_p50=itl.get("p50"),
            itl_ms_p99=itl.get("p99"),
            tpot_ms_p50=line["tpot_ms"].get("p50"),
            tpot_ms_p99=line["tpot_ms"].get("p99"),
            submit_ms=line["submit_ms"],
            generate_us_p50=line["generate_us"]["p50"],
            generate_us_p99=line["generate_us"]["p99"],
        )
    first = next(iter(lines))
    for way, line in lines.items():
        if way == PREFILL_ONLY:
            continue
        for base in dict.fromkeys((first, way.replace("pack", "fifo"))):
            if base != way and base in lines:
                report.row(clock=clock, way=way, against=base, **_change(line, lines[base]))


def _change(line: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Multiples of the other's figures; ``long_ttft`` is the worst of a long prompt's first token."""
    pairs = zip(line["long_ttft_ms"], base["long_ttft_ms"], strict=True)
    return {
        "ttft_p99": line["ttft_ms"]["p99"] / base["ttft_ms"]["p99"],
        "tokens_per_s": line["tokens_per_s"] / base["tokens_per_s"],
        "itl_p99": line["itl_ms"]["p99"] / base["itl_ms"]["p99"],
        "long_ttft": max(mine / theirs for mine, theirs in pairs),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--budget", type=int, default=256, help="prefill tokens per step")
    parser.add_argument("--batch", type=int, default=8, help="decodes per step")
    parser.add_argument("--lookahead", type=int, default=64)
    parser.add_argument("--force-fifo-every", type=int, default=8)
    parser.add_argument("--overlap-steps", type=int, choices=(0, 1, 2), default=1)
    parser.add_argument("--step-ms", type=float, default=8.5, help="cost of a step in virtual time")
    parser.add_argument("--token-us", type=float, default=4.0, help="cost of a token in virtual time")
    parser.add_argument("--model", default="tiny-chat", help="model of the real runs")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3, help="real runs of every way, in turns")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--only", choices=["virtual", "real"])


def run(options: argparse.Namespace, report: Report) -> None:
    """In virtual time, then for real (the median of the rounds)."""
    if options.only != "real":
        virtual = {way: summarise(_virtual(options, way)) for way in options.ways}
        tell(report, "virtual", virtual)
        report.add(virtual=virtual)
    if options.only != "virtual":
        real = _real(options)
        tell(report, "real", real)
        report.add(real=real)


def _virtual(options: argparse.Namespace, way: str) -> Answers:
    from aioinfer.testing import VirtualLoop

    return _run(lambda: VirtualLoop(0), run_virtual, options, way)


def _real(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The run with the median throughput of every way; the ways take turns."""
    import uvloop

    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            runs[way].append(summarise(_run(uvloop.new_event_loop, run_real, options, way)))
    for each in runs.values():
        each.sort(key=lambda line: line["tokens_per_s"])
    return {way: each[len(each) // 2] for way, each in runs.items()}


def _run(
    factory: Callable[[], asyncio.AbstractEventLoop], what: Any, options: argparse.Namespace, way: str
) -> Answers:
    with asyncio.Runner(loop_factory=factory) as runner:
        answers: Answers = runner.run(what(options, way))
        return answers
