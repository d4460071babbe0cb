"""Refusals over HTTP: status, code and the field as the body has it; and what is honoured since it can be."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import pytest

from aioinfer.scheduling.forecast import Forecast, Late
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.sequence import Sequence
from aioinfer.server.openai.fields import ChatBody, CompletionBody
from tests.server.calls import http
from tests.server.chats import tool
from tests.server.conftest import Bundled, Serving, site
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice

CHAT: Any = [{"role": "user", "content": "Hello!"}]
CHOICE = {"structured_outputs": {"choice": ["cat"]}, "allowed_token_ids": [500]}
STOPPED = {"allowed_token_ids": [500], "stop_token_ids": [500], "min_tokens": 1}
#: body -> the field that the refusal names, and words of its message
NOTHING_ALLOWED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_choice": ["cat"], "bad_words": ["cat", "c", "ca"]}, "guided_choice", "bad_words"),
    (CHOICE, "structured_outputs.choice", "allowed"),
    (STOPPED, "allowed_token_ids", "min_tokens"),
    ({"allowed_token_ids": [7], "bad_words": [[7]]}, "bad_words", "allowed_token_ids"),
]


CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_constraints_that_allow_nothing_are_a_400_that_names_them(
    bundled: Bundled, stream: bool
) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    async with bundled() as model, http(site(model)) as client:
        for body, param, words in (*NOTHING_ALLOWED, ({"response_format": bad}, "response_format", "")):
            reply = await client.post(CHATS, {"messages": CHAT, "max_tokens": 4, "stream": stream, **body})
            assert reply.refusal == (400, param)
            assert words in reply.error["message"]


async def test_a_dead_end_within_an_answer_is_a_400_or_the_last_event(bundled: Bundled) -> None:
    body = {"allowed_token_ids": [7, 8], "bad_words": [[8], [7, 7, 7]]}
    ask: Any = {"model": "tiny-chat", "messages": CHAT, "max_tokens": 6, "extra_body": body}
    async with bundled() as client:
        with pytest.raises(openai.BadRequestError, match="after 2 tokens") as caught:
            await client.chat.completions.create(**ask)
        assert (caught.value.param, caught.value.code) == ("bad_words", "constraint_failed")
        with pytest.raises(openai.APIError, match="after 2 tokens") as failed:
            async for _ in await client.chat.completions.create(**ask, stream=True):
                pass
        assert failed.value.code == "constraint_failed"


async def test_biases_of_all_allowed_tokens_leave_them_allowed(bundled: Bundled) -> None:
    body = {"prompt": "a", "max_tokens": 3, "logit_bias": {"7": -100}, "allowed_token_ids": [7]}
    async with bundled() as model, http(site(model)) as client:
        reply = await client.post(COMPLETIONS, body)
        assert reply.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_recognised(serving: Serving, stream: bool) -> None:
    device = ToyDevice(num_pages=64, max_model_len=32)
    long = [{"role": "user", "content": "x" * 100}]
    async with serving(device=device, num_pages=64) as served:
        for path, param, prompt in ((CHATS, "messages", long), (COMPLETIONS, "prompt", [1] * 100)):
            reply = await served.post(path, {param: prompt, "stream": stream})
            assert reply.refusal == (400, param)
            assert reply.error["code"] == "context_length_exceeded"
            assert "maximum context length" in reply.error["message"]


async def test_without_the_extra_the_field_and_the_extra_are_named(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    required: Any = {"tools": [tool("f", {"type": "object"})], "tool_choice": "required"}
    formats = {"tool_call_parser": "hermes"}
    async with serving(**formats) as served, served.client() as client:
        for field, body in (
            ("response_format", {"response_format": schema}),
            ("guided_regex", {"extra_body": {"guided_regex": "a"}}),
            ("tools", required),
        ):
            with pytest.raises(openai.BadRequestError, match=r"aioinfer\[structured\]") as caught:
                await client.chat.completions.create(model="toy", messages=CHAT, max_tokens=2, **body)
            assert caught.value.param == field


async def test_continuous_usage_counts_with_the_events(bundled: Bundled) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": CHAT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True}
    async with bundled() as model, http(site(model)) as client:
        reply = await client.post(CHATS, {**body, "stream_options": options})
    usages = [event["usage"] for event in reply.events()]
    counts = [usage["completion_tokens"] for usage in usages if usage is not None]
    assert len(counts) == len(usages) - 1  # without the event that opens the choice
    assert counts == sorted(counts)
    assert counts[-2:] == [6, 6]
    assert len({usage["prompt_tokens"] for usage in usages if usage is not None}) == 1


@rest(SECONDS)
async def test_the_final_message_can_be_continued(bundled: Bundled) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Once upon"}]
    async with bundled() as model, http(site(model)) as client:

        async def prompt_tokens(**extra: Any) -> int:
            reply = await client.post(CHATS, {"messages": messages, "max_tokens": 1, **extra})
            tokens: int = reply.json()["usage"]["prompt_tokens"]
            return tokens

        plain = await prompt_tokens()
        closed = await prompt_tokens(add_generation_prompt=False)
        continued = await prompt_tokens(continue_final_message=True)
    assert continued < closed < plain


@rest(SECONDS)
async def test_no_value_of_any_field_is_a_fault(serving: Serving) -> None:
    """Values nested as deeply as JSON allows, and long ones: an error shows a part of them."""
    deep, nested = "@deep@", "[" * 940 + '"x"' + "]" * 940  # too deep for an encoder within a test
    async with serving(tool_call_parser="hermes") as served:
        for path, kind, plain in (
            (CHATS, ChatBody, {"messages": CHAT}),
            (COMPLETIONS, CompletionBody, {"prompt": "a"}),
        ):
            for field in sorted(kind.honoured | kind.refused.keys()):
                for value in (deep, "x" * 100_000, {"a": deep}):
                    body = json.dumps({"max_tokens": 1, **plain, field: value}).replace('"@deep@"', nested)
                    reply = await served.post(path, body.encode())
                    assert reply.status in (200, 400, 404), (field, reply.text[:300])
                    assert len(reply.text) < 2000, field


@pytest.mark.parametrize("limit", ["deadline", "ttft_target"])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}], ids=str)
async def test_what_would_be_late_is_429_with_retry_after(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], limit: str
) -> None:
    def late(forecast: Forecast, queues: RequestQueues, sequence: Sequence, now: float) -> Late:
        return Late(limit, 10.2, 7.2 if getattr(sequence.request, limit) == 3 else float("inf"))

    monkeypatch.setattr(Forecast, "late", late)
    async with serving() as served:
        asked = {"prompt": "a", "max_tokens": 3, **more}
        reply = await served.post(COMPLETIONS, {**asked, limit: 3})
        assert (reply.status, reply.headers["Retry-After"]) == (429, "8"), "not before it would be in time"
        assert "in 10.2 s, 7.2 s after its" in reply.error["message"]
        reply = await served.post(COMPLETIONS, {**asked, limit: 4})
        assert (reply.status, reply.headers["Retry-After"]) == (429, "86400")
        assert reply.error["code"] == limit
        assert (await served.post(COMPLETIONS, asked)).status == 200
