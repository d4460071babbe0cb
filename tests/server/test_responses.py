"""``/v1/responses`` through the real openai client, which checks every object against its types."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from aioinfer.scheduling.step import Step
from aioinfer.server.responses.endpoints import Response
from tests.server.chats import USER, WEATHER, add_tags
from tests.server.conftest import Bundled, Serving
from tests.server.event_order import ResponseOrder
from tests.server.test_tool_requests import ROUND_TRIP
from tests.tiers import SECONDS, rest

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": WEATHER,
    "strict": True,
}
ASK: Any = {"model": "tiny-chat", "input": [USER], "temperature": 0}


async def ordered(client: openai.AsyncOpenAI, **options: Any) -> dict[str, Any]:
    """The response of a stream, whose events are in order and have the types of the client."""
    order = ResponseOrder()
    async for event in await client.responses.create(**{**ASK, **options}, stream=True):
        order.take(event.type, event.to_json())
    order.check_ended()
    return order.response


async def both(client: openai.AsyncOpenAI, **options: Any) -> Any:
    """The response, whole; its stream says the same."""
    whole = await client.responses.create(**{**ASK, **options})
    streamed = await ordered(client, **options)
    assert [_compared(each) for each in streamed["output"]] == [
        _compared(json.loads(each.to_json())) for each in whole.output
    ]
    for name in ("status", "incomplete_details", "usage", "tools", "text", "instructions", "metadata"):
        value = json.loads(whole.to_json())[name]
        streamed_value = streamed[name]
        if name == "usage":
            for each in (value, streamed_value):
                each["input_tokens_details"].pop("cached_tokens")
        assert streamed_value == value, name
    return whole


def _compared(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


@rest(SECONDS)
async def test_text_is_answered_whole_and_streamed(bundled: Bundled) -> None:
    async with bundled() as client:
        answer = await both(client, metadata={"topic": "sums"}, instructions="Be brief.")
        items = await both(
            client, input=[{"role": "user", "content": [_text("What is "), _text("20 + 22?")]}]
        )
        text = await both(client, input="What is 20 + 22?")
    assert text.output_text == items.output_text == "20 + 22 = 42"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.metadata, answer.instructions) == ({"topic": "sums"}, "Be brief.")
    assert (answer.output[0].type, answer.output[0].status) == ("message", "completed")
    # What strict readers of other languages look for is there, null or not.
    given = json.loads(answer.to_json())
    assert Response.__annotations__.keys() - {"user", "safety_identifier"} <= given.keys()


def _text(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


async def test_an_answer_that_reaches_its_limit_is_incomplete(bundled: Bundled) -> None:
    async with bundled() as client:
        answer = await both(client, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.max_output_tokens) == ("incomplete", 3)
    assert answer.usage.output_tokens == 3


@pytest.mark.native
async def test_logprobs_are_those_of_the_text(bundled: Bundled) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with bundled() as client:
        answer = await both(client, **options)
        with pytest.raises(openai.BadRequestError, match="include"):
            await both(client, top_logprobs=2)
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == answer.usage.output_tokens
    assert "".join(each.token for each in logprobs).startswith("20 + 22 = 42")
    assert {len(each.top_logprobs) for each in logprobs} == {2}
    assert answer.top_logprobs == 2


@rest(SECONDS)
async def test_an_agent_calls_its_tools_until_the_model_answers(bundled: Bundled, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(ROUND_TRIP)
    conversation: list[Any] = [USER]
    async with bundled(directory) as client:
        for turn in range(2):
            answer = await both(
                client,
                input=conversation,
                tools=[TOOL],
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0.3,
                extra_body={"seed": turn},
            )
            (call,) = answer.output
            assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, WEATHER)
            # The client's object is an item of the next request.
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            conversation += [call, output]
        last = await both(client, input=conversation, tools=[TOOL], max_output_tokens=4)
        assert last.output[0].type == "message"
        # A format is that of text, which a required call is not: instructor sends both.
        formatted = await both(
            client,
            tools=[TOOL],
            tool_choice={"type": "function", "name": "weather"},
            text={"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}},
        )
        assert [each.type for each in formatted.output] == ["function_call"]
        # The template has read all of it: other results make another prompt.
        conversation[-1] = {**conversation[-1], "output": [_text("sunny all day")]}
        other = await both(client, input=conversation, tools=[TOOL], max_output_tokens=4)
    assert other.usage.input_tokens > last.usage.input_tokens
    assert [each.name for each in last.tools] == ["weather"]


class Sum(BaseModel):
    left: int = Field(ge=0, le=9)
    right: int = Field(ge=0, le=9)


@rest(SECONDS)
async def test_structured_output_is_parsed(bundled: Bundled) -> None:
    async with bundled() as client:
        answer = await client.responses.parse(**{**ASK, "temperature": 1.5}, text_format=Sum)
        assert isinstance(answer.output_parsed, Sum)
        assert answer.text
        assert answer.text.format
        assert answer.text.format.type == "json_schema"
        anything = await both(client, text={"format": {"type": "json_object"}}, max_output_tokens=300)
        assert anything.output_text.startswith("{")
        schema = {"type": "nothing"}
        with pytest.raises(openai.BadRequestError) as caught:
            await both(client, text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
    assert caught.value.param == "text.format"


@rest(SECONDS)
async def test_reasoning_is_an_item_of_its_own(bundled: Bundled, directory: Path) -> None:
    tags = add_tags(directory, "<think>", "</think>", special=False)
    bias = {str(tags["<think>"]): 100, str(tags["</think>"]): 14}
    schema = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}
    async with bundled(directory, reasoning_parser="qwen3") as client:
        for seed in range(20):
            extra = {"logit_bias": bias, "seed": seed}
            answer = await both(client, text={"format": schema}, extra_body=extra, temperature=2.0)
            assert json.loads(answer.output_text) in ("yes", "no")
            if len(answer.output) == 2:
                break
        # The item of an answer is one of the next request.
        again = await both(client, input=[USER, *answer.output, USER], max_output_tokens=4)
        assert again.usage.input_tokens > 30
        with pytest.raises(openai.BadRequestError) as caught:
            await both(client, include=["message.output_text.logprobs"])
    reasoning, message = answer.output
    assert (reasoning.type, reasoning.summary, message.type) == ("reasoning", [], "message")
    details = answer.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.output_tokens
    assert caught.value.param == "include"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_the_end_of_the_stream(serving: Serving, stream: bool) -> None:
    def fault(step: Step) -> None:
        if step.id == 4:
            raise RuntimeError("planned")

    body = {"input": "Hello", "max_output_tokens": 200, "ignore_eos": True, "stream": stream}
    async with serving(fault=fault) as served:
        reply = await served.post("/v1/responses", body)
        after = await served.post("/v1/responses", {**body, "max_output_tokens": 3, "stream": False})
    assert after.json()["status"] == "incomplete"
    assert "planned" not in reply.text
    if stream:
        assert read_events(ResponseOrder().take, reply.text)[-2:] == ["error", "response.failed"]
    else:
        assert (reply.status, reply.error["type"]) == (500, "server_error")


def read_events(take: Callable[[str | None, str], None], text: str) -> list[str]:
    """Gives the events of a body to ``take``; returns their names."""
    names = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            name, data = lines
            assert name.startswith("event: ")
            assert data.startswith("data: ")
            take(name[7:], data[6:])
            names.append(name[7:])
    return names


#: the schema of an object that is nested deeply
DEEP: Any = functools.reduce(lambda inner, _: {"type": "object", "properties": {"a": inner}}, range(300), {})
IMAGE = {"type": "input_image"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
LABELS = ("name", "description")
FORMAT = {"type": "json_schema", "schema": {}, "name": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "pope", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [USER, {"role": "user", "content": [IMAGE]}]}, "input[1].content[0].image_url"),
    ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
    ({"input": [USER, {"type": "mcp_call"}]}, "input[1].type"),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": 1}]},
        "input[0].arguments",
    ),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": 1}]}, "input[0].output"),
    *(({"input": [{**OUTPUT, "name": name}]}, "input[0].name") for name in ({}, 0, [], False, 7)),
    *(({"text": {"format": {**FORMAT, label: 0}}}, f"text.format.{label}") for label in LABELS),
    ({"input": [{**USER, "colour": "red"}]}, "input[0].colour"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": 1}, "store"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "1"}}, "prompt"),
    ({"messages": [USER]}, "messages"),
    ({"colour": "red"}, "colour"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"reasoning": {"effort": "least"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"text": {"verbosity": "least"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"tools": [{"type": "funtion", "name": "f"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}, {**TOOL, "name": "a b"}]}, "tools[1].name"),
    ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"include": ["everything"]}, "include[0]"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"tools": [{**TOOL, "parameters": DEEP}], "tool_choice": "none"}, "tools"),
]


@rest(SECONDS)
async def test_refusals_name_the_field_of_the_body(bundled: Bundled) -> None:
    async with bundled() as client:
        for change, param in REFUSED:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    # Past the client's own types.
                    body = {"input": "hi", "stream": stream, **change}
                    await client.post("/responses", body=body, cast_to=object)
                assert caught.value.param == param, change


#: of Mistral, for example
ALTERNATES = (
    "{%- for m in messages -%}{%- if loop.index0 and m.role in ('system', loop.previtem.role) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}{%- endfor -%}"
)


@rest(SECONDS)
@pytest.mark.parametrize("template", ["", ALTERNATES], ids=["any-order", "alternates"])
async def test_what_clients_send_on_their_own_is_accepted(
    bundled: Bundled, directory: Path, template: str
) -> None:
    file = directory / "chat_template.jinja"
    file.write_text(template + file.read_text())
    bodies: dict[str, dict[str, Any]] = {
        "codex": {
            "instructions": "You are a coding agent.",
            "input": [
                {"type": "message", "role": "developer", "content": [_text("permissions")]},
                {"type": "message", "role": "developer", "content": [_text("skills")]},
                {"type": "message", "role": "user", "content": [_text("environment")]},
                {"type": "message", "role": "user", "content": [_text("hi")]},
                {"type": "message", "role": "developer", "content": [_text("new permissions")]},
            ],
            "tools": [
                {**TOOL, "defer_loading": True},
                *(
                    {"type": kind}
                    for kind in ("web_search", "local_shell", "custom", "tool_search", "namespace")
                ),
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": None,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "abc",
        },
        "codex with a model that it knows": {
            "input": "hi",
            "reasoning": {"effort": "medium", "summary": "detailed"},
            "text": {"verbosity": "low"},
        },
        "openai-agents": {
            "input": [{"role": "user", "content": "hi"}],
            "include": [],
            "instructions": "Help.",
            "tools": [],
            "store": True,
        },
        "ai-sdk": {
            "input": [{"role": "user", "content": [_text("hi")]}],
            "tool_choice": "auto",
            "store": True,
        },
    }
    async with bundled(directory) as client:
        for name, body in bodies.items():
            answer: Any = await client.post(
                "/responses", body={"max_output_tokens": 4, **body}, cast_to=object
            )
            assert answer["status"] in ("completed", "incomplete"), name
            # What the model is not told of is not in effect.
            assert (answer["reasoning"]["effort"], answer["text"]["verbosity"]) == (None, "medium"), name
            assert [each["type"] for each in answer["tools"]] == (["function"] if name == "codex" else [])
