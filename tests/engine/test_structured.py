"""Structured output: every output obeys its grammar, whatever the window, and a bad grammar hurts nobody."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import jsonschema
import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import Grammar, SamplingParams
from aioinfer.text.grammar import Compiler
from tests.engine.conftest import MakeEngine
from tests.engine.reading import replay
from tests.engine.simulation import settle
from tests.engine.test_transparency import retract_every
from tests.tiers import SECONDS, grid, rest
from tests.toys import toy_generate

SCHEMAS_PER_RUN = 40


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose instances are bounded in length, so that a short output can complete one."""
    kind = rng.choice(
        ["string", "integer", "boolean", "enum", "array", "object", "null", "anyOf"][: 8 if depth < 2 else 4]
    )
    match kind:
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "enum":
            return {"enum": rng.sample(["red", "green", 7, True, None, "a b", "ü"], rng.randint(1, 4))}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(0, 3)}
        case "object":
            names = rng.sample(["name", "age", "x", "tags", "é"], rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": names[: rng.randint(0, len(names))],
                "additionalProperties": False,
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    return {"type": kind}


@rest(SECONDS)
@pytest.mark.parametrize("every", [0, 6])
@pytest.mark.parametrize("window", grid([1], [0, 2]))
async def test_outputs_of_the_bundled_model_always_validate(window: int, every: int) -> None:
    rng = random.Random(100 * window + every)
    schemas = [random_schema(rng) for _ in range(SCHEMAS_PER_RUN)]
    async with Engine(EngineConfig(overlap_steps=window, threads=1)) as engine:
        retract_every(engine, every)

        async def one(number: int, schema: dict[str, Any]) -> bool:
            grammar = Grammar("json_schema", json.dumps(schema))
            temperature = rng.choice([0.0, 0.7, 1.0, 2.0])
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=300, grammar=grammar)
            result = await engine.generate([{"role": "user", "content": "Answer in JSON."}], params)
            assert engine._core.preparing._compiler is not None
            ended = result.finish_reason == "stop"
            replay(engine._core.preparing._compiler, grammar, result.token_ids, ended=ended)
            if ended:
                jsonschema.validate(json.loads(result.text), schema)
            return ended

        ended = await asyncio.gather(*[one(number, schema) for number, schema in enumerate(schemas)])
        assert sum(ended) > 0.9 * len(ended)
        assert not every or engine.stats().retractions > 0
        await settle(engine)


