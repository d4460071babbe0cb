"""The examples of the engine in process, with scripted answers."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest

from aioinfer import Engine, EngineConfig, OutOfMemory
from aioinfer.testing import Answer, FakeEngine
from examples import agent, custom_policy, extraction, race, tree_search, worker
from tests.engine.test_chat import freed
from tests.tiers import SECONDS, rest


async def test_the_worker_writes_a_line_per_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"Number {n} is" for n in range(300)]

    def answer(prompt: str) -> str | Exception:
        return OutOfMemory("a step") if prompt == prompts[7] else prompt[:-3] + "\n."

    async with FakeEngine(answer) as engine:
        output = io.StringIO()
        assert await worker.work(engine, prompts, output) == 1
        lines = output.getvalue().splitlines()
        assert len(lines) == 300
        assert lines[7] == "failed: a step"
        assert lines[299] == "Number 299 ."
        assert capsys.readouterr().err.endswith(f"[{'#' * 40}] 300/300")


async def test_the_race_ends_with_the_first_good_answer() -> None:
    answers = [Answer("bad"), Answer("good one", delay=0.05), Answer("good two", delay=60.0)]
    async with FakeEngine(answers) as engine:
        assert await race.race(engine, "x", lambda text: "good" in text, n=3) == "good one"
        await freed(engine)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        engine.answers = "bad"
        assert await race.race(engine, "x", lambda text: "good" in text) is None


async def test_the_agent_calls_functions_until_it_has_an_answer() -> None:
    calls = [("multiply", {"a": 17, "b": 23})]
    async with FakeEngine([Answer(tool_calls=calls), "It is 391."]) as engine:
        assert await agent.ask(engine, "What is 17 times 23?") == "It is 391."
        assert engine.requests[-1].prompt.endswith("tool: 391\nassistant: ")
        engine.answers = [Answer(tool_calls=[("divide", {})]), "Sorry."]
        assert await agent.ask(engine, "And divided?") == "Sorry."
        assert engine.requests[-1].prompt.endswith("tool: 0\nassistant: ")  # it can call nothing else
        engine.answers = Answer(tool_calls=calls)
        with pytest.raises(RuntimeError, match="8 turns"):
            await agent.ask(engine, "What?")


async def test_extraction_gives_instances() -> None:
    answers = {"Tom": '{"name": "Tom", "kind": "cat", "age": 14}', "": "no JSON"}
    async with FakeEngine(answers) as engine:
        first, second = await extraction.extract(engine, ["Tom, a cat", "Rex"])
        assert first == extraction.Pet(name="Tom", kind="cat", age=14)
        assert isinstance(second, extraction.Pet)
        engine.answers = '{"name": "Tom", "language": "Python", "language": "Python", "and so on": '
        (pet,) = await extraction.extract(engine, ["a model that writes members without end"])
        assert pet.name == "Tom"


async def test_the_policy_lets_those_go_first_who_must_be_served_soonest() -> None:
    def config(**settings: Any) -> EngineConfig:
        return EngineConfig(model="fake", num_pages=64, overlap_steps=0, max_running_requests=1, **settings)

    reports, chats = ([f"{kind} {n}" for n in range(1, 6)] for kind in ("report", "chat"))
    async with FakeEngine("x", config=config()) as engine:
        assert await custom_policy.order(engine) == reports + chats
    async with FakeEngine("x", config=config(policy=custom_policy.EarliestDeadline)) as engine:
        assert await custom_policy.order(engine) == [*chats, *reports]


@rest(SECONDS)
async def test_the_tree_search_goes_on_where_the_text_is_likely() -> None:
    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        prompt = await engine.tokenize([{"role": "user", "content": "Write a short story about Mira."}])

        async def score(output: list[int]) -> float:
            return await tree_search.fluency(engine, prompt, output)

        best = await tree_search.search(engine, prompt, score, rounds=12)
        assert best.text.startswith("Once there was a child called")
        assert best.token_ids[: len(best.parent.token_ids)] == best.parent.token_ids if best.parent else False
        assert best.total / best.visits > 0.5
        await freed(engine)
        assert asyncio.all_tasks() == {asyncio.current_task()}


@rest(SECONDS)
async def test_pruned_thoughts_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_search, "KEPT", 1)
    asked = 0

    async def score(output: list[int]) -> float:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.Event().wait()
        return 1.0

    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        best = await tree_search.search(engine, await engine.tokenize("Once"), score, rounds=1)
        assert best.visits == 1
        await freed(engine)
        assert asyncio.all_tasks() == {asyncio.current_task()}
