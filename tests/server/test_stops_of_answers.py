"""Stop strings act on what clients see as the answer, in every protocol."""

from __future__ import annotations

from typing import Any

import pytest

from aioinfer import EngineConfig
from aioinfer.params import SamplingParams
from aioinfer.testing import FakeEngine
from tests.server.calls import Http
from tests.server.test_reasoning_tokens import CHATS, MESSAGES, RESPONSES, USER, fake

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "First"}}\n</tool_call>'
THINKS = "<think>\nFirst 20.\n</think>\n\n42 First"
CALLS = f"<think>\nFirst.\n</think>\n\n{CALL}"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
STOPS: list[dict[str, Any]] = [{"stop": ["First"]}, {"stop_regex": ["F[a-z]+st"]}]


async def chat(client: Http, **body: Any) -> Any:
    reply = await client.post(CHATS, {"messages": USER, **body})
    assert reply.status == 200, reply.text
    return reply.json()["choices"][0]


@pytest.mark.parametrize("stops", STOPS, ids=["strings", "patterns"])
async def test_a_chat_ends_in_its_content(stops: dict[str, Any]) -> None:
    async with fake(THINKS) as client:
        found = await chat(client, **stops)
        assert (found["message"]["reasoning_content"], found["message"]["content"]) == ("First 20.", "42 ")
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", next(iter(stops.values()))[0])
        # Where the reasoning is content, it is searched.
        found = await chat(client, **stops, separate_reasoning=False)
        assert (found["message"]["content"], found["finish_reason"]) == ("<think>\n", "stop")
        found = await chat(client, **stops, include_reasoning=False)
        assert found["message"]["content"] == "42 "
        found = await chat(client, **stops, include_stop_str_in_output=True)
        assert found["message"]["content"] == "42 First"
        streamed = await client.post(CHATS, {"messages": USER, "stream": True, **stops})
        deltas = [each["choices"][0]["delta"] for each in streamed.events()]
        assert "".join(each.get("content") or "" for each in deltas) == "42 "
        assert "".join(each.get("reasoning_content") or "" for each in deltas) == "First 20."


async def test_a_call_is_not_torn() -> None:
    async with fake(CALLS) as client:
        found = await chat(client, tools=TOOLS, stop=["First", "tool", "}"])
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"a": "First"}'
        assert (found["finish_reason"], found["stop_reason"]) == ("tool_calls", 0)
        # Without tools, it is content.
        found = await chat(client, stop=["First"])
        assert found["message"]["content"] == CALL[: CALL.index("First")]


async def test_other_protocols_are_the_same() -> None:
    async with fake(THINKS) as client:
        body = {"messages": USER, "max_tokens": 200, "stop_sequences": ["First"]}
        message = (await client.post(MESSAGES, {**body, "thinking": {"type": "adaptive"}})).json()
        assert [each.get("thinking") or each.get("text") for each in message["content"]] == [
            "First 20.",
            "42 ",
        ]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "First")
        answer = (await client.post(RESPONSES, {"input": "Hi", "stop_regex": ["First"]})).json()
        assert [each["content"][0]["text"] for each in answer["output"]] == ["First 20.", "42 "]
        # A completion has no formats.
        plain = (await client.post("/v1/completions", {"prompt": "Hi", "stop": ["First"]})).json()
        assert plain["choices"][0]["text"] == "<think>\n"


async def test_chats_in_the_process_are_the_same() -> None:
    config = EngineConfig(model="fake", reasoning_parser="qwen3", tool_call_parser="hermes")
    async with FakeEngine(THINKS, config=config) as engine:
        result = await engine.chat(USER, SamplingParams(stop="First"))
        assert (result.reasoning, result.content, result.finish_reason) == ("First 20.", "42 ", "stop")
        assert result.result.text == THINKS.removesuffix("First")
    async with FakeEngine(CALLS, config=config) as engine:
        result = await engine.chat(USER, SamplingParams(stop="First"), tools=TOOLS)
        assert [call.parsed for call in result.tool_calls] == [{"a": "First"}]
        assert result.finish_reason == "tool_calls"
