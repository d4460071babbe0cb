"""What holds for the adapters of all frameworks, each with the real package."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pydantic import BaseModel

from aioinfer import Engine, EngineConfig, InvalidRequest, WrongLoop
from aioinfer.errors import ConfigError
from aioinfer.parallel.dispatcher import Dispatcher
from aioinfer.testing import Answer, FakeEngine
from tests.integrations.drivers import DRIVERS, Driver, dspy, langchain, llama_index, pydantic_ai
from tests.integrations.libraries import LENIENT
from tests.tiers import SECONDS, rest

pytestmark = [rest(SECONDS), LENIENT]

SUM = "What is 17 + 25?"
CALLING = Answer("I look.", reasoning="Rome", tool_calls=[("weather", {"city": "Rome"})])
#: the first letter comes at once, and no more for an hour
SLOW = Answer("one two three four", pace=3600)
Make = Callable[..., Driver]


class Sign(BaseModel):
    name: str
    open: bool


@pytest.fixture(params=DRIVERS, ids=lambda made: made.__name__)
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(EngineConfig(model="tiny-chat", threads=1, num_pages=256)) as engine:
        yield engine


async def ended(engine: Engine) -> None:
    """Wait until the engine has no request."""
    while engine.stats().running or engine.stats().waiting:
        await asyncio.sleep(0)


async def test_an_answer_is_that_of_the_engine_streamed_or_not(engine: Engine, make: Make) -> None:
    driver = make(engine, temperature=0)
    own = await engine.chat([{"role": "user", "content": SUM}])
    said = await driver.ask(SUM)
    assert said.text == own.content == "17 + 25 = 42"
    assert said.tokens == (own.usage.prompt_tokens, own.usage.completion_tokens)
    assert said.reason == "stop"
    pieces = [piece async for piece in driver.stream(SUM)]
    assert "".join(pieces) == own.content
    assert len([piece for piece in pieces if piece]) > 1


async def test_arguments_of_a_call_go_before_the_usual_ones(engine: Engine, make: Make) -> None:
    driver = make(engine, temperature=0, max_tokens=3)
    cut = await driver.ask(SUM)
    assert (cut.reason, cut.tokens[1]) == ("length", 3)
    assert (await driver.ask(SUM, max_tokens=100)).text == "17 + 25 = 42"
    stopped = await driver.ask(SUM, max_tokens=100, stop=["="])
    assert (stopped.text.strip(), stopped.reason) == ("17 + 25", "stop")


async def test_an_answer_obeys_the_type_that_it_has_to_have(engine: Engine, make: Make) -> None:
    driver = make(engine, temperature=0)
    found = await driver.typed("Write a sign.", Sign)
    assert isinstance(found, Sign)
    assert found.name


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_its_outcome_told(make: Make, streamed: bool) -> None:
    async with FakeEngine([CALLING, "Take an umbrella."]) as engine:
        found = await make(engine).turns("How is the weather in Rome?", streamed=streamed)
        first, second = engine.requests
    assert found == ("weather", {"city": "Rome"}, "Take an umbrella.")
    (tool,) = first.tools or ()
    assert tool["function"]["parameters"]["additionalProperties"] is False
    assert first.params.grammar is not None
    user, called, outcome = second.messages or ()
    assert (user["role"], called["role"], outcome["role"]) == ("user", "assistant", "tool")
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert called["content"] == "I look."
    assert outcome["tool_call_id"] == call["id"]
    assert outcome["content"] == "Rome: rain"


async def test_a_stream_that_is_left_ends_its_request(make: Make) -> None:
    async with FakeEngine(SLOW) as engine:
        driver = make(engine)
        pieces = driver.stream("Go on")
        await anext(pieces)
        assert engine.stats().running == 1
        await pieces.aclose()  # type: ignore[attr-defined]
        await ended(engine)
        engine.answers = "Yes."
        assert (await driver.ask("Are you there?")).text == "Yes."


# The others do not stream to threads.
@pytest.mark.parametrize("make", [langchain, llama_index, dspy], indirect=True)
async def test_a_stream_that_a_thread_leaves_ends_its_request(make: Make) -> None:
    async with FakeEngine(SLOW) as engine:
        driver = make(engine)
        assert await asyncio.to_thread(lambda: next(driver.stream_here("Go on"))) == "o"
        await ended(engine)
        engine.answers = "Yes."
        assert await asyncio.to_thread(driver.ask_here, "Are you there?") == "Yes."


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cancelled_task_ends_its_request(make: Make, streamed: bool) -> None:
    async with FakeEngine(SLOW) as engine:
        driver = make(engine)

        async def read() -> None:
            async for _ in driver.stream("Go on"):
                pass

        task = asyncio.create_task(read() if streamed else _done(driver.ask("Go on")))
        while not engine.stats().running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ended(engine)
        engine.answers = "Yes."
        assert (await driver.ask("Are you there?")).text == "Yes."


async def test_a_thread_waits_and_other_loops_await(engine: Engine, make: Make) -> None:
    for given in (engine, engine.threadsafe()):
        driver = make(given, temperature=0)
        assert await asyncio.to_thread(_elsewhere, driver) == ["17 + 25 = 42"] * 3
        assert (await driver.ask(SUM)).text == "17 + 25 = 42"


def test_a_program_without_a_loop_has_an_engine_in_a_thread(make: Make) -> None:
    with Engine.in_thread(EngineConfig(model="tiny-chat", threads=1, num_pages=256)) as engine:
        assert make(engine, temperature=0).ask_here(SUM) == "17 + 25 = 42"


async def test_an_adapter_outlives_a_restart_and_its_copies_have_the_same_engine(make: Make) -> None:
    engine = FakeEngine("Hello.")
    driver = make(engine)
    for _ in range(2):
        async with engine:
            assert (await driver.ask("Hi")).text == "Hello."
            assert await asyncio.to_thread(driver.ask_here, "Hi") == "Hello."
            driver.model = copy.deepcopy(driver.model)
            assert (await driver.ask("Hi")).text == "Hello."
    with pytest.raises(Exception, match="closed"):
        await driver.ask("Hi")
    assert len(engine.requests) == 6


async def test_several_engines_answer_as_one(make: Make) -> None:
    async with Dispatcher([FakeEngine("Hello."), FakeEngine("Hello.")]) as engine:
        driver = make(engine)
        answers = await asyncio.gather(*(driver.ask("Hi") for _ in range(4)))
        assert [each.text for each in answers] == ["Hello."] * 4


# Those of pydantic-ai run a loop of their own.
@pytest.mark.parametrize("make", [each for each in DRIVERS if each is not pydantic_ai], indirect=True)
async def test_a_synchronous_call_on_the_engines_loop_is_refused(make: Make) -> None:
    async with FakeEngine("Hello.") as engine:
        driver = make(engine)
        with pytest.raises(Exception, match="await the asynchronous one") as caught:
            driver.ask_here("Hi")
        assert isinstance(caught.value, WrongLoop) or isinstance(caught.value.__cause__.__cause__, WrongLoop)
        assert not engine.requests


async def test_errors_name_what_is_wrong(make: Make) -> None:
    async with FakeEngine(
        "Hello.", config=EngineConfig(model="fake", num_pages=64, max_model_len=512)
    ) as engine:
        driver = make(engine)
        with pytest.raises(Exception, match="top_p: must be in"):
            await driver.ask("Hi", top_p=0.0)
        with pytest.raises(Exception, match="maximum context length is 512") as caught:
            await driver.ask("x" * 2000)
        causes = [caught.value, caught.value.__cause__]
        causes += [each.__cause__ for each in causes if each is not None]
        assert any(getattr(each, "code", None) == "context_length_exceeded" for each in causes)
        with pytest.raises((InvalidRequest, ValueError), match="min_p"):
            make(engine, min_p=7)
        with pytest.raises((ConfigError, ValueError), match="or an Engine"):
            make("tiny-chat")
        engine.answers = RuntimeError("the device is on fire")
        with pytest.raises(Exception, match="the device is on fire"):
            await driver.ask("Hi")
        engine.answers = "Hello."
        assert (await driver.ask("Hi")).text == "Hello."


def _elsewhere(driver: Driver) -> list[str]:
    """What a thread gets, streamed or not, and a loop that it runs."""
    return [driver.ask_here(SUM), "".join(driver.stream_here(SUM)), asyncio.run(driver.ask(SUM)).text]


async def _done(asked: Any) -> None:
    await asked
