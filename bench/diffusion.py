"""``python -m bench diffusion``: what each part of block diffusion brings, one after the other.

The bundled diffusion model answers held-out questions of its tasks, ``concurrency`` at a time, in six ways,
each with all that the ones before it have:

* ``sync``: a batch denoises until every block of it is done; prompts come in between, a block at a time, and
  a block that is done has one more forward to itself. How the seed of FDFO describes what was before it.
* ``fdfo``: who is done leaves; but between rounds a request gives its slot and its block's pages back, and
  what is known of the block travels through the host.
* ``reuse``: slot and pages stay where they are, and rounds follow each other on the device while no block
  gets done and nobody waits.
* ``mixed``: prompts of any length, rounds and commits are rows of one forward.
* ``fused``: the last forward over a block is the first over the next.
* ``overlap``: the next round is launched before the host knows what came of the last one.

``fresh`` is the number of prompt blocks that are not in the prefix cache: 0 asks the same questions again,
others put a conversation of so many blocks in front. All ways see the same requests, in turns within a
round; ratios are of neighbours. Accuracy is exact match, of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.diffusion.state import BlockState
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.request import Request
from aioinfer.scheduling.blocks import BlockScheduler
from aioinfer.scheduling.step import Step
from bench.report import environment, percentiles, write_line

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from demo_tasks import Item, held_out

TASKS = ("add", "copy", "reverse", "key_value", "json", "story")
#: settings of each way, on top of those of the one before
WAYS: dict[str, dict[str, Any]] = {
    "sync": {
        "diffusion_mode": "sync",
        "mixed": False,
        "first": "prefill",
        "fused_commit": False,
        "window": 0,
    },
    "fdfo": {"diffusion_mode": "fdfo"},
    "reuse": {"max_rounds": 64},
    "mixed": {"mixed": True, "first": "decode", "chunk_size": 512},
    "fused": {"fused_commit": True},
    "overlap": {"window": 1, "max_rounds": 1},
}


class Restless(BlockScheduler):
    """Nobody keeps slot and pages between the rounds of a block."""

    __slots__ = ()

    def resolve_blocks(
        self, step: Step, blocks: Mapping[int, BlockState], forwards: int = 1
    ) -> list[Request]:
        moved = super().resolve_blocks(step, blocks, forwards)
        for request in list(self.batch.requests):
            if request.mid_block:
                self._retract(request)
        return moved


@dataclass
class Question:
    """A held-out question, perhaps behind a conversation."""

    item: Item
    messages: list[dict[str, str]]


def conversations(rng: random.Random, count: int, fresh: int, engine: Engine) -> list[Question]:
    """Questions of all tasks in turn; in front of each so many blocks of others' questions and answers."""
    tokenizer, size = engine.tokenizer, engine.info.block_size
    assert tokenizer is not None
    assert size is not None
    seed = rng.randrange(1 << 30) if fresh else 0
    pools = {task: held_out(task, -(-count // len(TASKS)), seed) for task in TASKS}
    questions = [
        Question(item, list(item.messages)) for items in zip(*pools.values(), strict=True) for item in items
    ][:count]
    for question in questions if fresh else ():
        own = len(tokenizer.encode_chat(question.messages))
        history: list[dict[str, str]] = []
        while len(tokenizer.encode_chat([*history, *question.messages])) < own + (fresh - 1) * size:
            other = rng.choice(held_out(rng.choice(TASKS), 8, rng.randrange(1 << 30)))
            history += [*other.messages, {"role": "assistant", "content": other.answer}]
        question.messages = [*history, *question.messages]
    return questions


async def measure(
    engine: Engine, questions: list[Question], concurrency: int, params: SamplingParams
) -> dict[str, Any]:
    """Ask them all, ``concurrency`` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def ask(question: Question) -> Result:
        async with gate:
            return await engine.generate(question.messages, params)

    counters = engine._started_core().scheduler.counters
    forwards, start = counters.forwards, time.perf_counter()
    results = await asyncio.gather(*[ask(question) for question in questions])
    wall = time.perf_counter() - start
    tokens = sum(len(result.token_ids) for result in results)
    right: dict[str, list[bool]] = {}
    for question, result in zip(questions, results, strict=True):
        right.setdefault(question.item.task, []).append(question.item.check(result.text))
    # From when it could first be asked: waiting for others' answers is no fault of the engine.
    ttft = [1e3 * result.metrics.ttft for result in results if result.metrics and result.metrics.ttft]
    return {
        "tokens_per_s": tokens / wall,
        "forwards_per_token": (counters.forwards - forwards) / tokens,
        "ttft_ms": percentiles(ttft)["p50"],
        "right": right,
    }


def configs(options: argparse.Namespace, block: int) -> dict[str, EngineConfig]:
    """The engines, way by way."""
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        dtype=options.dtype,
        device=options.device,
        load_format=options.load_format,
        max_running_requests=max(options.concurrency),
        max_step_tokens=max(2048, 4 * block * max(options.concurrency)),
        chunk_size=block,
    )
    found = {}
    for way, settings in WAYS.items():
        config = replace(config, **settings)
        found[way] = config
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every way at every concurrency and number of fresh blocks, in turns."""
    params = SamplingParams(
        temperature=0,
        max_tokens=options.max_tokens,
        diffusion=DiffusionParams(algorithm=options.algorithm, threshold=options.threshold),
    )
    async with AsyncExitStack() as stack:
        engines = {
            way: await stack.enter_async_context(Engine(config))
            for way, config in configs(options, options.block).items()
            if way in options.ways
        }
        if "fdfo" in engines:
            engines["fdfo"]._started_core().scheduler.__class__ = Restless
        result: dict[str, Any] = {}
        for fresh in options.fresh:
            for concurrency in options.concurrency:
                key = f"{concurrency}x{fresh}"
                result[key] = await _cell(engines, options, params, concurrency, fresh)
                _print_cell(concurrency, fresh, result[key])
        return result


async def _cell(
    engines: dict[str, Engine],
    options: argparse.Namespace,
    params: SamplingParams,
    concurrency: int,
    fresh: int,
) -> dict[str, Any]:
    count = max(options.requests, options.per_client * concurrency)
    lines: dict[str, list[dict[str, Any]]] = {way: [] for way in engines}
    for number in range(options.rounds):
        rng = random.Random(f"{options.load_seed}:{fresh}:{concurrency}:{number}")
        questions = conversations(rng, count, fresh, next(iter(engines.values())))
        ways = list(engines) if number % 2 == 0 else list(reversed(engines))
        for way in ways:
            if fresh:
                engines[way].flush_cache()
            elif number == 0:
                await measure(engines[way], questions, concurrency, params)  # now all prompts are cached
            lines[way].append(await measure(engines[way], questions, concurrency, params))
    base = lines[next(iter(lines))]
    cell: dict[str, Any] = {}
    for way, runs in lines.items():
        tasks = {task: [ok for each in runs for ok in each["right"].get(task, ())] for task in TASKS}
        cell[way] = {
            **{
                name: statistics.median(each[name] for each in runs)
                for name in ("tokens_per_s", "forwards_per_token", "ttft_ms")
            },
            "over_first": statistics.median(
                one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(runs, base, strict=True)
            ),
            "accuracy": {task: sum(right) / len(right) for task, right in tasks.items() if right},
            "runs": [each["tokens_per_s"] for each in runs],
        }
    return cell


def _print_cell(concurrency: int, fresh: int, cell: dict[str, Any]) -> None:
    print(f"\nconcurrency {concurrency}, {fresh} fresh prompt blocks")
    print(f"{'':10s}{'tokens/s':>10s}{'ratio':>8s}{'forwards/token':>16s}{'TTFT p50':>10s}  accuracy")
    for way, line in cell.items():
        accuracy = " ".join(f"{task} {value:.2f}" for task, value in line["accuracy"].items())
        print(
            f"{way:10s}{line['tokens_per_s']:10.0f}{line['over_first']:8.2f}"
            f"{line['forwards_per_token']:16.3f}{line['ttft_ms']:10.1f}  {accuracy}",
            flush=True,
        )


def main() -> int:
    import uvloop

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-diffusion")
    parser.add_argument("--block", type=int, default=16, help="positions per block of the model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", choices=("auto", "random"))
    parser.add_argument("--algorithm", default="low_confidence")
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--fresh", type=int, nargs="+", default=[0, 4, 30])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--per-client", type=int, default=3, help="requests per client at least")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append the JSON line to this file")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run(options))
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    write_line(
        {"bench": "diffusion", "cells": result, "options": settings, "environment": environment()},
        options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
