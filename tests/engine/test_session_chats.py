"""Chats in sessions: messages, answers with reasoning and calls, whoever reads them, and where they part."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from aioinfer import ChatStream, EngineConfig, SamplingParams, errors
from aioinfer.engine import Engine
from aioinfer.testing import Answer, FakeEngine
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.tiers import SECONDS, rest

CALLING = Answer("Let me look.", reasoning="They want it.", tool_calls=[("weather", {"city": "Rome"})])
USER = {"role": "user", "content": "How warm is it in Rome?"}
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: warm"


async def read(chat: ChatStream, way: str) -> dict[str, Any] | None:
    """Read an answer; returns the message, as far as its reader knows it."""
    if way == "await":
        return (await chat).message
    if way == "iterate":
        calls: list[str] = []
        async for delta in chat:
            calls += [call.id for call in delta.tool_calls if call.id]
        return {"ids": calls}
    if way == "half":
        await anext(chat)
    while not chat.done:
        await asyncio.sleep(0)
    return None


@pytest.mark.parametrize("way", ["await", "iterate", "close", "drop", "half"])
async def test_the_answer_becomes_a_message_whoever_reads_it(way: str) -> None:
    async with FakeEngine([CALLING, "It is warm."]) as engine:
        session = engine.session(tools=[weather])
        chat = session.chat("How warm is it in Rome?")
        seen = await read(chat, way)
        if way == "close":
            chat.close()
        if way in ("drop", "half"):
            del chat
            gc.collect()
        question, answer = session.messages
        assert question == USER
        assert (answer["content"], answer["reasoning_content"]) == ("Let me look.", "They want it.")
        (call,) = answer["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        if way == "await":
            assert answer == seen
        if way == "iterate":
            assert seen == {"ids": [call["id"]]}
        reply = {"role": "tool", "tool_call_id": call["id"], "content": "Rome: warm"}
        second = await session.chat(reply)
        assert second.content == "It is warm."
        assert session.messages == [question, answer, reply, second.message]


async def test_an_answer_that_may_still_be_read_is_waited_for(make_engine: MakeEngine) -> None:
    """Its reader and the session must name its calls alike."""
    async with make_engine(num_pages=256) as engine:
        session = engine.session()
        chat = session.chat("hi", GREEDY)
        while not chat.done:
            await asyncio.sleep(0)
        with pytest.raises(errors.InvalidRequest, match="session: has an answer that is not read"):
            session.chat("more", GREEDY)
        fork = session.fork()
        first = await chat
        assert fork.messages == session.messages == [{"role": "user", "content": "hi"}, first.message]
        await session.chat("more", GREEDY)
        await settle(engine)


async def test_messages_are_copies(make_engine: MakeEngine) -> None:
    given = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    async with make_engine(num_pages=256) as engine:
        session = engine.session()
        stream = session.chat(given, GREEDY)
        given[0]["content"] = "changed"
        await stream
        session.messages[0]["content"] = "changed"
        session.messages.clear()
        assert session.messages[0] == {"role": "system", "content": "be"}
        assert len(session.messages) == 3


async def test_a_chat_says_what_it_says_without_a_session(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=256) as engine, engine.session() as session:
        messages: list[dict[str, Any]] = []
        for text in ("one", "two", "three"):
            messages.append({"role": "user", "content": text})
            own = await session.chat(text, GREEDY)
            async with make_engine(num_pages=256, prefix_cache=False) as other:
                plain = await other.chat(messages, GREEDY)
            assert own.result.token_ids == plain.result.token_ids
            messages.append(plain.message)
            assert session.messages == messages
            assert session.token_ids == (*own.result.prompt_token_ids, *own.result.token_ids)
            assert session.held_tokens == (session.num_tokens - 1) // 4 * 4
        session.close()
        await settle(engine)


async def test_turns_that_fail_are_not_among_the_messages() -> None:
    async with FakeEngine(["one", errors.StepFailed("planted"), "three"]) as engine:
        session = engine.session()
        await session.chat("1")
        before = session.messages
        with pytest.raises(errors.StepFailed):
            await session.chat("2")
        cut = session.chat("3")
        cut.close()
        while session.in_turn:
            await asyncio.sleep(0)
        assert session.messages == before


@pytest.mark.parametrize(
    ("messages", "field"),
    [(3, "messages"), ([1], "messages"), ([{"content": "x"}], "messages"), ([], "messages")],
    ids=str,
)
async def test_what_is_no_message_is_refused(make_engine: MakeEngine, messages: Any, field: str) -> None:
    async with make_engine() as engine:
        session = engine.session()
        with pytest.raises(errors.InvalidRequest) as refused:
            session.chat(messages)
        assert refused.value.field.startswith(field)
        assert session.messages == []
        assert not session.in_turn


async def test_a_reader_of_its_own_says_what_the_answer_is(make_engine: MakeEngine) -> None:
    """As the HTTP server does, whose streams are parsed by its own code."""
    async with make_engine(num_pages=256) as engine:
        session = engine.session()
        given = [{"role": "user", "content": "hi"}]
        asked, prompt = engine.asked_chat(given, GREEDY)
        stream, answer = session.turn(asked, prompt, given)
        with pytest.raises(errors.InvalidRequest, match="turn under way"):
            session.turn(asked, prompt, given)
        await stream
        answer.answered({"role": "assistant", "content": "as it was read"})
        assert session.messages[-1]["content"] == "as it was read"
        second = [*session.messages, {"role": "user", "content": "more"}]
        asked, prompt = engine.asked_chat(second, GREEDY)
        stream, _ = session.turn(asked, prompt, second[2:])
        result = await stream
        del stream
        assert session.messages == [*second, {"role": "assistant", "content": result.text}]


@pytest.mark.native
@rest(SECONDS)
async def test_the_bundled_model_remembers_and_computes_the_new_tokens_only() -> None:
    """Ten forks with ten seeds, against ten requests without a cache, in deterministic mode: to the bit."""
    long = "Tell me a story about a small fox, a purple bird and a very old tree in the woods. " * 6
    settings: dict[str, Any] = {"deterministic": True, "threads": 1}
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=12, logprobs=1) for seed in range(10)]
    async with Engine(EngineConfig(**settings)) as engine, engine.session() as session:
        first = await session.generate(long, params[0])
        before = session.num_tokens
        forks = [session.fork() for _ in params]
        results = await asyncio.gather(
            *(fork.generate(" And then", each) for fork, each in zip(forks, params, strict=True))
        )
        for result in results:
            assert result.usage.cached_tokens >= (before - 1) // 16 * 16 > 100
        prompts = [[*result.prompt_token_ids] for result in results]
        session.close()
        for fork in forks:
            fork.close()
        await settle(engine)
    async with Engine(EngineConfig(**settings, prefix_cache=False)) as engine:
        assert (await engine.generate(long, params[0])).token_ids == first.token_ids
        for result, prompt, each in zip(results, prompts, params, strict=True):
            plain = await engine.generate(prompt, each)
            assert (result.token_ids, result.logprobs) == (plain.token_ids, plain.logprobs)
