"""Calls with many requests wait for room in the queue, whoever fills it, and lose nothing that is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from aioinfer import ChatResult, ChatRow, EngineConfig, SamplingParams, errors
from aioinfer.testing import Answer, FakeEngine

ONE_AT_A_TIME: Any = {"model": "fake", "num_pages": 256, "overlap_steps": 0, "max_running_requests": 1}


def engine_with(answers: Any = "x", **settings: Any) -> FakeEngine:
    return FakeEngine(answers, config=EngineConfig(**{**ONE_AT_A_TIME, "max_queued_requests": 2, **settings}))


async def fill(engine: FakeEngine) -> list[Any]:
    """Others: as many requests as the queue takes, that never end by themselves."""
    script, engine.answers = engine.answers, Answer("x", delay=1e6)
    held = [engine.generate("other")]
    while not held[0].admitted:
        await asyncio.sleep(0)
    try:
        while True:
            held.append(engine.generate("other"))
            await held[-1].accepted()
    except errors.Rejected:
        engine.answers = script
        return held


async def quiet(engine: FakeEngine, tries: list[int]) -> None:
    """Turns of the loop in which a call that waits must do nothing."""
    for _ in range(20):
        await asyncio.sleep(0)
    before = len(tries)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(tries) == before


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each look whether the queue has room."""
    from aioinfer.loop.service import Service

    seen: list[int] = []
    check = Service.check_room

    def counted(self: Any, tokens: int) -> None:
        seen.append(tokens)
        check(self, tokens)

    monkeypatch.setattr(Service, "check_room", counted)
    return seen


@pytest.mark.parametrize("on_error", ["raise", "return"])
async def test_a_map_waits_while_others_fill_the_queue(tries: list[int], on_error: Any) -> None:
    async with engine_with(lambda prompt: f"<{prompt}>") as engine:
        held = await fill(engine)
        results = asyncio.ensure_future(_all(engine.map(["a", "b", "c"], on_error=on_error)))
        await quiet(engine, tries)
        assert not results.done()
        for stream in held:
            stream.close()
        assert [each.text for each in await results] == ["<a>", "<b>", "<c>"]


async def test_embeddings_wait_while_others_fill_the_queue(tries: list[int]) -> None:
    async with engine_with() as engine:
        held = await fill(engine)
        embedding = asyncio.ensure_future(engine.embed(["a", "b", "c"]))
        await quiet(engine, tries)
        assert not embedding.done()
        for stream in held:
            stream.close()
        assert len(await embedding) == 3


async def test_a_map_waits_for_the_start_of_requests_of_others(tries: list[int]) -> None:
    """One of the others ends, so that another one begins: that is room."""
    async with engine_with() as engine:
        held = await fill(engine)
        results = engine.map(["a"])
        reading = asyncio.ensure_future(anext(results))
        await quiet(engine, tries)
        held[0].close()
        while not engine.requests or engine.requests[-1].prompt != "a":
            await asyncio.sleep(0)
        for stream in held:
            stream.close()
        assert (await reading).text == "x"


async def test_calls_that_wait_for_room_have_it_in_their_turns() -> None:
    """Two have all of it when the third one begins to wait."""
    async with engine_with() as engine:
        calls = (_all(engine.map([name] * 20, concurrency=2)) for name in "abc")
        await asyncio.gather(*calls)
        begun = "".join(each.prompt for each in engine.requests)
    assert begun.index("c") < 6
    assert {*begun[:12]} == {*begun[12:24]} == {*"abc"}


async def test_rows_refused_after_tokenizing_are_tried_again() -> None:
    """A chat's tokens are known late: the queue of tokens is full by then."""
    async with engine_with(max_queued_requests=64, max_queued_tokens=400) as engine:
        chats: Any = [[{"role": "user", "content": "y" * 300}] for _ in range(6)]
        found = [each async for each in engine.map(chats, concurrency=6)]
        assert [each.text for each in found] == ["x"] * 6


async def test_a_scripted_refusal_is_tried_again_and_the_order_is_kept() -> None:
    answers = iter(["a", errors.Rejected("full"), "b", "c"])
    async with engine_with(answers, max_running_requests=4, max_queued_requests=64) as engine:
        assert [each.text async for each in engine.map(["1", "2", "3"])] == ["a", "b", "c"]


async def test_rows_that_wait_end_with_the_engine() -> None:
    async with engine_with() as engine:
        await fill(engine)
        results = asyncio.ensure_future(_all(engine.map(["a"], on_error="return")))
        embedding = asyncio.ensure_future(engine.embed(["a"]))
        for _ in range(20):
            await asyncio.sleep(0)
        engine.lose_device()
        for call in (results, embedding):
            with pytest.raises(errors.EngineFailed):
                await call


# -- what is wrong with all, or with one ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("params", {"params": {"max_tokens": 3}}),
        ("params[1]", {"params": [SamplingParams(), 7]}),
        ("params", {"params": [SamplingParams()] * 3}),
        ("stop_token_ids", {"params": SamplingParams(stop_token_ids=(10**6,))}),
        ("priority", {"priority": "high"}),
        ("adapter", {"adapter": "absent"}),
        ("waiting_timeout", {"waiting_timeout": -1}),
    ],
)
async def test_what_is_wrong_with_all_rows_is_raised_once(field: str, arguments: Any) -> None:
    async with engine_with() as engine:
        with pytest.raises(errors.InvalidRequest) as caught:
            engine.map(["a", "b"], on_error="return", **arguments)
        assert caught.value.field == field


