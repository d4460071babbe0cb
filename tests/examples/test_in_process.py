"""The examples of the engine in process, with scripted answers, and as programs."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import pytest

from aioinfer import OutOfMemory
from aioinfer.testing import Answer, FakeEngine
from examples import agent, extraction, race, worker
from tests.engine.test_chat import freed
from tests.tiers import PROGRAM, battery

ROOT = Path(__file__).parents[2]


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


@battery(PROGRAM)
@pytest.mark.parametrize("name", ["race", "extraction"])
def test_the_examples_run_as_programs(name: str) -> None:
    command = [sys.executable, f"examples/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
