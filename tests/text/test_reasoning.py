"""Thoughts and the answer around them, however the text is split."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.text.reasoning import REASONING_PARSERS as ALL
from aioinfer.text.reasoning.tagged import Tagged
from tests.text.answers import answer, deltas, reader
from tests.text.call_formats import cut
from tests.tiers import thinned

#: the formats of two tags; the messages of Harmony have tests of their own
PARSERS: dict[str, type[Tagged]] = {name: each for name, each in ALL.items() if issubclass(each, Tagged)}
every_format = pytest.mark.parametrize("name", PARSERS)

PIECES = [
    "<think>", "</think>", "\n", "\n\n", " ", "<", "<th", "ink>", "</", "a", "bc", "é", ">", "[TH", "[/", "]",
    "<think>thought", "tho", "ught", "`",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def tagged(name: str, text: str) -> str:
    """The text with the parser's tags."""
    parser = PARSERS[name]
    return text.replace("<think>", parser.opening + parser.header).replace("</think>", parser.closing)


def split(name: str, text: str, prompt_end: str = "") -> tuple[str, str]:
    got = answer([text], name, None, prompt_end)
    assert got == answer(list(text), name, None, prompt_end)
    assert (got.calls, got.finish) == ([], "stop")
    return got.reasoning, got.content


def oracle(name: str, text: str, prompt_end: str) -> tuple[str, str]:
    """The whole text at once."""
    parser = PARSERS[name]
    opening, closing = re.escape(parser.opening), re.escape(parser.closing)
    within = parser.opened_by(prompt_end)
    thoughts, content = [], ""
    if not within and (led := re.match(rf"\s*(?={opening}|{closing})", text)):
        text = text[led.end() :]
    while text:
        if within:
            again = re.match(rf"(?:\s*{opening}(?:{parser.header})?)*\n*", text)
            assert again
            text = text[again.end() :]
            body, tag, text = text.partition(parser.closing)
            thoughts.append(body.rstrip("\n") if tag else body)
            within = False
        else:
            tags = re.finditer(rf"({opening}(?:{parser.header})?)|{closing}", text)
            tag_ = next((each for each in tags if (content + text[: each.start()]).count("`") % 2 == 0), None)
            if tag_ is None:
                return "\n".join(filter(None, thoughts)), content + text
            content, text, within = content + text[: tag_.start()], text[tag_.end() :], bool(tag_[1])
        if not within and (not content or content.endswith("\n")):
            text = text.lstrip("\n")
    return "\n".join(filter(None, thoughts)), content


def test_reasoning_opened_by_the_template() -> None:
    assert split("deepseek-r1", "hm </think>\n\n42") == ("hm ", "42")
    assert split("qwen3", "hm", "<think>\n") == ("hm", "")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel>thought\nhm<channel|>42", ("hm", "42")),
        ("<|channel>thought\n<channel|>42", ("", "42")),
        ("<|channel>thoughtless<channel|>42", ("less", "42")),
        ("<|channel>thou<channel|>42", ("thou", "42")),
        ("<|channel>thou", ("thou", "")),
        ("thought\n42", ("", "thought\n42")),
        ("<|channel><|channel>thought\n<channel|>42", ("", "42")),
    ],
)
def test_the_name_of_a_channel_is_no_reasoning(text: str, wanted: tuple[str, str]) -> None:
    assert split("gemma4", text) == wanted


ANYWHERE = [
    # several, behind what is said
    ("<think>a</think>b<think>c</think>d", "a\nc", "bd"),
    ("<think>a</think><think>b</think>c", "a\nb", "c"),
    ("<think>a</think>\nI look.\n\n<think>\nb\n</think>\n\nYes.", "a\nb", "I look.\n\nYes."),
    ("<think>a</think>I look.<think></think> Yes.", "a", "I look. Yes."),
    # tags that open or close nothing
    ("<think>\n<think>a</think>b", "a", "b"),
    ("<think>a</think></think>\n\nb</think>", "a", "b"),
    ("<think>a</think>\n</think>\nb", "a", "b"),
    ("<think>a</think>b</think>\n\nc", "a", "b\n\nc"),
    ("<think>a <think> b</think>c", "a <think> b", "c"),
    ("<think></think>b", "", "b"),
    ("<think>\n\n</think>\n\nb", "", "b"),
    # code names tags
    ("<think>a</think>The tag `</think>` ends `<think>`.<think>b</think>", "a\nb", None),
    ("<think>a</think>\n```\n<think>\n</think>\n```\nb", "a", "```\n<think>\n</think>\n```\nb"),
]


@pytest.mark.parametrize(
    ("name", "end", "text", "thought", "content"),
    thinned(
        [
            pytest.param(name, end, *each)
            for name, end, each in itertools.product(PARSERS, ["<think>\n", "<think></think>\n\n"], ANYWHERE)
        ],
        5,
    ),
)
def test_a_thought_may_be_anywhere(name: str, end: str, text: str, thought: str, content: str | None) -> None:
    content = "The tag `</think>` ends `<think>`." if content is None else content
    wanted = tagged(name, thought), tagged(name, content)
    if PARSERS[name].header in text:
        assert split(name, tagged(name, text), tagged(name, end)) == wanted


