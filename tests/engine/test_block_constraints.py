"""Grammars on blocks: every output obeys, exactly where the answers are closed, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aioinfer import Engine, StreamCheckpoint, errors
from aioinfer.config import EngineConfig
from aioinfer.execution.decoding import block_steering
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, Grammar, SamplingParams
from aioinfer.text.guidance import GuidanceBackend
from tests.engine.test_hostile_grammars import AMBIGUOUS
from tests.tiers import SECONDS, grid, rest

PLAIN = SamplingParams(seed=1, temperature=0.8, max_tokens=40, ignore_eos=True)
PROMPT = [{"role": "user", "content": "JSON: Tom is 31 years old and lives in Rome."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "pets": {"enum": [["é"], None]}},
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", PERSON),
    "object": Grammar("json_object"),
    "characters of many bytes": Grammar("regex", "(é|日本|😀){12,40}"),
    "string": Grammar("json_schema", {"type": "string", "minLength": 20, "maxLength": 40}),
    "numbers": Grammar("json_schema", {"type": "array", "items": {"type": "number"}, "minItems": 3}),
    "regex": Grammar("regex", r"[0-9]{3}-[a-z]+ [A-Z]{2,4}\."),
    "lark": Grammar("lark", 'start: "a" b+ "c"\nb: "[" b* "]" | /[a-z]{2}/'),
    "gbnf": Grammar("lark", 'root ::= "x" [0-9]+ " " ("foo" | "bar")+ "."'),
    "choices": Grammar("choice", ["yes please", "no thanks", "日本語", "x" * 60]),
    "enum": Grammar("json_schema", {"enum": ["a", "é\n", 3, None, True]}),
}
ALGORITHMS = (
    DiffusionParams(),
    DiffusionParams(threshold=0.0),
    DiffusionParams(algorithm="static_steps"),
    DiffusionParams(algorithm="entropy_bound"),
    DiffusionParams(algorithm="joint_threshold", steps=3),
)


@pytest.fixture(name="engine")
async def make_engine() -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model="tiny-diffusion", threads=1)) as engine:
        yield engine


def obeys(engine: Engine, grammar: Grammar, result: Result) -> bool:
    """By the tokens, and, if it ended by itself, by the whole."""
    assert engine.tokenizer is not None
    ends = engine.info.eos_token_ids
    backend = GuidanceBackend(
        engine.tokenizer.for_grammars(), engine.info.vocab_size, sorted(ends), max_depth=64
    )
    matcher = backend.compile(grammar)
    tokens = [token for token in result.token_ids if token not in ends]
    if matcher.advance(tokens) < len(tokens):
        return False
    return result.finish_reason == "length" or matcher.stopped or matcher.accept(min(ends))


@pytest.mark.parametrize(
    "name", grid(["schema", "choices", "regex"], sorted({*GRAMMARS} - {"schema", "choices", "regex"}))
)
async def test_outputs_obey_whatever_the_algorithm_and_the_temperature(engine: Engine, name: str) -> None:
    grammar = GRAMMARS[name]
    alone = await engine.generate("ab", PLAIN)
    asked = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=50 - seed, grammar=grammar, diffusion=diffusion
        )
        for seed, diffusion in enumerate(ALGORITHMS)
        for temperature in (0.0, 2.0)
    ]
    neighbour, *results = await asyncio.gather(
        engine.generate("ab", PLAIN), *(engine.generate(PROMPT, each) for each in asked)
    )
    assert neighbour.token_ids == alone.token_ids
    for result in results:
        assert obeys(engine, grammar, result), result.text


async def test_closed_answers_need_no_walk_over_chats_either(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_steering, "Walk", None)
    enum = {"type": "string", "enum": ["red", "blue", "green"]}
    asked = SamplingParams(temperature=1.0, seed=2, max_tokens=30)
    assert (await engine.chat(PROMPT, asked, response_format=enum)).parsed in enum["enum"]
    choice = asked.changed(grammar=Grammar("choice", ["yes please", "no thanks"]))
    assert (await engine.chat(PROMPT, choice)).content in ("yes please", "no thanks")


@pytest.mark.parametrize("most", [3, 4, 5])
async def test_an_answer_is_complete_by_the_greatest_length(engine: Engine, most: int) -> None:
    """``no`` takes one token or two."""
    grammar = Grammar("choice", ["yes, and a lot more than that", "no"])
    result = await engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=most, grammar=grammar))
    assert result.text == "no"
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("temperature", grid([1.5], [0.0]))
async def test_ids_do_not_depend_on_how_long_a_search_takes(temperature: float) -> None:
    found = []
    for patience in (0.5, 0.0):
        config = EngineConfig(model="tiny-diffusion", threads=1, grammar_patience=patience)
        async with Engine(config) as engine:
            asked = [
                SamplingParams(temperature=temperature, seed=3, max_tokens=40, grammar=grammar, diffusion=how)
                for grammar in (GRAMMARS["schema"], GRAMMARS["choices"], GRAMMARS["regex"])
                for how in (ALGORITHMS[0], ALGORITHMS[4])
            ]
            results = await asyncio.gather(*(engine.generate(PROMPT, each) for each in (*asked, PLAIN)))
            found.append([(each.token_ids, each.step_map) for each in results])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", grid([*AMBIGUOUS][2:3], [*AMBIGUOUS][:2] + [*AMBIGUOUS][3:]))
async def test_an_ambiguous_grammar_ends_alone(engine: Engine, name: str) -> None:
    source = re.sub(r"^(root ::=|start:) (.*)", r'\1 \2 "!"', AMBIGUOUS[name])
    assert engine.tokenizer is not None
    never = [engine.tokenizer.encode_part("!")]
    asked = SamplingParams(
        temperature=1.5, seed=1, max_tokens=300, grammar=Grammar("lark", source), bad_words=never
    )
    alone = await engine.generate("ab", PLAIN)
    bad, good = engine.generate("ab", asked), engine.generate("ab", PLAIN)
    with pytest.raises(errors.ConstraintFailed, match=r"max is \d+|processor time"):
        await bad
    assert (await good).token_ids == alone.token_ids


async def test_a_backend_that_panics_fails_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As libraries in Rust raise."""

    fill, armed = GuidanceBackend.fill, []

    def broken(self: GuidanceBackend, matchers: Any, masks: Any) -> None:
        if armed and any(matcher.cost is armed[0] for matcher in matchers):
            raise Panic("at the worst")
        fill(self, matchers, masks)

    compile_ = GuidanceBackend.compile

    def noted(self: GuidanceBackend, grammar: Grammar) -> Any:
        matcher: Any = compile_(self, grammar)
        if grammar.kind == "regex":
            armed.append(matcher.cost)
        return matcher

    monkeypatch.setattr(GuidanceBackend, "compile", noted)
    good = SamplingParams(temperature=1.0, seed=1, max_tokens=40, grammar=GRAMMARS["schema"])
    expected = await engine.generate(PROMPT, good)
    bad = engine.generate(PROMPT, good.changed(grammar=GRAMMARS["regex"]))
    async for _ in engine.generate("x", PLAIN.changed(max_tokens=1)):
        break
    monkeypatch.setattr(GuidanceBackend, "fill", broken)
    with pytest.raises((errors.AioInferError, ValueError), match="at the worst"):
        await bad
    assert (await engine.generate(PROMPT, good)).token_ids == expected.token_ids


