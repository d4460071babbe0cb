"""The notation of Gemma 4's calls: what is nearly in it, and the schemas that decide what a value is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.text.tool_calls import Gemma4, Parsed
from aioinfer.text.tool_calls.base import LONGEST_EARLY
from tests.text.call_formats import Calls, collect
from tests.text.test_calls import gemma, quoted

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "size": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"type": ["string", "null"]},
    "names": {"type": "array", "items": {"type": "string"}},
    "counts": {"type": "array", "items": {"type": "integer"}},
    "place": {"$ref": "#/$defs/place"},
    "either": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    "any": {},
}
PLACE = {"type": "object", "properties": {"name": {"type": "string"}, "at": {"type": "integer"}}}
FUNCTIONS: Any = {
    name: {"type": "object", "properties": PROPERTIES, "$defs": {"place": PLACE}} for name in ("f", "g")
}


def read(text: str, functions: Any = None) -> tuple[str, Calls, bool]:
    """Content, calls and whether they are complete, the same whole and by character."""
    found = []
    for parts in ([text], list(text), [text[at : at + 5] for at in range(0, len(text), 5)]):
        parser = Gemma4(FUNCTIONS if functions is None else functions)
        deltas: list[Parsed] = [*(parser.push(part) for part in parts), parser.finish()]
        content, calls = collect(deltas)
        found.append((content, calls, bool(calls) and not parser.unfinished))
    assert found[0] == found[1] == found[2]
    return found[0]


def value(text: str, functions: Any = None) -> Any:
    content, [(_, arguments)], complete = read(text, functions)
    assert (content, complete) == ("", True), (content, arguments)
    return json.loads(arguments)


@pytest.mark.parametrize("head", [":f", "call:f", "call: f", " call : f ", "f", "call f", "\n:f\n"])
def test_the_word_before_a_name_may_be_missing(head: str) -> None:
    text = f"<|tool_call>{head}{{days:4}}<tool_call|>"
    assert read(f"Hm: so.{text}") == ("Hm: so.", [("f", '{"days": 4}')], True)
    assert read(text + text) == ("", [("f", '{"days": 4}')] * 2, True)


def test_a_brace_too_many_is_dropped() -> None:
    for end in ("}}", "}\n}\n"):
        assert read(f"<|tool_call>call:f{{days:4{end}<tool_call|>a") == ("a", [("f", '{"days": 4}')], True)
    assert read("<|tool_call>call:f{days:4}} b")[0] == "} b"


def test_without_the_word_a_name_must_be_known() -> None:
    for text in ("<|tool_call>h{days:4}<tool_call|>", "<|tool_call>call{a:1}", "<|tool_call> {a:1}",
                 "<|tool_call>call:f no bracket<tool_call|>", "<|tool_call>:<tool_call|>",
                 "call:f{}"):  # fmt: skip
        assert read(text) == (text, [], False)
    assert value("<|tool_call>call:ns:h{days:4}<tool_call|>") == {"days": 4}
    bad = "<|tool_call>call:bad no bracket<tool_call|>"
    assert read(f"{bad}{gemma('days:4')}") == (bad, [("f", '{"days": 4}')], True)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("city:42", {"city": "42"}),
        ("city:42.50", {"city": "42.50"}),
        ("city:true", {"city": "true"}),
        ("city:null,days:4", {"city": "null", "days": 4}),
        ("maybe:null", {"maybe": None}),
        ("maybe:42", {"maybe": "42"}),
        ("names:[1,true,a b]", {"names": ["1", "true", "a b"]}),
        ("place:{name:7,at:7}", {"place": {"name": "7", "at": 7}}),
        ("either:{name:7,at:7}", {"either": {"name": "7", "at": 7}}),
        ("any:7,other:7", {"any": 7, "other": 7}),
        (f"days:{quoted('4')}", {"days": 4}),
        (f"days:{quoted('four')}", {"days": "four"}),
        (f"size:{quoted('1.5')},flag:{quoted('True')}", {"size": 1.5, "flag": True}),
        (f"counts:[{quoted('4')},5]", {"counts": [4, 5]}),
        (f"counts:{quoted('[4, 5]')}", {"counts": [4, 5]}),
        (f"names:{quoted(chr(91) + repr('a') + chr(93))}", {"names": ["a"]}),
        (f"place:{{at:{quoted('7')}}}", {"place": {"at": 7}}),
        (f"any:{quoted('7')}", {"any": "7"}),
    ],
)
def test_the_schema_decides_what_a_value_is(arguments: str, wanted: Any) -> None:
    assert value(gemma(arguments)) == wanted


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("city:,days:4", {"city": "", "days": 4}),
        ("days:4,city: }", {"days": 4, "city": ""}),
        ("place:{name:}", {"place": {"name": ""}}),
        ('"city":"Rome","days":4', {"city": "Rome", "days": 4}),
        ("'city' : 'Rome' , 'days' : 4", {"city": "Rome", "days": 4}),
        ('city:"a, {b}: [c]",days:4', {"city": "a, {b}: [c]", "days": 4}),
        ('city:"a \\"b\\"\\n"', {"city": 'a "b"\n'}),
        ("city:'it is \"so\"',days:4", {"city": 'it is "so"', "days": 4}),
        ("city:it's,days:4", {"city": "it's", "days": 4}),
        ("city:'tis so,days:4", {"city": "'tis so", "days": 4}),
        ("names:['a', \"b\", c]", {"names": ["a", "b", "c"]}),
        ('days:"4"', {"days": 4}),
        ('any:"4"', {"any": "4"}),
        ('place:{"name": "x", "at": 1}', {"place": {"name": "x", "at": 1}}),
    ],
)
def test_other_quotation_marks_and_missing_values(arguments: str, wanted: Any) -> None:
    if arguments.endswith(" }"):
        arguments = arguments[:-1]
    assert value(gemma(arguments)) == wanted


def test_the_closing_tag_may_stand_for_the_last_bracket() -> None:
    for arguments, wanted in (
        ("days:4", {"days": 4}), (f"city:{quoted('Rome')}", {"city": "Rome"}),
        ("counts:[1]", {"counts": [1]}),
    ):  # fmt: skip
        assert value(f"<|tool_call>call:f{{{arguments}<tool_call|>") == wanted
        assert not read(f"<|tool_call>call:f{{{arguments}")[2]
        assert not read(f"<|tool_call>call:f{{place:{{{arguments}<tool_call|>")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        "city", "city,days:4", "days:,city:a", "days:}", "any:", "counts:[1", "counts:[1,2}", ":4",
        f"city:{quoted('a')}{quoted('b')}", f"city:{quoted('Rome')[:-5]}", "city:a, b",
        f"city:a{quoted('b')}",
        "days 4", "place:{counts:[1", "days:4 <|tool_call>",
    ],
)  # fmt: skip
def test_damaged_arguments_leave_the_call_unfinished(arguments: str) -> None:
    content, calls, complete = read(gemma(arguments))
    assert not complete, (content, calls)


def test_white_space_is_held_back_alike_whole_and_by_character() -> None:
    for space in (" " * 256, " " * 257, " " * 1100):
        for arguments in (
            f"city:{space}{quoted('a')}",
            f"city:{space},days:1",
            f"days:{space}4",
            f"{space}days:4",
        ):
            content, calls, complete = read(gemma(arguments))
            assert complete == (len(space) <= 256) or "4" in arguments, (content, calls)


def test_a_long_string_where_the_schema_allows_none_is_passed_on_as_text() -> None:
    for length in (LONGEST_EARLY - 9, LONGEST_EARLY + 9):
        told = json.dumps(["x" * length])
        found = value(gemma(f"names:{quoted(told)}"))
        assert found == {"names": ["x" * length] if len(told) < LONGEST_EARLY else told}