@pytest.mark.parametrize(
    ("name", "end", "text", "wanted"),
    [
        ("cohere", "<|START_THINKING|>", "a<|END_THINKING|><|START_TEXT|>b\n<|END_TEXT|>", ("a", "b\n")),
        ("cohere", "", "<|START_RESPONSE|>b<|END_RESPONSE|>", ("", "b")),
        ("solar", "", "<|think|>a<|end|><|begin|>assistant<|content|>b<|end|>", ("a", "b")),
        ("solar", "<|think|><|end|><|begin|>assistant", "<|content|>b", ("", "b")),
        ("ernie45", "<think>\n", "a\n</think>\n\n<response>\nb\n</response>\n", ("a", "b\n")),
        ("hunyuan-a13b", "", "<think>\na\n</think>\n<answer>\nb</answer>", ("a", "b")),
        ("apriel", "Here are my reasoning steps:\n", "a\n[BEGIN FINAL RESPONSE]\nb", ("a", "b")),
        ("apriel", "", "[BEGIN FINAL RESPONSE]b\n[END FINAL RESPONSE]", ("", "b\n")),
        ("minimax-m3", "", "</mm:think>b", ("", "b")),
        (
            *("kimi-k3", "<|open|>think<|sep|>", "a<|close|>think<|sep|><|open|>response<|sep|>b"),
            ("a", "b"),
        ),
        ("kimi-k3", "", "<|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|>", ("", "b")),
    ],
)
def test_the_answer_may_have_tags_of_its_own(name: str, end: str, text: str, wanted: tuple[str, str]) -> None:
    assert split(name, text, end) == wanted


@every_format
def test_a_tag_that_closes_nothing_is_not_shown(name: str) -> None:
    closed = tagged(name, "<think></think>")
    for text in ("</think>Yes.", "\n</think>\n\nYes.", "</think></think>Yes.", "Yes.</think>"):
        assert split(name, tagged(name, text), closed) == ("", "Yes.")
    assert split(name, tagged(name, "So it is.\n</think>\n\nYes."), closed) == ("", "So it is.\nYes.")


def test_a_prompt_may_have_opened_or_closed_a_channel() -> None:
    parser = PARSERS["gemma4"]
    opened, closed = "<|turn>model\n<|channel>thought\n", "<|channel>thought\n<channel|>"
    assert (parser.opened_by(opened), parser.opened_by(closed)) == (True, False)
    assert split("gemma4", "thought of it<channel|>42", opened) == ("thought of it", "42")
    assert parser.in_template("{{ text.split('<channel|>')[-1] }}")


@every_format
@pytest.mark.parametrize("end", ["", "\n", "\n\n", " "])
def test_the_end_of_the_prompt_tells_where_the_output_begins(name: str, end: str) -> None:
    parser = PARSERS[name]
    assert parser.opened_by(f"assistant{parser.opening}{end}")
    assert parser.opened_by(f"{parser.opening}{end}{parser.closing}{end}") is False
    assert parser.opened_by(f"assistant{end}") is parser.opened
    # A tag that someone wrote about.
    assert parser.opened_by(f"What is {parser.opening}?{end}") is parser.opened


@every_format
@given(text=texts, end=st.sampled_from(["", "<think>\n", "<think></think>\n\n"]), data=st.data())
def test_the_result_does_not_depend_on_the_split(name: str, text: str, end: str, data: st.DataObject) -> None:
    text, end = tagged(name, text), tagged(name, end)
    got = split(name, text, end)
    assert got == answer(cut(text, data), name, None, end)[:2]
    assert got == oracle(name, text, end)


@every_format
@given(space=st.integers(0, 100), breaks=st.integers(0, 100))
def test_white_space_is_not_held_back_for_ever(name: str, space: int, breaks: int) -> None:
    text = tagged(name, " " * space + "<think>hm" + "\n" * breaks + "</think>" + "\n" * breaks + "yes")
    got = split(name, text)
    if space <= 64:
        assert got == ("hm" + "\n" * (breaks - 64), "yes")
    elif not PARSERS[name].opened:
        assert got == ("hm" + "\n" * (breaks - 64), " " * space + "\n" * breaks + "yes")


def test_only_the_beginning_of_a_tag_is_held_back() -> None:
    reads = reader("qwen3")
    parts = ["<thi", "nk>a", "b<", "c", "</think", ">", "d</think", "<th", "ink", ">", "e"]
    got = [[value for delta in found for value in delta.values()] for found in deltas(reads, parts)]
    assert got == [[], ["a"], ["b"], ["<c"], [], [], ["d"], ["</think"], [], [], ["\ne"]]


@every_format
def test_a_reader_tells_whether_text_would_be_content(name: str) -> None:
    text = tagged(name, "<think>\na\n</think>\n\né\n\n<think>c</think>ß")
    reads = reader(name, None, tagged(name, "<think></think>"))
    for at, character in enumerate(text):
        before = text[:at]
        content = text[at:].startswith(("é", "\n\n" + PARSERS[name].opening)) or character == "ß"
        if content or not before.endswith("é\n"):
            assert reads.answering(text[at:]) == content, before
        deltas(reads, [character])
