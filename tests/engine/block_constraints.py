"""Random JSON schemas and regexes, and what an output under one of them must be.

``python -m tests.engine.block_constraints --schemas 300 --regexes 100`` runs a battery of any size: hot and
greedy, lock-step and first done first out, windows of 0 to 2, retracted, 1 to 32 at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import Grammar, SamplingParams
from aioinfer.text.grammar import Compiler
from examples.training.tasks import TASKS, held_out
from tests.engine.reading import replay

__all__ = ["COMBINATIONS", "Case", "Neighbour", "battery", "random_regex", "random_schema"]

MODEL = "tiny-diffusion"
#: mode of diffusion, and window
COMBINATIONS = [(mode, window) for mode in ("sync", "fdfo") for window in (0, 1, 2)]
TEMPERATURES = (0.0, 1.5)
#: fewer than 32 requests need
FEW_PAGES = 16
_FORMATS = jsonschema.FormatChecker(["date", "uuid", "ipv4"])
_NAMES = ("name", "age", "city", "x", "tags", "é", "a b", 'q"', "id")
_VALUES = ("red", "green", "a b", "ü", "日本", "", 7, -3, 2.5, True, None, [1, "a"], {"k": 1})
_PATTERNS = ("^[a-c]{2,5}$", "^(ab|ba)+$", "^[A-Z][a-z]{1,8}$", "^x?[0-9]{3}$", "^é[^a]{0,3}$")

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 0, names: Sequence[str] = ()) -> Schema:
    """A schema whose instances are mostly short. ``names``: of definitions that it may refer to."""
    if depth == 0:
        definitions = {f"d{at}": random_schema(rng, 2) for at in range(rng.choice([0, 0, 1, 2]))}
        inner = random_schema(rng, 1, tuple(definitions))
        return {"$defs": definitions, **inner} if definitions else inner
    leaves = ["string", "pattern", "format", "integer", "number", "boolean", "null", "enum", "const"]
    nested = ["object", "object", "object", "array", "array", "anyOf"] * (4 - depth) if depth < 4 else []
    kind = rng.choice([*leaves, *nested, *["ref"] * (3 if names else 0)])
    match kind:
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", **_some(rng, minLength=low, maxLength=low + rng.randint(0, 8))}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", **_some(rng, minimum=low, maximum=low + rng.randint(0, 2000))}
        case "number":
            least = rng.randint(-50, 50) / 4
            return {"type": "number", "minimum": least, "maximum": least + rng.randint(0, 2000) / 8}
        case "enum":
            return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice(_VALUES)}
        case "object":
            return _object(rng, depth, names)
        case "array":
            low = rng.randint(0, 2)
            items = random_schema(rng, depth + 1, names)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1, names) for _ in range(rng.randint(1, 3))]}
        case "ref":
            return {"$ref": f"#/$defs/{rng.choice(names)}"}
    return {"type": kind}


def _object(rng: random.Random, depth: int, names: Sequence[str]) -> Schema:
    fields = rng.sample(_NAMES, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1, names) for name in fields},
        "required": rng.sample(fields, rng.randint(0, len(fields))),
    }
    if rng.random() < 0.9:
        schema["additionalProperties"] = False
    return schema


def _some(rng: random.Random, **limits: int) -> dict[str, int]:
    """All, or all but one."""
    left_out = rng.choice([None, None, *limits])
    return {name: value for name, value in limits.items() if name != left_out}


def random_regex(rng: random.Random, depth: int = 0) -> str:
    """An expression of which :mod:`re` and Rust have the same opinion."""
    if depth == 0:
        return "".join(random_regex(rng, 1) for _ in range(rng.randint(1, 4)))
    kind = rng.choice(["class", "literal", "class", *["repeat", "repeat", "group"] * (depth < 3)])
    match kind:
        case "class":
            return rng.choice(["[a-f]", "[0-9]", "[^a-y]", "[α-ω]", "[äöü]", "[一-丐]", "[A-Za-z ]", "."])
        case "literal":
            return rng.choice(["a", "ab", "the ", "é", "日本", r"\.", '"', "🙂", "-", "true"])
        case "repeat":
            low = rng.randint(0, 4)
            times = rng.choice([f"{{{low},{low + rng.randint(0, 6)}}}", f"{{{low}}}", f"{{{low},}}", *"*+?"])
            return f"(?:{random_regex(rng, depth + 1)}){times}"
    return f"(?:{'|'.join(random_regex(rng, depth + 1) for _ in range(rng.randint(2, 4)))})"


@dataclass(frozen=True)
class Case:
    """A random grammar."""

    seed: int
    grammar: Grammar

    @classmethod
    def of_schema(cls, seed: int) -> Case:
        schema = random_schema(random.Random(f"schema {seed}"))
        return cls(seed, Grammar("json_schema", json.dumps(schema)))

    @classmethod
    def of_regex(cls, seed: int) -> Case:
        return cls(seed, Grammar("regex", random_regex(random.Random(f"regex {seed}"))))

    def check(self, text: str) -> None:
        """Raise for a finished output that is none, by other means than the engine's."""
        source = self.grammar.text
        if self.grammar.kind == "json_schema":
            schema = json.loads(source)
            validator = jsonschema.Draft202012Validator(schema, format_checker=_FORMATS)
            validator.validate(json.loads(text))
        else:
            assert re.fullmatch(source, text), text


