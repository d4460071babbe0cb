"""Diffusion blocks obey grammars: always, whatever way they are computed, and nobody beside them notices."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.engine import Engine
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.loop.preparing import Preparing
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from examples.training.tasks import held_out
from tests.engine.block_constraints import (
    COMBINATIONS,
    FEW_PAGES,
    MODEL,
    Case,
    Neighbour,
    alone,
    battery,
    bits,
)
from tests.engine.block_parity import WAYS, answers, logprobs
from tests.engine.guided_blocks import Asked, Guided, decode
from tests.tiers import SECONDS, SIMULATION, nightly, rest, scaled, thinned
from tests.toys.blocks import ScriptedDevice
from tests.toys.tokenizer import ByteTokenizer

# -- random grammars -----------------------------------------------------------------------------------


async def _battery(schemas: range, regexes: range, neighbours: range, **settings: Any) -> Counter[str]:
    cases = [*map(Case.of_schema, schemas), *map(Case.of_regex, regexes)]
    beside = [*map(Neighbour.of, neighbours)]
    tally = await battery(schemas.start, cases, beside, await alone(beside), **settings)
    assert tally.counts.total() == 2 * len(cases) + len(beside)
    assert settings.get("pages") is None or tally.retractions > 0
    return tally.counts


@pytest.mark.native
async def test_a_handful_of_random_grammars_is_obeyed() -> None:
    counts = await _battery(range(4), range(2), range(2), mode="fdfo", window=1, max_tokens=64)
    assert counts["json_schema stop"] > 0


@pytest.mark.native
@rest(SECONDS)
@pytest.mark.parametrize(("mode", "window"), [("sync", 1), ("fdfo", 2)])
async def test_random_grammars_are_obeyed(mode: str, window: int) -> None:
    """40 schemas and 15 regexes, greedy and hot, in all."""
    first = 100 * window
    counts = await _battery(
        range(first, first + 20), range(first, first + 8), range(4), mode=mode, window=window, pages=FEW_PAGES
    )
    assert counts["json_schema stop"] > 20
    assert counts["regex stop"] > 5


@pytest.mark.native
@nightly(SIMULATION)
@pytest.mark.parametrize(("mode", "window"), COMBINATIONS)
async def test_300_random_schemas_and_100_regexes_are_obeyed(mode: str, window: int) -> None:
    """Each of them in all modes and windows, with few pages in half of these."""
    for half, pages in enumerate((None, FEW_PAGES)):
        first = (half + window) % 2
        halves = range(first, 300, 2), range(first, 100, 2), range(first, 100, 2)
        counts = await _battery(*halves, mode=mode, window=window, pages=pages)
        assert counts["json_schema stop"] > 200
        assert counts["regex stop"] > 50


# -- kinds of constraints, in every way ----------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é", "日本", "ab"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
#: name -> parameters
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "choice": {"grammar": Grammar("choice", '["yes, it is", "no", "日本語 text", "null and void"]')},
    "regex": {"grammar": Grammar("regex", '(the [a-f]{2,6}|[α-ω]+|"x")( [0-9]{3}){0,3}')},
    "schema": {"grammar": _SCHEMA},
    "lark": {"grammar": Grammar("lark", 'start: item ("," item)*\nitem: /[a-z]{1,5}/ | "(" start ")"')},
    "bad words": {"bad_words": ("a", "e", " the", "12")},
    "schema and bad words": {"grammar": _SCHEMA, "bad_words": ("z", "x", " y")},
}
DIFFUSION: dict[str, dict[str, Any]] = {
    "joint_threshold": {"threshold": 0.6, "edit_threshold": 0.5},
    "low_confidence": {"threshold": 0.9},
    "static_steps": {"steps": 5},
}
SIZE, LONGEST = 8, 128


def make_device(config: EngineConfig) -> ScriptedDevice:
    return ScriptedDevice(
        num_pages=40 * LONGEST // SIZE,
        page_size=config.page_size,
        num_slots=config.num_slots,
        max_model_len=LONGEST,
        vocab_size=ByteTokenizer().vocab_size,
        edits=2,
    )


def make_engine(**settings: Any) -> Engine:
    config = EngineConfig(**{"model": "scripted", "page_size": SIZE, **settings})
    launcher = InlineLauncher if config.launch_mode == "inline" else ThreadLauncher
    return Engine(
        config, launcher=lambda _: launcher(make_device(config)), tokenizer=lambda _: ByteTokenizer()
    )


def asked_of(kind: str) -> list[Asked]:
    """Of every algorithm, greedy and drawn, around the ends of blocks."""
    found = []
    names = usable_algorithms(None)
    for number, algorithm in enumerate(names):
        diffusion = DiffusionParams(algorithm=algorithm, **DIFFUSION.get(algorithm, {}))
        for length in (1, SIZE - 1, SIZE, 2 * SIZE + 3):
            params = SamplingParams(
                temperature=[0.0, 1.5][(length + number) % 2],
                seed=length,
                logprobs=0,
                max_tokens=[SIZE + 1, 40][length % 2],
                diffusion=diffusion,
                **CONSTRAINTS[kind],
            )
            found.append(([(length * at + number) % 256 + 1 for at in range(length)], params))
    return found


@pytest.fixture(scope="module")
def expected() -> list[tuple[Asked, Guided]]:
    """What the algorithms alone make of every kind."""
    device = make_device(EngineConfig(page_size=SIZE))
    preparing = Preparing(EngineConfig(), device.open(), ByteTokenizer(), drafts=False)
    asked = [each for kind in CONSTRAINTS for each in asked_of(kind)]
    return list(zip(asked, decode(device, device.script, asked, LONGEST, preparing), strict=True))


async def _answers(asked: list[Asked], **settings: Any) -> list[Result]:
    async with make_engine(**settings) as engine:
        return await answers(engine, asked)


@rest(SECONDS)
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_every_constraint_gives_the_same_in_every_way(way: str, expected: list[tuple[Asked, Guided]]) -> None:
    results = asyncio.run(_answers([asked for asked, _ in expected], max_running_requests=32, **WAYS[way]))
    for result, (asked, plain) in zip(results, expected, strict=True):
        assert result.token_ids == plain.ids, asked
        assert result.step_map == plain.steps, asked
        assert logprobs(result) == plain.logprobs, asked
    reasons = Counter(result.finish_reason for result in results)
    assert min(reasons["stop"], reasons["length"]) > 20


@pytest.mark.native
@rest(SECONDS)
@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_the_bundled_model_gives_the_same_in_every_way(kind: str) -> None:
    items = held_out("json", 6, 3)
    asked = []
    for number, item in enumerate(items):
        params = SamplingParams(
            temperature=[0.0, 1.0][number % 2], seed=number, logprobs=0, max_tokens=60, **CONSTRAINTS[kind]
        )
        asked.append((item.messages, params))
    found = []
    for way in [*WAYS][:: 1 if scaled(8) == 8 else 3]:
        settings = {"deterministic": True, "max_running_requests": 4, **WAYS[way]}
        config = EngineConfig(model=MODEL, threads=1, **settings)
        async with Engine(config) as engine:
            results = await asyncio.gather(*[engine.generate(*each) for each in asked])
        found.append([bits(result) for result in results])
        assert found[-1] == found[0], way
    assert len({tuple(ids) for ids, *_ in found[0]}) > 1
