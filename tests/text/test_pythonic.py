"""Calls in Python's notation: literals, near misses, and the text around them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.text.tool_calls import PARSERS
from tests.text.call_formats import Calls, collect, parse

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
ONE = [("f", '{"a": 1}')]
TWO = [*ONE, ("g", "{}")]

VALUES: list[tuple[str, Any]] = [
    ("12", 12),
    ("-3", -3),
    ("007", 7),
    ("1_000", 1000),
    ("0x1F", 31),
    ("2.50", 2.5),
    (".5", 0.5),
    ("1e3", 1000.0),
    ("True", True),
    ("false", False),
    ("None", None),
    ("null", None),
    ("'x'", "x"),
    ('"x"', "x"),
    ("''", ""),
    ('""', ""),
    ("'''a\n'b' \"c\"'''", "a\n'b' \"c\""),
    ('"""def f():\n    return \'\'"""', "def f():\n    return ''"),
    # escapes of Python and of JSON
    (r"'a\nb\t\'c\' \"d\" \\'", "a\nb\t'c' \"d\" \\"),
    (r'"\u00e9\xe9\U0001F600\101\/\d"', "éé😀A/\\d"),
    (r'"\ud83d\ude00 \x4 \u12"', "😀 \\x4 \\u12"),
    (r"'\033[31m'", "\x1b[31m"),
    # quotation marks, brackets and line breaks that models do not escape
    ("'sed -n '1,9p' f.py'", "sed -n '1,9p' f.py"),
    ("'it's \"so\"'", 'it\'s "so"'),
    ('"cat <<E\nimport csv\nE"', "cat <<E\nimport csv\nE"),
    ("'grep -F \"]\" (log)'", 'grep -F "]" (log)'),
    ("'printf a\x00b'", "printf a\x00b"),
    # lists, tuples, sets, dicts
    ("[]", []),
    ("[1, 'a', [None], ]", [1, "a", [None]]),
    ("(1, 2)", [1, 2]),
    ("{'a', 'b'}", ["a", "b"]),
    ("{}", {}),
    (
        "{'a': {\"b\": [True, {}]}, 'c\\'d': 1, e: 2, 3: 4}",
        {"a": {"b": [True, {}]}, "c'd": 1, "e": 2, "3": 4},
    ),
    ('{"a": true,\n "b": null}', {"a": True, "b": None}),
    # words are strings
    ("New York", "New York"),
    ("10:30", "10:30"),
    ("nan", "nan"),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_literals_become_json(text: str, value: Any) -> None:
    for told in (f"{START}[f(a={text})]{END}", f"{START}[f(z = 1, a = {text} , b=[{text}]), g()]{END}"):
        found = parse("lfm2", [told])
        assert found == parse("lfm2", list(told))
        content, calls = found
        assert content == ""
        arguments = json.loads(calls[0][1])
        assert arguments["a"] == value
        assert type(arguments["a"]) is type(value)
        assert arguments.get("b", [value]) == [value]


LFM2 = [
    (f"{START}[f(a=1), g()]{END}", "", TWO),
    (f"Let me see.\n\n{START}[f(a=1)]{END}\nDone.", "Let me see.Done.", ONE),
    (f"{START}[f(a=1)]{END}{START}[g()]{END}", "", TWO),
    (f"{START}[a.b-c(a=1)]{END}", "", [("a.b-c", '{"a": 1}')]),
    # brackets, tags and commas that models omit or add
    (f"{START}f(a=1){END}", "", ONE),
    (f"{START} [ f ( a = 1 ) ] {END}", "", ONE),
    (f"{START}[f(a=1,), g( )]", "", TWO),
    (f"{START}[f(a=1)\ng()]{END}", "", TWO),
    (f"{START}[f(a=1); g(){END}", "", TWO),
    (f"{START}[f(a=1)", "", ONE),
    (f"{START}[f(a=1)]{END[:9]}", "", ONE),
    # JSON
    (f'{START}[{{"name": "f", "arguments": {{"a": 1}}}}]{END}', "", ONE),
    (f'{START}{{"name": "f", "arguments": {{"a": 1}}}}{END}', "", ONE),
    # no calls
    (f"{START}[]{END}", f"{START}[]{END}", []),
    (f"{START}[f(1)]{END}", f"{START}[f(1)]{END}", []),
    ("[link text](url) and [f(a=1)]", "[link text](url) and [f(a=1)]", []),
    (f"{START}is a tag. {START}[f(a=1)]{END}", f"{START}is a tag. ", ONE),
]
PYTHONIC = [
    ("[f(a=1), g()]", "", TWO),
    ("\n[f(a=1)] ", "", ONE),
    ("<|python_start|>[f(a=1)]<|python_end|>", "", ONE),
    ("[f(a=1)", "", ONE),
    ("[f(a=1)]\nDone.", "Done.", ONE),
    ("Hm. [f(a=1)]", "Hm. [f(a=1)]", []),
    ("[f](url)", "[f](url)", []),
    ("[1, 2]", "[1, 2]", []),
    ("[f(x) for x in y]", "[f(x) for x in y]", []),
]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [*(("lfm2", *case) for case in LFM2), *(("pythonic", *case) for case in PYTHONIC)],
)
def test_calls_and_text_are_told_apart(name: str, text: str, content: str, calls: Calls) -> None:
    assert parse(name, [text]) == (content, calls)
    assert parse(name, list(text)) == (content, calls)


@pytest.mark.parametrize(
    "call",
    [
        "f(a='x",
        "f(a=",
        "f(a={'b'",
        "f(a=[1)",
        "f(a=1]",
        "f(a=g(1))",
        "f(a=1, 2)",
        "f(a=1, a=2)",
        "f(a='print('x')')",
        "f(a=\"mul='\\,'))\"')",
        "f(a='He said 'x', so')",
    ],
)
def test_calls_whose_arguments_are_damaged_are_not_complete(call: str) -> None:
    for text in (f"{START}[{call}]{END}", f"{START}[{call}, g()]{END}"):
        for parts in ([text], list(text)):
            parser = PARSERS["lfm2"]()
            collect([*map(parser.push, parts), parser.finish()])
            assert parser.unfinished
