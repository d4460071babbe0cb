"""The parser of Llama's format: the beginning of an answer decides."""

from __future__ import annotations

import pytest

from tests.text.call_formats import Calls, parse

CALL = '{"name": "f", "parameters": {"a": 1}}'
FOUND = [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", FOUND),
        (f"<|python_tag|>{CALL}", "", FOUND),
        (f"\n<|python_tag|> {CALL}\n", "", FOUND),
        (f"{CALL}; {CALL}", "", FOUND * 2),
        (f"{CALL};\n<|python_tag|>{CALL};", "", FOUND * 2),
        (f"{CALL}\n{CALL}", "", FOUND * 2),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', "", FOUND),
        ('{"name":"f","arguments":{"a": 1} }', "", FOUND),
        ('{"parameters": {"a": 1}, "name": "f"}', "", FOUND),
        # what follows a call
        (f"{CALL} and", " and", FOUND),
        (f"{CALL}; {{", "; {", FOUND),
        (f'{CALL}; {{"name": "g"', '; {"name": "g"', FOUND),
        (CALL[:-1] + ', "id": 1}', ', "id": 1}', FOUND),
        # the length is reached within the arguments, or behind them
        (CALL[:-3], "", [("f", '{"a": ')]),
        (CALL[:-1], "", FOUND),
        # no calls
        ("", "", []),
        (f"So: {CALL}", f"So: {CALL}", []),
        (f"<|python_tag|>print({CALL})", f"<|python_tag|>print({CALL})", []),
        ('{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
        ('{"name": "f", "parameters": "{}"}', '{"name": "f", "parameters": "{}"}', []),
        ('{"name": "f"', '{"name": "f"', []),
        ("<|python", "<|python", []),
    ],
)
def test_calls_and_answers_similar_to_calls(text: str, content: str, calls: Calls) -> None:
    assert parse("llama3", [text]) == parse("llama3", list(text)) == (content, calls)