@dataclass(frozen=True)
class Neighbour:
    """A request without a grammar."""

    messages: list[dict[str, str]]
    params: SamplingParams

    @classmethod
    def of(cls, seed: int) -> Neighbour:
        rng = random.Random(f"neighbour {seed}")
        item = held_out(rng.choice([*TASKS]), 1, seed)[0]
        temperature = rng.choice([0.0, 1.0])
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=60, logprobs=0)
        return cls(item.messages, params)


@dataclass
class Tally:
    """What came of a battery."""

    counts: Counter[str] = field(default_factory=Counter)
    retractions: int = 0
    #: by case and temperature
    answers: dict[tuple[str, int, float], Any] = field(default_factory=dict)


def bits(result: Result) -> tuple[Any, ...]:
    """What must not depend on others."""
    return result.token_ids, result.step_map, result.finish_reason, result.logprobs


async def alone(neighbours: Sequence[Neighbour]) -> list[tuple[Any, ...]]:
    """One at a time, the plainest way."""
    config = EngineConfig(
        model=MODEL,
        threads=1,
        deterministic=True,
        max_running_requests=1,
        overlap_steps=0,
        prefix_cache=False,
    )
    async with Engine(config) as engine:
        return [bits(await engine.generate(each.messages, each.params)) for each in neighbours]


async def battery(
    seed: int,
    cases: Sequence[Case],
    neighbours: Sequence[Neighbour] = (),
    expected: Sequence[tuple[Any, ...]] = (),
    *,
    mode: str,
    window: int,
    pages: int | None = None,
    max_tokens: int = 160,
) -> Tally:
    """Ask every case, greedy and hot, and every neighbour in between, in waves of 1 to 32.

    Raises AssertionError or ValidationError, with the seed of the case in a note, for an answer that is none,
    and for a neighbour that has another answer than ``expected``, which :func:`alone` gives.
    """
    rng = random.Random(seed)
    asked: list[tuple[Case, float] | int] = [
        (case, temperature) for case in cases for temperature in TEMPERATURES
    ]
    asked += range(len(neighbours))
    rng.shuffle(asked)
    tally = Tally()
    config = EngineConfig(
        model=MODEL,
        threads=1,
        deterministic=True,
        max_running_requests=32,
        diffusion_mode=mode,  # type: ignore[arg-type]
        overlap_steps=window,  # type: ignore[arg-type]
        num_pages=pages,
        new_token_ratio=0.0,
        min_new_token_ratio=0.0,
    )
    async with Engine(config) as engine:

        async def one(what: tuple[Case, float] | int) -> None:
            if isinstance(what, int):
                neighbour = neighbours[what]
                got = bits(await engine.generate(neighbour.messages, neighbour.params))
                assert got == expected[what], (neighbour, got, expected[what])
                tally.counts["neighbours"] += 1
                return
            case, temperature = what
            try:
                result = await _ask(engine, case, temperature, max_tokens)
                reason = _check(engine, case, result)
            except Exception as error:
                error.add_note(f"{case} temperature={temperature} mode={mode} window={window} pages={pages}")
                raise
            tally.counts[f"{case.grammar.kind} {reason}"] += 1
            tally.answers[case.grammar.kind, case.seed, temperature] = bits(result)

        while asked:
            wave = [asked.pop() for _ in range(min(len(asked), rng.choice([1, 2, 5, 8, 16, 32, 32])))]
            async with asyncio.TaskGroup() as group:
                for what in wave:
                    group.create_task(one(what))
        tally.retractions = engine.stats().retractions
    return tally


async def _ask(engine: Engine, case: Case, temperature: float, max_tokens: int) -> Result:
    kind = "JSON" if case.grammar.kind == "json_schema" else "text"
    params = SamplingParams(
        temperature=temperature, seed=case.seed, max_tokens=max_tokens, grammar=case.grammar, logprobs=0
    )
    return await engine.generate([{"role": "user", "content": f"Answer in {kind}: {case.seed}."}], params)


def _check(engine: Engine, case: Case, result: Result) -> str:
    """Raises unless an output is one of the grammar, or the beginning of one; how it ended."""
    compiler = Compiler(engine._core.preparing._grammar_compiler().backend)
    replay(compiler, case.grammar, result.token_ids, ended=result.finish_reason == "stop")
    if result.finish_reason == "stop":
        case.check(result.text)
    assert result.finish_reason is not None
    return result.finish_reason


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--regexes", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--neighbours", type=int, default=100)
    options = parser.parse_args()
    first = options.first_seed
    cases = [Case.of_schema(seed) for seed in range(first, first + options.schemas)]
    cases += [Case.of_regex(seed) for seed in range(first, first + options.regexes)]
    neighbours = [Neighbour.of(seed) for seed in range(first, first + options.neighbours)]
    expected = await alone(neighbours)
    answers: dict[tuple[str, int, float], Any] = {}
    for number, (mode, window) in enumerate(COMBINATIONS):
        for pages in (None, FEW_PAGES):
            began = time.perf_counter()
            tally = await battery(number, cases, neighbours, expected, mode=mode, window=window, pages=pages)
            for name, answer in tally.answers.items():
                assert answers.setdefault(name, answer) == answer, (name, mode, window, pages)
            counts, seconds = dict(sorted(tally.counts.items())), time.perf_counter() - began
            counts["retractions"] = tally.retractions
            print(f"{mode} window={window} pages={pages}: {counts}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
