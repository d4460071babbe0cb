"""Tool calls through the real openai client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from aioinfer.text.tool_calls import PARSERS
from tests.server.chats import ROME, SCHEMAS, TOOLS, USER, WEATHER, Answer, add_tags, both, tool
from tests.server.conftest import Bundled
from tests.tiers import SECONDS, grid, rest, thinned

#: a format of JSON, and one of its own
REQUIRED = ["hermes", "harmony"]


@rest(SECONDS)
@pytest.mark.parametrize("name", grid(REQUIRED, [name for name in PARSERS if name not in REQUIRED]))
async def test_required_calls_are_always_valid(bundled: Bundled, name: str) -> None:
    async with bundled(tool_call_parser=name) as client:
        options: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        for seed, temperature in enumerate([0.0, 0.7, 1.0, 1.5, 2.0]):
            answers = await both(
                client, **options, seed=seed, n=4, temperature=temperature, max_tokens=400, logprobs=True
            )
            for answer in answers:
                answer.check()
                assert (len(answer.calls), answer.content) == (1, None)
                assert answer.finish_reason == "tool_calls"
                assert answer.logprobs > 0


@rest(SECONDS)
async def test_several_calls_of_one_answer(bundled: Bundled) -> None:
    end = {"1": -100}  # sampled only if no other token is allowed
    now = tool("now", {"type": "object", "additionalProperties": False})
    options: Any = {"tools": [now], "tool_choice": "required", "logit_bias": end, "max_tokens": 300}
    async with bundled() as client:
        for seed in range(3):
            (answer,) = await both(client, **options, seed=seed)
            assert (answer.finish_reason, answer.content) == ("length", None)
            assert len(set(answer.ids)) == len(answer.calls) >= 3
            assert {name for name, _ in answer.calls} == {"now"}
            assert all(json.loads(arguments) == {} for _, arguments in answer.calls[:-1])
        (answer,) = await both(client, **options, parallel_tool_calls=False)
        assert (answer.finish_reason, len(answer.calls)) == ("tool_calls", 1)


@rest(SECONDS)
@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_named_function_is_called_once(bundled: Bundled, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    async with bundled() as client:
        for answer in await both(client, tools=TOOLS, tool_choice=choice, temperature=2.0, seed=5, n=4):
            answer.check()
            assert [called for called, _ in answer.calls] == [name]
            assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"tools": [tool("weather", WEATHER, strict=True)]},
        {"tools": [], "tool_choice": "none"},
    ],
    ids=str,
)
async def test_without_a_required_call_the_model_answers(bundled: Bundled, options: dict[str, Any]) -> None:
    async with bundled() as client:
        (answer,) = await both(client, **{"tools": TOOLS, "temperature": 0, **options})
    assert answer == Answer("20 + 22 = 42", finish_reason="stop")


@rest(SECONDS)
async def test_calls_without_a_grammar(bundled: Bundled) -> None:
    async with bundled() as client:

        async def ask(text: str, **options: Any) -> Answer:
            extra = {"guided_choice": [text]}
            (answer,) = await both(client, temperature=0, extra_body=extra, **{"tools": TOOLS, **options})
            return answer

        call = ("weather", '{"city": "Rome", "days": 1}')
        assert await ask(f"Hm.\n{ROME}") == Answer("Hm.", calls=[call], finish_reason="tool_calls")
        assert await ask(f"{ROME}\n{ROME}") == Answer(calls=[call, call], finish_reason="tool_calls")
        broken = ROME.replace("name", "nom")
        assert await ask(broken) == Answer(broken, finish_reason="stop")
        # The request has no tools.
        assert await ask(ROME, tools=None) == Answer(ROME, finish_reason="stop")
        assert await ask(ROME, tool_choice="none") == Answer(ROME, finish_reason="stop")


@rest(SECONDS)
async def test_an_answer_that_is_cut_off_loses_nothing(bundled: Bundled) -> None:
    text = f"Hm.\n{ROME}"
    call = ("weather", '{"city": "Rome", "days": 1}')
    async with bundled() as client:

        async def ask(**options: Any) -> Answer:
            extra = {"guided_choice": [text]}
            (answer,) = await both(client, tools=TOOLS, temperature=0, extra_body=extra, **options)
            return answer

        seen = set()
        for most in range(1, 80, 6):
            answer = await ask(max_tokens=most)
            assert answer.finish_reason in ("length", "tool_calls")
            seen.add(len(answer.calls))
            if answer.calls:
                ((name, arguments),) = answer.calls
                assert (answer.content, name) == ("Hm.", "weather")
                assert call[1].startswith(arguments)
            else:
                assert text.startswith(answer.content or "")
                assert len(answer.content or "") >= most
        assert seen == {0, 1}
        # A stop string ends the content. It is not looked for in a call.
        for stop in ("days", "<tool_call>", "</tool_call>"):
            assert await ask(stop=[stop]) == Answer("Hm.", calls=[call], finish_reason="tool_calls")
        assert await ask(stop=["m."]) == Answer("H", finish_reason="stop")
        assert (await ask(logprobs=True)).logprobs > 60


@rest(SECONDS)
async def test_the_clients_own_accumulation_of_deltas(bundled: Bundled) -> None:
    strict: Any = tool("weather", WEATHER, strict=True)
    options: Any = {"model": "tiny-chat", "messages": [USER], "tools": [strict], "tool_choice": "required"}
    async with bundled() as client:
        whole = await client.chat.completions.create(**options, temperature=1.0, seed=3)
        events = []
        async with client.chat.completions.stream(**options, temperature=1.0, seed=3) as stream:
            async for event in stream:
                events.append(event.type)
            final = await stream.get_final_completion()
    first, second = whole.choices[0], final.choices[0]
    assert first.finish_reason == second.finish_reason == "tool_calls"
    assert first.message.tool_calls
    assert second.message.tool_calls
    for one, other in zip(first.message.tool_calls, second.message.tool_calls, strict=True):
        assert one.type == "function"
        assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    assert events.count("tool_calls.function.arguments.delta") > 5
    assert "tool_calls.function.arguments.done" in events


@rest(SECONDS)
@pytest.mark.parametrize("name", thinned(PARSERS, 3))
@pytest.mark.parametrize("special", [False, True])
async def test_special_tokens_of_a_format_reach_its_parser(
    bundled: Bundled, directory: Path, name: str, special: bool
) -> None:
    add_tags(directory, *PARSERS[name].tags, special=special)
    async with bundled(directory, tool_call_parser=name) as client:
        # So warm that no white space between the parts of JSON goes on until the answer is cut off.
        options: Any = {"tool_choice": "required", "seed": 3, "n": 3, "max_tokens": 900, "temperature": 2}
        for answer in await both(client, tools=TOOLS, **options):
            answer.check()
            assert (answer.content, answer.finish_reason) == (None, "tool_calls")


@rest(SECONDS)
@pytest.mark.parametrize("special", [False, True])
async def test_tags_that_are_tokens(bundled: Bundled, directory: Path, special: bool) -> None:
    tags = add_tags(directory, "<tool_call>", "</tool_call>", special=special)
    async with bundled(directory) as client:
        # The model calls a strict function: the grammar constrains the arguments to its schema.
        (answer,) = await both(
            client,
            tools=[tool("weather", WEATHER, strict=True)],
            parallel_tool_calls=False,
            logit_bias={str(tags["<tool_call>"]): 100},
            seed=1,
        )
        answer.check()
        assert (len(answer.calls), answer.content) == (1, None)
        # Other special tokens are omitted from the text.
        assert (await both(client, tools=TOOLS, temperature=0))[0].content == "20 + 22 = 42"


@rest(SECONDS)
async def test_a_response_format_applies_to_answers_without_calls(bundled: Bundled) -> None:
    answer_schema = {"enum": ["yes", "no"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": answer_schema}}
    strict = [tool(name, schema, strict=True) for name, schema in SCHEMAS.items()]
    async with bundled() as client:
        answers = await both(
            client,
            tools=strict,
            response_format=response_format,
            seed=1,
            temperature=2.0,
            n=12,
            max_tokens=999,
        )
    for answer in answers:
        answer.check()
        assert (answer.content is None) == bool(answer.calls)
        if answer.content is not None:
            jsonschema.validate(json.loads(answer.content), answer_schema)
    assert {bool(answer.calls) for answer in answers} == {False, True}
