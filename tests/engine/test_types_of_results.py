"""The types that a program sees: mypy checks them with the rest of the repository."""

from __future__ import annotations

import asyncio
from typing import Any, assert_type

from aioinfer import (
    LLM,
    AioInferError,
    ChatResult,
    ChatRow,
    Embedding,
    Engine,
    Result,
    SamplingParams,
    Scores,
    ThreadsafeEngine,
)
from aioinfer.testing import FakeEngine

CHAT = [{"role": "user", "content": "a"}]


async def of_engines(engine: Engine, threadsafe: ThreadsafeEngine) -> None:
    async for result in engine.map(["a"]):
        assert_type(result, Result)
    async for either in engine.map([[1, 2], [3]], [SamplingParams(), None], on_error="return"):
        assert_type(either, Result | AioInferError)
    async for chat in engine.map([ChatRow(CHAT)]):
        assert_type(chat, ChatResult)
    async for answer in engine.map((ChatRow(CHAT) for _ in range(2)), on_error="return"):
        assert_type(answer, ChatResult | AioInferError)
    assert_type(await engine.embed("a"), Embedding)
    assert_type(await engine.embed([1, 2]), Embedding)
    assert_type(await engine.embed(["a"]), list[Embedding])
    assert_type(await engine.embed([[1], [2]], on_error="return"), list[Embedding | AioInferError])
    assert_type(threadsafe.embed("a").result(), Embedding)
    assert_type(threadsafe.embed(["a"]).result(), list[Embedding])


def of_llms(llm: LLM) -> None:
    assert_type(llm.generate("a"), list[Result])
    assert_type(llm.generate(["a"], on_error="return"), list[Result | AioInferError])
    assert_type(llm.chat(CHAT), list[ChatResult])
    assert_type(llm.chat([ChatRow(CHAT)], on_error="return"), list[ChatResult | AioInferError])
    assert_type(llm.embed("a"), Embedding)
    assert_type(llm.embed(["a"], on_error="return"), list[Embedding | AioInferError])


async def test_results_are_what_their_types_say() -> None:
    async with FakeEngine("x") as engine:
        assert isinstance(await engine.embed([1, 2]), Embedding)
        found = await engine.embed([[1], [2]])
        assert [type(each) for each in found] == [Embedding] * 2
        assert [type(each) async for each in engine.map([ChatRow(CHAT)])] == [ChatResult]


async def test_embeddings_of_another_thread_have_errors_in_their_places() -> None:
    inputs: Any = ["a", 7, "", "x" * 10**6]
    async with FakeEngine("x") as engine:
        remote = engine.threadsafe()
        found = await asyncio.wrap_future(remote.embed(inputs, on_error="return"))
        assert [isinstance(each, AioInferError) for each in found] == [False, True, True, True]


def test_a_ranking_has_the_best_first_and_none_without_a_score() -> None:
    scores = Scores.with_errors(
        Scores([0.1, 0.9, 0.9], usage=Any, tokens=[1, 1, 1]),  # type: ignore[arg-type]
        {1: AioInferError("bad")},
        4,
    )
    assert scores.ranking() == [2, 3, 0]
    assert scores.ranking(1) == [2]
