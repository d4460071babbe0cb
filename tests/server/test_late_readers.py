"""Streams with parsers whose client reads late: much text at once, parsed with bounded work per turn."""

from __future__ import annotations

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
from aioinfer.text.tool_calls import Hermes
from tests.server.chats import ROME
from tests.server.test_large import counting_turns

ALL = [AnswerFormat(Hermes, each) for each in (None, *REASONING_PARSERS.values())]


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
