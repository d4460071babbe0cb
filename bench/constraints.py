"""``python -m bench constraints``: what a grammar costs a diffusion model, and what it does to its rounds.

The bundled diffusion model answers held-out questions of its JSON task, ``concurrency`` at a time:

* ``free``: as it likes;
* ``schema``: under a JSON schema of the question's own fields.

Both in lock-step (``sync``, the first way of ``python -m bench diffusion``) and first done first out
(``fdfo``, its ``fused``, the default on a CPU). All see the same questions, in turns within a round, and
every ratio is that of neighbours in time, of which the median counts.

``tokens_per_round`` is a request's: tokens of the answers over forwards of its blocks, commits included.
``at_equal`` is the speed over that of ``free`` in the same mode as if both had the same tokens per round: the
ratio of rounds per second. ``over_sync`` is tokens/s over those of ``sync`` under the same constraint.
``rounds_per_answer`` counts forwards of one answer's blocks; ``accuracy`` is exact match.

A last pass, which no ratio is of, counts the microseconds that guides take per row and round, and how many
masks they ask the grammar for; ``fill_us``, of these masks, is part of ``steer_us``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.decoding.block_steering import RowsGuide
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from aioinfer.text.guidance import GuidanceBackend
from bench.diffusion import WAYS
from bench.report import Report
from examples.training.tasks import Item, held_out

_TYPES = {str: {"type": "string", "maxLength": 20}, int: {"type": "integer", "minimum": 0, "maximum": 150}}


def _schema(item: Item) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(item.answer)
    schema = {
        "type": "object",
        "properties": {name: _TYPES[type(value)] for name, value in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"grammar": Grammar("json_schema", json.dumps(schema))}


#: name -> parameters of an item, besides those that all have
KINDS: dict[str, Callable[[Item], dict[str, Any]]] = {"free": lambda item: {}, "schema": _schema}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-diffusion")
    parser.add_argument("--block", type=int, default=16, help="positions per block of the model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--per-client", type=int, default=4, help="requests per client at least")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per concurrency, mode and kind of constraint; then one per concurrency for the guides."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare(options, report))


async def compare(options: argparse.Namespace, report: Report) -> None:
    """Measure every mode and kind at every concurrency, in turns; then the guides."""
    async with AsyncExitStack() as stack:
        engines = {
            mode: await stack.enter_async_context(Engine(config))
            for mode, config in _configs(options).items()
        }
        for concurrency in options.concurrency:
            for (mode, kind), line in (await _cell(engines, options, concurrency)).items():
                report.row(concurrency=concurrency, mode=mode, kind=kind, **line)
        for concurrency in options.concurrency:
            items = held_out("json", _count(options, concurrency), 1)
            for kind in options.kinds:
                if kind != "free":
                    with _watched() as watched:
                        await _measure(engines["fdfo"], options, items, kind, concurrency)
                    report.row(concurrency=concurrency, kind=kind, **watched.line())


def _configs(options: argparse.Namespace) -> dict[str, EngineConfig]:
    most = max(options.concurrency)
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        device=options.device,
        max_running_requests=most,
        num_pages=most * 64,
    )
    found: dict[str, EngineConfig] = {}
    for way, settings in WAYS.items():
        chunk = settings.get("chunk_size", config.chunk_tokens) or options.block
        config = found[way] = replace(config, **{**settings, "chunk_size": chunk})
    return {"sync": found["sync"], "fdfo": found["fused"]}


def _count(options: argparse.Namespace, concurrency: int) -> int:
    count: int = max(options.requests, options.per_client * concurrency)
    return count


async def _cell(
    engines: dict[str, Engine], options: argparse.Namespace, concurrency: int
) -> dict[tuple[str, str], dict[str, Any]]:
    ways = [(mode, kind) for mode in engines for kind in options.kinds]
    runs: dict[tuple[str, str], list[_Run]] = {way: [] for way in ways}
    for number in range(options.rounds):
        items = held_out("json", _count(options, concurrency), random.Random(number).randrange(1 << 30))
        for mode, kind in ways:  # prompts are cached and grammars compiled
            await _measure(engines[mode], options, items, kind, concurrency)
        for mode, kind in ways if number % 2 == 0 else reversed(ways):
            runs[mode, kind].append(await _measure(engines[mode], options, items, kind, concurrency))
    return {way: _line(way, runs) for way in ways}


def _line(way: tuple[str, str], runs: dict[tuple[str, str], list[_Run]]) -> dict[str, Any]:
    mode, kind = way
    mine, first = runs[way], next(iter(runs))[1]

    def over(others: list[_Run], figure: Callable[[_Run], float]) -> float:
        return statistics.median(figure(one) / figure(other) for one, other in zip(mine, others, strict=True))

    line = {name: statistics.median(getattr(each, name) for each in mine) for name in _FIGURES}
    line["at_equal"] = over(runs[mode, first], lambda run: run.rounds_per_s)
    line["tokens_per_round_over"] = over(runs[mode, first], lambda run: run.tokens_per_round)
    line["over_sync"] = over(runs["sync", kind], lambda run: run.tokens_per_s)
    return line


@dataclass(frozen=True)
class _Run:
    """All questions once."""

    seconds: float
    tokens: int
    #: forwards of blocks, summed over requests
    rounds: int
    right: list[bool]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def rounds_per_s(self) -> float:
        return self.rounds / self.seconds

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def rounds_per_answer(self) -> float:
        return self.rounds / len(self.right)

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.right)


_FIGURES = ("tokens_per_s", "tokens_per_round", "rounds_per_answer", "accuracy")


async def _measure(
    engine: Engine, options: argparse.Namespace, items: list[Item], kind: str, concurrency: int
) -> _Run:
    """Ask all questions, ``concurrency`` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def ask(item: Item) -> Result:
        params = SamplingParams(
            temperature=0,
            max_tokens=options.max_tokens,
            diffusion=DiffusionParams(threshold=options.threshold),
            **KINDS[kind](item),
        )
        async with gate:
            return await engine.generate(item.messages, params)

    rounds, start = engine.stats().rounds, time.perf_counter()
    results = await asyncio.gather(*[ask(item) for item in items])
    return _Run(
        time.perf_counter() - start,
        sum(len(result.token_ids) for result in results),
        engine.stats().rounds - rounds,
        [item.check(result.text) for item, result in zip(items, results, strict=True)],
    )