@pytest.mark.parametrize("forged", grid([[1 << 40] * 16], [[7] * 16, [-1] * 16, [-5] * 16]), ids=str)
async def test_a_checkpoint_with_a_forged_path_goes_on_within_its_grammar(
    engine: Engine, forged: list[int]
) -> None:
    grammar = GRAMMARS["schema"]
    asked = SamplingParams(
        temperature=1.5, seed=3, max_tokens=60, grammar=grammar, diffusion=DiffusionParams(threshold=1.0)
    )
    stream = engine.generate(PROMPT, asked)
    record: dict[str, Any] = {}
    async for _ in stream:
        record = json.loads(stream.checkpoint().to_json())
        if (record.get("block") or {}).get("path"):
            break
    await stream.aclose()
    record["block"]["path"] = forged[: len(record["block"]["ids"])]
    checkpoint = StreamCheckpoint.from_json(json.dumps(record))
    try:
        result = await engine.restore(checkpoint)
    except errors.ConstraintFailed:
        return  # what was known had no other way on that is found
    assert obeys(engine, grammar, result)


@pytest.mark.parametrize("token", [1, 7])
async def test_a_checkpoint_whose_block_was_filled_against_its_grammar_is_refused(
    engine: Engine, token: int
) -> None:
    """No search comes to a block without unknown positions."""
    how = DiffusionParams(threshold=1.0, draft=True)
    grammar = Grammar("choice", ["yes please and more", "no thanks at all, no"])
    stream = engine.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=40, grammar=grammar, diffusion=how)
    )
    record: dict[str, Any] = {}
    async for _ in stream:
        record = json.loads(stream.checkpoint().to_json())
        if any((record.get("block") or {}).get("path") or ()):
            break
    await stream.aclose()
    block = record["block"]
    places = [at for at, known in enumerate(block["known"]) if not known]
    assert places
    for at in places:
        block["known"][at], block["ids"][at] = True, token
    with pytest.raises(errors.InvalidRequest, match=r"checkpoint: block: ids: .*grammar"):
        await engine.restore(StreamCheckpoint.from_json(json.dumps(record)))


