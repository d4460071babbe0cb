"""Budgets of thought over HTTP: the limit is exact, and the usage of every protocol says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Serving
from tests.server.test_reasoning_tokens import CHATS, MESSAGES, RESPONSES, USER, fake

COMPLETIONS = "/v1/completions"
#: a token is a byte; behind a thought that is cut, what is left of it is content
THOUGHT = "I add. Then I see."
ANSWER = f"<think>{THOUGHT}</think>42"
BUDGETS = [0, 1, 4, len(THOUGHT), len(THOUGHT) + len("</think>"), 500]


def bodies(tokens: int) -> dict[str, list[dict[str, Any]]]:
    """The same budget, in each way to ask for it."""
    thinking = {"type": "enabled", "budget_tokens": tokens}
    chat: dict[str, Any] = {"messages": USER}
    return {
        CHATS: [{**chat, "thinking_token_budget": tokens}, {**chat, "thinking_budget": tokens}],
        RESPONSES: [{"input": "Hi", "thinking_token_budget": tokens}],
        MESSAGES: [
            {**chat, "max_tokens": 200, "thinking": thinking},
            {**chat, "max_tokens": 200, "thinking_token_budget": tokens},
        ],
    }


def read(path: str, body: Any) -> tuple[str, str, int]:
    """Reasoning, content, and how many tokens the usage has for the reasoning."""
    usage = body["usage"]
    if path == CHATS:
        message = body["choices"][0]["message"]
        count = usage["completion_tokens_details"]["reasoning_tokens"]
        return message.get("reasoning_content") or "", message["content"], count
    blocks = body["content"] if path == MESSAGES else body["output"]
    thoughts = [each for each in blocks if each["type"] in ("thinking", "reasoning")]
    (text,) = [each for each in blocks if each["type"] in ("text", "message")]
    details = usage["output_tokens_details"]
    if path == MESSAGES:
        return "".join(each["thinking"] for each in thoughts), text["text"], details["thinking_tokens"]
    thought = "".join(part["text"] for each in thoughts for part in each["content"])
    return thought, text["content"][0]["text"], details["reasoning_tokens"]


@pytest.mark.parametrize("tokens", BUDGETS)
async def test_every_protocol_limits_and_counts_the_same(tokens: int) -> None:
    async with fake(ANSWER) as client:
        for path, several in bodies(tokens).items():
            for body in several:
                reply = await client.post(path, body)
                assert reply.status == 200, reply.text
                reasoning, content, count = read(path, reply.json())
                assert (reasoning, count) == (THOUGHT[:tokens], min(tokens, len(THOUGHT)))
                assert content.endswith("42")
                assert (content == "42") == (tokens >= len(THOUGHT))
        prompt = {"prompt": "Hi", "max_tokens": 200, "thinking_token_budget": tokens}
        text = (await client.post(COMPLETIONS, prompt)).json()["choices"][0]["text"]
        assert text.startswith(f"<think>{THOUGHT[:tokens]}</think>")


async def test_a_stream_is_the_same_and_says_what_was_asked_for() -> None:
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True},
            "thinking_token_budget": 3, "thinking_grace": 9, "thinking_end": " So."}  # fmt: skip
    async with fake(ANSWER) as client:
        events = (await client.post(CHATS, body)).events()
    deltas = [each["choices"][0]["delta"] for each in events if each["choices"]]
    assert "".join(each.get("reasoning_content") or "" for each in deltas) == "I add. So."
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("I add. So.")


async def test_a_model_without_thoughts_refuses_by_the_name_of_the_field(serving: Serving) -> None:
    async with serving() as served:
        for path, body, field in (
            (CHATS, {"messages": USER, "thinking_token_budget": 3}, "thinking_token_budget"),
            (COMPLETIONS, {"prompt": "a", "thinking_budget": 3}, "thinking_budget"),
            (RESPONSES, {"input": "a", "thinking_token_budget": 3}, "thinking_token_budget"),
        ):
            for stream in (False, True):
                reply = await served.post(path, {**body, "stream": stream})
                assert reply.refusal == (400, field)
        # A wish is not.
        reply = await served.post(
            RESPONSES, {"input": "a", "reasoning": {"effort": "low"}, "max_output_tokens": 3}
        )
        assert reply.status == 200
    async with serving(reasoning_parser="qwen3") as served:
        body = {"messages": USER, "thinking_token_budget": 3, "guided_regex": "a"}
        reply = await served.post(CHATS, body)
        assert reply.refusal == (400, "thinking_token_budget")