@pytest.mark.parametrize("field", ["pooling", "dimensions", "adapter", "on_error"])
async def test_what_is_wrong_with_all_inputs_is_raised_once(field: str) -> None:
    async with engine_with() as engine:
        options: Any = {"on_error": "return", field: "absent"}
        with pytest.raises(errors.InvalidRequest) as caught:
            await engine.embed(["a", "b"], **options)
        assert caught.value.field == field


async def test_each_row_has_its_parameters() -> None:
    params = [SamplingParams(max_tokens=count) for count in (1, 2, 3)]
    async with engine_with("x y z", max_queued_requests=64) as engine:
        assert [each.text async for each in engine.map(["a", "b", "c"], params)] == ["x", "x y", "x y z"]
        found = [each async for each in engine.map(iter("abcd"), params, on_error="return")]
        assert [getattr(each, "text", None) for each in found] == ["x", "x y", "x y z", None]
        assert isinstance(found[3], errors.InvalidRequest)


class Sum(BaseModel):
    value: int


def weather(city: str) -> str:
    """The weather."""
    return city


async def test_rows_of_chats_have_tools_formats_and_names() -> None:
    def answer(prompt: str) -> Answer:
        if "Rome" in prompt:
            return Answer(tool_calls=[("weather", {"city": "Rome"})])
        return Answer('{"value": 3}')

    def asks(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    rows = [
        ChatRow(asks("Rome?"), id="a", tools=[weather]),
        ChatRow(asks("1 + 2?"), id="b", response_format=Sum, params=SamplingParams(max_tokens=40)),
        ChatRow(asks("?"), id="c", response_format={"type": "nonsense"}, tools=7),  # type: ignore[arg-type]
        ChatRow([], id="d"),
    ]
    async with engine_with(answer, max_queued_requests=64, tool_call_parser="hermes") as engine:
        found = [each async for each in engine.map(rows, on_error="return")]
        calls, parsed, *wrong = found
        assert isinstance(calls, ChatResult)
        assert isinstance(parsed, ChatResult)
        assert [call.name for call in calls.tool_calls] == ["weather"]
        assert parsed.parsed == Sum(value=3)
        assert [each.result.request_id for each in (calls, parsed)] == ["a", "b"]
        assert [type(each) for each in wrong] == [errors.InvalidRequest] * 2
        assert [each.request_id for each in wrong] == ["c", "d"]  # type: ignore[union-attr]


async def test_an_input_that_cannot_be_embedded_is_its_own_error() -> None:
    inputs: Any = ["a", "", "b", 7, "x" * 10**6, "c"]
    async with engine_with(max_queued_requests=64) as engine:
        found = await engine.embed(inputs, on_error="return")
        bad = [at for at, each in enumerate(found) if isinstance(each, errors.InvalidRequest)]
        assert bad == [1, 3, 4]
        assert [found[at].field for at in bad] == ["inputs[1]", "inputs[3]", "inputs[4]"]
        assert "truncate_prompt_tokens" in str(found[4])
        with pytest.raises(errors.InvalidRequest, match="truncate_prompt_tokens"):
            await engine.embed("x" * 10**6)


# -- what was done is not lost ---------------------------------------------------------------------------


async def test_a_map_that_was_left_has_what_was_done() -> None:
    answers = {"slow": Answer("s", delay=1e6), "": "x"}
    async with engine_with(answers, max_running_requests=8, max_queued_requests=64) as engine:
        results = engine.map(["a", "slow", "b", "c"], concurrency=4)
        done = 0

        def progress(count: int, total: int | None) -> None:
            nonlocal done
            done = count

        results._progress = progress
        assert (await anext(results)).text == "x"
        reading = asyncio.ensure_future(anext(results))
        while done < 3:
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert {at: each.text for at, each in (await results.undelivered()).items()} == {2: "x", 3: "x"}


# -- StopAsyncIteration ----------------------------------------------------------------------------------


def _stops(*_: Any) -> None:
    raise StopAsyncIteration


class _Rows:
    def __iter__(self) -> Iterator[str]:
        return self  # type: ignore[return-value]

    def __next__(self) -> str:
        raise StopAsyncIteration


class _Length(list[int]):
    def __len__(self) -> int:
        raise StopAsyncIteration


async def test_no_call_ends_quietly_with_what_its_arguments_raise() -> None:
    async with engine_with(max_queued_requests=64) as engine:
        prompts: list[Any] = [["a"], _Rows(), [_Length([1, 2])]]
        for given, progress in zip(prompts, (_stops, None, None), strict=True):
            with pytest.raises(RuntimeError, match="StopAsyncIteration"):
                await _all(engine.map(given, progress=progress))
        with pytest.raises(RuntimeError, match="StopAsyncIteration"):
            await engine.embed(["a", "b", "c"], progress=_stops)


async def _all(results: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in results]
