"""Answers are the same whole and streamed, however they are split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.chat.answers import AnswerFormat, ChatFormat
from aioinfer.chat.tools import parse_tools
from aioinfer.params import Grammar, SamplingParams
from aioinfer.text.reasoning import REASONING_PARSERS, ReasoningParser
from aioinfer.text.tool_calls import PARSERS, Hermes, Qwen3Coder
from aioinfer.text.tool_calls.raw_values import Signatures
from tests.server.chats import ROME
from tests.text.call_formats import FORMATS as CALLS
from tests.tiers import SECONDS, rest, scaled

PIECES = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>analysis<|message|>"),
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    *("<tool_call>", "</tool_call>", ROME, ROME[:40], '{"name": "f", "arguments": {', "}}"),
    *("\n", '"', "<", "hm "),
]
FORMATS = [
    AnswerFormat(tools, reasoning)
    for tools in (None, *PARSERS.values())
    for reasoning in (None, *REASONING_PARSERS.values())
]


def from_deltas(answer: AnswerFormat, parts: list[str]) -> tuple[dict[str, Any], str]:
    """The message that a client assembles from the deltas, and the finish reason."""
    reader = answer.reader()
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for at, part in enumerate(parts):
        for _ in reader.read(part, ended=at == len(parts) - 1):
            pass
        for delta in reader.deltas():
            assert len(delta) == 1
            for name in delta.keys() & {"content", "reasoning_content"}:
                assert delta[name]
                message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if "tool_calls" not in message:
        message["content"] = message["content"] or ""
    return message, reader.finish_reason("stop")


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for call in message.get("tool_calls", []):
        assert call.pop("id")
    return message


def whole(answer: AnswerFormat, text: str) -> tuple[dict[str, Any], str]:
    reader = answer.reader()
    for _ in reader.read(text, ended=True):
        pass
    return without_ids(reader.message()), reader.finish_reason("stop")


def check(answer: AnswerFormat, text: str, parts: list[str]) -> None:
    message, reason = from_deltas(answer, parts)
    assert (without_ids(message), reason) == whole(answer, text)


@rest(SECONDS)
@given(answer=st.sampled_from(FORMATS), data=st.data())
@settings(max_examples=scaled(500), deadline=None)
def test_any_cuts_give_the_same_message(answer: AnswerFormat, data: st.DataObject) -> None:
    pieces = (*PIECES, *(CALLS[answer.tools.name].pieces if answer.tools else ()))
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    check(answer, text, [text[low:high] for low, high in itertools.pairwise([0, *cuts, len(text)])])
    check(answer, text, [*text, ""])


@pytest.mark.parametrize("reasoning", REASONING_PARSERS.values(), ids=REASONING_PARSERS)
def test_reasoning_content_and_calls(reasoning: type[ReasoningParser]) -> None:
    answer = AnswerFormat(Hermes, reasoning)
    text = f"{reasoning.opening}\nI call\n{ROME}\n{reasoning.closing}\n\nOne moment.\n{ROME}"
    message, reason = whole(answer, text)
    # A call within the reasoning is not a call. Line breaks around tags belong to those of two tags.
    assert message["reasoning_content"].strip("\n") == f"I call\n{ROME}"
    assert message["content"].strip("\n") == "One moment."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert reason == "tool_calls"
    check(answer, text, [*text, ""])


def test_the_types_of_arguments_are_found_with_the_request() -> None:
    tools = parse_tools([{"type": "function", "function": {"name": "f"}}])
    for parser, wanted in ((Qwen3Coder, True), (Hermes, False)):
        _, answer = ChatFormat(parser).apply(SamplingParams(), tools)
        assert isinstance(answer.functions, Signatures) == wanted


def test_tags_within_json_of_a_grammar_are_text() -> None:
    json_ = SamplingParams(grammar=Grammar("json_object"))
    for params, wanted in ((json_, True), (SamplingParams(), False)):
        _, answer = ChatFormat(Hermes, REASONING_PARSERS["qwen3"]).apply(params, None)
        assert answer.json == wanted
        reader = answer.reader("<think></think>")
        for _ in reader.read('{"a": "</think>"}', ended=True):
            pass
        assert ("</think>" in reader.message()["content"]) == wanted


def test_messages_of_gpt_oss() -> None:
    call = CALLS["harmony"].tell("weather", {"city": "Rome"})
    again = "<|end|><|start|>assistant"
    thoughts = f"<|channel|>analysis<|message|>I call.{again}"
    text = f"{thoughts}<|channel|>commentary<|message|>One moment.{again}{call}"
    answer = AnswerFormat(PARSERS["harmony"], REASONING_PARSERS["harmony"])
    message, reason = whole(answer, text)
    assert (message["reasoning_content"], message["content"]) == ("I call.", "One moment.")
    assert [made["function"]["arguments"] for made in message["tool_calls"]] == ['{"city": "Rome"}']
    assert reason == "tool_calls"
    check(answer, text, [*text, ""])
    message, reason = whole(answer, f"{thoughts}<|channel|>final<|message|>It is sunny.")
    assert (message["reasoning_content"], message["content"], reason) == ("I call.", "It is sunny.", "stop")


def test_an_answer_longer_than_a_piece() -> None:
    text = "\n".join([ROME] * 200) + "<tool_call>" * 2000
    answer = AnswerFormat(Hermes, None)
    message, reason = whole(answer, text)
    assert len(message["tool_calls"]) == 200
    assert message["content"] == "<tool_call>" * 2000
    assert reason == "tool_calls"
    check(answer, text, [text])


def test_without_tools_calls_are_text() -> None:
    for reasoning in REASONING_PARSERS.values():
        message, reason = whole(AnswerFormat(None, reasoning), f"{reasoning.closing}{ROME}")
        assert ROME in message["content"]
        assert reason == "stop"
