"""``python -m bench promises``: whether requests that are accepted with a ``ttft_target`` meet it, whether
those that are refused would have, and what ``itl_target`` costs beside fixed chunks. In virtual time.

Requests of mixed prompts and outputs arrive at random, each with a target from tight to loose; the load is a
multiple of what the engine computes when all arrive at once. ``met`` is the share of accepted requests that
had their first token in time. For ``refused_met``, a sample of the refused ones is let in by runs of the same
load: each run has some of them without a target, far apart, and all else as before. ``took_p50`` and
``took_p95`` are the time to the first token as a multiple of the prediction, of requests that waited. With
``--outputs stopping`` the lengths of outputs are not known: every token may be the last one.

The rows with ``itl_p99`` are streams beside which prompts arrive: the gaps between tokens of all, and prompts
per second, with a target, and with fixed chunks and no target.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import Rejected
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from aioinfer.testing import TimedLauncher, VirtualLoop
from bench.report import Report, percentiles

PROMPTS = (16, 64, 256)
OUTPUTS = (16, 48, 128)
#: multiples of what a request takes in its slot
TARGETS = (0.25, 0.5, 1.0, 2.0)
VOCAB = (100, 800)
#: requests between two that are let in by the same run
APART = 100
#: of the requests that arrive; the others are what an engine begins with
WARM = 50


class Ask(NamedTuple):
    """A request of the load, with times in multiples of what one takes."""

    at: float
    prompt: list[int]
    output: int
    target: float
    priority: int


class Fate(NamedTuple):
    """What became of it, in seconds; None: it was refused."""

    ttft: float | None
    predicted: float | None = None


@dataclass
class Gaps:
    """Of the streams, and the tokens of all requests per second."""

    seconds: list[float] = field(default_factory=list)
    rate: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.6, 0.8, 1.0, 1.15, 1.3])
    parser.add_argument("--sample", type=int, default=100, help="refused requests that are let in, per load")
    parser.add_argument("--outputs", choices=("fixed", "stopping"), default="fixed")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--running", type=int, default=16, help="max_running_requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--itl", type=float, nargs="*", default=[0.03, 0.05, 0.1], help="targets, in seconds")
    parser.add_argument("--chunks", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512])


def run(options: argparse.Namespace, report: Report) -> None:
    """One row per load, and one per target and chunk."""
    report.fact("seed", options.seed)
    if options.loads:
        asks = load_of(options)
        whole = simulate(options, asks, [], None)[1]
        for load in options.loads:
            report.row(**promises(options, asks, load, whole))
    for target, chunk in [*((each, 512) for each in options.itl), *((0.0, each) for each in options.chunks)]:
        found = gaps(target, chunk, options.seed)
        figures = percentiles(found.seconds)
        report.row(itl_target=target, chunk=chunk, itl_p99=figures["p99"], prompts_s=found.rate)


def load_of(options: argparse.Namespace) -> list[Ask]:
    dice, asks, at = random.Random(options.seed), list[Ask](), 0.0
    for _ in range(options.requests):
        prompt = [dice.randint(*VOCAB) for _ in range(dice.choice(PROMPTS))]
        at += dice.expovariate(1.0)
        asks.append(Ask(at, prompt, dice.choice(OUTPUTS), dice.choice(TARGETS), dice.choice((0, 1))))
    return asks


def promises(options: argparse.Namespace, asks: Sequence[Ask], load: float, whole: float) -> dict[str, Any]:
    """Figures of one load; ``whole``: seconds of all requests at once."""
    rate, taken = load * len(asks) / whole, whole * options.running / len(asks)
    times = [ask.at / rate for ask in asks]
    targets = [ask.target * taken for ask in asks]
    fates, _ = simulate(options, asks, times, targets)
    seen = [*zip(fates, targets, strict=True)][WARM:]
    refused = [at for at, fate in enumerate(fates) if fate.ttft is None and at >= WARM]
    sample = sorted(random.Random(options.seed).sample(refused, min(options.sample, len(refused))))
    would: list[bool] = []
    for group in far_apart(sample):
        then, _ = simulate(options, asks, times, targets, group)
        would += [(then[at].ttft or 0.0) <= targets[at] for at in group]
    accepted = [(fate.ttft, target) for fate, target in seen if fate.ttft is not None]
    ratios = [
        fate.ttft / fate.predicted
        for fate, target in seen
        if fate.ttft is not None and fate.predicted is not None and fate.predicted > target / 2
    ]
    figures = percentiles(ratios)
    return {
        "load": load,
        "policy": options.policy,
        "outputs": options.outputs,
        "refused": len(refused) / len(seen),
        "met": sum(ttft <= target for ttft, target in accepted) / max(1, len(accepted)),
        "refused_met": sum(would) / len(would) if would else None,
        "let_in": len(would),
        "took_p50": figures.get("p50"),
        "took_p95": figures.get("p95"),
    }


def far_apart(sample: Sequence[int]) -> list[list[int]]:
    """Groups of requests that do not meet each other."""
    groups: list[list[int]] = []
    for at in sample:
        group = next((each for each in groups if at - each[-1] >= APART), None)
        if group is None:
            groups.append(group := [])
        group.append(at)
    return groups


def simulate(
    options: argparse.Namespace,
    asks: Sequence[Ask],
    times: Sequence[float],
    targets: Sequence[float] | None,
    let_in: Collection[int] = (),
) -> tuple[list[Fate], float]:
    """What becomes of each request, and the seconds of all. Without ``times`` they come at once, twice."""

    async def one(engine: Engine, at: int) -> Fate:
        ask = asks[at]
        stops = tuple(range(VOCAB[0], VOCAB[0] + 700 // ask.output)) if options.outputs == "stopping" else ()
        tokens = 2 * ask.output if stops else ask.output
        params = SamplingParams(
            temperature=1, seed=at, max_tokens=tokens, ignore_eos=True, stop_token_ids=stops
        )
        target = None if targets is None or at in let_in else targets[at]
        try:
            result = await engine.generate(ask.prompt, params, ttft_target=target, priority=ask.priority)
        except Rejected:
            return Fate(None)
        assert result.metrics is not None
        return Fate(result.metrics.ttft, result.metrics.predicted_ttft)

    async def course() -> tuple[list[Fate], float]:
        loop = asyncio.get_running_loop()
        async with engine_of(options) as engine:
            begin, tasks = loop.time(), list[asyncio.Task[Fate]]()
            for at in range(len(asks)):
                if times:
                    await asyncio.sleep(max(0.0, begin + times[at] - loop.time()))
                tasks.append(asyncio.create_task(one(engine, at)))
            return await asyncio.gather(*tasks), loop.time() - begin

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(course())


def seconds_of(step: Step) -> float:
    """What a step takes."""
    rows = step.generating
    decoding = 0.008 + 4e-4 * rows.num_tokens + 2e-7 * float(rows.starts.sum())
    return decoding + sum(row.length * (2e-4 + 1e-8 * row.start) for row in step.prefilling)


def engine_of(options: argparse.Namespace | None, **settings: Any) -> Engine:
    from tests.toys import ToyDevice

    if options is not None:
        settings = {"policy": options.policy, "max_running_requests": options.running, **settings}
        settings |= {"max_queued_requests": options.requests, "max_queued_tokens": 1 << 24}
    settings = {"max_step_tokens": 256, "itl_target": 0.2, "speculation": "off", **settings}
    config = EngineConfig(model="toy", page_size=16, num_pages=4000, prefix_cache=False, **settings)
    device = ToyDevice(num_pages=4000, page_size=16, num_slots=config.num_slots, vocab_size=VOCAB[1] + 1)
    launcher = TimedLauncher(device, seconds_of)
    return Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None)


def gaps(target: float, chunk: int, seed: int, prompts: int = 60) -> Gaps:
    """Of eight streams at a time beside which prompts arrive."""

    async def course() -> Gaps:
        loop, dice, found = asyncio.get_running_loop(), random.Random(seed), Gaps()
        settings = {"max_step_tokens": 1024, "chunk_size": chunk, "max_prefill_tokens": chunk}
        if target:
            settings = {"max_step_tokens": 1024, "chunk_size": 1024}
        async with engine_of(None, itl_target=target, max_running_requests=32, **settings) as engine:

            async def one(prompt: int, output: int) -> None:
                params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
                result = await engine.generate([dice.randint(*VOCAB) for _ in range(prompt)], params)
                assert result.metrics is not None
                found.seconds += [b - a for a, b in itertools.pairwise(result.metrics.token_times)]

            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(one(16, 40 * prompts))
                await asyncio.sleep(1.0)
                found.seconds.clear()
                begin = loop.time()
                async with asyncio.TaskGroup() as those:
                    for _ in range(prompts):
                        those.create_task(one(dice.choice((200, 600, 1200)), 40))
                found.rate = prompts / (loop.time() - begin)
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(course())
