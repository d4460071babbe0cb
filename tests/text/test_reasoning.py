"""The parsers of reasoning: reasoning and content, however the text is split."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer.text.reasoning import REASONING_PARSERS as ALL
from aioinfer.text.reasoning import Harmony, ReasoningParser
from tests.text.call_formats import cut

#: the formats of two tags; the messages of Harmony have tests of their own
REASONING_PARSERS = {name: parser for name, parser in ALL.items() if parser is not Harmony}

PIECES = [
    "<think>", "</think>", "\n", "\n\n", " ", "<", "<th", "ink>", "</", "a", "bc", "é", ">", "[TH", "[/", "]",
    "<think>thought", "tho", "ught",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def tagged(name: str, text: str) -> str:
    """The text with the parser's tags."""
    parser = REASONING_PARSERS[name]
    return text.replace("<think>", parser.opening).replace("</think>", parser.closing)


def split(parser: ReasoningParser, parts: list[str]) -> tuple[str, str]:
    pairs = [*(parser.push(part) for part in parts), parser.finish()]
    return "".join(reasoning for reasoning, _ in pairs), "".join(content for _, content in pairs)


def oracle(name: str, text: str, prompt_end: str) -> tuple[str, str]:
    """The whole text at once."""
    parser = REASONING_PARSERS[name]
    within = prompt_end.startswith(parser.opening) or (parser.opened and not prompt_end)
    if prompt_end.startswith(parser.closing):
        return "", text
    opened = re.match(rf"\s*{re.escape(parser.opening)}({parser.header})?\n*", text)
    if not opened and not within:
        return "", text
    body = text[opened.end() :] if opened else text
    closed = re.search(rf"\n*{re.escape(parser.closing)}\n*", body)
    return (body[: closed.start()], body[closed.end() :]) if closed else (body, "")


def test_reasoning_opened_by_the_template() -> None:
    opened, plain = (REASONING_PARSERS[name] for name in ("deepseek-r1", "qwen3"))
    assert split(opened(), ["hm </thi", "nk>\n", "\n42"]) == ("hm ", "42")
    assert split(plain(), ["hm </thi", "nk>\n", "\n42"]) == ("", "hm </think>\n\n42")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel>thought\nhm<channel|>42", ("hm", "42")),
        ("<|channel>thought\n<channel|>42", ("", "42")),
        ("<|channel>thoughtless<channel|>42", ("less", "42")),
        ("<|channel>thou<channel|>42", ("thou", "42")),
        ("<|channel>thou", ("thou", "")),
        ("thought\n42", ("", "thought\n42")),
    ],
)
def test_the_name_of_a_channel_is_no_reasoning(text: str, wanted: tuple[str, str]) -> None:
    parser = REASONING_PARSERS["gemma4"]
    assert split(parser(), [text]) == split(parser(), list(text)) == wanted


def test_a_prompt_may_have_opened_or_closed_a_channel() -> None:
    parser = REASONING_PARSERS["gemma4"]
    opened, closed = "<|turn>model\n<|channel>thought\n", "<|channel>thought\n<channel|>"
    assert (parser.opened_by(opened), parser.opened_by(closed)) == (True, False)
    assert split(parser(opened), ["thought of it<channel|>", "42"]) == ("thought of it", "42")
    assert parser.in_template("{{ text.split('<channel|>')[-1] }}")


@pytest.mark.parametrize("name", REASONING_PARSERS)
@pytest.mark.parametrize("end", ["", "\n", "\n\n", " "])
def test_the_end_of_the_prompt_tells_where_the_output_begins(name: str, end: str) -> None:
    parser = REASONING_PARSERS[name]
    assert parser.opened_by(f"assistant{parser.opening}{end}")
    assert parser.opened_by(f"{parser.opening}{end}{parser.closing}{end}") is False
    assert parser.opened_by(f"assistant{end}") is parser.opened
    # A tag that someone wrote about.
    assert parser.opened_by(f"What is {parser.opening}?{end}") is parser.opened


@pytest.mark.parametrize("name", REASONING_PARSERS)
@given(text=texts, end=st.sampled_from(["", "<think>\n", "</think>\n\n"]), data=st.data())
def test_the_result_does_not_depend_on_the_split(name: str, text: str, end: str, data: st.DataObject) -> None:
    text, end = tagged(name, text), tagged(name, end)
    parser = REASONING_PARSERS[name]
    got = split(parser(end), cut(text, data))
    assert got == split(parser(end), list(text))
    assert got == oracle(name, text, end)


@pytest.mark.parametrize("name", REASONING_PARSERS)
@given(space=st.integers(0, 100), breaks=st.integers(0, 100))
def test_white_space_is_not_held_back_for_ever(name: str, space: int, breaks: int) -> None:
    text = tagged(name, " " * space + "<think>hm" + "\n" * breaks + "</think>" + "\n" * breaks + "yes")
    got = split(REASONING_PARSERS[name](), [text])
    assert got == split(REASONING_PARSERS[name](), list(text))
    if space <= 64:
        assert got == ("hm" + "\n" * (breaks - 64), "yes")
    elif not REASONING_PARSERS[name].opened:
        assert got == ("", text)


def test_only_the_beginning_of_a_tag_is_held_back() -> None:
    parser = REASONING_PARSERS["qwen3"]()
    assert [parser.push(part) for part in ("<thi", "nk>a", "b<", "c", "</think", ">", "d</think")] == [
        ("", ""),
        ("a", ""),
        ("b", ""),
        ("<c", ""),
        ("", ""),
        ("", ""),
        ("", "d</think"),
    ]
    assert parser.finish() == ("", "")
