"""The reasoning and the content of Harmony, the format of gpt-oss."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.text.harmony import TAGS
from tests.counting import most_kept
from tests.text.answers import Answer, answer, deltas, reader
from tests.text.call_formats import FORMATS, MARK, cut
from tests.tiers import SECONDS, nightly, rest, scaled

NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.\n{NEXT}"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
PIECES = (*FORMATS["harmony"].pieces, FINAL, THOUGHT, NEXT, "<|return|>", "hm ", "<")


START = "<|start|>assistant"


def read(parts: list[str], prompt_end: str = START) -> Answer:
    return answer(parts, "harmony", "harmony", prompt_end)


def test_a_header_may_follow_several_ends() -> None:
    text = f"{THOUGHT[: -len(START)]}<|call|><|end|><|return|> to=assistant"
    assert read([text]) == read(list(text)) == ("Hm.\n", "", [], "stop")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{THOUGHT}{FINAL}42", "Hm.\n", "42"),
        (f"{THOUGHT}{FINAL}42<|return|>", "Hm.\n", "42"),
        (f"{FINAL}a < b", "", "a < b"),
        (f"{THOUGHT}{THOUGHT}{FINAL}42", "Hm.\n\nHm.\n", "42"),
        # what is told the user before the answer
        (f"<|channel|>commentary<|message|>I add.{NEXT}{FINAL}42", "", "I add.\n42"),
        # what the assistant tells itself
        (f"<|channel|>commentary to=assistant<|message|>Hm.{NEXT}{FINAL}42", "Hm.", "42"),
        (f"<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.{NEXT}{FINAL}42", "Hm.", "42"),
        (f" to=assistant<|channel|>analysis<|message|>Hm.{NEXT}{FINAL}42", "Hm.", "42"),
        (f"<|channel|>commentary to=assistant{FINAL}42", "", "42"),
        ("<|start|>functions.f to=assistant<|channel|>commentary<|message|>[1]", "[1]", ""),
        # headers that models vary
        ("<|channel|> analysis <|message|>Hm.<|end|>\n<|start|>assistant<|message|>42", "Hm.", "42"),
        (f"<|channel|>analysis<|message|>Hm.<|start|>assistant{FINAL}42", "Hm.", "42"),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}42", "Hm.", "42"),
        (f"<|channel|>analysis<|message|>Hm.<|end|>assistant{FINAL}42", "Hm.", "42"),
        (f"<|channel|>analysis<|message|>Hm.<|end|><|return|><|start|>assistant{FINAL}42", "Hm.", "42"),
        ("<|channel|>final <|constrain|>a-list.v1;x=2<|message|>42", "", "42"),
        ("<|channel|>final application/json<|message|>42", "", "42"),
        ("<|constrain|>json<|message|>42", "", "42"),
        ("<|channel|>justification<|message|>42", "", "42"),
        ("<|channel|><|message|>42", "", "42"),
        ("<|message|>42", "", "42"),
        ("<|start|>user<|message|>x", "", "x"),
        ("<|start|>}<|channel|>final<|message|>x", "", "}x"),
        ("<|channel|>final (json)<|message|>42", "", "42"),
        ('<|channel|>final <|constrain|>text/plain; charset="utf-8"<|message|>42', "", "42"),
        # to the user
        ("<|channel|>final to=user<|message|>42", "", "42"),
        ("<|channel|>commentary to=all<|message|>42", "", "42"),
        # headers without their end
        ("<|start|>assistantYes.", "", "Yes."),
        ("<|channel|>final Yes.", "", "Yes."),
        ("<|channel|>analysis So, ", "So, ", ""),
        ("<|channel|>final <|constrain|>json Yes, yes", "", "Yes, yes"),
        ('<|channel|>final <|constrain|>json {"a": 1}', "", 'json {"a": 1}'),
        ("<|channel|>comm", "", ""),
        ("<|start|>assist", "", ""),
        ("<|channel|>final json<|mess", "", ""),
        (f"<|channel|>final {THOUGHT}{FINAL}42", "Hm.\n", "42"),
        ('<|channel|>final {"a": 1}<|return|>', "", '{"a": 1}'),
        (f"<|channel|>analysis I think{NEXT}{FINAL}42", "I think", "42"),
        ("<|channel|>final", "", ""),
        ("<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>js", "", ""),
        (" to=functions.f", "", ""),
        (f"{THOUGHT}<|chan", "Hm.\n", ""),
        # tags within messages
        (f"{FINAL}see <|message|> and <|constrain|>, <|channel|> and so on", "", "see  and , and so on"),
        (f"{FINAL}4<|message|>2", "", "42"),
        # no messages
        ("42", "", "42"),
        ("assist", "", "assist"),
        ("  4 <|end|>2", "", "  4 2"),
        ("", "", ""),
        ("<|end|>", "", ""),
        ("<|channel|>", "", ""),
        # the length is reached
        ("<|channel|>analysis<|message|>Hm <|en", "Hm <|en", ""),
    ],
)
def test_the_channel_tells_reasoning_from_content(text: str, reasoning: str, content: str) -> None:
    wanted = reasoning, content, [], "stop"
    assert read([text]) == read(list(text)) == answer([text], "harmony", None, START) == wanted


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (CALL, "f", "{}"),
        (f"{CALL}<|call|>", "f", "{}"),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "f", "{}"),
        (f"{THOUGHT}{CALL}", "f", "{}"),
        (f"{THOUGHT.removesuffix(START)}{CALL}", "f", "{}"),
        ("<|channel|>analysis to=functions.f<|message|>{}<|end|>", "f", "{}"),
        ("<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>\n{}", "f", "{}"),
        ("<|channel|>commentary json to=functions.f<|message|>{}", "f", "{}"),
        (" to=math.sum<|channel|>commentary<|message|>{}", "math.sum", "{}"),
        # none, and what is no object
        (CALL.replace("{}", "<|call|>"), "f", "{}"),
        (CALL.replace("{}", " <|end|>"), "f", "{}"),
        (CALL.replace("{}", "[1]<|call|>"), "f", "[1]"),
        (CALL.replace("{}", "{'a': <|call|>"), "f", "{'a': "),
        ("<|channel|>commentary to=python code<|message|>print(1)<|call|>", "python", "print(1)"),
        (" to=browser.search<|channel|>analysis<|message|>1 < 2", "browser.search", "1 < 2"),
        # tags in strings
        (CALL.replace("{}", '{"a": "<|call|>' + FINAL + '"}<|call|>'), "f", '{"a": "<|call|>' + FINAL + '"}'),
    ],
)
def test_a_message_to_others_is_a_call(text: str, name: str, arguments: str) -> None:
    finish = "tool_calls" if arguments.endswith("}") else "stop"
    wanted = "Hm.\n" * text.count("Hm."), "", [(name, arguments)], finish
    assert read([text]) == read(list(text)) == wanted
    # Without tools there is nobody to read it.
    assert not answer([text], "harmony", None, START).content or FINAL in text


def test_content_may_follow_a_call() -> None:
    text = f"{CALL} so<|call|>{START}{FINAL}42{NEXT}<|channel|>commentary to=functions.g<|message|>{{}}"
    assert read([text]) == read(list(text)) == ("", "so42", [("f", "{}"), ("g", "{}")], "tool_calls")


def test_a_prompt_can_have_opened_the_reasoning() -> None:
    end = "<|start|>assistant<|channel|>analysis<|message|>"
    assert read([f"Hm.{NEXT}{FINAL}42"], end)[:2] == ("Hm.", "42")
    assert read(["Hm."], end)[:2] == ("Hm.", "")
    assert read(["Hm."])[:2] == ("", "Hm.")


@rest(SECONDS)
@given(data=st.data())
@settings(max_examples=scaled(1000), deadline=None)
def test_nothing_is_lost_and_the_cuts_do_not_matter(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=20)))
    end = data.draw(st.sampled_from(["<|start|>assistant", "<|channel|>analysis<|message|>"]))
    got = read(cut(text, data), end)
    assert got == read(list(text), end) == read([text], end)
    seen = Counter(got.reasoning + got.content + "".join(map("".join, got.calls)))
    assert seen[MARK] == text.count(MARK)
    assert not any(tag in got.content for tag in TAGS)
    # All but tags and headers comes back.
    lost = "".join(Counter(text) - seen)
    assert re.fullmatch(r"[\w\s<|>.,:=\"]*", lost)


def test_text_is_passed_on_as_it_arrives() -> None:
    parts = (THOUGHT[: -len(NEXT)], " So", NEXT, FINAL, "4", "2<", "3")
    got = deltas(reader("harmony", "harmony"), parts)
    thoughts = [[{"reasoning_content": text}] for text in ("Hm.\n", " So")]
    assert got == [*thoughts, [], [], *([{"content": text}] for text in ("4", "2", "<3"))]


def test_a_reader_tells_whether_text_would_be_content() -> None:
    text = f"{THOUGHT}{FINAL}b{NEXT}{CALL}<|call|>{START}{FINAL}b"
    reads = reader("harmony", "harmony", START)
    for at, character in enumerate(text):
        assert reads.answering(text[at:]) == (character == "b"), text[:at]
        deltas(reads, [character])


@rest(SECONDS)
def test_a_header_is_not_held_back_for_ever() -> None:
    for before in ("<|channel|>", "<|start|>assistant<|channel|>final ", " " * 9, " to=functions."):
        text = before + "x" * 3000 + before + " " * 3000
        reads = reader("harmony")
        held, longest = 0, 0
        for found in deltas(reads, text):
            held = 0 if found else held + 1
            longest = max(longest, held)
        assert longest <= 1100


@nightly(SECONDS)
def test_long_answers_are_not_kept_so_that_no_piece_reads_them_again() -> None:
    # Each of the parts has several times what may be kept.
    thoughts, ends = 2_000, 10_000
    text = f"{THOUGHT}<|start|><|channel|>final " * thoughts + FINAL + "<|en" * ends
    parts = [text[at : at + 5] for at in range(0, len(text), 5)]
    got = read(parts)
    assert got.reasoning.count("Hm.") == thoughts
    assert got.content.count("<|en") == ends
    reads = reader("harmony", None, START)

    def push(part: str) -> None:
        deltas(reads, [part])
        reads._reasoned.clear()  # kept until its tokens are counted, and not read before

    assert most_kept(push, parts) < 20_000
