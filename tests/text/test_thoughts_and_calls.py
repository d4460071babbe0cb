"""Thoughts and calls in one answer: which calls are drafts, and what ends a thought."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.chat.answers import AnswerReader
from aioinfer.text.reasoning import REASONING_PARSERS, Qwen3
from aioinfer.text.reasoning.tagged import Tagged
from aioinfer.text.tool_calls import PARSERS
from tests.text.answers import answer, deltas, reader
from tests.text.call_formats import FORMATS, SCHEMAS, cut, written
from tests.tiers import SECONDS, points, rest, scaled

THOUGHTS = [name for name, each in REASONING_PARSERS.items() if issubclass(each, Tagged)]
#: formats whose calls can stand behind text, next to thoughts between tags
CALLS = [name for name in PARSERS if name != "harmony" and not FORMATS[name].alone]
#: each format with one of the other kind that it occurs with
TOGETHER = [
    *(("qwen3", tools) for tools in CALLS),
    *((thought, "hermes") for thought in THOUGHTS if thought != "qwen3"),
    *((name, name) for name in THOUGHTS if name in CALLS),
    ("mistral", "mistral-v11"),
    ("ernie45", "granite"),
]
every_pair = pytest.mark.parametrize(("thought", "tools"), TOGETHER)
every_format = pytest.mark.parametrize("tools", CALLS)
ARGUMENTS: dict[str, Any] = {"text": "a Roman city"}
FOUND = [("f", ARGUMENTS)]


def read(text: str, thought: str, tools: str, end: str = "<think></think>") -> Any:
    """The answer, whole and by character, with arguments as objects if they are JSON."""
    parser = REASONING_PARSERS[thought]

    def tagged(text: str) -> str:
        text = text.replace("<think>", parser.opening + parser.header)
        return text.replace("</think>", parser.closing)

    got = answer([tagged(text)], thought, tools, tagged(end))
    assert got == answer(tagged(text), thought, tools, tagged(end))
    return got._replace(calls=[(name, _object(arguments)) for name, arguments in got.calls])


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def one(tools: str, arguments: Any = None, name: str = "f") -> str:
    return written(tools, [(name, ARGUMENTS if arguments is None else arguments)])


@every_pair
def test_a_thought_without_its_end_ends_at_a_call(thought: str, tools: str) -> None:
    two = written(tools, [("f", ARGUMENTS), ("g", {})])
    for begin, end in (("<think>", "<think></think>"), ("", "<think>"), ("a</think>b<think>", "<think>")):
        got = read(f"{begin}\nI look.\n{one(tools)}", thought, tools, end)
        assert (got.calls, got.finish) == (FOUND, "tool_calls")
        assert (got.reasoning, got.content) == (("a\nI look.", "b") if "b" in begin else ("I look.", ""))
    got = read(f"<think>{two}\n", thought, tools)
    assert got == ("", "", [*FOUND, ("g", {})], "tool_calls")


@every_pair
def test_a_draft_in_a_thought_that_is_closed_is_no_call(thought: str, tools: str) -> None:
    draft = f"I may write\n{one(tools)}\n\nor not."
    got = read(f"<think>{draft}</think>{one(tools, {}, 'g')}", thought, tools)
    assert got == (draft, "", [("g", {})], "tool_calls")
    got = read(f"<think>{draft}</think>{draft}</think>", thought, tools)
    assert (got.reasoning, got.calls) == (draft, FOUND)
    for length in range(1, len(one(tools)) - 2):
        cut_off = one(tools)[:length].rstrip("\n")
        text = f"<think>{cut_off}</think>Yes."
        got = read(text, thought, tools)
        if "Roman" not in cut_off or "city" in cut_off:
            assert got == (cut_off, "Yes.", [], "stop")


@every_pair
def test_tags_within_arguments_are_arguments(thought: str, tools: str) -> None:
    parser = REASONING_PARSERS[thought]
    arguments = {"text": f"{parser.opening}hm{parser.closing}\n`{parser.closing}"}
    call = one(tools, arguments)
    for text in (call, f"<think>{call}", f"<think>a</think>{call}</think>", f"{call}<think>a</think>"):
        got = read(text, thought, tools)
        assert (got.content, got.calls, got.finish) == ("", [("f", arguments)], "tool_calls")
        assert got.reasoning == ("a" if "a</think>" in text else "")


@every_pair
def test_a_thought_may_follow_a_call(thought: str, tools: str) -> None:
    got = read(f"Hm.\n{one(tools)}\n<think>a</think>\nSo.", thought, tools)
    assert got == ("a", "Hm.So.", FOUND, "tool_calls")


@every_format
def test_a_call_without_its_end_does_not_hide_a_thought(tools: str) -> None:
    text = one(tools)
    for end in range(text.index("city") + 5, len(text)):
        got = read(f"{text[:end]}<think>a</think>So.", "mistral", tools)
        if got.calls == FOUND and "city" not in got.content:
            assert "[" not in got.content.removeprefix(text)
            assert got.reasoning == "a"


@every_format
def test_prose_that_names_a_tag_streams_on(tools: str) -> None:
    reads = reader("qwen3", tools, "<think>")
    opening = reads.openings[0]
    parts = ["I write ", opening, " {<x> here,", " and", " there", "\n", "now."]
    got = ["".join(each["reasoning_content"] for each in part) for part in deltas(reads, parts)]
    assert got[0] == "I write "
    assert got[-4:] == [" and", " there", "", "\nnow."]
    got = read(f"I write {opening} here.</think>Yes.", "qwen3", tools, "<think>")
    assert got == (f"I write {opening} here.", "Yes.", [], "stop")
    got = read(f"I write {opening} here.", "qwen3", tools, "<think>")
    assert got == (f"I write {opening} here.", "", [], "stop")
    got = read(f"I write {opening} here.\n{one(tools)}", "qwen3", tools, "<think>")
    assert got == (f"I write {opening} here.", "", FOUND, "tool_calls")


@every_format
def test_what_is_cut_off_within_a_thought_is_not_a_complete_call(tools: str) -> None:
    text = one(tools)
    for length in range(len(text)):
        got = read(f"<think>a{text[:length]}", "qwen3", tools)
        assert got.content == ""
        assert got.finish == "stop" or got.calls == FOUND


def test_what_is_read_at_the_end_is_read_once_more_and_not_again() -> None:
    one_ = f"<think>\n{one('hermes')}\n"
    got = answer([one_ * 3], Qwen3.name, "hermes")
    assert [name for name, _ in got.calls] == ["f"]
    assert got.reasoning == f"{one('hermes')}\n{one_}"


def test_tags_within_json_that_a_grammar_made_are_text() -> None:
    text = '{"a": "<think>hm</think>", "b": "</think>"}'
    for tools in (None, PARSERS["hermes"](SCHEMAS)):
        reads = AnswerReader(tools, Qwen3("<think>"), json=True)
        read_ = [*deltas(reads, f"hm</think>\n{text}", ended=True)]
        got = [delta for part in read_ for delta in part]
        assert "".join(each.get("reasoning_content", "") for each in got) == "hm"
        assert "".join(each.get("content", "") for each in got) == text


def test_what_was_read_comes_in_its_order() -> None:
    text = f"a<think>b</think>c{one('hermes', {})}d<think>e</think>"
    found = deltas(reader("qwen3", "hermes"), [text])[0]
    kinds = ["content", "reasoning_content", "content", "tool_calls", "tool_calls", "content"]
    assert [kind for each in found for kind in each] == [*kinds, "reasoning_content"]


def pieces(thought: str, tools: str) -> st.SearchStrategy[list[str]]:
    parser = REASONING_PARSERS[thought]
    tags = [parser.opening, parser.closing, parser.opening + parser.header, *parser.tags]
    parts = st.sampled_from([*FORMATS[tools].pieces, *tags, *tags, "hm.", "`"])
    calls = st.sampled_from([one(tools), one(tools, {"text": parser.closing}), one(tools)[:-3]])
    return st.lists(parts | calls, max_size=16)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("thought", "tools"),
    points(
        [*TOGETHER, ("qwen3", "llama3"), ("harmony", "harmony")],
        [pair for pair in itertools.product(THOUGHTS, CALLS) if pair not in TOGETHER],
    ),
)
@given(data=st.data())
@settings(max_examples=scaled(60, 20), deadline=None)
def test_an_answer_does_not_depend_on_the_split(thought: str, tools: str, data: st.DataObject) -> None:
    text = "".join(data.draw(pieces(thought, tools)))
    parser = REASONING_PARSERS[thought]
    end = data.draw(st.sampled_from(["", parser.opening, parser.opening + parser.closing]))
    got = answer([text], thought, tools, end)
    assert got == answer(text, thought, tools, end) == answer(cut(text, data), thought, tools, end)
    assert len(got.reasoning + got.content) <= 2 * len(text)
