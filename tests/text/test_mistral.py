"""The parsers of Mistral's formats, which read each other's calls."""

from __future__ import annotations

import re

import pytest

from aioinfer.text.tool_calls import PARSERS
from aioinfer.text.tool_calls.base import LONGEST_EARLY, ToolCallParser
from tests.text.call_formats import Calls, parse
from tests.tiers import SECONDS, rest

FOUND = [("f", '{"a": 1}')]
BARE = '[TOOL_CALLS]f[ARGS]{"a": 1}'
LISTED = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize("name", ["mistral", "mistral-v11"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[TOOL_CALLS][{LISTED}]", "", FOUND),
        (f"[TOOL_CALLS] [{LISTED}, {LISTED}]", "", FOUND * 2),
        (f"Hm.\n[TOOL_CALLS] [ {LISTED} , {LISTED} ]\nSo", "Hm.So", FOUND * 2),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "a1B2c3D4e"}]', "", FOUND),
        ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', "", FOUND),
        ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f", "id": "a1B2c3D4e"}]', "", FOUND),
        ('[TOOL_CALLS][{"id": "a1B2c3D4e", "name": "f", "arguments": {"a": 1}}]', "", FOUND),
        (f'[TOOL_CALLS][{LISTED}, {{"id": "b", "arguments": {{"a": 1}}, "name": "f"}}]', "", FOUND * 2),
        (BARE, "", FOUND),
        (BARE + BARE, "", FOUND * 2),
        ('[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', "", FOUND),
        ('[TOOL_CALLS]f{"a": 1}', "", FOUND),
        ('[TOOL_CALLS] a.b-c [ARGS]{"a": 1}', '[TOOL_CALLS] a.b-c [ARGS]{"a": 1}', []),
        ('[TOOL_CALLS]a.b-c[ARGS] {"a": 1}', "", [("a.b-c", '{"a": 1}')]),
        # the length is reached
        (f"[TOOL_CALLS][{LISTED}", "", FOUND),
        (f"[TOOL_CALLS][{LISTED}, ", "", FOUND),
        (f'[TOOL_CALLS][{LISTED}, {{"name": "g"', ', {"name": "g"', FOUND),
        ('[TOOL_CALLS]f[ARGS]{"a": ', "", [("f", '{"a": ')]),
        # unexpected text behind a call
        (f"[TOOL_CALLS][{LISTED} and", " and", FOUND),
        (f"[TOOL_CALLS][{LISTED}, 2] {BARE}", ", 2] ", FOUND * 2),
        # no calls
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("[TOOL_CALLS]f[ARGS]1", "[TOOL_CALLS]f[ARGS]1", []),
        ("[TOOL_CALLS]f[CALL_ID", "[TOOL_CALLS]f[CALL_ID", []),
        (f"[TOOL_CALLS]f[{BARE}", "[TOOL_CALLS]f[", FOUND),
        (LISTED, LISTED, []),
    ],
)
def test_calls_and_text_similar_to_calls(name: str, text: str, content: str, calls: Calls) -> None:
    assert parse(name, [text]) == parse(name, list(text)) == (content, calls)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("name", "piece"),
    [("mistral", '[TOOL_CALLS][{"arguments":{'), ("hermes", '<tool_call>{"arguments":{"')],
)
def test_arguments_without_a_name_are_parsed_again_a_few_times_only(
    name: str, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[int] = []
    plain = ToolCallParser._no_call

    def watch(parser: ToolCallParser) -> bool:
        again.append(len(parser._tentative))
        return plain(parser)

    monkeypatch.setattr(ToolCallParser, "_no_call", watch)
    text = piece * 4000
    assert parse(name, [text]) == (text, [])
    assert sum(again) < 8 * LONGEST_EARLY + 100 * 4000
    again.clear()
    assert parse(name, list(text)) == (text, [])
    assert sum(again) < 8 * LONGEST_EARLY + 100 * 4000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral-v11", '[TOOL_CALLS]f[ARGS]{"b": <y>}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": <y>}}</tool_call>'),
    ],
)
def test_a_call_whose_arguments_break_off_is_not_complete(name: str, text: str) -> None:
    parser = PARSERS[name]()
    parser.push(text)
    parser.finish()
    assert parser.unfinished


def test_ids_are_such_as_the_templates_demand() -> None:
    parsed = PARSERS["mistral"]().push(BARE)
    assert parsed.calls[0].id
    assert re.fullmatch("[A-Za-z0-9]{9}", parsed.calls[0].id)
