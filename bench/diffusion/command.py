"""``python -m bench diffusion``: what each part of block diffusion brings, one after the other.

The bundled diffusion model answers held-out questions of its tasks, ``concurrency`` at a time, in several
ways, each with all that the ones before it have:

* ``sync``: a batch denoises until every block of it is done; prompts come in between, a block at a time, and
  a block that is done has one more forward to itself. So the seed of FDFO describes what was before it.
* ``sync+``: the same with prompts of up to 512 tokens in one forward, which the ones below do without, until
  ``mixed``.
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

With ``--shape``, a model of random weights in a real one's shape, whose blocks take scripted rounds: prompts
and answers then mean nothing, and only the time counts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.text.tokenizer import Tokenizer
from bench.diffusion.scripted import SHAPES, ScriptedDevice, write_shape
from bench.diffusion.ways import WAYS, configs, make_restless, scheduler_of
from bench.report import Report, percentiles
from examples.training.tasks import Item, held_out

TASKS = ("add", "copy", "reverse", "key_value", "json", "story", "letters", "dice")


@dataclass
class Question:
    """What is asked, and, if it means something, the answer."""

    prompt: Any
    item: Item | None = None

    @property
    def task(self) -> str | None:
        return None if self.item is None else self.item.task


def conversations(rng: random.Random, count: int, fresh: int, engine: Engine) -> list[Question]:
    """Questions of all tasks in turn; in front of each so many blocks of others' questions and answers."""
    tokenizer, size = engine.tokenizer, engine.info.block_size
    assert tokenizer is not None
    assert size is not None
    seed = rng.randrange(1 << 30) if fresh else 0
    pools = {task: held_out(task, -(-count // len(TASKS)), seed) for task in TASKS}
    items = [item for items in zip(*pools.values(), strict=True) for item in items][:count]
    return [Question(_behind(rng, item.messages, fresh, size, tokenizer), item) for item in items]


def _behind(
    rng: random.Random, messages: list[dict[str, str]], fresh: int, size: int, tokenizer: Tokenizer
) -> list[dict[str, str]]:
    """The messages, with so many blocks in front of them."""
    own = len(tokenizer.encode_chat(messages))
    history: list[dict[str, str]] = []
    while fresh and len(tokenizer.encode_chat([*history, *messages])) < own + (fresh - 1) * size:
        other = rng.choice(held_out(rng.choice(TASKS), 8, rng.randrange(1 << 30)))
        history += [*other.messages, {"role": "assistant", "content": other.answer}]
    return [*history, *messages]


def noise(rng: random.Random, count: int, fresh: int, engine: Engine) -> list[Question]:
    """Prompts of random tokens: a block that is always the same, and ``fresh`` others."""
    size = engine.info.block_size
    assert size is not None
    common = list(range(10, 10 + size + size // 2))
    return [
        Question([*(rng.randrange(10, 500) for _ in range(fresh * size)), *common[number % size :]])
        for number in range(count)
    ]


async def measure(
    engine: Engine, questions: list[Question], concurrency: int, params: SamplingParams
) -> dict[str, Any]:
    """Ask them all, ``concurrency`` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def ask(question: Question) -> Result:
        async with gate:
            return await engine.generate(question.prompt, params)

    counters = scheduler_of(engine).queues.counters
    forwards, start = counters.forwards, time.perf_counter()
    results = await asyncio.gather(*[ask(question) for question in questions])
    wall = time.perf_counter() - start
    tokens = sum(len(result.token_ids) for result in results)
    right: dict[str, list[bool]] = {}
    for question, result in zip(questions, results, strict=True):
        if question.item is not None:
            right.setdefault(question.item.task, []).append(question.item.check(result.text))
    ttft = [1e3 * result.metrics.ttft for result in results if result.metrics and result.metrics.ttft]
    return {
        "tokens_per_s": tokens / wall,
        "forwards_per_token": (counters.forwards - forwards) / tokens,
        "ttft_ms": percentiles(ttft)["p50"],
        "right": right,
    }


async def compare(options: argparse.Namespace, report: Report) -> None:
    """Every way at every concurrency and number of fresh blocks, in turns."""
    params = SamplingParams(
        temperature=0,
        max_tokens=options.max_tokens,
        ignore_eos=options.shape is not None,
        diffusion=DiffusionParams(algorithm=options.algorithm, threshold=options.threshold),
    )
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        model, block = options.model, options.block
        if options.shape:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model, block = str(write_shape(options.shape, folder)), SHAPES[options.shape]["block_size"]

        def scripted(config: EngineConfig) -> ThreadLauncher:
            return ThreadLauncher(ScriptedDevice(config, options.variation))

        for way, config in configs(options, model, block).items():
            if way in options.ways:
                engine = Engine(config, launcher=scripted) if options.shape else Engine(config)
                engines[way] = await stack.enter_async_context(engine)
        if "fdfo" in engines:
            make_restless(engines["fdfo"])
        for fresh in options.fresh:
            for concurrency in options.concurrency:
                cell = await _cell(engines, options, params, concurrency, fresh)
                for way, line in cell.items():
                    report.row(way=way, concurrency=concurrency, fresh=fresh, **line)


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
        ask = noise if options.shape else conversations
        questions = ask(rng, count, fresh, next(iter(engines.values())))
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
        answers = [ok for right in tasks.values() for ok in right]
        cell[way] = {
            **{
                name: statistics.median(each[name] for each in runs)
                for name in ("tokens_per_s", "forwards_per_token", "ttft_ms")
            },
            "over_first": statistics.median(
                one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(runs, base, strict=True)
            ),
            "accuracy": statistics.mean(answers) if answers else None,
            "accuracy_by_task": {task: sum(right) / len(right) for task, right in tasks.items() if right},
            "runs": [each["tokens_per_s"] for each in runs],
        }
    return cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-diffusion")
    parser.add_argument("--block", type=int, default=16, help="positions per block of the model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shape", choices=list(SHAPES), help="a random model whose rounds are scripted")
    parser.add_argument("--variation", type=float, default=0.6, help="of the scripted rounds of a block")
    parser.add_argument("--algorithm", default="low_confidence")
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--fresh", type=int, nargs="+", default=[0, 4, 30])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--per-client", type=int, default=3, help="requests per client at least")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load-seed", type=int, default=0)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per number of fresh blocks, concurrency and way."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare(options, report))
