"""``/v1/messages`` through the real anthropic client, which checks every object against its types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import pytest
from pydantic import BaseModel

from aioinfer.scheduling.step import Step
from aioinfer.server.anthropic.wires import arguments_of
from tests.server.chats import USER, WEATHER, add_tags
from tests.server.conftest import Messages, Serving
from tests.server.event_order import MessageOrder
from tests.server.test_reasoning import OPENS
from tests.server.test_responses import read_events
from tests.server.test_tool_requests import ROUND_TRIP
from tests.tiers import SECONDS, rest

TOOL: Any = {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}
STRICT: Any = {**TOOL, "strict": True}
ASK: Any = {"model": "tiny-chat", "messages": [USER], "max_tokens": 400}


async def both(client: anthropic.AsyncAnthropic, **options: Any) -> Any:
    """The message, whole; its stream has its events in order and says the same."""
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    options = {**ASK, **options, "extra_body": extra}
    whole = await client.messages.create(**options)
    order = MessageOrder()
    async for event in await client.messages.create(**options, stream=True):
        order.take(event.type, event.to_json())
    order.check_ended()
    given = json.loads(whole.to_json())
    for name in ("stop_reason", "stop_sequence", "role", "model"):
        assert order.message[name] == given[name], name
    assert [_compared(each) for each in order.message["content"]] == [
        _compared(each) for each in given["content"]
    ]
    assert order.message["usage"]["output_tokens"] == whole.usage.output_tokens
    return whole


def _compared(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name != "id"}


@rest(SECONDS)
async def test_text_is_answered_whole_and_streamed(messages: Messages) -> None:
    async with messages() as client:
        answer = await both(client)
        blocks = [{"type": "text", "text": text} for text in ("What is ", "20 + 22?")]
        blocks[0]["cache_control"] = {"type": "ephemeral"}
        other = await both(client, messages=[{"role": "user", "content": blocks}])
        begun = [USER, {"role": "assistant", "content": "20 + 22 ="}]
        prefilled = await both(client, messages=begun)
        system = await both(client, system=[{"type": "text", "text": "Be brief."}], max_tokens=5)
    assert answer.content[0].text == other.content[0].text == "20 + 22 = 42"
    # The AI SDK takes no `citations` that are null.
    assert answer.content[0].to_dict() == {"type": "text", "text": "20 + 22 = 42"}
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert prefilled.content[0].text == " 42"
    assert system.usage.input_tokens + system.usage.cache_read_input_tokens > answer.usage.input_tokens


@rest(SECONDS)
async def test_why_a_message_stopped(messages: Messages) -> None:
    async with messages() as client:
        short = await both(client, max_tokens=3)
        assert (short.stop_reason, short.stop_sequence, short.usage.output_tokens) == ("max_tokens", None, 3)
        stopped = await both(client, stop_sequences=["nothing", "22 ="])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "22 =")
        assert stopped.content[0].text == "20 + "
        endless = await both(client, max_tokens=20_000, extra_body={"logit_bias": {"1": -100}})
        assert endless.stop_reason == "model_context_window_exceeded"


@rest(SECONDS)
async def test_an_agent_calls_its_tools_until_the_model_answers(messages: Messages, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(ROUND_TRIP)
    conversation: list[Any] = [USER]
    async with messages(directory) as client:
        for turn in range(2):
            answer = await both(
                client,
                messages=conversation,
                tools=[STRICT],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                extra_body={"seed": turn, "temperature": 0.3},
            )
            (call,) = answer.content
            assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
            jsonschema.validate(call.input, WEATHER)
            # The client's objects are content of the next request.
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
            conversation += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
            ]

        async def count(**change: Any) -> int:
            last = {**conversation[-1], "content": [{**result, **change}, conversation[-1]["content"][1]]}
            options: Any = {"model": "tiny-chat", "tools": [STRICT], "tool_choice": {"type": "auto"}}
            counted = await client.messages.count_tokens(messages=[*conversation[:-1], last], **options)
            return counted.input_tokens

        last = await both(client, messages=conversation, tools=[STRICT], max_tokens=4)
        assert last.usage.input_tokens + last.usage.cache_read_input_tokens == await count()
        blocks = [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}]
        assert await count(content=blocks, is_error=False) == await count()
        assert await count(is_error=True) > await count()


class Sum(BaseModel):
    sign: Literal["plus", "minus"]
    right: bool


@rest(SECONDS)
async def test_the_helpers_of_the_client_work(messages: Messages) -> None:
    async with messages() as client:
        answer = await client.messages.parse(**ASK, output_format=Sum, extra_body={"temperature": 0.5})
        assert isinstance(answer.parsed_output, Sum)
        # The client's own stream assembles calls.
        choice: Any = {"type": "tool", "name": "weather"}
        async with client.messages.stream(**ASK, tools=[STRICT], tool_choice=choice) as events:
            message: Any = await events.get_final_message()
    (call,) = message.content
    assert message.stop_reason == "tool_use"
    jsonschema.validate(call.input, WEATHER)


@rest(SECONDS)
async def test_thinking_is_a_block_of_its_own(messages: Messages, directory: Path) -> None:
    template = directory / "chat_template.jinja"
    opens = OPENS.replace("thinking", "enable_thinking")
    template.write_text("{% if '</think>' in '' %}{% endif %}" + template.read_text() + opens)
    tags = add_tags(directory, "<think>", "</think>", special=False)
    bias = {str(tags["</think>"]): 14, "1": -100}
    async with messages(directory, reasoning_parser="qwen3") as client:

        async def ask(kind: str | None, **more: Any) -> Any:
            thinking = {} if kind is None else {"thinking": {"type": kind, **more}}
            extra = {"logit_bias": bias, "seed": 1, "temperature": 1.5}
            return await both(client, **thinking, max_tokens=60, extra_body=extra)

        enabled = await ask("enabled", budget_tokens=1024)
        assert enabled.content[0].type == "thinking"
        assert enabled.usage.output_tokens_details.thinking_tokens > 0
        omitted = await ask("enabled", budget_tokens=1024, display="omitted")
        assert omitted.content == [
            each.model_copy(update={"thinking": ""}) if each.type == "thinking" else each
            for each in enabled.content
        ]
        assert omitted.usage.output_tokens_details == enabled.usage.output_tokens_details
        for kind in ("disabled", "adaptive", None):
            assert {each.type for each in (await ask(kind)).content} == {"text"}
        # Blocks of an answer are content of the next request.
        earlier = {"role": "assistant", "content": enabled.content}
        again = await both(client, messages=[USER, earlier, USER], max_tokens=3)
        assert again.stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_the_end_of_the_stream(serving: Serving, stream: bool) -> None:
    def fault(step: Step) -> None:
        if step.id == 4:
            raise RuntimeError("planned")

    body = {"messages": [USER], "max_tokens": 200, "ignore_eos": True, "stream": stream}
    async with serving(fault=fault) as served:
        reply = await served.post("/v1/messages", body)
    assert "planned" not in reply.text
    if stream:
        assert read_events(MessageOrder().take, reply.text)[-1] == "error"
    else:
        assert reply.status == 500
    error = reply.events()[-1] if stream else reply.json()
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert error["request_id"] == reply.headers["x-request-id"]


async def test_errors_have_anthropics_form(serving: Serving) -> None:
    async with (
        serving(server={"api_key": "secret"}) as served,
        anthropic.AsyncAnthropic(base_url=served.url, api_key="secret", max_retries=0) as client,
    ):
        options = {**ASK, "model": "toy", "max_tokens": 3, "extra_body": {"ignore_eos": True}}
        assert (await client.messages.create(**options)).stop_reason == "max_tokens"  # with x-api-key
        bearer = anthropic.AsyncAnthropic(base_url=served.url, auth_token="secret", max_retries=0)
        async with bearer:
            assert (await bearer.messages.create(**options)).stop_reason == "max_tokens"
        for change, kind, status in (
            ({"api_key": "wrong"}, "authentication_error", 401),
            ({"model": "other"}, "not_found_error", 404),
            ({"max_tokens": 0}, "invalid_request_error", 400),
        ):
            changed = {**options, **change}
            other = client.with_options(api_key=changed.pop("api_key", "secret"))
            with pytest.raises(anthropic.APIStatusError) as caught:
                await other.messages.create(**changed)
            body: Any = caught.value.body
            assert (caught.value.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
            assert caught.value.request_id == body["request_id"]


LATER = {"role": "system", "content": "# Environment"}
EFFORT = {"role": "system", "output_config": {"effort": "low"}}
NO_EFFORT = {"output_config": {"effort": 5}}
CALL = {"type": "tool_use", "id": "1", "name": "f"}
REFERENCE = {"type": "tool_reference", "tool_name": "weather"}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def result(*blocks: Any) -> dict[str, Any]:
    return said({"type": "tool_result", "tool_use_id": "1", "content": [*blocks]})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
    ({"messages": [said({"type": "image"})]}, "messages[0].content[0].source"),
    ({"messages": [said({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [said({**CALL, "input": {}})]}, "messages[0].content[0].type"),
    ({"messages": [USER, said({**CALL, "input": 5}, role="assistant")]}, "messages[1].content[0].input"),
    ({"messages": [said({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"colour": "red"}, "colour"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": ["a", 5]}, "stop_sequences[1]"),
    ({"temperature": "hot"}, "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": "aloud"}}, "thinking.display"),
    ({"output_config": {"effort": "least"}}, "output_config.effort"),
    ({"messages": [{**USER, "output_config": {"effort": "low"}}]}, "messages[0].output_config"),
    ({"messages": [USER, {**LATER, "clear_at": "noon"}]}, "messages[1].clear_at"),
    ({"messages": [USER, {"role": "system", "output_config": {}}]}, "messages[1].content"),
    ({"messages": [EFFORT, EFFORT, USER], **NO_EFFORT}, "output_config.effort"),
    ({"messages": [USER, {**EFFORT, **NO_EFFORT}, EFFORT]}, "messages[1].output_config.effort"),
    ({"tools": [{**TOOL, "defer_loading": "yes"}]}, "tools[0].defer_loading"),
    ({"tools": [TOOL, {**TOOL, "name": "a b", "defer_loading": True}]}, "tools[1].name"),
    ({"tools": [{"name": "f", "defer_loading": True}]}, "tools[0].input_schema"),
    ({"messages": [{"role": "user", "content": [REFERENCE]}]}, "messages[0].content[0].type"),
    ({"messages": [result({"type": "tool_reference"})]}, "messages[0].content[0].content[0].tool_name"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "type": "function"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL, TOOL]}, "tools[2].name"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
]


@rest(SECONDS)
async def test_refusals_name_the_field_of_the_body(messages: Messages) -> None:
    async with messages() as client:
        for change, field in REFUSED:
            for path in ("", "/count_tokens"):
                if path and not change.keys() & {"messages", "system", "tools", "thinking", "output_config"}:
                    continue
                # Past the client's own types. What is compiled for an answer does not matter to a count.
                body = {
                    key: value for key, value in {**ASK, **change}.items() if not path or key != "max_tokens"
                }
                try:
                    await client.post(f"/v1/messages{path}", body=body, cast_to=object)
                    raised = ""
                except anthropic.BadRequestError as error:
                    raised = str(error.body["error"]["message"])
                assert raised.startswith(f"{field}: ") or (path and field == "output_config.format"), change


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": -Infinity}', "[1]", '{"a": ' * 400 + "1" + "}" * 400, "{"]
)
def test_arguments_that_are_no_json_object_are_kept_as_text(text: str) -> None:
    assert arguments_of(text) == {"INVALID_JSON": text}
    assert arguments_of('{"a": [1.5, null]}') == {"a": [1.5, None]}
    assert arguments_of("") == {}