@pytest.mark.parametrize(
    ("grammar", "wanted"),
    [
        (Grammar("choice", '["bcd", "dcb"]'), {"bcd", "dcb"}),
        (Grammar("regex", "[ab]{3}"), {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        (Grammar("lark", 'start: "x" ("y" | "z")'), {"xy", "xz"}),
        (Grammar("lark", 'root ::= "x" end\nend ::= "y" | "z"'), {"xy", "xz"}),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
async def test_every_kind_of_grammar_constrains(
    make_engine: MakeEngine, grammar: Grammar, wanted: set[str]
) -> None:
    async with make_engine() as engine:
        for seed in range(10):
            params = SamplingParams(seed=seed, max_tokens=20, grammar=grammar)
            result = await engine.generate([1, 2, 3], params)
            assert result.text in wanted
            assert result.finish_reason == "stop"


async def test_rows_without_a_grammar_are_none_the_wiser(make_engine: MakeEngine) -> None:
    async with make_engine(overlap_steps=2, num_pages=24) as engine:
        free = SamplingParams(temperature=0, max_tokens=30)
        bound = SamplingParams(max_tokens=30, grammar=Grammar("regex", "[a-d]{5,9}"))
        streams = [engine.generate([number] * 5, bound if number % 2 else free) for number in range(1, 13)]
        results = [await stream for stream in streams]
        for number, result in enumerate(results, 1):
            if number % 2:
                assert set(result.text) <= set("abcd")
            else:
                assert result.token_ids == toy_generate([number] * 5, free)
        await settle(engine)


BAD = {
    "no regex": Grammar("regex", "("),
    "no JSON": Grammar("json_schema", '{"type": '),
    "no schema": Grammar("json_schema", "[1]"),
    "no type": Grammar("json_schema", '{"type": "nope"}'),
    "unsatisfiable": Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'),
    "deep": Grammar("json_schema", '{"not": ' * 5000 + "{}" + "}" * 5000),
    "nested": Grammar("json_schema", '{"properties": {"a": ' * 100 + "{}" + "}}" * 100),
    "no lark": Grammar("lark", "start: a"),
    "no gbnf": Grammar("lark", 'root ::= ( "a"'),
    "empty lark": Grammar("lark", ""),
    "endless lark": Grammar("lark", "start: start"),
    "no choice": Grammar("choice", "[]"),
    "huge": Grammar("regex", "(" + "|".join(f"[a-z]{{{number}}}" for number in range(1, 4000)) + ")"),
    "catastrophic": Grammar("regex", "((a{1,900}){1,900}){1,900}(b{1,900}){1,900}c{50000}"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_grammar_is_one_clean_error(make_engine: MakeEngine, name: str) -> None:
    """Refused when compiled, or failed while it runs; in no case does another stream notice."""
    async with make_engine() as engine:
        free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        other = engine.generate([1, 2, 3], free)
        large = name in ("huge", "catastrophic")
        for seed in range(20 if large else 1):
            stream = engine.generate([1, 2], SamplingParams(seed=seed, max_tokens=10, grammar=BAD[name]))
            if large:
                # Large ones may be within the limits; then they do constrain until they reach one.
                try:
                    assert set((await stream).text) <= set("abcdefghijklmnopqrstuvwxyz"), seed
                except (errors.InvalidRequest, errors.ConstraintFailed) as error:
                    assert "grammar" in str(error), (seed, error)
            else:
                with pytest.raises(errors.InvalidRequest, match="grammar"):
                    await stream
        assert (await other).token_ids == toy_generate([1, 2, 3], free)
        await settle(engine)


SOUND = [
    Grammar("regex", "(ab|c[d-f]{2,5})+x?"),
    Grammar("regex", "a{3}(b|[^c])*"),
    Grammar("lark", 'start: (x | "b")+ "c"\nx: /[de]{2}/ | start'),
    Grammar("choice", '["bcd", "dcb", "b"]'),
    Grammar("json_schema", '{"type": "array", "items": {"enum": [1, "a"]}, "minItems": 1, "maxItems": 3}'),
    Grammar("json_schema", '{"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]}'),
]


def spoilt(rng: random.Random) -> Grammar:
    """A grammar with some slips of the pen, or one that is nested or repeated at random."""
    sound = rng.choice(SOUND)
    source = sound.source
    if rng.random() < 0.2:
        depth = rng.choice([3, 70, 2000])
        around = {"regex": ("(", "){1,9}"), "json_schema": ('{"anyOf": [', "]}")}.get(sound.kind, ("[", "]"))
        return Grammar(sound.kind, around[0] * depth + source + around[1] * depth)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(source) + 1)
        match rng.randrange(3):
            case 0:
                source = source[:at] + source[at + rng.randint(1, 6) :]
            case 1:
                source = source[:at] + rng.choice(r"""()[]{}*+?|\"':,.^$-09az~&/""") + source[at:]
            case 2:
                source = source[:at] + source[at - 9 : at] * rng.choice([1, 1, 500]) + source[at:]
    return Grammar(sound.kind, source)


@rest(SECONDS)
async def test_random_slips_are_one_clean_error_or_another_grammar(make_engine: MakeEngine) -> None:
    rng = random.Random(7)
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    kept = refused = 0
    async with make_engine(overlap_steps=2) as engine:
        for number in range(200):
            grammar = spoilt(rng)
            other = engine.generate([1, 2, number % 64], free)
            try:
                result = await engine.generate(
                    [1, 2], SamplingParams(seed=number, max_tokens=10, grammar=grammar)
                )
            except (errors.InvalidRequest, errors.ConstraintFailed) as error:
                assert "grammar" in str(error), grammar
                refused += 1
            else:
                assert engine._core.preparing._compiler is not None
                ended = result.finish_reason == "stop"
                replay(
                    Compiler(engine._core.preparing._compiler.backend),
                    grammar,
                    result.token_ids,
                    ended=ended,
                )
                kept += 1
            assert (await other).token_ids == toy_generate([1, 2, number % 64], free)
        await settle(engine)
    assert min(kept, refused) > 20


async def test_a_grammar_that_reaches_a_limit_fails_its_request_and_spoils_no_later_one(
    make_engine: MakeEngine,
) -> None:
    """llguidance then allows an end, which would be none; and what its limits count is shared by copies."""
    grammar = Grammar("regex", "(" * 70 + "a{3}(b|[^c])*" + "){1,9}" * 70)
    async with make_engine() as engine:
        for _ in range(3):
            with pytest.raises(errors.ConstraintFailed, match=r"grammar: .* too many"):
                await engine.generate([1, 2], SamplingParams(seed=1, max_tokens=60, grammar=grammar))
        await settle(engine)


async def test_a_grammar_whose_forced_text_has_no_end_holds_nobody(make_engine: MakeEngine) -> None:
    """``/b+/`` takes every b, so the one behind it never comes, and nothing but a b may. (Looking for the end
    of that would stop the whole process.)"""
    for source in ('start: /b+/ "b"', '%llguidance {"no_forcing": false}\nstart: /b+/ /b+/ // end'):
        async with make_engine() as engine:
            output = await engine.generate(
                [1, 2], SamplingParams(max_tokens=10, grammar=Grammar("lark", source))
            )
            assert set(output.text) == {"b"}
            assert output.finish_reason == "length"
            await settle(engine)


async def test_what_cannot_be_combined_is_refused(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for field, value in (("min_tokens", 2), ("ignore_eos", True)):
            params = SamplingParams(max_tokens=5, grammar=Grammar("regex", "a*"), **{field: value})
            with pytest.raises(errors.InvalidRequest, match="cannot be combined with a grammar") as refused:
                await engine.generate([1, 2], params)
            assert refused.value.field == field
    with pytest.raises(errors.InvalidRequest, match="grammar"):
        Grammar("xml", "")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequest, match="grammar"):
        Grammar("regex", "a" * 1_100_000)
    async with make_engine(max_grammar_bytes=4) as engine:
        assert await engine.generate([1, 2], SamplingParams(max_tokens=3, grammar=Grammar("regex", "a+b+")))
        with pytest.raises(errors.InvalidRequest, match="max_grammar_bytes"):
            await engine.generate([1, 2], SamplingParams(grammar=Grammar("regex", "a+b+c")))
    async with make_engine(tokenizer=None) as engine:
        with pytest.raises(errors.InvalidRequest, match="tokenizer"):
            await engine.generate([1, 2], SamplingParams(grammar=Grammar("regex", "a")))


async def test_one_compilation_serves_all_who_ask_at_a_time(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        params = SamplingParams(max_tokens=5, grammar=Grammar("regex", "[ab]{4}"))
        await engine.generate([1], params)
        compiler = engine._core.preparing._compiler
        assert compiler is not None
        calls = []
        compile_once = compiler.backend.compile
        compiler.backend.compile = lambda grammar: (calls.append(grammar), compile_once(grammar))[1]  # type: ignore[method-assign,func-returns-value]
        params = SamplingParams(max_tokens=5, grammar=Grammar("regex", "[cd]{4}"))
        streams = [engine.generate([number], params) for number in range(1, 9)]
        for stream in streams:
            assert set((await stream).text) <= set("cd")
        assert len(calls) == 1
