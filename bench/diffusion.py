"""``python -m bench diffusion``: what each part of block diffusion brings, one after the other.

The bundled diffusion model answers held-out questions of its tasks, ``concurrency`` at a time, in several
ways, each with all that the ones before it have:

* ``sync``: a batch denoises until every block of it is done; prompts come in between, a block at a time, and
  a block that is done has one more forward to itself, as the authors of first-done-first-out describe what
  they replaced;
* ``fdfo``: a request whose block is done goes on to its next one; rounds follow each other on the device
  while no block gets done and no request waits;
* ``mixed``: prompts of any length, rounds and commits are rows of one forward;
* ``fused``: the last forward over a block is the first over the next;
* ``overlap``: the next round is launched before the host has read the last one.

``fresh`` is the number of prompt blocks that are not in the prefix cache: 0 asks the same questions again,
others put a conversation of that length in front. All ways see the same requests, in turns within a round;
``over_first`` is a ratio of neighbours. Accuracy is exact match, of all rounds.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, SamplingParams
from bench.report import Report, percentiles
from bench.scripted_model import SHAPES, ScriptedDevice, write_shape
from examples.training.tasks import Item, held_out

TASKS = ("add", "copy", "reverse", "key_value", "json", "story", "letters", "dice")
#: settings of each way, on top of those of the one before; a chunk of 0 is a block
WAYS: dict[str, dict[str, Any]] = {
    "sync": {
        "diffusion_mode": "sync",
        "mixed": False,
        "step_priority": "prefill",
        "fused_commit": False,
        "overlap_steps": 0,
        "chunk_size": 0,
    },
    "fdfo": {"diffusion_mode": "fdfo", "max_rounds": 64},
    "mixed": {"mixed": True, "step_priority": "decode", "chunk_size": 512},
    "fused": {"fused_commit": True},
    "overlap": {"overlap_steps": 1, "max_rounds": 1},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-diffusion")
    parser.add_argument("--block", type=int, default=16, help="positions per block of the model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shape", choices=list(SHAPES), help="a random model whose rounds are scripted")
    parser.add_argument("--variation", type=float, default=0.6, help="of the scripted rounds of a block")
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--fresh", type=int, nargs="+", default=[0, 4, 30])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--per-client", type=int, default=3, help="requests per client at least")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per number of fresh blocks, concurrency and way."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare(options, report))


async def compare(options: argparse.Namespace, report: Report) -> None:
    """Measure every way at every concurrency and number of fresh blocks, in turns."""
    params = SamplingParams(
        temperature=0,
        max_tokens=options.max_tokens,
        ignore_eos=options.shape is not None,
        diffusion=DiffusionParams(threshold=options.threshold),
    )
    async with AsyncExitStack() as stack:
        model, block = options.model, options.block
        if options.shape:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model, block = str(write_shape(options.shape, folder)), SHAPES[options.shape]["block_size"]

        def scripted(config: EngineConfig) -> ThreadLauncher:
            return ThreadLauncher(ScriptedDevice(config, options.variation))

        engines: dict[str, Engine] = {}
        for way, config in _configs(options, model, block).items():
            if way in options.ways:
                engine = Engine(config, launcher=scripted) if options.shape else Engine(config)
                engines[way] = await stack.enter_async_context(engine)
        for fresh in options.fresh:
            for concurrency in options.concurrency:
                for way, line in (await _cell(engines, options, params, concurrency, fresh)).items():
                    report.row(way=way, concurrency=concurrency, fresh=fresh, **line)


def _configs(options: argparse.Namespace, model: str, block: int) -> dict[str, EngineConfig]:
    most = max(options.concurrency)
    config = EngineConfig(
        model=model,
        threads=options.threads,
        dtype=options.dtype,
        device=options.device,
        load_format="random" if options.shape else "auto",
        max_running_requests=most,
        # Several engines share the memory: enough for a thousand positions each, and no more.
        num_pages=most * -(-1024 // max(16, block)),
        max_step_tokens=max(2048, 4 * block * most),
    )
    found = {}
    for way, settings in WAYS.items():
        chunk = settings.get("chunk_size", config.chunk_tokens) or block
        config = replace(config, **{**settings, "chunk_size": chunk})
        found[way] = config
    return found


async def _cell(
    engines: dict[str, Engine],
    options: argparse.Namespace,
    params: SamplingParams,
    concurrency: int,
    fresh: int,
) -> dict[str, dict[str, Any]]:
    count = max(options.requests, options.per_client * concurrency)
    lines: dict[str, list[dict[str, Any]]] = {way: [] for way in engines}
    for number in range(options.rounds):
        rng = random.Random(f"0:{fresh}:{concurrency}:{number}")
        ask = noise if options.shape else conversations
        questions = ask(rng, count, fresh, next(iter(engines.values())))
        for way in list(engines) if number % 2 == 0 else list(reversed(engines)):
            if fresh:
                engines[way].flush_cache()
            elif number == 0:
                await measure(engines[way], questions, concurrency, params)  # now all prompts are cached
            lines[way].append(await measure(engines[way], questions, concurrency, params))
    base = lines[next(iter(lines))]
    cell: dict[str, dict[str, Any]] = {}
    for way, runs in lines.items():
        answers = [ok for each in runs for ok in each["right"]]
        cell[way] = {
            name: statistics.median(each[name] for each in runs)
            for name in ("tokens_per_s", "forwards_per_token", "ttft_ms")
        }
        cell[way]["over_first"] = statistics.median(
            one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(runs, base, strict=True)
        )
        cell[way]["accuracy"] = statistics.mean(answers) if answers else None
    return cell


@dataclass
class Question:
    """A prompt and, unless it means nothing, its task and answer."""

    prompt: Any
    item: Item | None = None


def conversations(rng: random.Random, count: int, fresh: int, engine: Engine) -> list[Question]:
    """Questions of all tasks in turn; in front of each ``fresh`` blocks of other questions and answers."""
    tokenizer, size = engine.tokenizer, engine.info.block_size
    assert tokenizer is not None
    assert size is not None
    seed = rng.randrange(1 << 30) if fresh else 0
    pools = [held_out(task, -(-count // len(TASKS)), seed) for task in TASKS]
    items = [item for items in zip(*pools, strict=True) for item in items][:count]
    found = []
    for item in items:
        own = len(tokenizer.encode_chat(item.messages))
        history: list[dict[str, str]] = []
        while fresh and len(tokenizer.encode_chat([*history, *item.messages])) < own + (fresh - 1) * size:
            other = rng.choice(held_out(rng.choice(TASKS), 8, rng.randrange(1 << 30)))
            history += [*other.messages, {"role": "assistant", "content": other.answer}]
        found.append(Question([*history, *item.messages], item))
    return found


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
    """Ask all questions, ``concurrency`` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def ask(question: Question) -> Result:
        async with gate:
            return await engine.generate(question.prompt, params)

    forwards, start = engine.stats().forwards, time.perf_counter()
    results = await asyncio.gather(*[ask(question) for question in questions])
    wall = time.perf_counter() - start
    tokens = sum(len(result.token_ids) for result in results)
    ttft = [1e3 * result.metrics.ttft for result in results if result.metrics and result.metrics.ttft]
    return {
        "tokens_per_s": tokens / wall,
        "forwards_per_token": (engine.stats().forwards - forwards) / tokens,
        "ttft_ms": percentiles(ttft)["p50"],
        "right": [
            question.item.check(result.text)
            for question, result in zip(questions, results, strict=True)
            if question.item is not None
        ],
    }
