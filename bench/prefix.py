"""``python -m bench prefix``: what the prefix cache brings, and what it costs where it brings nothing.

Three loads on the bundled model, each with the cache on and off, in turns:

* ``system``: every prompt begins with the same long system prompt;
* ``turns``: conversations in which every prompt is all that was said before and a little more;
* ``none``: prompts that share nothing, in a pool so small that cached pages are evicted all the time.

TTFT and throughput are wall-clock; ``cpu`` is the processor time of the whole process, which other programs
on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from bench.report import Report, percentiles

LOADS = ("system", "turns", "none")
RATIOS = ("ttft_p50_ms", "ttft_p99_ms", "tokens_per_s", "cpu_us_per_token")
#: requests at a time, turns of a conversation, and tokens of a question
_CONCURRENCY, _TURNS, _QUESTION = 16, 8, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--system", type=int, default=512, help="tokens of the system prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)


def run(options: argparse.Namespace, report: Report) -> None:
    """Medians with the cache off and on, and the median of the ratios of neighbouring runs, by load."""
    import uvloop

    for name in options.loads:
        runs: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
        for number in range(options.rounds):
            for cache in ("off", "on") if number % 2 else ("on", "off"):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runs[cache].append(runner.run(measure(options, name, cache == "on")))
        for cache, lines in runs.items():
            median = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
            report.row(load=name, cache=cache, **{key: median[key] for key in ("hit_rate", *RATIOS)})
        pairs = list(zip(runs["on"], runs["off"], strict=True))
        ratios = {key: statistics.median(on[key] / off[key] for on, off in pairs) for key in RATIOS}
        report.row(load=name, cache="on / off", hit_rate=None, **ratios)


async def measure(options: argparse.Namespace, name: str, cache: bool) -> dict[str, float]:
    """Figures of one load with the cache on or off."""
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        prefix_cache=cache,
        num_pages=512 if name == "none" else None,
        max_running_requests=_CONCURRENCY,
    )
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
    gate = asyncio.Semaphore(_CONCURRENCY)
    results: list[Result] = []

    async def ask(prompt: list[int]) -> Result:
        async with gate:
            result = await engine.generate(prompt, params)
        results.append(result)
        return result

    async def talk(rng: random.Random) -> None:
        history = _tokens(rng, _QUESTION)
        for _ in range(_TURNS):
            result = await ask(history)
            history = history + result.token_ids + _tokens(rng, _QUESTION)

    async with Engine(config) as engine:
        await ask(_tokens(random.Random(-1), 64))
        results.clear()
        rng = random.Random(0)
        wall, cpu = time.perf_counter(), time.process_time()
        if name == "turns":
            talks = max(1, options.requests // _TURNS)
            await asyncio.gather(*[talk(random.Random(number)) for number in range(talks)])
        else:
            system = _tokens(rng, options.system) if name == "system" else []
            own = _QUESTION if name == "system" else options.system // 4 + _QUESTION
            await asyncio.gather(*[ask(system + _tokens(rng, own)) for _ in range(options.requests)])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        stats = engine.stats()
    ttft = [1e3 * result.metrics.ttft for result in results if result.metrics and result.metrics.ttft]
    count = sum(len(result.token_ids) for result in results)
    return {
        "tokens_per_s": count / wall,
        "cpu_us_per_token": 1e6 * cpu / count,
        "hit_rate": stats.hit_rate,
        **{f"ttft_{key}_ms": value for key, value in percentiles(ttft).items()},
    }


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(100, 800) for _ in range(count)]
