"""The reasoning and the content of Harmony, the format of gpt-oss."""

from __future__ import annotations

from collections import Counter

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.text.harmony import HEADER
from aioinfer.text.reasoning import Harmony
from tests.counting import most_kept
from tests.text.call_formats import FORMATS, MARK, cut
from tests.text.test_reasoning import split as split_by
from tests.tiers import SECONDS, nightly, rest, scaled

NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.\n{NEXT}"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
PIECES = (*FORMATS["harmony"].pieces, FINAL, THOUGHT, NEXT, "<|return|>", "hm ", "<")


def split(parts: list[str], prompt_end: str = "<|start|>assistant") -> tuple[str, str]:
    return split_by(Harmony(prompt_end), parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{THOUGHT}{FINAL}42", "Hm.\n", "42"),
        (f"{THOUGHT}{FINAL}42<|return|>", "Hm.\n", "42"),
        (f"{FINAL}a < b", "", "a < b"),
        (f"{THOUGHT}{THOUGHT}{FINAL}42", "Hm.\n\nHm.\n", "42"),
        # what is told the user before the answer
        (f"<|channel|>commentary<|message|>I add.{NEXT}{FINAL}42", "", "I add.\n42"),
        # what is for tools, with its tags
        (f"{THOUGHT}{CALL}", "Hm.\n", CALL),
        (f"{CALL}<|call|>", "", f"{CALL}<|call|>"),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "", None),
        (f"{THOUGHT.removesuffix('<|start|>assistant')}{CALL}", "Hm.\n", CALL),
        # headers that models vary
        ("<|channel|> analysis <|message|>Hm.<|end|>\n<|start|>assistant<|message|>42", "Hm.", "42"),
        (f"<|channel|>analysis<|message|>Hm.<|start|>assistant{FINAL}42", "Hm.", "42"),
        # a header without a message, in front of one
        (f"<|channel|>final {THOUGHT}{FINAL}42", "Hm.\n", "<|channel|>final 42"),
        # no messages
        ("42", "", None),
        ("", "", None),
        ("<|end|>", "", None),
        ("<|message|>42", "", None),
        ("<|channel|>", "", None),
        ("<|start|>user<|message|>x", "", None),
        (f"{FINAL}see <|channel|> and <|start|>user", "", "see <|channel|> and <|start|>user"),
        # the length is reached
        (f"{THOUGHT}<|chan", "Hm.\n", "<|start|>assistant<|chan"),
        ("<|channel|>analysis<|message|>Hm <|en", "Hm <|en", ""),
    ],
)
def test_the_channel_tells_reasoning_from_content(text: str, reasoning: str, content: str | None) -> None:
    wanted = reasoning, text if content is None else content
    if CALL in text and "Hm." in text and NEXT in text:
        wanted = reasoning, f"<|start|>assistant{content}"
    assert split([text]) == split(list(text)) == wanted


def test_a_prompt_can_have_opened_the_reasoning() -> None:
    end = "<|start|>assistant<|channel|>analysis<|message|>"
    assert split([f"Hm.{NEXT}{FINAL}42"], end) == ("Hm.", "42")
    assert split(["Hm."], end) == ("Hm.", "")
    assert split(["Hm."]) == ("", "Hm.")


@rest(SECONDS)
@given(data=st.data())
@settings(max_examples=scaled(1000), deadline=None)
def test_nothing_is_lost_and_the_cuts_do_not_matter(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=20)))
    end = data.draw(st.sampled_from(["<|start|>assistant", "<|channel|>analysis<|message|>"]))
    reasoning, content = got = split(cut(text, data), end)
    assert got == split(list(text), end) == split([text], end)
    seen = Counter(reasoning + content)
    assert seen[MARK] == text.count(MARK)
    # All but tags and headers comes back.
    lost = Counter(text) - seen
    assert set(lost) <= set(f"{THOUGHT}{FINAL}{CALL}<|call|><|return|>")
    if not regex.search(HEADER, text) and end.endswith("assistant"):
        assert got == ("", text)


def test_text_is_passed_on_as_it_arrives() -> None:
    parser = Harmony()
    got = [parser.push(part) for part in (THOUGHT[: -len(NEXT)], " So", NEXT, FINAL, "4", "2<", "3")]
    assert got == [("Hm.\n", ""), (" So", ""), ("", ""), ("", ""), ("", "4"), ("", "2"), ("", "<3")]
    assert parser.finish() == ("", "")


@rest(SECONDS)
def test_a_header_is_not_held_back_for_ever() -> None:
    for before in ("<|channel|>", "<|start|>assistant<|channel|>final ", " " * 9, " to=functions."):
        parser = Harmony()
        text = before + "x" * 3000 + before + " " * 3000
        seen, held = "", 0
        for at, character in enumerate(text):
            seen += parser.push(character)[1]
            held = max(held, at + 1 - len(seen))
        assert held <= 1100
        assert seen + parser.finish()[1] == text


@nightly(SECONDS)
def test_long_answers_are_not_kept_so_that_no_piece_reads_them_again() -> None:
    # Each of the parts has several times what may be kept.
    thoughts, ends = 2_000, 10_000
    text = f"{THOUGHT}<|start|><|channel|>final " * thoughts + FINAL + "<|en" * ends
    parts = [text[at : at + 5] for at in range(0, len(text), 5)]
    reasoning, content = split(parts)
    assert reasoning.count("Hm.") == thoughts
    assert content.count("<|en") == ends
    assert most_kept(Harmony("<|start|>assistant").push, parts) < 20_000
