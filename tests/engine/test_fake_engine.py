"""FakeEngine: scripted answers, and all else as the real engine has it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import jsonschema
import pytest
import uvloop

from aioinfer import EngineConfig, Grammar, SamplingParams, errors
from aioinfer.engine import EngineState
from aioinfer.testing import Answer, FakeEngine, VirtualLoop
from tests.tiers import PROGRAM, SECONDS, rest

pytest_plugins = ["aioinfer.testing.fixtures", "pytester"]

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3}, "s": {"enum": ["x", "y"]}, "l": {"type": "array"}},
    "required": ["n", "s", "l"],
}


async def test_answers_are_for_all_in_order_by_prompt_or_computed(fake_engine: FakeEngine) -> None:
    async with fake_engine as engine:
        engine.answers = "Grüße 😀"
        assert (await engine.generate("a")).text == "Grüße 😀"
        text = ""
        async for chunk in engine.generate("a"):
            text += chunk.text
        assert text == "Grüße 😀"
        engine.answers = iter(["1", Answer("2"), "3"])
        results = await asyncio.gather(*(engine.generate("a") for _ in range(3)))
        assert [each.text for each in results] == ["1", "2", "3"]
        engine.answers = {"weather": "warm", "": "hm"}
        assert (await engine.generate("the weather?")).text == "warm"
        assert (await engine.chat([{"role": "user", "content": "weather"}])).content == "warm"
        assert (await engine.generate("else")).text == "hm"
        engine.answers = lambda prompt: prompt[::-1]
        assert (await engine.generate("abc")).text == "cba"
        prompt = engine.prompt("xyz")
        assert (await engine.generate(prompt)).text == "zyx"
        assert [each.prompt for each in engine.requests][-2:] == ["abc", "xyz"]


@pytest.mark.parametrize("answers", [[], {"weather": "warm"}, lambda prompt: None])
async def test_a_request_without_an_answer_is_refused(answers: Any) -> None:
    async with FakeEngine(answers) as engine:
        with pytest.raises(errors.InvalidRequest, match="no answer for 'Hi'"):
            engine.generate("Hi")


async def test_the_parameters_that_end_an_output_count() -> None:
    async with FakeEngine("one two three") as engine:
        result = await engine.generate("a", SamplingParams(max_tokens=2))
        assert (result.text, result.finish_reason) == ("one two", "length")
        result = await engine.generate("a", SamplingParams(stop=["two"]))
        assert (result.text, result.stop_reason) == ("one ", "two")
        assert (await engine.generate("a", SamplingParams(min_tokens=15))).text == "one two three  "
        assert (await engine.generate("a", SamplingParams(logprobs=0))).logprobs


async def test_grammars_are_obeyed() -> None:
    async with FakeEngine('{"n": 4, "s": "y", "l": []}') as engine:
        params = SamplingParams(grammar=SCHEMA)
        assert (await engine.generate("a", params)).text == engine.answers
        for answers in (None, "I would rather not", '{"n": 12, "s": "z", "l": []}'):
            engine.answers = answers
            found = await engine.generate("a", params)
            jsonschema.validate(json.loads(found.text), SCHEMA)
        choice = SamplingParams(grammar=Grammar("choice", ["yes", "no"]))
        assert (await engine.generate("a", choice)).text in ("yes", "no")
        engine.answers = None
        assert (await engine.generate("a")).text == ""


async def test_failures_are_raised_where_the_engine_raises_them() -> None:
    async with FakeEngine() as engine:
        engine.answers = [
            errors.Rejected("full", 3.0),
            errors.OutOfMemory("a step"),
            Answer("half", error=KeyError("k")),
            "fine",
        ]
        with pytest.raises(errors.Rejected) as full:
            engine.generate("a")
        assert full.value.retry_after == 3.0
        with pytest.raises(errors.OutOfMemory):
            await engine.generate("a")
        stream = engine.generate("a")
        with pytest.raises(errors.StepFailed) as failed:
            await stream
        assert isinstance(failed.value.__cause__, KeyError)
        assert stream.result().text == "half"
        assert (await engine.generate("a")).text == "fine"
        engine.answers = "x" * 100
        stream = engine.generate("a")
        await anext(stream)
        engine.lose_device()
        with pytest.raises(errors.EngineFailed):
            await stream
        assert engine.state is EngineState.FAILED


@rest(SECONDS)
def test_delays_pass_on_the_clock_of_the_loop() -> None:
    async def run() -> tuple[list[str], list[float]]:
        loop = asyncio.get_running_loop()
        answers = {"slow": Answer("slow", delay=20.0), "typed": Answer("abcd", pace=1.0), "": "fast"}
        done: list[str] = []
        times: list[float] = []

        async def ask(prompt: str) -> None:
            done.append((await engine.generate(prompt)).text)
            times.append(loop.time())

        async with FakeEngine(answers, delay=0.5) as engine, asyncio.TaskGroup() as group:
            for prompt in ("slow", "typed", "x"):
                group.create_task(ask(prompt))
        return done, times

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        done, times = runner.run(run())
    assert done == ["fast", "abcd", "slow"]
    # One second for each further token, and the end is one. Steps last 10 ms where nothing is due.
    assert times == pytest.approx([0.5, 4.5, 20.0], abs=0.05)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(run()) == (done, times)


@rest(SECONDS)
def test_steps_in_flight_are_computed_in_their_order() -> None:
    """Timers of uvloop have milliseconds, so one of a later moment can come first."""

    async def run() -> str:
        config = EngineConfig(model="fake", overlap_steps=1, num_pages=4096)
        async with FakeEngine(Answer("x" * 300, pace=0.0007), config=config) as engine:
            return (await engine.generate("a", SamplingParams(max_tokens=300))).text

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == "x" * 300


@rest(PROGRAM)
def test_an_engine_that_is_left_running_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("pytest_plugins = ['aioinfer.testing.fixtures']")
    pytester.makepyfile(
        """
        import asyncio

        def test_left(fake_engine):
            runner = asyncio.Runner()
            runner.run(fake_engine.start())

        def test_closed(fake_engine):
            async def use():
                async with fake_engine:
                    fake_engine.answers = "Hi"
                    assert (await fake_engine.generate("x")).text == "Hi"

            asyncio.run(use())
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-q")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*the engine was left running*"])


