"""The real openai client against the running server."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from aioinfer.params import SamplingParams
from aioinfer.server.openai.protocol import Served, parse_completion
from tests.server.conftest import Serving
from tests.toys import ToyTokenizer, toy_generate
from tests.toys.device import toy_logprob

CHAT: Any = [{"role": "user", "content": "Hello there"}]


def expected(prompt_ids: list[int], max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    ids = toy_generate(prompt_ids, params)
    return ToyTokenizer().decode(token for token in ids if token)


async def test_a_chat_completion_answers(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(
            model="toy", messages=CHAT, temperature=0, max_tokens=30
        )
    ids = ToyTokenizer().encode_chat(CHAT)
    assert answer.choices[0].message.content == expected(ids, 30)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.total_tokens == len(ids) + answer.usage.completion_tokens


async def test_a_streamed_chat_has_one_role_one_reason_and_usage(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        stream = await client.chat.completions.create(
            model="toy",
            messages=CHAT,
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    assert [delta.delta.role for delta in deltas if delta.delta.role] == ["assistant"]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [deltas[-1].finish_reason]
    assert "".join(delta.delta.content or "" for delta in deltas) == expected(
        ToyTokenizer().encode_chat(CHAT), 30
    )
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_take_text_lists_and_token_ids(serving: Serving, stream: bool) -> None:
    ids = [5, 6, 7]
    async with serving() as served, served.client(strict=not stream) as client:
        for prompt, wanted in (
            ("abc", [ToyTokenizer().encode("abc")]),
            (["abc", "xyz"], [ToyTokenizer().encode("abc"), ToyTokenizer().encode("xyz")]),
            (ids, [ids]),
            ([ids, [9]], [ids, [9]]),
        ):
            options: Any = {"model": "toy", "prompt": prompt, "temperature": 0, "max_tokens": 12}
            texts = [""] * len(wanted)
            if stream:
                async for chunk in await client.completions.create(**options, stream=True):
                    for choice in chunk.choices:
                        texts[choice.index] += choice.text
            else:
                answer = await client.completions.create(**options)
                for choice in answer.choices:
                    texts[choice.index] += choice.text
            assert texts == [expected(item, 12) for item in wanted], prompt


async def test_n_choices_differ_when_sampled_and_repeat_with_their_seed(serving: Serving) -> None:
    async with serving() as served, served.client() as client:

        async def ask() -> list[str]:
            answer = await client.completions.create(
                model="toy", prompt="abc", n=4, seed=7, max_tokens=20, temperature=1.0
            )
            return [choice.text for choice in answer.choices]

        first, second = await ask(), await ask()
    assert first == second
    assert len(set(first)) > 1


def test_the_parameters_of_further_choices_are_not_checked_again() -> None:
    """Checking large parameters 128 times would block the event loop."""
    body = {"prompt": "abc", "n": 3, "seed": 2**63 - 1, "logit_bias": {"5": 1}}
    call = parse_completion(json.dumps(body).encode(), Served("toy", SamplingParams()))
    chosen = [params for _, params in call.choices()]
    assert [params.seed for params in chosen] == [2**63 - 1, 0, 1]
    assert all(params.logit_bias is chosen[0].logit_bias for params in chosen)


async def test_n_choices_share_the_pages_of_their_prompt(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        answer = await client.completions.create(model="toy", prompt="abcde" * 20, n=4, seed=7, max_tokens=5)
        assert len(answer.choices) == 4
        assert answer.usage.prompt_tokens == 100
        stats = served.engine.stats()
        # At least one token of each prompt is left to compute: 24 of its 25 pages are shared.
        assert stats.cached_tokens == 3 * 96
        assert stats.prefill_tokens == 100 + 3 * 4


async def test_a_bad_argument_is_a_400_that_names_it(serving: Serving) -> None:
    """Found at parsing, at tokenizing or at compiling."""
    refused: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"n": 1000}, "n"),
        ({"messages": []}, "messages"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words"),
        ({"extra_body": {"bad_words": "word"}}, "bad_words"),
        ({"extra_body": {"priority": "high"}}, "priority"),
        ({"extra_body": {"stop_regex": "("}}, "stop_regex"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"guided_json": 7}}, "guided_json"),
        ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ]
    async with serving() as served, served.client() as client:
        for change, param in refused:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(
                        **{"model": "toy", "messages": CHAT, "stream": stream, **change}
                    )
                assert caught.value.param == param


async def test_cached_tokens_are_reported_and_salts_keep_tenants_apart(serving: Serving) -> None:
    async with serving() as served, served.client() as client:

        async def cached(**extra: Any) -> int:
            answer = await client.chat.completions.create(
                model="toy", messages=CHAT, temperature=0, max_tokens=3, extra_body=extra
            )
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        prompt = len(ToyTokenizer().encode_chat(CHAT))
        assert await cached() == 0
        assert await cached() == (prompt - 1) // 4 * 4
        assert await cached(cache_salt="mine") == 0
        assert await cached(cache_salt="mine", priority=1, prompt_cache_key="x") > 0


async def test_logprobs_come_with_every_token_of_a_chat(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        ask: Any = {"model": "toy", "messages": CHAT, "temperature": 0, "max_tokens": 8, "logprobs": True}
        answer = await client.chat.completions.create(**ask)
        logprobs = answer.choices[0].logprobs
        assert len(logprobs.content) == answer.usage.completion_tokens
        assert [entry.bytes for entry in logprobs.content] == [
            list(entry.token.encode()) for entry in logprobs.content
        ]
        streamed: list[Any] = []
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                streamed += (choice.logprobs.content or []) if choice.logprobs else []
        assert [entry.logprob for entry in streamed] == [entry.logprob for entry in logprobs.content]
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await client.chat.completions.create(**{**ask, "logprobs": False}, top_logprobs=3)


async def test_logprobs_of_an_echoed_prompt(serving: Serving) -> None:
    # The type has no null for the first token, which OpenAI itself sends.
    async with serving() as served, served.client(strict=False) as client:
        answer = await client.completions.create(
            model="toy", prompt=[4, 5, 6], temperature=0, max_tokens=4, logprobs=0, echo=True
        )
        logprobs = answer.choices[0].logprobs
        assert "".join(logprobs.tokens).startswith(answer.choices[0].text)
        assert logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1:3] == [toy_logprob(1, 5).logprob, toy_logprob(2, 6).logprob]
        assert logprobs.text_offset[:3] == [0, 1, 2]
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client.completions.create(model="toy", prompt=[4], logprobs=0, echo=True, stream=True)


async def test_response_formats_constrain_the_answer(serving: Serving) -> None:
    async with serving() as served, served.client() as client:

        async def text(**extra: Any) -> str:
            answer = await client.chat.completions.create(
                model="toy", messages=CHAT, max_tokens=40, seed=1, **extra
            )
            return answer.choices[0].message.content or ""

        assert await text(extra_body={"guided_choice": ["bcd", "dcb"]}) in ("bcd", "dcb")
        assert set(await text(extra_body={"structured_outputs": {"regex": "[bc]{7}"}})) <= set("bc")
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["b"]}}}
        with pytest.raises(openai.BadRequestError, match="combined"):
            await text(response_format=form, extra_body={"guided_regex": "a"})
