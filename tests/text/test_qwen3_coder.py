"""The values of Qwen3-Coder's format: raw text becomes JSON of the types that a schema names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.text.tool_calls import Qwen3Coder
from aioinfer.text.tool_calls.raw_values import Signatures
from tests.counting import calls_of
from tests.text.call_formats import collect
from tests.text.test_calls import coder

NAMED = {
    "$defs": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "nested": {"properties": {"b": {}}, "anyOf": [{"required": ["b"]}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, " 12 ", 12),
        ({"type": "integer"}, "12 days", "12 days"),
        ({"type": "number"}, "1.50", 1.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "integer"}, "None", None),
        ({"type": "null"}, "null", None),
        ({"type": "array"}, " [1, 2]", [1, 2]),
        ({"type": "array"}, "1, 2", "1, 2"),
        ({"type": "object"}, '{"a": [null]}', {"a": [None]}),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "[12]", "[12]"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "[12]", [12]),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/city"}, "Rome", "Rome"),
        ({"$ref": "#/$defs/days"}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/days"}]}, "3", 3),
        ({"$ref": "#/$defs/loop"}, "3", "3"),
        ({"$ref": "elsewhere"}, "3", "3"),
        ({"type": "real"}, "3", "3"),
        ({"type": "float"}, "2.5", 2.5),
        ({"type": "dict"}, "{'a': 1}", {"a": 1}),
        ({}, "3", "3"),
        (True, "3", "3"),
        (7, "3", "3"),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"items": {"type": "integer"}}, "[1]", [1]),
        ({"$ref": "#/$defs/nested"}, '{"b": "c"}', {"b": "c"}),
        ({"properties": {}, "enum": ["{}"]}, "{}", "{}"),
        ({"type": "integer"}, "1" * 20_000, "1" * 20_000),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_is_of_the_type_that_its_schema_names(schema: Any, text: str, value: Any) -> None:
    functions = {"f": {"type": "object", "properties": {"a": schema}, **NAMED}}
    told = coder(("a", text), ("b", "2"))
    found = []
    for parts in ([told], list(told)):
        parser = Qwen3Coder(functions)
        content, [(_, arguments)] = collect([*(parser.push(part) for part in parts), parser.finish()])
        assert (content, parser.unfinished) == ("", False)
        found.append(arguments)
    assert found[0] == found[1]
    # Parameters that the schema does not have are strings.
    assert json.loads(found[0]) == {"a": value, "b": "2"}


def test_numbers_of_many_digits_are_numbers() -> None:
    for digits in ("1" * 5000, "-" + "1" * 5000, "1" * 5000 + ".5"):
        parser = Qwen3Coder({"f": {"properties": {"a": {"type": ["integer", "number", "string"]}}}})
        _, calls = collect([parser.push(coder(("a", digits)))])
        assert calls == [("f", f'{{"a": {digits}}}')]


def test_parameters_without_names_have_the_type_of_further_properties() -> None:
    parser = Qwen3Coder({"f": {"additionalProperties": {"type": "integer"}}})
    _, calls = collect([parser.push(coder(("a", "1")) + coder(("a", "1"), name="unknown"))])
    assert calls == [("f", '{"a": 1}'), ("unknown", '{"a": "1"}')]


LARGE: dict[str, Any] = {
    "root reference": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{at}": {"properties": {"a": {"type": "integer"}}} for at in range(20_000)},
    },
    "union": {"additionalProperties": {"anyOf": [{"type": "integer"}] * 40_000}},
    "unions of one union": {
        "properties": {f"k{at}": {"anyOf": [{"$ref": "#/$defs/u"}]} for at in range(400)},
        "$defs": {"u": {"enum": [1] * 100_000}},
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_are_read_once_for_all_answers(name: str) -> None:
    signatures = Signatures({"f": LARGE[name]})
    signatures.prepare()
    text = coder(*((f"k{at}", "1") for at in range(20))) * 20

    def answer() -> None:
        parser = Qwen3Coder(signatures)
        for at in range(0, len(text), 4096):
            parser.push(text[at : at + 4096])

    assert calls_of(answer) < 40_000
