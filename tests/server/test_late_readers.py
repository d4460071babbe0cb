"""Streams with parsers whose client reads late: much text at once, parsed with bounded work per turn."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest

from aioinfer.chat.answers import AnswerFormat, ChatFormat
from aioinfer.outputs import Chunk, TokenLogprob, Usage
from aioinfer.params import SamplingParams
from aioinfer.server.http import pace
from aioinfer.server.http.pace import Pace
from aioinfer.server.openai.protocol import Served, parse_chat
from aioinfer.server.openai.shapes import CHAT
from aioinfer.text.reasoning import REASONING_PARSERS
from aioinfer.text.tool_calls import Hermes, base
from tests.server.chats import ROME
from tests.server.test_answers import PIECES
from tests.server.test_large import counting_turns

ALL = [AnswerFormat(Hermes, each) for each in (None, *REASONING_PARSERS.values())]


@pytest.fixture(autouse=True)
def ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "new_id", lambda: "call_1")


def text_of(rng: random.Random, length: int) -> str:
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts.append(rng.choice([*PIECES, "\n" * 70, " " * 70, "x" * rng.randrange(9000)]))
    return "".join(parts)


def at_once(answer: AnswerFormat, chunks: list[str]) -> list[dict[str, Any]]:
    """The deltas as the parsers give them: reasoning of a whole chunk, and content by 4096 characters."""
    assert answer.reasoning is not None
    assert answer.tools is not None
    thoughts, tools, deltas = answer.reasoning(), answer.tools(), []
    for at, chunk in enumerate(chunks):
        ended = at == len(chunks) - 1
        reasoning, content = thoughts.push(chunk)
        if ended:
            last = thoughts.finish()
            reasoning, content = reasoning + last[0], content + last[1]
        parsed = [tools.push(content[start : start + 4096]) for start in range(0, len(content), 4096)]
        if ended:
            parsed.append(tools.finish())
        deltas += [{"reasoning_content": reasoning}] * bool(reasoning)
        text = "".join(each.content for each in parsed)
        deltas += [{"content": text}] * bool(text)
        for call in [call for each in parsed for call in each.calls]:
            function: dict[str, Any] = {"arguments": call.arguments}
            body: dict[str, Any] = {"index": call.index, "function": function}
            if call.id is not None:
                function = {"name": call.name, "arguments": call.arguments}
                body = {"index": call.index, "id": call.id, "type": "function", "function": function}
            deltas.append({"tool_calls": [body]})
    return deltas


@pytest.mark.parametrize("answer", ALL[1:], ids=REASONING_PARSERS)
def test_the_deltas_are_those_of_text_that_is_parsed_at_once(answer: AnswerFormat) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    for _ in range(40):
        chunks = [text_of(rng, rng.choice([1, 100, 30_000])) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.5:
            chunks[0] = "<think>" + chunks[0]
        reader, found = answer.reader(), []
        for at, chunk in enumerate(chunks):
            for _ in reader.read(chunk, ended=at == len(chunks) - 1):
                pass
            found += [*reader.deltas()]
        assert found == at_once(answer, chunks)


@pytest.mark.parametrize("answer", ALL, ids=["none", *REASONING_PARSERS])
async def test_long_text_is_parsed_in_many_turns(
    answer: AnswerFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_SLICE", 0.0)
    pushed: list[int] = []
    push = Hermes.push

    def recorded(self: Hermes, text: str) -> Any:
        pushed.append(len(text))
        return push(self, text)

    monkeypatch.setattr(Hermes, "push", recorded)
    text = "<think>" + "hm " * 20_000 + "</think>" + ROME * 500 + "x" * 50_000
    reader = answer.reader()

    between = Pace()
    async with counting_turns() as turns:
        for _ in reader.read(text, ended=True):
            await between()
    assert max(pushed) <= 4096
    assert turns() >= len(text) // 4096
    assert sum(1 for _ in reader.deltas()) >= 500


def test_one_event_has_the_logprobs_and_one_the_reason() -> None:
    raw = b'{"messages":[{"role":"user","content":"x"}]}'
    call = parse_chat(raw, Served("toy", SamplingParams(), ChatFormat()))
    chunk = Chunk("hm " + ROME * 3, [1], "stop", usage=Usage(1, 1), logprobs=[TokenLogprob(1, -0.5, ())])
    for text, ended, count in ((chunk.text, True, 7), (chunk.text, False, 7), ("", True, 1), ("", False, 0)):
        reader = AnswerFormat(Hermes, None).reader()
        part = replace(chunk, text=text, finish_reason="stop" if ended else None)
        for _ in reader.read(text, ended=ended):
            pass
        events = [*CHAT.deltas(call, 0, part, reader, '{"content":[]}' if text else "null")]
        assert len(events) == count
        assert ['"logprobs":{"content":[]}' in event for event in events] == [
            bool(text) and at == 0 for at in range(count)
        ]
        reasons = ['"finish_reason":null' not in event for event in events]
        assert reasons == [ended and at == count - 1 for at in range(count)]
