"""The parser of Hermes' format: calls and content, however the text is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.call_formats import Calls, cut
from tests.text.call_formats import parse as parse_format
from tests.tiers import SECONDS, rest, scaled

LONG = "x" * 2000


def parse(parts: list[str]) -> tuple[str, Calls]:
    return parse_format("hermes", parts)


def call(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call('{"a": 1}'), "", [("f", '{"a": 1}')]),
        ("Let me look.\n" + call("{}"), "Let me look.", [("f", "{}")]),
        (call("{}") + "\n" + call("{}", "g"), "", [("f", "{}"), ("g", "{}")]),
        ("a\n\n" + call("{}") + "\n b " + call("{}", "g") + "c\n", "a b c\n", [("f", "{}"), ("g", "{}")]),
        (
            call('{"a": "}<\\"</tool_call>{[", "b": [{}]}'),
            "",
            [("f", '{"a": "}<\\"</tool_call>{[", "b": [{}]}')],
        ),
        ('<tool_call>{"arguments":{"a":{}} , "name":"f"}</tool_call>', "", [("f", '{"a":{}}')]),
        ('<tool_call>{"name":"\\u00fc\\n","arguments":{}}</tool_call>', "", [("ü\n", "{}")]),
        # missing or truncated parts of the closing tag
        ('<tool_call>{"name":"f","arguments":{"a":1}</tool_call>', "", [("f", '{"a":1}')]),
        (call('{"a":1}')[:-4], "", [("f", '{"a":1}')]),
        (call('{"a":1}')[:-14], "", [("f", '{"a":1}')]),
        # the length is reached within the arguments
        ('<tool_call>{"name":"f","arguments":{"a":[1', "", [("f", '{"a":[1')]),
        # no calls
        ("<tool_call>", "<tool_call>", []),
        ("\n<tool_call>\n[]</tool_call>\n", "\n<tool_call>\n[]</tool_call>\n", []),
        ('<tool_call>{"name": "f", "arguments": "{}"}', '<tool_call>{"name": "f", "arguments": "{}"}', []),
        ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
        ('<tool_call>{"arguments":{}, "x":1}', '<tool_call>{"arguments":{}, "x":1}', []),
        ("<tool_call>" + call("{}"), "<tool_call>", [("f", "{}")]),
        ('<tool_call>{"name": ' + call("{}"), '<tool_call>{"name": ', [("f", "{}")]),
        ('<tool_call>{"arguments":{ ' + call("{}"), '<tool_call>{"arguments":{ ', [("f", "{}")]),
        # unexpected text behind the arguments
        ('<tool_call>{"name":"f","arguments":{},"id":1}</tool_call>', ',"id":1}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name":"f","arguments":{"a": x</tool_call>b', "b", [("f", '{"a": x')]),
    ],
)
def test_calls_and_text_similar_to_calls(text: str, content: str, calls: Calls) -> None:
    assert parse([text]) == parse(list(text)) == (content, calls)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@rest(SECONDS)
@given(
    calls=st.lists(
        st.tuples(st.text("fgh_-", min_size=1), st.dictionaries(st.text(), json_values, max_size=4)),
        max_size=4,
    ),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
    data=st.data(),
)
@settings(max_examples=scaled(100, 20), deadline=None)
def test_any_arguments_come_back_as_they_were_written(
    calls: list[tuple[str, dict[str, Any]]], indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    written = [
        (name, json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)) for name, arguments in calls
    ]
    text = "Hm.\n" + "\n".join(call(arguments, name) for name, arguments in written)
    content, found = parse(cut(text, data))
    assert content == ("Hm." if calls else "Hm.\n")
    assert found == written


@pytest.mark.parametrize(
    "text",
    [
        f'<tool_call>{" " * 2000}{{"name": "f", "arguments": {{}}}}</tool_call>',
        call("{}", LONG),
        f'<tool_call>{{"arguments": {{"a": "{LONG * 9}"}}, "name": "f"}}</tool_call>',
        f'<tool_call>{{"arguments": {{"a": 1}}, "name": "{LONG}"}}</tool_call>',
    ],
    ids=["space", "name", "early arguments", "late name"],
)
@given(data=st.data())
@settings(max_examples=scaled(30, 10), deadline=None)
def test_what_takes_too_long_to_become_a_call_is_content(text: str, data: st.DataObject) -> None:
    assert parse(cut(text, data)) == parse([text]) == (text, [])


@given(before=st.integers(0, 100), behind=st.integers(0, 100))
def test_line_breaks_are_not_held_back_for_ever(before: int, behind: int) -> None:
    text = "a" + "\n" * before + call("{}") + "\n" * behind + "b"
    assert parse(list(text)) == parse([text]) == ("a" + "\n" * (before - 64) + "b", [("f", "{}")])


@pytest.mark.parametrize("space", [1000, 1100])
def test_space_behind_arguments_is_not_held_back_for_ever(space: int) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}' + " " * space + "}</tool_call>"
    content = " " * space + "}</tool_call>" if space > 1024 else ""
    assert parse(list(text)) == parse([text]) == (content, [("f", "{}")])


def test_long_arguments_are_parsed() -> None:
    arguments = json.dumps({"a": LONG * 50})
    text = call(arguments)
    parts = [text[at : at + 7] for at in range(0, len(text), 7)]
    assert parse(parts) == ("", [("f", arguments)])
    early = f'<tool_call>{{"arguments": {{"a": "{LONG * 8}"}}, "name": "f"}}</tool_call>'
    assert parse([early]) == ("", [("f", json.dumps({"a": LONG * 8}))])
