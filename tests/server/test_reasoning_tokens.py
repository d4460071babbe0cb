"""How many tokens were reasoning, in the usage of every protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aioinfer import EngineConfig
from aioinfer.config import ServerConfig
from aioinfer.testing import FakeEngine
from tests.server.calls import Http, http
from tests.server.conftest import run_server

THOUGHT = "I add é and è.\n"
ANSWER = f"<think>\n{THOUGHT}</think>\n\n42"
#: a token is a byte
TOKENS = len(THOUGHT.strip().encode())
USER = [{"role": "user", "content": "Hi"}]
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@asynccontextmanager
async def fake(answer: str = ANSWER) -> AsyncIterator[Http]:
    config = EngineConfig(model="fake", num_pages=4096, reasoning_parser="qwen3", tool_call_parser="hermes")
    async with (
        run_server(FakeEngine(answer, config=config), ServerConfig(port=0)) as running,
        http(running.url) as client,
    ):
        yield client


@pytest.fixture
async def site() -> AsyncIterator[Http]:
    async with fake() as client:
        yield client


async def usage(client: Http, path: str, **body: Any) -> Any:
    reply = await client.post(path, body)
    assert reply.status == 200, reply.json()
    return reply.json()["usage"]


async def test_whole_answers_of_all_protocols_have_one_count(site: Http) -> None:
    chat = await usage(site, CHATS, messages=USER)
    response = await usage(site, RESPONSES, input="Hi")
    message = await usage(site, MESSAGES, messages=USER, max_tokens=200, thinking={"type": "adaptive"})
    assert chat["completion_tokens_details"]["reasoning_tokens"] == TOKENS
    assert response["output_tokens_details"]["reasoning_tokens"] == TOKENS
    assert message["output_tokens_details"]["thinking_tokens"] == TOKENS
    async with FakeEngine(ANSWER, config=EngineConfig(model="fake", reasoning_parser="qwen3")) as engine:
        result = await engine.chat(USER)
        assert result.usage.reasoning_tokens == TOKENS
        *_, last = [delta async for delta in engine.chat(USER)]
        assert last.usage is not None
        assert last.usage.reasoning_tokens == TOKENS
        assert (await engine.generate("Hi")).usage.reasoning_tokens == 0


async def test_choices_are_counted_together_and_reasoning_that_is_not_shown_too(site: Http) -> None:
    body = {"messages": USER, "n": 3, "include_reasoning": False}
    found = await usage(site, CHATS, **body)
    assert found["completion_tokens_details"]["reasoning_tokens"] == 3 * TOKENS


async def test_where_the_reasoning_is_content_there_is_no_count(site: Http) -> None:
    found = await usage(site, CHATS, messages=USER, separate_reasoning=False)
    assert "completion_tokens_details" not in found


@pytest.mark.parametrize("answer", ["42", "<think>\n</think>\n42"])
async def test_answers_without_a_thought_have_none(answer: str) -> None:
    async with fake(answer) as client:
        found = await usage(client, CHATS, messages=USER)
        assert found["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_thought_that_is_cut_counts(site: Http) -> None:
    found = await usage(site, CHATS, messages=USER, max_tokens=3)  # words, of which one is the mark
    thought = " ".join(THOUGHT.split()[:2])
    assert found["completion_tokens_details"]["reasoning_tokens"] == len(thought.encode())


@pytest.mark.parametrize("continuous", [False, True])
async def test_streams_tell_at_their_end_and_meanwhile(site: Http, continuous: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    reply = await site.post(CHATS, {"messages": USER, "stream": True, "stream_options": options})
    counts = [event["usage"] for event in reply.events()]
    told = [each["completion_tokens_details"]["reasoning_tokens"] for each in counts if each]
    assert told[-1] == TOKENS
    if continuous:
        assert told[-2] == TOKENS
        assert all(one["completion_tokens_details"]["reasoning_tokens"] <= one["completion_tokens"]
                   for one in counts if one)  # fmt: skip
        assert len(told) > 2
    else:
        assert len(told) == 1
