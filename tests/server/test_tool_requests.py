"""Requests with tools: their validation, and the prompt that the template renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from aioinfer.text.tokenizer import HFTokenizer
from tests.server.chats import TOOLS, USER, WEATHER, tool, whole
from tests.server.conftest import Bundled, Serving
from tests.tiers import SECONDS, rest

TEMPLATE = """{%- for m in messages -%}
{%- for call in m.tool_calls or [] -%}
{%- if call.function.arguments is not mapping -%}{{ raise_exception('arguments are text') }}{%- endif -%}
{{ '<|assistant|>' + call.id + call.function.name + call.function.arguments.city + '<|end|>' }}
{%- endfor -%}
{{ '<|user|>' + (m.tool_call_id or '') + m.content + '<|end|>' }}
{%- endfor -%}
{%- for tool in tools or [] -%}
{%- if tool.function.strict is defined -%}{{ raise_exception('strict is not for the model') }}{%- endif -%}
{{ tool.function | tojson }}
{%- else -%}{{ raise_exception('no tools') }}{%- endfor -%}
{{ '<|assistant|>' }}"""


@rest(SECONDS)
async def test_the_template_sees_tools_and_calls_as_objects(bundled: Bundled, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    conversation = [USER, called, {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    strict = [tool("weather", WEATHER, strict=True)]
    async with bundled(directory) as client:
        for tools in (TOOLS, strict):
            (answer,) = await whole(client, messages=conversation, tools=tools, temperature=0, max_tokens=5)
            assert answer.finish_reason is not None
        for change, message in (
            ({"tools": None}, "no tools"),
            ({"tool_choice": "none"}, "no tools"),
            ({"messages": broken(conversation, "[1]")}, "arguments are text"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await whole(client, **{"messages": conversation, "tools": TOOLS, **change})


ROUND_TRIP = """{%- for tool in tools or [] -%}{{ tool.function.name }} {% endfor -%}
{%- for m in messages -%}
{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content }}
{%- for call in m.tool_calls or [] -%}
{{ call.function.name + '(' + call.function.arguments.days | string + ')' + call.id }}
{%- endfor -%}
{{ (m.tool_call_id or '') + '<|end|>' }}
{%- endfor -%}
{{ '<|assistant|>' }}"""


@rest(SECONDS)
async def test_the_result_of_a_call_goes_into_the_next_turn(bundled: Bundled, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(ROUND_TRIP)
    tokenizer = HFTokenizer.load(directory)
    messages: list[Any] = [USER]
    async with bundled(directory) as client:
        for turn in range(2):
            answer = await client.chat.completions.create(
                model="tiny-chat",
                messages=messages,
                tools=TOOLS,
                tool_choice={"type": "function", "function": {"name": "weather"}},
                seed=turn,
                temperature=0.3,
            )
            message = answer.choices[0].message
            (call,) = message.tool_calls or []
            # The client's object is a message of the next request.
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        last = await client.chat.completions.create(
            model="tiny-chat", messages=messages, tools=TOOLS, temperature=0, max_tokens=4
        )
    rendered = f"weather lists <|user|>{USER['content']}<|end|>"
    for message, result in zip(messages[1::2], messages[2::2], strict=True):
        (call,) = message.tool_calls
        days = json.loads(call.function.arguments)["days"]
        rendered += f"<|assistant|>weather({days}){call.id}<|end|>"
        rendered += f"<|user|>rain{result['tool_call_id']}<|end|>"
    assert last.usage.prompt_tokens == len(tokenizer.encode(f"{rendered}<|assistant|>"))


def broken(conversation: list[Any], arguments: Any) -> list[Any]:
    """The same conversation with other arguments."""
    copy = json.loads(json.dumps(conversation))
    copy[1]["tool_calls"][0]["function"]["arguments"] = arguments
    return copy


DEEP: Any = {}
for _ in range(80):
    DEEP = {"properties": {"a": DEEP}}
HERMES = {"tool_call_parser": "hermes"}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(**function: Any) -> dict[str, Any]:
    """The call of a message."""
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]}


WRONG = {"properties": {"a": {"type": "b"}}}
REQUIRED = {"tool_choice": "required"}
FUNCTION = "messages[0].tool_calls[0].function"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool("a b", {})]}, "tools[0].function.name"),
    ({"tools": [tool("", {})]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65, {})]}, "tools[0].function.name"),
    ({"tools": [tool("x\n", {})]}, "tools[0].function.name"),
    ({"tools": [TOOLS[0], tool("weather", {})]}, "tools[1].function.name"),
    ({"tools": [tool("x", [])]}, "tools[0].function.parameters"),
    ({"tools": [tool("x", {"type": "string"})]}, "tools[0].function.parameters.type"),
    ({"tools": [tool("x", {}, description=1)]}, "tools[0].function.description"),
    ({"tools": [tool("x", {}, strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool(f"x{at}", {}) for at in range(129)]}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": 1}, "tool_choice"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tool_choice": named(None)}, "tool_choice.function.name"),
    ({"tool_choice": named("nothing")}, "tool_choice.function.name"),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [], **REQUIRED}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({**REQUIRED, "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tool_choice": named("weather"), "guided_regex": "a"}, "tool_choice"),
    ({**REQUIRED, "tools": [tool("x", {"enum": ["y" * 70_000]})]}, "tools"),
    ({"tools": [tool("x", {"properties": 1})]}, "tools[0].function.parameters.properties"),
    ({**REQUIRED, "tools": [tool("x", WRONG)]}, "tools"),
    ({"tools": [tool("x", WRONG, strict=True)]}, "tools"),
    ({**REQUIRED, "tools": [tool("x", DEEP)]}, "tools"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": 1, "content": ""}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, FUNCTION),
    (called(), f"{FUNCTION}.name"),
    (called(name="f", arguments=1), f"{FUNCTION}.arguments"),
]


async def test_invalid_tools_are_refused(serving: Serving) -> None:
    async with serving(**HERMES) as served:
        for change, param in REFUSED:
            for stream in (False, True):
                body = {"messages": [USER], "tools": TOOLS, "stream": stream, **change}
                assert (await served.post("/v1/chat/completions", body)).refusal == (400, param), change


async def test_without_a_parser_tools_are_refused(serving: Serving) -> None:
    options: Any = {"model": "toy", "messages": [USER], "max_tokens": 3}
    async with serving() as served, served.client() as client:
        for choice in ("auto", "required", named("weather")):
            with pytest.raises(openai.BadRequestError, match="tool_call_parser") as caught:
                await client.chat.completions.create(**options, tools=TOOLS, tool_choice=choice)
            assert caught.value.param == "tools"
        for offered in ({"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            (answer,) = await whole(client, **options, **offered)
            assert answer.finish_reason in ("stop", "length")


async def test_a_schema_beyond_max_grammar_depth_is_refused_by_its_field(serving: Serving) -> None:
    deep: Any = {"const": 1}
    for _ in range(4):
        deep = {"properties": {"a": deep}}
    ending = {"type": "object", **deep}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": ending}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("tools", {"tools": [tool("f", ending)], **REQUIRED}),
        ("tools", {"tools": [tool("f", ending, strict=True)], "stream": True}),
        ("response_format", {"response_format": form}),
        ("guided_grammar", {"guided_grammar": f"start: %json {json.dumps(ending)}"}),
    ]
    async with serving(**HERMES, reasoning_parser="qwen3", max_grammar_depth=8) as served:
        for param, options in cases:
            reply = await served.post("/v1/chat/completions", {"messages": [USER], **options})
            assert reply.refusal == (400, param)
            assert "more than 8 levels deep" in reply.error["message"]
