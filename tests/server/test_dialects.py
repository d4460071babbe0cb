"""Fields of vLLM's, SGLang's and llama.cpp's dialects, through a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioinfer.chat.answers import ChatFormat
from aioinfer.chat.asking import chat_request
from aioinfer.chat.variables import EFFORTS
from aioinfer.config import ServerConfig
from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.server.anthropic.parsing import parse_message
from aioinfer.server.openai.objects import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from aioinfer.server.openai.protocol import Call, parse_chat, parse_completion
from aioinfer.server.openai.protocol import Served as Offer
from aioinfer.server.responses.parsing import parse_response
from aioinfer.server.responses.stored import StoredResponses
from aioinfer.text.reasoning import Harmony, Qwen3
from tests.server.calls import Http, http
from tests.server.chats import add_tags
from tests.server.conftest import Bundled, Served, Serving, site
from tests.server.test_openapi import violations
from tests.tiers import SECONDS, rest

USER = [{"role": "user", "content": "abc"}]


CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = [CHATS, COMPLETIONS]


async def asked(client: Served | Http, path: str, **body: Any) -> Any:
    """The answer of a chat or a completion, checked against its type; of a stream, its events."""
    chat = path == CHATS
    given = {"messages": USER} if chat else {"prompt": "abcd"}
    reply = await client.post(path, {"max_tokens": 6, **given, **body})
    assert reply.status == 200, reply.text
    if body.get("stream"):
        for event in reply.events():
            assert not violations(ChatChunk if chat else CompletionChunk, event), event
        return reply.events()
    assert not violations(ChatAnswer if chat else CompletionAnswer, reply.json()), reply.text
    return reply.json()


@pytest.mark.parametrize("path", PATHS)
async def test_what_stopped_a_choice_is_told(serving: Serving, path: str) -> None:
    greedy = {"ignore_eos": True, "temperature": 0}
    async with serving() as served:
        first = await asked(served, path, **greedy, return_token_ids=True)
        token = first["choices"][0]["token_ids"][2]
        text = served.engine.tokenizer.decode([token])
        for body, reason in (({}, None), ({"stop_token_ids": [token]}, token), ({"stop": text}, text)):
            answer = await asked(served, path, **greedy, **body)
            assert [choice["stop_reason"] for choice in answer["choices"]] == [reason]
            events = await asked(served, path, **greedy, **body, stream=True, n=2)
            told = [each for event in events for each in event["choices"] if each["finish_reason"]]
            assert [each["stop_reason"] for each in told] == [reason] * 2
            assert sum("stop_reason" in each for event in events for each in event["choices"]) == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("logprobs", [False, True])
async def test_token_ids_of_choices_and_prompts(serving: Serving, path: str, logprobs: bool) -> None:
    chat = path == CHATS
    body: dict[str, Any] = {"seed": 1, "n": 2, "return_token_ids": True}
    if logprobs:
        body |= {"logprobs": True if chat else 1}
    async with serving() as served:
        answer = await asked(served, path, **body)
        prompt = await served.engine.tokenize(USER if chat else "abcd")
        told = [answer] if chat else answer["choices"]
        assert [each["prompt_token_ids"] for each in told] == [prompt] * len(told)
        count = sum(len(each["token_ids"]) for each in answer["choices"])
        assert count == answer["usage"]["completion_tokens"]
        events = await asked(served, path, **body, stream=True)
        for index, choice in enumerate(answer["choices"]):
            parts = [each for event in events for each in event["choices"] if each["index"] == index]
            assert [token for each in parts for token in each.get("token_ids", [])] == choice["token_ids"]
            beside = events if chat else parts
            assert [each["prompt_token_ids"] for each in beside if "prompt_token_ids" in each] == [prompt]
        assert "token_ids" not in json.dumps(await asked(served, path))


async def test_logprobs_name_tokens_by_their_ids(serving: Serving) -> None:
    async with serving() as served:
        body: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True, "seed": 1}
        choice = (await asked(served, COMPLETIONS, **body, logprobs=2))["choices"][0]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names
        assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
        plain = (await asked(served, COMPLETIONS, logprobs=2, seed=1))["choices"][0]
        assert choice["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]
        choice = (await asked(served, CHATS, **body, logprobs=True, top_logprobs=1))["choices"][0]
        names = [f"token_id:{token}" for token in choice["token_ids"]]
        assert [each["token"] for each in choice["logprobs"]["content"]] == names


@pytest.mark.parametrize("path", PATHS)
async def test_logprobs_of_the_prompt(bundled: Bundled, path: str) -> None:
    async with bundled() as model, http(site(model)) as client:
        answer = await asked(client, path, prompt_logprobs=2, return_token_ids=True)
        told = answer if path == CHATS else answer["choices"][0]
        first, *others = told["prompt_logprobs"]
        assert first is None
        for token, found in zip(told["prompt_token_ids"][1:], others, strict=True):
            assert found[str(token)]["logprob"] <= 0
            assert {1, 2} <= {each["rank"] for each in found.values()} <= {1, 2, None}
        assert told.get("logprobs") is None
        zero = await asked(client, path, prompt_logprobs=0)
        told = zero if path == CHATS else zero["choices"][0]
        assert all(len(each) == 1 for each in told["prompt_logprobs"][1:])


async def test_prompts_are_cut_and_have_special_tokens_or_not(bundled: Bundled) -> None:
    async with bundled() as model, http(site(model)) as client:
        whole = await asked(client, COMPLETIONS, return_token_ids=True)
        ids = whole["choices"][0]["prompt_token_ids"]
        body = {"return_token_ids": True, "truncate_prompt_tokens": 2}
        for more in ({}, {"prompt": ids * 500}):
            cut = await asked(client, COMPLETIONS, **body, **more)
            assert cut["choices"][0]["prompt_token_ids"] == ids[-2:]
            assert cut["usage"]["prompt_tokens"] == 2
        assert len((await asked(client, CHATS, **body))["prompt_token_ids"]) == 2
        # As many as leave room for the answer.
        body = {"return_token_ids": True, "truncate_prompt_tokens": -1, "prompt": ids * 500}
        context = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        for most in (1, 20):
            cut = await asked(client, COMPLETIONS, **body, max_tokens=most)
            assert cut["usage"]["prompt_tokens"] == context - most
        # The bundled model has no tokens around texts: both are the same, and are accepted.
        for special in (True, False):
            await asked(client, COMPLETIONS, add_special_tokens=special)


MOST = {"waiting_timeout": 5.0, "running_timeout": 5.0, "max_lag": 8}


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_what_cannot_be_is_refused_by_its_name(parse: Any) -> None:
    """The first field of each body. Of the server, a request may lower the timeouts."""
    given = {"messages": USER, "prompt": "abcd"}
    del given["prompt" if parse is parse_chat else "messages"]
    served = Offer("toy", SamplingParams(), most=MOST)
    bodies: list[dict[str, Any]] = [
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"add_special_tokens": "yes"},
        {"return_token_ids": 1},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 1, "stream": True},
        {"waiting_timeout": 0},
        {"max_lag": 1.5},
        {"waiting_timeout": 6},
        {"running_timeout": 5.5},
        {"max_lag": 9},
        {"max_new_tokens": 3, "max_tokens": 4},
        {"n_predict": -2},
        {"n_predict": -1, "max_tokens": 4},
        {"random_seed": 2, "seed": 1},
        {"repeat_penalty": 1.2},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 5, "thinking_budget": 4},
        {"thinking_end": "a" * 1025},
    ]
    for body in bodies:
        with pytest.raises(InvalidRequest) as refused:
            parse(json.dumps({**given, **body}).encode(), served)
        assert refused.value.field == next(iter(body))


async def test_a_request_may_set_shorter_timeouts(serving: Serving) -> None:
    async with serving(running_timeout=60.0, max_running_requests=1) as served:
        body = {"messages": USER, "max_tokens": 4000, "ignore_eos": True, "running_timeout": 0.001}
        reply = await served.post(CHATS, body)
        assert (reply.status, reply.error["code"]) == (504, "running_timeout")
        reply = await served.post(CHATS, {**body, "running_timeout": 61})
        assert reply.refusal == (400, "running_timeout")


def test_names_of_other_engines_mean_the_same() -> None:
    served = Offer("toy", SamplingParams())

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
    served = Offer("toy", SamplingParams(), format_)
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
        {"reasoning_effort": "highest"},
        {"reasoning_effort": ["high"]},
        {"think": True, "enable_thinking": False},
        {"think": True, "chat_template_kwargs": {variable: False}},
        {"think": "yes"},
        {"thinking": {"type": "enabled", "budget_tokens": 100}},
        {"thinking": {"type": ["enabled"]}},
    ):
        with pytest.raises(InvalidRequest) as caught:
            chat(format_, **fields)
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


def test_an_effort_that_no_template_reads_is_a_budget() -> None:
    thinks = ChatFormat(reasoning=Qwen3, template_names=frozenset({"enable_thinking"}))
    for effort, tokens in EFFORTS.items():
        assert chat(thinks, reasoning_effort=effort).params.thinking_budget == tokens
        call = chat(thinks, reasoning_effort=effort, thinking_token_budget=7)
        assert call.params.thinking_budget == 7
    low = chat(thinks, reasoning_effort="low")
    assert low.chat_template_kwargs is None
    assert low.names["thinking_budget"] == "reasoning_effort"
    # There are no thoughts in the match of an expression, but in the answer before which JSON is required.
    assert chat(thinks, reasoning_effort="low", guided_regex="a*").params.thinking_budget is None
    assert chat(thinks, reasoning_effort="low", guided_json={}).params.thinking_budget == 1024
    with pytest.raises(InvalidRequest, match="chat template"):
        chat(ChatFormat(template_names=frozenset()), reasoning_effort="low")
    reads = ChatFormat(reasoning=Harmony, template_names=frozenset({"reasoning_effort"}))
    assert chat(reads, reasoning_effort="low").params.thinking_budget is None


def test_the_budgets_of_other_protocols() -> None:
    format_ = ChatFormat(reasoning=Qwen3, template_names=frozenset({"enable_thinking"}))
    served = Offer("toy", SamplingParams(), format_, stored=StoredResponses(ServerConfig()))

    def message(**fields: Any) -> Call:
        return parse_message(json.dumps({"messages": USER, "max_tokens": 9, **fields}).encode(), served)

    def response(**fields: Any) -> Call:
        return parse_response(json.dumps({"input": "a", **fields}).encode(), served)

    enabled = {"type": "enabled", "budget_tokens": 1024}
    call = message(thinking=enabled)
    assert (call.params.thinking_budget, call.params.max_tokens) == (1024, 9)
    assert call.names["thinking_budget"] == "thinking.budget_tokens"
    effort = {"output_config": {"effort": "low"}}
    assert message(thinking={**enabled, "budget_tokens": 3}, **effort).params.thinking_budget == 3
    assert message(thinking={"type": "adaptive"}, **effort).params.thinking_budget == 1024
    assert message(thinking={"type": "disabled", "budget_tokens": 3}).params.thinking_budget is None
    assert message(thinking=enabled, thinking_token_budget=4).params.thinking_budget == 4
    call = response(reasoning={"effort": "medium"})
    assert (call.params.thinking_budget, call.repeated["reasoning"]["effort"]) == (8192, "medium")
    assert response(thinking_token_budget=4).params.thinking_budget == 4
    assert response().params.thinking_budget is None


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
    async with bundled(directory, reasoning_parser="qwen3") as model, http(site(model)) as client:

        async def said(content: str, **more: Any) -> list[str]:
            body: dict[str, Any] = {
                "messages": [*USER, {"role": "assistant", "content": content}],
                "continue_final_message": True,
                "temperature": 0,
                "logit_bias": {"1": -100},
            }
            found = await asked(client, CHATS, **body, **more, stream=stream)
            parts = [e["choices"][0]["delta"] for e in found] if stream else [found["choices"][0]["message"]]
            names = ("reasoning_content", "reasoning", "content")
            return ["".join(part.get(name) or "" for part in parts) for name in names]

        thought, same, content = await said("<think>I")
        assert thought == same != ""
        assert content == ""
        assert await said("<think>I", include_reasoning=False) == ["", "", ""]
        assert await said("<think>I", separate_reasoning=False) == ["", "", thought]
        for closed in ("<think>I</think>The", "The"):
            thought, _, content = await said(closed)
            assert (thought, content != "") == ("", True)
        # A grammar goes on there, too.
        _, _, content = await said("<think>I</think>The", guided_json={"enum": ["yes"]}, max_tokens=20)
        assert content == '"yes"'
