"""The events of Responses and Messages in every way that an answer can be cut into chunks: always an order
that the protocol allows, and at the end the same as the whole answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from aioinfer.chat.answers import ChatFormat
from aioinfer.config import ServerConfig
from aioinfer.outputs import Chunk, Result, Usage
from aioinfer.params import SamplingParams
from aioinfer.server.anthropic.wires import MESSAGES_WIRE
from aioinfer.server.http.failures import Failure
from aioinfer.server.openai.logprobs import Speller
from aioinfer.server.openai.protocol import Served
from aioinfer.server.responses.stored import StoredResponses
from aioinfer.server.responses.wires import RESPONSES_WIRE
from aioinfer.server.wire import AnswerContext, AnswerWriter
from aioinfer.text.reasoning import REASONING_PARSERS
from aioinfer.text.tool_calls import PARSERS
from tests.server.chats import ROME, WEATHER
from tests.server.event_order import MessageOrder, ResponseOrder
from tests.toys import ToyTokenizer

LISTS = ROME.replace("weather", "lists").replace('"city": "Rome", "days": 1', "")
BROKEN = ROME.replace("1}}", "1")
THOUGHT = "<think>\nhm, é\n</think>\n\n"
#: text of an answer, why it ended, and what it is made of
ANSWERS = {
    "plain": ("20 + 22 = 42", "stop", ["text"]),
    "empty": ("", "stop", []),
    "cut off": ("20 +", "length", ["text"]),
    "call": (ROME, "stop", ["call"]),
    "calls behind text": (f"Hm.\n{ROME}\n{LISTS}", "stop", ["text", "call", "call"]),
    "thought": (f"{THOUGHT}42", "stop", ["reasoning", "text"]),
    "thought and call": (f"{THOUGHT}Hm.\n{ROME}", "stop", ["reasoning", "text", "call"]),
    "thought only": ("<think>\nhm", "length", ["reasoning"]),
    "call cut off": (f"{THOUGHT}{BROKEN}", "length", ["reasoning", "call"]),
}
KINDS = {
    "message": "text",
    "function_call": "call",
    "reasoning": "reasoning",
    "text": "text",
    "tool_use": "call",
    "thinking": "reasoning",
}

Order = ResponseOrder | MessageOrder


class Recorder:
    """The events of a stream."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.ended = False

    async def send(self, data: str, name: str | None = None) -> None:
        assert not self.ended
        self.order.take(name, data)

    async def end(self, data: str | None = None) -> None:
        assert data is None
        self.ended = True
        self.order.check_ended()


def served() -> Served:
    chat = ChatFormat(PARSERS["hermes"], REASONING_PARSERS["qwen3"])
    nothing = StoredResponses(ServerConfig(max_stored_responses=0))
    return Served("toy", SamplingParams(), chat, stored=nothing)


async def writer(protocol: str, usage: Usage, **body: Any) -> tuple[AnswerWriter, Order]:
    if protocol == "responses":
        tools = [
            {"type": "function", "name": name, "parameters": WEATHER, "strict": False}
            for name in ("weather", "lists")
        ]
        given = {"input": "hi", "tools": tools, "metadata": {"a": "b"}, "instructions": "be", **body}
        wire, order = RESPONSES_WIRE, ResponseOrder()
    else:
        tools = [{"name": name, "input_schema": WEATHER} for name in ("weather", "lists")]
        given = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "tools": tools, **body}
        wire, order = MESSAGES_WIRE, MessageOrder()
    call = wire.parse(json.dumps({k: v for k, v in given.items() if v is not None}).encode(), served())
    tokenizer = ToyTokenizer()
    context = AnswerContext(
        tokenizer=tokenizer,
        speller=Speller(tokenizer.token_bytes),
        readers=[None if call.answer is None else call.answer.reader()],
        usage=lambda _: usage,
        prompt_ids=lambda _: [],
    )
    return await wire.answer(call, context), order


def chunks(rng: random.Random, text: str, reason: Any, usage: Usage) -> Iterator[Chunk]:
    """The text in pieces of random length, some of them empty; the last one may have no text."""
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
    parts = [text[at:to] for at, to in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts += [""] * rng.randint(0, 1)
    for at, part in enumerate(parts):
        ids = [2 + at % 9] * (1 + (at + 1 == len(parts)) * (usage.completion_tokens - len(parts)))
        last = at + 1 == len(parts)
        yield Chunk(part, ids, reason if last else None, usage=usage if last else None)


def comparable(value: Any) -> Any:
    """Without ids and times, which differ from answer to answer."""
    if isinstance(value, list):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {
            name: comparable(each)
            for name, each in value.items()
            if name not in ("id", "call_id", "created_at", "completed_at")
        }
    return value


def check_calls(answer: dict[str, Any], items: list[Any], cut_off: bool) -> None:
    """Arguments that were cut off are kept, of a message in Anthropic's form of what is no JSON."""
    calls = [each for each in items if KINDS[each["type"]] == "call"]
    if "status" in answer:
        assert answer["status"] == items[-1]["status"] == ("incomplete" if cut_off else "completed")
        given = [each["arguments"] for each in calls]
    else:
        reason = "max_tokens" if cut_off else "tool_use" if calls else "end_turn"
        assert answer["stop_reason"] == reason
        given = [each["input"].get("INVALID_JSON") or json.dumps(each["input"]) for each in calls]
    for call, arguments in zip(calls, given, strict=True):
        whole = '{"city": "Rome", "days": 1}' if call["name"] == "weather" else "{}"
        assert whole.startswith(arguments.rstrip("\n"))
        assert (arguments == whole) != cut_off


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("protocol", ["responses", "messages"])
async def test_every_cut_of_an_answer_is_a_valid_stream_of_the_whole(protocol: str, name: str) -> None:
    text, reason, parts = ANSWERS[name]
    usage = Usage(7, 40, 3)
    whole, _ = await writer(protocol, usage)
    result = Result(text, [2] * 40, reason, usage)
    wanted = json.loads(b"".join(await whole.whole([result])))
    items = wanted["output"] if protocol == "responses" else wanted["content"]
    empty = ["text"] if protocol == "responses" else []  # a response has an item in any case
    assert [KINDS[each["type"]] for each in items] == (parts or empty)
    check_calls(wanted, items, cut_off=reason == "length")
    for seed in range(40):
        rng = random.Random(f"{protocol} {name} {seed}")
        writes, order = await writer(protocol, usage)
        events = Recorder(order)
        await writes.open(events)
        for chunk in chunks(rng, text, reason, usage):
            await writes.chunk(0, chunk, events)
        await writes.close([usage], events)
        assert events.ended
        got = order.response if isinstance(order, ResponseOrder) else order.message
        assert comparable(got) == comparable(wanted), seed


@pytest.mark.parametrize("protocol", ["responses", "messages"])
async def test_a_stream_that_fails_anywhere_ends_with_the_error(protocol: str) -> None:
    text, reason, _ = ANSWERS["thought and call"]
    usage = Usage(7, 40)
    for seed in range(40):
        rng = random.Random(seed)
        writes, order = await writer(protocol, usage)
        events = Recorder(order)
        if seed:
            await writes.open(events)
            cut = [*chunks(rng, text, reason, usage)]
            for chunk in cut[: rng.randint(0, len(cut) - 1)]:
                await writes.chunk(0, chunk, events)
        await writes.fail(Failure(500, "server_error", "the device is gone"), events)
        assert events.ended
        assert order.error is not None
        assert order.error["message"] == "the device is gone"
