"""Refusals over HTTP: status, code and the field as the body has it; and what is honoured since it can be."""

from __future__ import annotations

import json
import sys
from typing import Any

import aiohttp
import openai
import pytest

from aioinfer.server.openai.fields import ChatBody, CompletionBody
from tests.server.chats import tool
from tests.server.conftest import Bundled, Serving
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice

CHAT: Any = [{"role": "user", "content": "Hello!"}]
#: body -> the field that the refusal names, and words of its message
NOTHING_ALLOWED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_choice": ["cat"], "bad_words": ["cat", "c", "ca"]}, "guided_choice", "bad_words"),
    (
        {"structured_outputs": {"choice": ["cat"]}, "allowed_token_ids": [500]},
        "structured_outputs.choice",
        "allowed",
    ),
    (
        {"allowed_token_ids": [500], "stop_token_ids": [500], "min_tokens": 1},
        "allowed_token_ids",
        "min_tokens",
    ),
    ({"allowed_token_ids": [7], "bad_words": [[7]]}, "bad_words", "allowed_token_ids"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_constraints_that_allow_nothing_are_a_400_that_names_them(
    bundled: Bundled, stream: bool
) -> None:
    async with bundled() as client:
        for body, param, words in NOTHING_ALLOWED:
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                await client.chat.completions.create(
                    model="tiny-chat", messages=CHAT, max_tokens=4, stream=stream, extra_body=body
                )
            assert caught.value.param == param


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
    async with bundled() as client:
        answer = await client.completions.create(
            model="tiny-chat", prompt="a", max_tokens=3, logit_bias={"7": -100},
            extra_body={"allowed_token_ids": [7]},
        )  # fmt: skip
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_recognised(serving: Serving, stream: bool) -> None:
    device = ToyDevice(num_pages=64, max_model_len=32)
    async with serving(device=device, num_pages=64) as served, served.client() as client:
        for kind, param in (("chat", "messages"), ("completion", "prompt")):
            with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
                if kind == "chat":
                    long: Any = [{"role": "user", "content": "x" * 100}]
                    await client.chat.completions.create(model="toy", messages=long, stream=stream)
                else:
                    await client.completions.create(model="toy", prompt=[1] * 100, stream=stream)
            assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


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


async def test_a_schema_that_does_not_compile_is_an_error_of_its_field(bundled: Bundled) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    async with bundled() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny-chat", messages=CHAT, response_format=bad)
        assert caught.value.param == "response_format"


async def test_continuous_usage_counts_with_the_events(bundled: Bundled) -> None:
    async with bundled() as client:
        stream: Any = await client.chat.completions.create(
            model="tiny-chat", messages=CHAT, max_tokens=6, stream=True, temperature=0,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages) - 1  # without the event that opens the choice
    assert counts == sorted(counts)
    assert counts[-2:] == [6, 6]
    assert len({usage.prompt_tokens for usage in usages if usage is not None}) == 1


@rest(SECONDS)
async def test_the_final_message_can_be_continued(bundled: Bundled) -> None:
    messages: Any = [*CHAT, {"role": "assistant", "content": "Once upon"}]

    async def prompt_tokens(**extra: Any) -> int:
        async with bundled() as client:
            answer = await client.chat.completions.create(
                model="tiny-chat", messages=messages, max_tokens=1, extra_body=extra
            )
            assert answer.usage is not None
            return answer.usage.prompt_tokens

    plain = await prompt_tokens()
    closed = await prompt_tokens(add_generation_prompt=False)
    continued = await prompt_tokens(continue_final_message=True)
    assert continued < closed < plain


async def test_the_id_of_an_answer_can_be_chosen(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        answer = await client.completions.create(
            model="toy", prompt="a", max_tokens=1, extra_body={"request_id": "mine-1"}
        )
        assert answer.id == "cmpl-mine-1"


@rest(SECONDS)
async def test_no_value_of_any_field_is_a_fault(serving: Serving) -> None:
    """Values nested as deeply as JSON allows, and long ones: an error shows a part of them."""
    deep, nested = "@deep@", "[" * 940 + '"x"' + "]" * 940  # too deep for an encoder within a test
    headers = {"Content-Type": "application/json"}
    formats = {"tool_call_parser": "hermes"}
    async with serving(**formats) as served, aiohttp.ClientSession() as session:
        for path, kind, plain in (
            ("chat/completions", ChatBody, {"messages": CHAT}),
            ("completions", CompletionBody, {"prompt": "a"}),
        ):
            for field in sorted(kind.honoured):
                for value in (deep, "x" * 100_000, {"a": deep}):
                    body = {"max_tokens": 1, **plain, field: value}
                    data = json.dumps(body).replace('"@deep@"', nested)
                    url = f"{served.url}/v1/{path}"
                    async with session.post(url, data=data, headers=headers) as response:
                        text = await response.text()
                    assert response.status in (200, 400, 404), (field, text[:300])
                    assert len(text) < 2000, field
