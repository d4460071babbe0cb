"""Fields of vLLM's, SGLang's and llama.cpp's dialects, through a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.asking import chat_request
from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.server.openai.objects import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from aioinfer.server.openai.protocol import Call, Served, parse_chat, parse_completion
from aioinfer.text.reasoning import Harmony, Qwen3
from tests.server.chats import add_tags
from tests.server.conftest import Bundled, Serving
from tests.server.test_openapi import violations
from tests.tiers import SECONDS, rest

USER = [{"role": "user", "content": "abc"}]


async def asked(session: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    """The answer of a chat or a completion, checked against its type; of a stream, its events."""
    chat = path == "chat/completions"
    given = {"messages": USER} if chat else {"prompt": "abcd"}
    async with session.post(path, json={"max_tokens": 6, **given, **body}) as response:
        text = await response.text()
        assert response.status == 200, text
    if body.get("stream"):
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        for event in events:
            assert not violations(ChatChunk if chat else CompletionChunk, event), event
        return events
    answer = json.loads(text)
    assert not violations(ChatAnswer if chat else CompletionAnswer, answer), answer
    return answer


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_what_stopped_a_choice_is_told(serving: Serving, path: str) -> None:
    async with serving() as served, aiohttp.ClientSession(f"{served.url}/v1/") as session:
        first = await asked(session, path, ignore_eos=True, temperature=0, return_token_ids=True)
        token = first["choices"][0]["token_ids"][2]
        text = served.engine.tokenizer.decode([token])  # type: ignore[union-attr]
        for body, reason in (({}, None), ({"stop_token_ids": [token]}, token), ({"stop": text}, text)):
            body = {"ignore_eos": True, "temperature": 0, **body}
            answer = await asked(session, path, **body)
            assert [choice["stop_reason"] for choice in answer["choices"]] == [reason]
            events = await asked(session, path, **body, stream=True, n=2)
            told = [each for event in events for each in event["choices"] if each["finish_reason"]]
            assert [each["stop_reason"] for each in told] == [reason] * 2
            assert sum("stop_reason" in each for event in events for each in event["choices"]) == 2


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_token_ids_of_choices_and_prompts(serving: Serving, path: str, logprobs: bool) -> None:
    chat = path == "chat/completions"
    body: dict[str, Any] = {"seed": 1, "n": 2, "return_token_ids": True}
    if logprobs:
        body |= {"logprobs": True if chat else 1}
    async with serving() as served, aiohttp.ClientSession(f"{served.url}/v1/") as session:
        answer = await asked(session, path, **body)
        prompt = await served.engine.tokenize(USER if chat else "abcd")
        told = [answer] if chat else answer["choices"]
        assert [each["prompt_token_ids"] for each in told] == [prompt] * len(told)
        assert (
            sum(len(each["token_ids"]) for each in answer["choices"]) == answer["usage"]["completion_tokens"]
        )
        events = await asked(session, path, **body, stream=True)
        for index, choice in enumerate(answer["choices"]):
            parts = [each for event in events for each in event["choices"] if each["index"] == index]
            assert [token for each in parts for token in each.get("token_ids", [])] == choice["token_ids"]
            if not chat:
                assert [each["prompt_token_ids"] for each in parts if "prompt_token_ids" in each] == [prompt]
        if chat:
            assert [each["prompt_token_ids"] for each in events if "prompt_token_ids" in each] == [prompt]
        assert "token_ids" not in json.dumps(await asked(session, path))


async def test_logprobs_name_tokens_by_their_ids(serving: Serving) -> None:
    async with serving() as served, aiohttp.ClientSession(f"{served.url}/v1/") as session:
        body: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True, "seed": 1}
        choice = (await asked(session, "completions", **body, logprobs=2))["choices"][0]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
        plain = (await asked(session, "completions", logprobs=2, seed=1))["choices"][0]
        assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
        choice = (await asked(session, "chat/completions", **body, logprobs=True, top_logprobs=1))["choices"][
            0
        ]
        assert [each["token"] for each in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_logprobs_of_the_prompt(bundled: Bundled, path: str) -> None:
    async with bundled() as client, aiohttp.ClientSession(str(client.base_url)) as session:
        answer = await asked(session, path, prompt_logprobs=2, return_token_ids=True)
        told = answer if path == "chat/completions" else answer["choices"][0]
        first, *others = told["prompt_logprobs"]
        assert first is None
        for token, found in zip(told["prompt_token_ids"][1:], others, strict=True):
            assert found[str(token)]["logprob"] <= 0
            assert {1, 2} <= {each["rank"] for each in found.values()} <= {1, 2, None}
        assert told.get("logprobs") is None
        zero = await asked(session, path, prompt_logprobs=0)
        told = zero if path == "chat/completions" else zero["choices"][0]
        assert all(len(each) == 1 for each in told["prompt_logprobs"][1:])


async def test_prompts_are_cut_and_have_special_tokens_or_not(bundled: Bundled) -> None:
    async with bundled() as client, aiohttp.ClientSession(str(client.base_url)) as session:
        whole = (await asked(session, "completions", return_token_ids=True))["choices"][0]["prompt_token_ids"]
        body = {"return_token_ids": True, "truncate_prompt_tokens": 2}
        for more in ({}, {"prompt": whole * 500}):
            cut = await asked(session, "completions", **body, **more)
            assert cut["choices"][0]["prompt_token_ids"] == whole[-2:]
            assert cut["usage"]["prompt_tokens"] == 2
        chat = await asked(session, "chat/completions", **body)
        assert len(chat["prompt_token_ids"]) == 2
        # The bundled model has no tokens around texts: both are the same, and are accepted.
        for special in (True, False):
            await asked(session, "completions", add_special_tokens=special)


@pytest.mark.parametrize(
    ("server", "body", "param"),
    [
        ({}, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({}, {"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({}, {"add_special_tokens": "yes"}, "add_special_tokens"),
        ({}, {"return_token_ids": 1}, "return_token_ids"),
        ({}, {"prompt_logprobs": 21}, "prompt_logprobs"),
        ({}, {"prompt_logprobs": -1}, "prompt_logprobs"),
        ({}, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({}, {"waiting_timeout": 0}, "waiting_timeout"),
        ({}, {"max_lag": 1.5}, "max_lag"),
        ({"waiting_timeout": 5.0}, {"waiting_timeout": 6}, "waiting_timeout"),
        ({"running_timeout": 5.0}, {"running_timeout": 5.5}, "running_timeout"),
        ({"max_lag": 8}, {"max_lag": 9}, "max_lag"),
        ({}, {"max_new_tokens": 3, "max_tokens": 4}, "max_new_tokens"),
        ({}, {"n_predict": -2}, "n_predict"),
        ({}, {"n_predict": -1, "max_tokens": 4}, "n_predict"),
        ({}, {"seed": 1, "random_seed": 2}, "random_seed"),
        ({}, {"repeat_penalty": 1.2}, "repeat_penalty"),
        ({}, {"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
    ids=lambda value: json.dumps(value),
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_what_cannot_be_is_refused_by_its_name(
    serving: Serving, path: str, server: dict[str, Any], body: dict[str, Any], param: str
) -> None:
    given = {"messages": USER} if path == "chat/completions" else {"prompt": "abcd"}
    async with (
        serving(**server) as served,
        aiohttp.ClientSession(f"{served.url}/v1/") as session,
        session.post(path, json={**given, **body}) as response,
    ):
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)


async def test_a_request_may_set_shorter_timeouts(serving: Serving) -> None:
    async with (
        serving(running_timeout=60.0, max_running_requests=1) as served,
        aiohttp.ClientSession(f"{served.url}/v1/") as session,
    ):
        body = {"messages": USER, "max_tokens": 4000, "ignore_eos": True, "running_timeout": 0.001}
        async with session.post("chat/completions", json=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (504, "running_timeout")


def test_names_of_other_engines_mean_the_same() -> None:
    served = Served("toy", SamplingParams())

    def params(**fields: Any) -> SamplingParams:
        return parse_completion(json.dumps({"prompt": "a", **fields}).encode(), served).params

    assert params(max_new_tokens=3, min_new_tokens=2, random_seed=7) == params(
        max_tokens=3, min_tokens=2, seed=7
    )
    assert params(n_predict=3) == params(max_tokens=3)
    assert params(n_predict=-1).max_tokens is None
    assert params().max_tokens == 16


# -- thinking ------------------------------------------------------------------------------------------


def chat(format_: ChatFormat, **fields: Any) -> Call:
    served = Served("toy", SamplingParams(), format_)
    return parse_chat(json.dumps({"messages": USER, **fields}).encode(), served)


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_thinking_is_the_variable_of_the_template(variable: str) -> None:
    format_ = ChatFormat(reasoning=Qwen3, template_names=frozenset({variable}))
    for value in (True, False):
        state = {"type": "enabled" if value else "disabled"}
        for fields in ({"enable_thinking": value}, {"think": value}, {"thinking": value}, {"thinking": state},
                       {"thinking": state, "chat_template_kwargs": {variable: value}}):  # fmt: skip
            assert chat(format_, **fields).chat_template_kwargs == {variable: value}
    assert chat(format_, reasoning_effort="none").chat_template_kwargs == {variable: False}
    for fields in (
        {"reasoning_effort": "high"},
        {"think": True, "enable_thinking": False},
        {"think": True, "chat_template_kwargs": {variable: False}},
        {"think": "yes"},
        {"thinking": {"type": "enabled", "budget_tokens": 100}},
        {"thinking": {"type": ["enabled"]}},
    ):
        with pytest.raises(InvalidRequest) as caught:
            chat(format_, **fields)  # type: ignore[arg-type]
        assert caught.value.field.split(".")[0] in fields


def test_thinking_without_a_variable_is_refused_where_the_model_thinks() -> None:
    thinks = ChatFormat(reasoning=Harmony, template_names=frozenset({"thinking", "reasoning_effort"}))
    does_not = ChatFormat(template_names=frozenset())
    for format_, value in ((thinks, True), (thinks, False), (does_not, True)):
        with pytest.raises(InvalidRequest, match="chat template") as caught:
            chat(format_, enable_thinking=value)
        assert caught.value.field == "enable_thinking"
    assert chat(does_not, thinking={"type": "disabled"}).chat_template_kwargs is None
    assert chat(thinks, reasoning_effort="none").chat_template_kwargs == {"reasoning_effort": "none"}


def test_where_the_answer_to_a_continued_message_begins() -> None:
    format_ = ChatFormat(reasoning=Qwen3)
    for content, begins in (
        ("<think>I shall", "<think>"),
        ([{"type": "text", "text": "<think>I "}, {"type": "text", "text": "shall"}], "<think>"),
        ("<think>no</think>The answer", "</think>"),
        ("The answer is", "</think>"),
        ("", None),
        (None, None),
    ):
        assert format_.continued({"role": "assistant", "content": content}) == begins
    assert ChatFormat().continued({"content": "<think>a"}) is None
    messages = [*USER, {"role": "assistant", "content": "<think>I"}]
    switches = {"continue_final_message": True}
    assert chat(format_, messages=messages, **switches).answer == chat_request(
        format_, messages, SamplingParams(), chat_template_kwargs=switches
    ).answer  # fmt: skip


@rest(SECONDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_goes_on_where_the_last_message_ends(
    bundled: Bundled, directory: Path, stream: bool
) -> None:
    add_tags(directory, "<think>", "</think>", special=False)
    async with (
        bundled(directory, reasoning_parser="qwen3") as client,
        aiohttp.ClientSession(str(client.base_url)) as session,
    ):

        async def said(content: str, **more: Any) -> tuple[str, str, str]:
            messages = [*USER, {"role": "assistant", "content": content}]
            bias = {str(token): -100 for token in (1,)}
            body = {
                "messages": messages,
                "continue_final_message": True,
                "temperature": 0,
                "logit_bias": bias,
            }
            found = await asked(session, "chat/completions", **body, **more, stream=stream)
            parts = [e["choices"][0]["delta"] for e in found] if stream else [found["choices"][0]["message"]]
            names = ("reasoning_content", "reasoning", "content")
            return tuple("".join(part.get(name) or "" for part in parts) for name in names)  # type: ignore[return-value]

        thought, same, content = await said("<think>I")
        assert thought == same != ""
        assert content == ""
        assert await said("<think>I", include_reasoning=False) == ("", "", "")
        assert await said("<think>I", separate_reasoning=False) == ("", "", thought)
        for closed in ("<think>I</think>The", "The"):
            thought, _, content = await said(closed)
            assert thought == ""
            assert content != ""
        # A grammar goes on there, too.
        _, _, content = await said("<think>I</think>The", guided_json={"enum": ["yes"]}, max_tokens=20)
        assert content == '"yes"'
