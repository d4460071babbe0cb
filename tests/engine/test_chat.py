"""``engine.chat``: the answers of the HTTP API in this process, whole, streamed, cut short and refused."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime
import enum
import gc
import json
import sys
import typing
from dataclasses import replace
from typing import Annotated, Any, Literal

import pydantic
import pytest
from typing_extensions import TypedDict

from aioinfer import ChatStream, SamplingParams, ToolCall, errors
from aioinfer.chat.functions import tool_of
from aioinfer.client.engine_like import EngineLike
from aioinfer.testing import Answer, FakeEngine
from tests.tiers import SECONDS, nightly, rest

USER = [{"role": "user", "content": "How warm is it in Rome?"}]
CALLING = Answer(
    "Let me look.", reasoning="They want\nthe weather.", tool_calls=[("weather", {"city": "Rome", "days": 2})]
)


def weather(city: str, days: Annotated[int, "from today on"] = 1) -> str:
    """The weather of a city."""
    return f"{city}: {days} warm days"


class Pet(pydantic.BaseModel):
    """A pet."""

    name: str
    kind: Literal["cat", "dog"]


async def deltas(chat: ChatStream) -> tuple[str, str, list[tuple[str | None, str | None, str]], Any]:
    content, reasoning, calls, reason = "", "", [], None
    async for delta in chat:
        assert reason is None
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.id is not None:
                calls.append((call.id, call.name, call.arguments))
            else:
                known = calls[call.index]
                calls[call.index] = (known[0], known[1], known[2] + call.arguments)
        reason = delta.finish_reason
        assert (delta.usage is None) == (reason is None)
    return content, reasoning, calls, reason


# -- answers -------------------------------------------------------------------------------------------


async def test_an_answer_is_split_into_reasoning_content_and_calls() -> None:
    async with FakeEngine(CALLING) as engine:
        result = await engine.chat(USER, tools=[weather])
        assert (result.content, result.reasoning) == ("Let me look.", "They want\nthe weather.")
        (call,) = result.tool_calls
        assert (call.name, call.parsed) == ("weather", {"city": "Rome", "days": 2})
        assert json.loads(call.arguments) == call.parsed
        assert result.finish_reason == "tool_calls"
        assert replace(result.usage, reasoning_tokens=0) == result.result.usage
        assert result.result.text == CALLING.text

        chat = engine.chat(USER, tools=[weather])
        content, reasoning, calls, reason = await deltas(chat)
        assert (content, reasoning, reason) == (result.content, result.reasoning, "tool_calls")
        # Awaited behind the deltas, it is the same answer, its ids included.
        again = await chat
        assert [(each.id, each.name, each.arguments) for each in again.tool_calls] == calls
        assert again.content == content


async def test_a_chat_goes_on_with_the_messages_of_results_and_calls() -> None:
    async with FakeEngine([CALLING, "Warm."]) as engine:
        first = await engine.chat(USER, tools=[weather])
        replies = [call.reply(weather(**call.parsed)) for call in first.tool_calls]
        assert (await engine.chat([*USER, first.message, *replies], tools=[weather])).content == "Warm."
        assert "tool: Rome: 2 warm days\n" in engine.requests[-1].prompt
    assert ToolCall("a", "f", "{}").reply({"warm": True})["content"] == '{"warm": true}'


async def test_the_rest_of_a_chat_that_was_read_in_part_can_be_awaited() -> None:
    async with FakeEngine(CALLING) as engine:
        chat = engine.chat(USER, tools=[weather])
        first = await anext(chat)
        result = await chat
        assert (result.reasoning or "").startswith(first.reasoning)
        assert result.content == "Let me look."
        assert (await chat) is result
        assert [delta async for delta in engine.chat(USER, tools=[weather])][-1].finish_reason == "tool_calls"


async def test_a_chat_is_rewritten_behind_what_was_read_of_it_and_before_its_end() -> None:
    async with FakeEngine(CALLING) as engine:
        chat = engine.chat(USER, tools=[weather])
        await anext(chat)
        read = chat.cell.taken_ids
        assert read > 0
        with pytest.raises(errors.InvalidRequest, match=f"to: a chat or session knows that {read} of its"):
            chat.stream.rewind(read - 1)
        chat.stream.rewind(read)
        result = await chat
        assert (result.content, result.reasoning) == ("Let me look.", CALLING.reasoning)
        with pytest.raises(errors.InvalidRequest, match="it has ended: fork it instead"):
            chat.stream.rewind(read)
        assert (await chat.stream.fork(at=read)[0]).text == chat.stream.result().text


async def test_without_formats_all_is_content() -> None:
    from aioinfer import EngineConfig

    config = EngineConfig(model="fake", num_pages=64, tool_call_parser=None, reasoning_parser=None)
    async with FakeEngine(CALLING, config=config) as engine:
        result = await engine.chat(USER)
        assert (result.content, result.reasoning, result.tool_calls) == (CALLING.text, None, [])
        assert (await deltas(engine.chat(USER)))[0] == CALLING.text
        with pytest.raises(errors.InvalidRequest, match="tool_call_parser"):
            engine.chat(USER, tools=[weather])


# -- tools ---------------------------------------------------------------------------------------------


async def test_required_tools_are_called_as_their_signatures_say() -> None:
    async with FakeEngine() as engine:
        result = await engine.chat(USER, tools=[weather, Pet], tool_choice=weather)
        assert [call.name for call in result.tool_calls] == ["weather"]
        assert weather(**result.tool_calls[0].parsed)
        result = await engine.chat(USER, tools=[weather, Pet], tool_choice=Pet)
        assert isinstance(result.tool_calls[0].parsed, Pet)
        result = await engine.chat(USER, tools=[weather], tool_choice="none")
        assert (result.tool_calls, result.content) == ([], "")


def test_a_signature_becomes_a_schema() -> None:
    def f(
        a: str, b: Literal["x", 2], c: list[dict[str, float]], d: int | None = None, *, e: bool = False
    ) -> None:
        """Does it."""

    function = tool_of("tools[0]", f)["function"]
    assert (function["name"], function["description"], function["strict"]) == ("f", "Does it.", True)
    schema = function["parameters"]
    assert (schema["required"], schema["additionalProperties"]) == (["a", "b", "c"], False)
    assert schema["properties"] == {
        "a": {"type": "string"},
        "b": {"enum": ["x", 2]},
        "c": {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "number"}}},
        "d": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "e": {"type": "boolean"},
    }
    described = tool_of("tools[0]", weather)["function"]["parameters"]["properties"]["days"]
    assert described == {"type": "integer", "description": "from today on"}


class Unit(enum.Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


@dataclasses.dataclass
class Place:
    town: str
    unit: Unit = Unit.CELSIUS


class Span(TypedDict, total=False):
    first: datetime.date
    days: int


class Person(pydantic.BaseModel):
    name: str
    friends: list[Person] = []


class Loose(pydantic.BaseModel, extra="allow"):
    name: str


def trip(
    where: Annotated[Place, "the goal"],
    when: datetime.datetime,
    units: list[Unit],
    who: Person | None = None,
    span: Span | None = None,
    loose: Loose | None = None,
) -> None: ...


async def test_parameters_may_be_of_classes_that_have_a_schema() -> None:
    schema = tool_of("tools[0]", trip)["function"]["parameters"]
    assert schema["required"] == ["where", "when", "units"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["where"] == {"$ref": "#/$defs/Place", "description": "the goal"}
    assert schema["properties"]["when"] == {"type": "string", "format": "date-time"}
    shared = schema["$defs"]
    assert [shared[name].get("additionalProperties") for name in ("Place", "Span", "Person", "Loose")] == [
        *[False] * 3,
        True,
    ]
    said = {
        "where": {"town": "Bonn", "unit": "F"},
        "when": "2026-01-02T03:04:05Z",
        "units": ["C"],
        "who": {"name": "Ann", "friends": [{"name": "Bob"}]},
    }
    async with FakeEngine(Answer(tool_calls=[("trip", said)])) as engine:
        (call,) = (await engine.chat(USER, tools=[trip], tool_choice=trip)).tool_calls
    assert json.loads(call.arguments) == said
    assert call.parsed == {
        "where": Place("Bonn", Unit.FAHRENHEIT),
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "units": [Unit.CELSIUS],
        "who": Person(name="Ann", friends=[Person(name="Bob")]),
    }


def unannotated(x):  # type: ignore[no-untyped-def]
    ...


def many(*x: int) -> None: ...


def named(**x: int) -> None: ...


def positional(x: int, /) -> None: ...


def bare(x: list) -> None: ...  # type: ignore[type-arg]


class Own:
    pass


def custom(x: Own) -> None: ...


def missing(x: "Unknown") -> None: ...  # type: ignore[name-defined]  # noqa: F821, UP037


@pytest.mark.parametrize(
    "tool", [unannotated, many, named, positional, bare, custom, missing, int, 7, "f", len, lambda: None]
)
async def test_a_tool_that_says_too_little_is_refused(tool: Any) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(errors.InvalidRequest) as caught:
            engine.chat(USER, tools=[weather, tool])
        assert caught.value.field.startswith("tools[1]")


# -- response formats ----------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    "form",
    [
        SCHEMA,
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
async def test_a_schema_is_obeyed_and_the_content_parsed(form: Any) -> None:
    async with FakeEngine(['{"n": 7}', "no JSON at all"]) as engine:
        assert (await engine.chat(USER, response_format=form)).parsed == {"n": 7}
        assert isinstance((await engine.chat(USER, response_format=form)).parsed["n"], int)


async def test_a_model_gets_an_instance() -> None:
    async with FakeEngine(Answer('{"name": "Tom", "kind": "cat"}', reasoning="A cat.")) as engine:
        result = await engine.chat(USER, response_format=Pet)
        assert result.parsed == Pet(name="Tom", kind="cat")
        assert result.reasoning == "A cat."
        assert result.parsed is result.parsed
        cut = await engine.chat(USER, SamplingParams(max_tokens=6), response_format=Pet)
        assert cut.finish_reason == "length"
        with pytest.raises(pydantic.ValidationError):
            _ = cut.parsed
        assert (await engine.chat(USER, response_format={"type": "text"})).parsed is None
        assert (await engine.chat(USER)).parsed is None


@dataclasses.dataclass
class Town:
    city: str
    pet: Pet | None = None


class Stay(TypedDict):
    start: Town
    days: int


class OldStay(typing.TypedDict):
    days: int


async def test_a_dataclass_gets_an_instance_and_a_typed_dict_its_values() -> None:
    place = Answer('{"city": "Rome", "pet": {"name": "Tom", "kind": "cat"}}')
    async with FakeEngine([place, '{"start": {"city": "Rome"}, "days": 2, "more": 1}']) as engine:
        parsed = (await engine.chat(USER, response_format=Town)).parsed
        assert parsed == Town("Rome", Pet(name="Tom", kind="cat"))
        result = await engine.chat(USER, response_format=Stay)
        assert result.parsed == {"start": Town("Rome"), "days": 2}  # closed: no other members


@pytest.mark.parametrize("form", [3, int, list[int], Town("Rome")])
async def test_formats_that_are_none_are_told_what_is_one(form: Any) -> None:
    async with FakeEngine("x") as engine:
        with pytest.raises(errors.InvalidRequest, match="a pydantic model, a dataclass or a TypedDict, got"):
            engine.chat(USER, response_format=form)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there pydantic reads every TypedDict")
async def test_a_typed_dict_that_pydantic_does_not_read_is_told_which_one_it_does() -> None:
    async with FakeEngine("x") as engine:
        with pytest.raises(errors.InvalidRequest, match=r"OldStay .*typing_extensions\.TypedDict"):
            engine.chat(USER, response_format=OldStay)


class Open(pydantic.BaseModel, extra="allow"):
    text: str


class Counted(pydantic.BaseModel):
    __pydantic_extra__: dict[str, int]
    model_config = {"extra": "allow"}
    text: str


class Tree(pydantic.BaseModel):
    text: str
    place: Place | None = None
    span: Span | None = None
    below: list[Tree] = []
    named: dict[str, Tree] = {}
    anything: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("model", "said", "kept"),
    [
        (Tree, {"text": "a", "more": 1}, False),
        (Tree, {"text": "a", "place": {"town": "b", "more": 1}}, False),
        (Tree, {"text": "a", "span": {"days": 2, "more": 1}}, False),
        (Tree, {"text": "a", "below": [{"text": "b", "more": 1}]}, False),
        (Tree, {"text": "a", "named": {"x": {"text": "b", "more": 1}}}, False),
        (Tree, {"text": "a", "anything": {"more": 1}}, True),
        (Open, {"text": "a", "more": 1}, True),
        (Counted, {"text": "a", "more": 1}, True),
    ],
)
async def test_a_model_has_the_members_of_its_class_and_no_others(
    model: Any, said: dict[str, Any], kept: bool
) -> None:
    ways: list[dict[str, Any]] = [{"response_format": model}, {"params": SamplingParams(grammar=model)}]
    async with FakeEngine(json.dumps(said)) as engine:
        for way in ways:
            content = (await engine.chat(USER, **way)).content
            assert model.model_validate_json(content).text == "a"
            assert ("more" in content) == kept


# -- refusals ------------------------------------------------------------------------------------------


class Broken:
    @classmethod
    def model_json_schema(cls) -> Any:
        raise RuntimeError("no schema")


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hi"}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].colour", {"messages": [{"role": "user", "content": "x", "colour": "red"}]}),
        ("messages", {"messages": [{"role": "user", "content": object()}]}),
        ("tools", {"tools": {"type": "function"}}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice.function.name", {"tools": [weather], "tool_choice": Pet}),
        ("parallel_tool_calls", {"tools": [weather], "parallel_tool_calls": 1}),
        ("response_format", {"response_format": "json"}),
        ("response_format", {"response_format": Broken}),
        ("response_format", {"response_format": SCHEMA, "params": SamplingParams(grammar=SCHEMA)}),
        ("response_format", {"response_format": {"type": "object", "properties": {"a": {"type": "colour"}}}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {}}},
        ),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        ("priority", {"priority": "high"}),
    ],
)
async def test_what_is_wrong_is_named_as_the_caller_knows_it(field: str, arguments: Any) -> None:
    async with FakeEngine("x") as engine:
        for read in (lambda chat: chat, lambda chat: anext(chat), lambda chat: chat.accepted()):
            with pytest.raises(errors.InvalidRequest) as caught:
                await read(engine.chat(**{"messages": USER, **arguments}))
            assert caught.value.field == field
        assert engine.stats().running == engine.stats().waiting == 0


async def test_nothing_of_the_arguments_is_read_later() -> None:
    messages = [{"role": "user", "content": "first"}]
    tools = [tool_of("", weather)]
    form = copy.deepcopy(SCHEMA)
    async with FakeEngine() as engine:
        chat = engine.chat(messages, response_format=form, tools=tools)
        messages[0]["content"] = "second"
        messages.append({"role": "user", "content": "third"})
        tools[0]["function"]["name"] = "x"
        form["properties"] = {}
        assert "n" in (await chat).parsed
        assert engine.requests[0].prompt == "user: first\nassistant: "


# -- leaving -------------------------------------------------------------------------------------------


async def freed(engine: EngineLike) -> None:
    """Nothing runs, and what is in flight has landed."""
    async with asyncio.timeout(60):
        while True:
            stats = engine.stats()
            if not (stats.running or stats.waiting or stats.pages_private or stats.pages_fenced):
                return
            await asyncio.sleep(0.001)


@rest(SECONDS)
async def test_a_chat_that_is_left_ends_its_request() -> None:
    async with FakeEngine("x" * 5000) as engine:
        async with engine.chat(USER) as chat:
            await anext(chat)
        assert chat.done
        await freed(engine)

        task = asyncio.create_task(engine.chat(USER))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await freed(engine)

        chat = engine.chat(USER)
        await anext(chat)
        del chat
        gc.collect()
        await freed(engine)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.chat(USER)
        await freed(engine)

        chat = engine.chat(USER)
        chat.close()
        with pytest.raises(errors.Cancelled):
            await chat
        with pytest.raises(TypeError, match="copied"):
            copy.copy(chat)


@nightly(SECONDS)
async def test_a_long_answer_is_parsed_in_turns_and_can_be_left_amid_them() -> None:
    """Whoever reads late gets much at once."""
    text = Answer("word " * 5000, reasoning="r").text
    async with FakeEngine(text) as engine:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        chat = engine.chat(USER)
        stream = chat._stream
        await stream
        counting = asyncio.create_task(others())
        await asyncio.sleep(0)
        before = turns
        task = asyncio.ensure_future(chat)
        await asyncio.sleep(0)
        assert not task.done()
        with pytest.raises(RuntimeError, match="another task"):
            await chat
        assert (await task).content == "word " * 5000
        assert turns > before + 1

        chat = engine.chat(USER)
        await chat._stream
        task = asyncio.ensure_future(chat)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        for read in (chat, anext(chat)):
            with pytest.raises(errors.Cancelled, match="left"):
                await read
        counting.cancel()


async def test_the_errors_of_a_request_are_raised_where_it_is_read() -> None:
    lost = ValueError("no device")
    async with FakeEngine([Answer("half", error=lost), errors.Rejected("full")]) as engine:
        chat = engine.chat(USER)
        content = ""
        with pytest.raises(errors.StepFailed):
            async for delta in chat:
                content += delta.content
        assert content == "half"
        with pytest.raises(errors.Rejected):
            engine.chat(USER)


# -- what a generation has besides its text --------------------------------------------------------------


async def test_deltas_have_the_logprobs_of_their_tokens() -> None:
    async with FakeEngine(CALLING, pace=0.0001) as engine:
        chat = engine.chat(USER, SamplingParams(logprobs=0), tools=[weather])
        deltas = [delta async for delta in chat]
        found = [each for delta in deltas for each in delta.logprobs or ()]
        assert len(deltas) > 3
        assert found == (await chat).result.logprobs
        assert all(delta.logprobs is None for delta in [each async for each in engine.chat(USER)])


async def test_a_chat_is_restored_as_its_text() -> None:
    async with FakeEngine("one two three", pace=0.0001) as engine:
        async with engine.chat(USER) as chat:
            assert (await anext(chat)).content
            checkpoint = chat.checkpoint()
        assert (await engine.restore(checkpoint)).text == "one two three"


async def test_a_repr_names_the_generation() -> None:
    async with FakeEngine("yes") as engine:
        shown = repr(await engine.chat(USER))
        assert "content='yes'" in shown
        assert "result=<Result of 4 tokens>" in shown
