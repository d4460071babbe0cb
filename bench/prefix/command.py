"""``python -m bench prefix``: what the prefix cache brings, and what it costs where it brings nothing.

Three loads on the bundled model, each with the cache on and off, in turns:

* ``system``: every prompt begins with the same long system prompt;
* ``turns``: conversations in which every prompt is all that was said before and a little more;
* ``none``: prompts that share nothing, in a pool so small that cached pages are evicted all the time.

TTFT and throughput are wall-clock; ``cpu`` is the processor time of the whole process, which other programs
on the machine disturb less: its ratio is what the cache costs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from bench.report import Report, percentiles

VOCAB = (100, 800)
#: figures whose ratio says something
RATIOS = ("ttft_p50_ms", "ttft_p99_ms", "tokens_per_s", "cpu_us_per_token")


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(*VOCAB) for _ in range(count)]


class Load:
    """Asks ``concurrency`` at a time and keeps the results."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self._engine = engine
        self._gate = asyncio.Semaphore(options.concurrency)
        self._params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
        self.rng = random.Random(options.load_seed)
        self.options = options
        self.results: list[Result] = []

    async def ask(self, prompt: list[int]) -> Result:
        async with self._gate:
            result = await self._engine.generate(prompt, self._params)
        self.results.append(result)
        return result


async def shared_system_prompt(load: Load) -> None:
    system = tokens(load.rng, load.options.system)
    await asyncio.gather(
        *[load.ask(system + tokens(load.rng, load.options.user)) for _ in range(load.options.requests)]
    )


async def multi_turn(load: Load) -> None:
    async def talk(rng: random.Random) -> None:
        history = tokens(rng, load.options.user)
        for _ in range(load.options.turns):
            result = await load.ask(history)
            history = history + result.token_ids + tokens(rng, load.options.user)

    talks = max(1, load.options.requests // load.options.turns)
    await asyncio.gather(*[talk(random.Random(number)) for number in range(talks)])


async def no_sharing(load: Load) -> None:
    count = load.options.system // 4 + load.options.user
    await asyncio.gather(*[load.ask(tokens(load.rng, count)) for _ in range(load.options.requests)])


LOADS: dict[str, Callable[[Load], Awaitable[None]]] = {
    "system": shared_system_prompt,
    "turns": multi_turn,
    "none": no_sharing,
}


async def measure(options: argparse.Namespace, name: str, cache: bool) -> dict[str, float]:
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        prefix_cache=cache,
        num_pages=options.pages if name == "none" else None,
        max_running_requests=options.concurrency,
    )
    async with Engine(config) as engine:
        load = Load(engine, options)
        await load.ask(tokens(random.Random(-1), 64))
        load.results.clear()
        wall, cpu = time.perf_counter(), time.process_time()
        await LOADS[name](load)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        stats = engine.stats()
    ttft = [1e3 * result.metrics.ttft for result in load.results if result.metrics and result.metrics.ttft]
    count = sum(len(result.token_ids) for result in load.results)
    return {
        "tokens_per_s": count / wall,
        "cpu_us_per_token": 1e6 * cpu / count,
        "hit_rate": stats.hit_rate,
        **{f"ttft_{key}_ms": value for key, value in percentiles(ttft).items()},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--system", type=int, default=512, help="tokens of the system prompt")
    parser.add_argument("--user", type=int, default=32, help="tokens of a question")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pages", type=int, default=512, help="KV pages of the load without sharing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--load-seed", type=int, default=0)


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
        # Neighbouring runs are compared with each other: what disturbs the machine disturbs both.
        pairs = list(zip(runs["on"], runs["off"], strict=True))
        ratios = {key: statistics.median(on[key] / off[key] for on, off in pairs) for key in RATIOS}
        report.row(load=name, cache="on / off", hit_rate=None, **ratios)
        report.add(**{name: runs})