@pytest.mark.parametrize(
    ("grammar", "most", "least"),
    [
        (Grammar("choice", ["abcdefghijklm", "nopqrstuvwxyz"]), 3, r"\d+ tokens or more"),
        (Grammar("json_schema", {"enum": ["a long text", None]}), 1, "2 tokens or more|3 tokens or more"),
        (Grammar("json_schema", {"type": "string", "minLength": 900}), 20, r"\d\d tokens or more"),
        (
            Grammar("json_schema", {"type": "array", "minItems": 300, "items": {"type": "null"}}),
            20,
            r"\d\d+ tokens or more",
        ),
    ],
)
async def test_what_no_output_is_short_enough_for_is_refused_before_it_queues(
    engine: Engine, grammar: Grammar, most: int, least: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=f"max_tokens.*{least}"):
        await engine.generate("x", SamplingParams(max_tokens=most, grammar=grammar))


async def test_what_exceeds_the_context_is_refused_before_it_queues(engine: Engine) -> None:
    grammar = Grammar("json_schema", {"type": "string", "minLength": 100_000})
    with pytest.raises(errors.InvalidRequest, match="context length") as caught:
        await engine.generate("x", SamplingParams(grammar=grammar))
    assert caught.value.code == "context_length_exceeded"


@rest(SECONDS)
async def test_tool_calls_of_a_diffusion_model_obey_their_schema() -> None:
    config = EngineConfig(model="tiny-diffusion", threads=1, tool_call_parser="hermes")
    function = {"name": "look_up", "parameters": PERSON}
    async with Engine(config) as engine:
        for seed in range(4):
            answer = await engine.chat(
                PROMPT,
                SamplingParams(temperature=1.5, seed=seed, max_tokens=250),
                tools=[{"type": "function", "function": function}],
                tool_choice="required",
            )
            if answer.finish_reason != "length":
                (call, *_) = answer.tool_calls
                assert call.name == "look_up"
                assert json.loads(call.arguments).keys() == {"name", "age", "pets"}


async def test_a_stop_token_that_the_grammar_does_not_allow_does_not_end_a_complete_output(
    engine: Engine,
) -> None:
    """What follows a complete output is an end of the model, whatever the caller would rather have."""
    letters = [(await engine.tokenize(letter, add_special_tokens=False))[-1] for letter in "efgh"]
    grammar = Grammar("regex", "[a-d]{3,9}")
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        grammar=grammar,
        stop_token_ids=letters,
        logit_bias=dict.fromkeys(letters, 99.0),
    )
    result = await engine.generate(PROMPT, params)
    assert result.finish_reason == "stop"
    assert not set(result.token_ids).intersection(letters)
    assert re.fullmatch("[a-d]{3,9}", result.text)
