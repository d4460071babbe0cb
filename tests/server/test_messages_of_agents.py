"""``/v1/messages`` as agents use it: Claude Code, and the tool runners of Anthropic's packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import anthropic
import pytest

from tests.server.chats import USER
from tests.server.conftest import Messages
from tests.server.test_messages import ASK, LATER, REFERENCE, TOOL, result
from tests.server.test_tool_requests import ROUND_TRIP
from tests.tiers import SECONDS, rest

#: of Qwen 3.5, for example
BEGINS_WITH_SYSTEM = (
    "{%- for m in messages if m.role == 'system' and m != messages[0] -%}"
    "{{ raise_exception('a late system message') }}{%- endfor -%}"
)


@pytest.mark.parametrize("template", ["", BEGINS_WITH_SYSTEM], ids=["any-order", "system-first"])
async def test_what_claude_code_sends_is_accepted(messages: Messages, directory: Path, template: str) -> None:
    file = directory / "chat_template.jinja"
    file.write_text(template + file.read_text())
    body = {
        **ASK,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "system", "content": [{"type": "text", "text": "# Environment"}]},
        ],
        "max_tokens": 4,
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "tools": [
            {**TOOL, "name": "ToolSearch"},
            {**TOOL, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": False,
    }
    # With the name of a model that it knows.
    medium = {"output_config": {"effort": "medium"}}
    known = {
        "messages": [USER, {**LATER, **medium}, {"role": "system", **medium}],
        "thinking": {"type": "adaptive", "display": "omitted"},
        **medium,
    }
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14", "anthropic-version": "2023-06-01"}
    async with messages(directory) as client:
        for change in ({}, known):
            answer: Any = await client.post(
                "/v1/messages?beta=true", body=body | change, options={"headers": headers}, cast_to=object
            )
            assert answer["stop_reason"] == "max_tokens"


@rest(SECONDS)
async def test_what_a_system_message_says_counts_while_it_is_there(
    messages: Messages, directory: Path
) -> None:
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ reasoning_effort }}")
    async with messages(directory) as client:

        async def count(*conversation: Any, **options: Any) -> int:
            options = {"model": "tiny-chat", "messages": [*conversation], **options}
            return (await client.messages.count_tokens(**options)).input_tokens

        cleared = {**LATER, "clear_at": "next_user_message"}
        kept = {**LATER, "clear_at": "never"}
        answer = {"role": "assistant", "content": "hm"}
        assert await count(USER, cleared) == await count(USER, kept) == await count(USER, LATER)
        assert await count(USER, cleared, answer, USER) == await count(USER, answer, USER)
        assert await count(USER, kept, answer, USER) == await count(USER, LATER, answer, USER)

        def at(effort: str) -> Any:
            return {"role": "system", "output_config": {"effort": effort}}

        efforts = {each: await count(USER, output_config={"effort": each}) for each in ("low", "medium")}
        assert efforts["low"] != efforts["medium"]
        later = [at("high"), USER, at("low")]
        assert await count(USER, *later, output_config={"effort": "medium"}) == await count(
            USER, USER, output_config={"effort": "low"}
        )


async def test_the_model_learns_of_a_deferred_tool_when_a_result_refers_to_it(
    messages: Messages, directory: Path
) -> None:
    (directory / "chat_template.jinja").write_text(ROUND_TRIP)
    call = {"type": "tool_use", "id": "1", "name": "find", "input": {"days": 1}}
    asked = [USER, {"role": "assistant", "content": [call]}]
    find, deferred = {**TOOL, "name": "find"}, {**TOOL, "defer_loading": True}
    async with messages(directory) as client:

        async def count(tools: list[Any], *blocks: Any, **options: Any) -> int:
            conversation = [*asked, result(*blocks)] if blocks else [USER]
            options = {"model": "tiny-chat", "messages": conversation, "tools": tools, **options}
            return (await client.messages.count_tokens(**options)).input_tokens

        text = {"type": "text", "text": "weather\n"}
        assert await count([find, deferred]) == await count([find]) < await count([find, TOOL])
        assert await count([find, deferred], text) == await count([find], text)
        # The model reads the name in the result.
        assert await count([find, deferred], REFERENCE) == await count([find, TOOL], text)
        named = {"tool_choice": {"type": "tool", "name": "weather"}}
        assert await count([find, deferred], **named) == await count([find, TOOL], **named)
        # Nobody could run Anthropic's own search.
        search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
        assert await count([find, deferred, search]) == await count([find, TOOL])


@rest(SECONDS)
async def test_agents_of_the_client_go_on_without_threads(messages: Messages) -> None:
    called: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        called.append(city)
        return "rain"

    async with messages() as client:
        options: Any = {**ASK, "tools": [weather], "tool_choice": {"type": "any"}, "max_iterations": 2}
        runner = client.beta.messages.tool_runner(**options)
        assert (await runner.until_done()).stop_reason == "tool_use"
        with pytest.raises(anthropic.BadRequestError, match=r"thread: .*send the whole") as caught:
            await client.beta.messages.create(**ASK, thread={"type": "create"})
    assert called
    error: Any = caught.value.body
    assert error["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


async def test_the_model_is_listed(messages: Messages) -> None:
    async with messages() as client:
        (model,) = [each async for each in client.models.list()]
        assert (model.id, model.type, model.display_name) == ("tiny-chat", "model", "tiny-chat")
        assert await client.models.retrieve("tiny-chat") == model
