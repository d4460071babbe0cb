"""Calls in DeepSeek's markup: the types of values, tags that models omit, and the text around calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.text.tool_calls import PARSERS
from tests.text.call_formats import collect

SCHEMAS: Any = {"f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}, "g": {}}
OPENING, CLOSING = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"


def parameter(key: str, value: str, string: str = "true") -> str:
    attribute = f' string="{string}"' if string else ""
    return f'<｜DSML｜parameter name="{key}"{attribute}>{value}</｜DSML｜parameter>\n'


def invoke(*parameters: str, name: str = "f") -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def read(text: str, name: str = "deepseek-v32") -> tuple[str, list[tuple[str, Any]], bool]:
    found = []
    for parts in ([text], list(text)):
        parser = PARSERS[name](SCHEMAS)
        content, calls = collect([*map(parser.push, parts), parser.finish()])
        found.append((content, calls, parser.unfinished))
    assert found[0] == found[1]
    content, calls, unfinished = found[0]
    return content, calls if unfinished else [(each, json.loads(told)) for each, told in calls], unfinished


@pytest.mark.parametrize(
    ("told", "value"),
    [
        (parameter("a", "12"), "12"),
        (parameter("a", "12", "false"), 12),
        (parameter("a", '{"b": [null, "</x>"]}', "false"), {"b": [None, "</x>"]}),
        (parameter("a", "True", "false"), True),
        # What the model calls JSON and is none, and what it says nothing of.
        (parameter("a", "Rome", "false"), "Rome"),
        (parameter("a", "12", ""), "12"),
        (parameter("n", "12", ""), 12),
        (parameter("n", "12"), "12"),
        (parameter("a", " \n<b>\n ").replace('"true"', "'true'"), " \n<b>\n "),
    ],
)
def test_the_attribute_says_what_a_value_is(told: str, value: Any) -> None:
    key = "n" if 'name="n"' in told else "a"
    for text in (f"{OPENING}\n{invoke(told)}{CLOSING}", invoke(told)):
        assert read(text) == ("", [("f", {key: value})], False)


ONE = invoke(parameter("a", "1"))
CALL = ("f", {"a": "1"})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"Hm.\n\n{OPENING}\n{ONE}{invoke(name='g')}{CLOSING}\nSo.", "Hm.So.", [CALL, ("g", {})]),
        (f"{OPENING}\n{invoke(chr(10))}{CLOSING}", "", [("f", {})]),
        (ONE, "", [CALL]),
        (f"Hm. {ONE}{ONE}", "Hm. ", [CALL, CALL]),
        (f"{OPENING}\n{ONE}", "", [CALL]),
        (f"{OPENING}\n{ONE.replace('</｜DSML｜invoke>', '')}{CLOSING}", "", [CALL]),
        (f"{OPENING} is a tag.", f"{OPENING} is a tag.", []),
    ],
)
def test_calls_and_text_are_told_apart(text: str, content: str, calls: Any) -> None:
    assert read(text) == (content, calls, False)
    newer = text.replace("function_calls", "tool_calls")
    assert read(newer, "deepseek-v4") == (content.replace("function_calls", "tool_calls"), calls, False)


@pytest.mark.parametrize("end", range(1, 6))
def test_calls_that_break_off_are_not_complete(end: int) -> None:
    told = invoke(parameter("a", "1"), parameter("b", "[1]", "false")).split("｜DSML｜")
    _, calls, unfinished = read(OPENING + "｜DSML｜".join(told[: end + 1]))
    assert bool(calls) == unfinished == (end > 1)
