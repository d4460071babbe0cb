"""Calls as a name and JSON after it, in the tags of DeepSeek and Kimi: near misses, ids, text around."""

from __future__ import annotations

import pytest

from aioinfer.text.tool_calls import PARSERS
from tests.text.call_formats import Calls, collect, parse

ONE = [("f", '{"a": 1}')]
TWO = [*ONE, ("g", "{}")]
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def fenced(arguments: str = '{"a": 1}', name: str = "f") -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def bare(arguments: str = '{"a": 1}', name: str = "f") -> str:
    return f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}"


def kimi(arguments: str = '{"a": 1}', id_: str = "functions.f:0") -> str:
    return f"<|tool_call_begin|>{id_}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def in_section(*calls: str) -> str:
    return SECTION + "\n".join(calls) + SECTION_END


V3 = [
    (in_section(fenced(), fenced("{}", "g")), "", TWO),
    (f"Let me see.\n\n{in_section(fenced())}\n\nDone.", "Let me see.Done.", ONE),
    # V3.1's calls
    (SECTION + bare() + bare("{}", "g") + SECTION_END, "", TWO),
    # tags that models omit, all or some
    (fenced() + "\n" + fenced("{}", "g"), "", TWO),
    (in_section(fenced()).removesuffix(SECTION_END), "", ONE),
    (fenced().removesuffix(CALL_END), "", ONE),
    (fenced().removesuffix(CALL_END) + fenced("{}", "g"), "", TWO),
    (f"Hm. {SECTION}{fenced().removeprefix(CALL)}", "Hm. ", ONE),
    (f"{SECTION}{fenced()[:-5]}", "", ONE),
    # the fence
    (fenced().replace("```json", "```"), "", ONE),
    (fenced().replace("```json", "```python"), "", ONE),
    (fenced().replace("```json\n", "").replace("\n```", ""), "", ONE),
    (fenced().replace("\n```json\n", " ```json ").replace("\n```", "```\n"), "", ONE),
    # other bars and spaces between the words of a tag
    (fenced().replace("｜", "|"), "", ONE),
    (in_section(fenced()).replace("▁", "_"), "", ONE),
    (in_section(fenced()).replace("▁", "\\_").replace("｜", "|"), "", ONE),
    (in_section(fenced()).replace("▁", " "), "", ONE),
    # no arguments
    (fenced(""), "", [("f", "{}")]),
    (fenced("null"), "", [("f", "{}")]),
    (bare(""), "", [("f", "{}")]),
    (f"{CALL}f{CALL_END}", "", [("f", "{}")]),
    # a function of this name
    (bare(name="function"), "", [("function", '{"a": 1}')]),
    # tags within arguments, and arguments over several lines
    (fenced(f'{{\n "a": "{CALL_END}{SECTION_END}```"\n}}'), "",
     [("f", f'{{\n "a": "{CALL_END}{SECTION_END}```"\n}}')]),
    # no calls
    (f"{SECTION}{SECTION_END}", f"{SECTION}{SECTION_END}", []),
    (f"a {CALL}b c", f"a {CALL}b c", []),
    (f"{SECTION}is a tag. {fenced()}", f"{SECTION}is a tag. ", ONE),
    (f"{CALL_END} ends a call", f"{CALL_END} ends a call", []),
    # text between calls, and tags that end nothing
    (f"{SECTION}{fenced()} and {CALL_END}{fenced('{}', 'g')}", " and ", TWO),
    (f"{fenced()}{SECTION_END}{CALL_END}\n", "", ONE),
    (f"{fenced()} ```a```", " ```a```", ONE),
]  # fmt: skip
KIMI_K2 = [
    (KIMI + kimi() + kimi("{}", "functions.g:1") + KIMI_END, "", TWO),
    (f"Let me see.{KIMI}\n{kimi()}\n{kimi('{}', 'functions.g:1')}\n{KIMI_END}", "Let me see.", TWO),
    # tags that models omit
    (kimi() + kimi("{}", "functions.g:1"), "", TWO),
    (kimi().removesuffix("<|tool_call_end|>") + kimi("{}", "functions.g:1"), "", TWO),
    (KIMI + kimi().removeprefix("<|tool_call_begin|>") + KIMI_END, "", ONE),
    (KIMI + kimi().replace("<|tool_call_argument_begin|>", " "), "", ONE),
    (kimi() + KIMI_END[:-3], "", ONE),
    # ids
    (kimi(id_="f:0"), "", ONE),
    (kimi(id_="functions.f"), "", ONE),
    (kimi(id_="\nfunctions.f:12 \n"), "", ONE),
    (kimi(id_="functions.a.b:c:3"), "", [("a.b:c", '{"a": 1}')]),
    (kimi(""), "", [("f", "{}")]),
    # no calls
    (f"{KIMI} Hm. {kimi()}", f"{KIMI} Hm. ", ONE),
    (f"{KIMI}functions.f:0 {KIMI_END[:4]} x", f"{KIMI}functions.f:0 {KIMI_END[:4]} x", []),
]
CASES = [
    *(("deepseek-v3", *case) for case in V3),
    *(("deepseek-v31", *case) for case in V3),
    *(("kimi-k2", *case) for case in KIMI_K2),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_and_text_are_told_apart(name: str, text: str, content: str, calls: Calls) -> None:
    assert parse(name, [text]) == (content, calls)
    assert parse(name, list(text)) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek-v3", fenced('{"a": "b')),
        ("deepseek-v31", bare('{"a": 1')),
        ("deepseek-v31", bare('{"a": ') + bare()),
        ("kimi-k2", kimi('{"a": [1') + kimi("{}", "functions.g:1")),
    ],
)
def test_calls_whose_arguments_break_off_are_not_complete(name: str, text: str) -> None:
    for parts in ([text], list(text)):
        parser = PARSERS[name]()
        collect([*map(parser.push, parts), parser.finish()])
        assert parser.unfinished


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (["functions.f:0", "functions.f:1"], ["functions.f:0", "functions.f:1"]),
        (["functions.f:3", "g:4"], ["functions.f:3", "functions.g:4"]),
        # An id stands for one call.
        (
            ["functions.f:5", "functions.f:5", "functions.f:6"],
            ["functions.f:5", "functions.f:6", "functions.f:7"],
        ),
        (["functions.f", "functions.f"], ["functions.f:0", "functions.f:1"]),
    ],
)
def test_calls_of_kimi_have_the_ids_that_it_writes(written: list[str], ids: list[str]) -> None:
    parser = PARSERS["kimi-k2"]()
    calls = parser.push("".join(kimi(id_=each) for each in written)).calls
    assert [call.id for call in calls if call.id] == ids