class _Watched:
    """What guides have done."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.row_rounds = self.masks = self.calls = 0

    def line(self) -> dict[str, float]:
        each = {
            f"{name}_us": 1e6 * self.seconds[name] / self.row_rounds
            for name in ("adjust", "steer", "written")
        }
        masks = {
            "masks": self.masks / self.row_rounds,
            "fill_us": 1e6 * self.seconds["fill"] / self.row_rounds,
        }
        return {**each, **masks, "masks_per_call": self.masks / max(1, self.calls)}


@contextmanager
def _watched() -> Iterator[_Watched]:
    """Time the methods of guides, and the masks that these ask for, which are part of ``steer``."""
    watched = _Watched()
    plain = {(owner, name): getattr(owner, name) for owner, name in _WATCHED}

    def timed(owner: type, name: str) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            began = time.perf_counter()
            result = plain[owner, name](self, *arguments)
            watched.seconds[name] += time.perf_counter() - began
            if name == "written":
                watched.row_rounds += len(arguments[0].ids)
            elif name == "fill":
                watched.masks += len(arguments[0])
                watched.calls += 1
            return result

        return call

    for owner, name in plain:
        setattr(owner, name, timed(owner, name))
    try:
        yield watched
    finally:
        for (owner, name), method in plain.items():
            setattr(owner, name, method)


_WATCHED: list[tuple[type, str]] = [
    *((RowsGuide, name) for name in ("adjust", "steer", "written")),
    (GuidanceBackend, "fill"),
]