@rest(SECONDS)
def test_it_loads_no_torch_and_leaves_nothing() -> None:
    code = """
import asyncio, sys, threading
from aioinfer.testing import FakeEngine

async def use():
    async with FakeEngine("Hi") as engine:
        assert (await engine.chat([{"role": "user", "content": "x"}])).content == "Hi"
    return asyncio.all_tasks() - {asyncio.current_task()}

print(asyncio.run(use()), "torch" in sys.modules, threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set() False 1\n"


def add(a: int, b: int) -> int:
    return a + b


async def test_the_turns_of_an_agent_can_be_asserted() -> None:
    async with FakeEngine([Answer(tool_calls=[("add", {"a": 1, "b": 2})]), "3", "x", "y", "z"]) as engine:
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        answer = await engine.chat(messages, tools=[add])
        messages += [answer.message, answer.tool_calls[0].reply(3)]
        await engine.chat(messages, tools=[add])
        await engine.generate("plain")
        first, second, plain = engine.requests
        assert [each["role"] for each in second.messages or ()] == ["user", "assistant", "tool"]
        assert second.messages is not None
        called = second.messages[1]["tool_calls"][0]["function"]
        assert called["name"] == "add"
        assert 'add({"a": 1, "b": 2})' in second.prompt
        assert first.tools == second.tools
        assert [each["function"]["name"] for each in second.tools or ()] == ["add"]
        assert plain.messages is plain.tools is None
        source = engine.prompt(messages)
        for _ in range(2):
            await engine.generate(source)
            assert len(engine.requests[-1].messages or ()) == 3
            assert engine.requests[-1].tools is None


@pytest.mark.parametrize("size", [1, 3, 384])
async def test_embeddings_have_the_size_that_is_wanted(size: int) -> None:
    async with FakeEngine(embedding_size=size) as engine:
        one, same, other = (each.vector for each in await engine.embed(["a text", "a text", "another"]))
        assert len(one) == len(other) == size
        assert one.tolist() == same.tolist()
        assert size == 1 or one.tolist() != other.tolist()
    async with FakeEngine(embedding_size=size) as again:
        assert (await again.embed("a text")).vector.tolist() == one.tolist()


async def test_scores_are_scripted_or_follow_from_the_texts() -> None:
    async with FakeEngine() as engine:
        found = (await engine.score("q", ["a", "q", "a"])).scores
        assert found[0] == found[2] < found[1] == pytest.approx(1.0)
        engine.scores = {"good": 0.9, "bad": 0.1}
        assert (await engine.score("q", ["a good one", "bad", "?"], method="judge")).scores == [0.9, 0.1, 0.0]
        engine.scores = lambda query, document: len(query) - len(document)
        assert (await engine.score(["abc", "d"], ["x", "yz"], instruction="fit")).scores == [2.0, -1.0]
        with pytest.raises(errors.InvalidRequest, match="documents"):
            await engine.score("q", [])


async def test_max_tokens_counts_words_of_the_script() -> None:
    async with FakeEngine("eins  zwei drei äöü") as engine:
        found = [await engine.generate("a", SamplingParams(max_tokens=most)) for most in (1, 2, 4, 200)]
        assert [each.text for each in found] == ["eins", "eins  zwei", *["eins  zwei drei äöü"] * 2]
        assert [each.finish_reason for each in found] == ["length", "length", "stop", "stop"]
        assert engine.requests[0].params.max_tokens == 1
        engine.answers = Answer(tool_calls=[("add", {"a": 1, "b": 2})])
        chat = await engine.chat(
            [{"role": "user", "content": "?"}], SamplingParams(max_tokens=9), tools=[add]
        )
        assert chat.tool_calls[0].parsed == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["x" * 300, "Grüße " * 50, "一二三" * 100])
async def test_a_script_of_fewer_words_is_not_cut_and_endless_ones_end(text: str) -> None:
    async with FakeEngine(text) as engine:
        result = await engine.generate("a", SamplingParams(max_tokens=50))
        assert (result.text, result.finish_reason) == (text, "stop")
        endless = await engine.generate("a", SamplingParams(max_tokens=500, ignore_eos=True))
        assert endless.text.startswith(text)
        assert endless.finish_reason == "length"


async def test_forks_and_rewound_streams_go_on_in_the_script() -> None:
    async with FakeEngine({"a": Answer("one two three", pace=0.001), "b": "other"}) as engine:
        stream = engine.generate("a")
        text = ""
        async for chunk in stream:
            text += chunk.text
            if len(text) >= 4:
                break
        assert (await engine.generate("b")).text == "other"
        (fork,), (other,) = stream.fork(at=4), stream.fork(at=4, then="TWO")
        assert (await fork).text == "one two three"
        assert (await other).text == "one TWO three"
        stream.rewind(2)
        assert (await stream).text == "one two three"
        stream.inject("ce upon", at=2)
        assert (await stream).text == "once uponhree"


async def test_an_engine_that_fails_has_failed() -> None:
    async with FakeEngine([Answer("half", error=errors.EngineFailed("gone")), "x"]) as engine:
        stream = engine.generate("a")
        with pytest.raises(errors.EngineFailed, match="gone"):
            await stream
        assert stream.result().text == "half"
        assert engine.state is EngineState.FAILED
        with pytest.raises(errors.EngineFailed):
            engine.generate("a")
