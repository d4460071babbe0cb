"""JSON schemas that become too large when they are merged are refused before native code merges them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.guidance import GuidanceBackend
from aioinfer.text.schema_merges import Merges
from tests.text.grammar_shapes import backend
from tests.text.merging_schemas import BOMBS, JsonSchema
from tests.tiers import SECONDS, nightly, rest, thinned

TOO_LARGE = "parts when its schemas are merged|parts copied to merge|more than 50000 merges"


@pytest.fixture(scope="module")
def guidance() -> GuidanceBackend:
    return backend()


def compiled(guidance: GuidanceBackend, schema: Any) -> None:
    guidance.compile(Grammar("json_schema", json.dumps(schema)))


@rest(SECONDS)
@pytest.mark.parametrize("name", thinned(BOMBS, 2))
def test_what_grows_without_bound_is_refused_and_little_of_it_is_not(
    guidance: GuidanceBackend, name: str
) -> None:
    Merges().check(BOMBS[name](4))
    for size in (30, 60) if "reference" in name else (40,) if "product" in name else (11, 12):
        schema = BOMBS[name](size)
        with pytest.raises(InvalidRequest, match=TOO_LARGE) as refused:
            compiled(guidance, schema)
        assert refused.value.field == "grammar"
        # The same where it is within something else, or after what is still small enough.
        for lark in ("start: %json {0}", "start: a b\na: %json {1}\nb: %json {0}"):
            text = lark.replace("{0}", json.dumps(schema)).replace("{1}", json.dumps(BOMBS[name](4)))
            with pytest.raises(InvalidRequest, match=TOO_LARGE):
                guidance.compile(Grammar("lark", text))


@rest(SECONDS)
def test_the_schemas_of_one_grammar_count_together(guidance: GuidanceBackend) -> None:
    schema = json.dumps(BOMBS["references in allOf"](10))
    guidance.compile(Grammar("lark", f"start: %json {schema}"))
    rules = "\n".join(f"r{at}: %json {schema}" for at in range(40))
    names = " ".join(f"r{at}" for at in range(40))
    with pytest.raises(InvalidRequest, match=TOO_LARGE):
        guidance.compile(Grammar("lark", f"start: {names}\n{rules}"))


def parts(schema: JsonSchema | bool) -> int:
    merges = Merges()
    merges.check(schema)
    return merges._parts


NAMED = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, 1),
        (False, 1),
        ({}, 1),
        ({"title": "x", "default": 3}, 1),
        ({"type": "string"}, 1),
        ({"type": ["string", "null"]}, 3),
        ({"enum": ["a", "b", 3]}, 4),
        ({"const": "x" * 256}, 2),
        ({"const": {"a": [1, 2]}}, 8),
        (NAMED, 5),
        ({**NAMED, "required": ["a"]}, 6),
        ({"$ref": "#/$defs/a", "$defs": {"a": NAMED}}, 1 + 5),
        ({"$ref": "#/$defs/a", "description": "x", "$defs": {"a": NAMED}}, 1 + 5),
        ({"$ref": "#/$defs/a", "type": "object", "required": ["a"], "$defs": {"a": NAMED}}, 6 + 5),
        ({"allOf": [NAMED, {"type": "object", "properties": {"c": True}}]}, 7),
        ({"allOf": [NAMED, {"type": "object", "properties": {"a": {"pattern": "x"}}}]}, 6),
        ({"allOf": [NAMED, {"type": "array"}]}, 1),
        ({"allOf": [NAMED, {"anyOf": [{"type": "object"}, {"type": "null"}]}]}, 5),
        ({"allOf": [NAMED, {"anyOf": [{"type": "object"}] * 3}]}, 16),
        ({"anyOf": [True, NAMED]}, 1),
        ({"type": "array", "items": NAMED}, 6),
        ({"type": "array", "prefixItems": [NAMED], "items": False}, 7),
        ({"type": "object", "additionalProperties": NAMED}, 6),
    ],
)
def test_parts_are_those_of_the_merged_schema(schema: JsonSchema | bool, expected: int) -> None:
    assert parts(schema) == expected


ORDINARY: dict[str, JsonSchema | bool] = {
    "inheritance": {
        "$defs": {
            "base": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
            **{
                f"d{at}": {
                    "allOf": [{"$ref": "#/$defs/base" if at == 0 else f"#/$defs/d{at - 1}"}],
                    "properties": {f"p{at}": {"type": "string"}},
                    "nullable": True,
                }
                for at in range(12)
            },
        },
        "$ref": "#/$defs/d11",
    },
    "recursion": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "string"},
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "default": None},
                    "right": {
                        "allOf": [{"$ref": "#/$defs/node"}],
                        "description": "the other",
                        "title": "right",
                    },
                },
                "required": ["value"],
                "examples": [{"id": "one", "$ref": "#"}],
            }
        },
        "$ref": "#/$defs/node",
    },
    "nullable everywhere": {
        "$defs": {
            "big": {
                "type": "object",
                "properties": {f"q{at}": {"type": "string", "nullable": True} for at in range(50)},
            }
        },
        "type": "object",
        "properties": {f"p{at}": {"allOf": [{"$ref": "#/$defs/big"}], "nullable": True} for at in range(50)},
    },
    "many names": {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(2000)}},
    "anything": True,
    "many values": {"type": "string", "enum": [f"value {at}" for at in range(4000)]},
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_schemas_are_accepted(guidance: GuidanceBackend, name: str) -> None:
    compiled(guidance, ORDINARY[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3, "allOf": {"a": 1}, "anyOf": "x", "enum": 4, "required": {"a": 1}, "type": 5},
        {"$ref": 3, "type": [1, None], "items": 4, "prefixItems": {"a": 1}, "patternProperties": [1]},
        {"$ref": "#", "minItems": 1},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b", "x": 1}, "b": {"$ref": "#/$defs/a", "x": 1}},
        },
        {"$ref": "#/$defs/a/0", "$defs": {"a": [True]}, "minItems": 2},
    ],
)
def test_malformed_schemas_are_left_to_the_library(schema: JsonSchema) -> None:
    Merges().check(schema)


def test_a_merge_that_never_ends_is_refused() -> None:
    trees = {
        name: {"type": "object", "properties": {"child": {"$ref": f"#/$defs/{name}"}}}
        for name in ("one", "two")
    }
    schema = {"$defs": trees, "allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]}
    with pytest.raises(ValueError, match=f"too deeply|{TOO_LARGE}"):
        Merges().check(schema)


@pytest.mark.parametrize("spelled", ["https://x.test/s#/$defs/a", "#a", "#/$defs/missing"])
def test_a_merged_reference_that_is_not_understood_is_refused_by_name(spelled: str) -> None:
    schema = {
        "$id": "https://x.test/s",
        "$defs": {"a": {"$anchor": "a"}},
        "allOf": [{"$ref": spelled}, NAMED],
    }
    with pytest.raises(ValueError, match=re.escape(spelled)):
        Merges().check(schema)
    del schema["allOf"][1]  # type: ignore[attr-defined]
    Merges().check(schema)


@pytest.mark.parametrize("spelled", ["https://x.test/s#/$defs/d{}", "s#/$defs/d{}", "#d{}"])
def test_no_way_to_spell_a_reference_hides_what_it_merges(guidance: GuidanceBackend, spelled: str) -> None:
    schema = json.loads(json.dumps(BOMBS["references in allOf"](20)))
    for name, definition in schema["$defs"].items():
        definition["$anchor"] = name
        for each in definition.get("properties", {}).values():
            each["allOf"][0]["$ref"] = spelled.format(each["allOf"][0]["$ref"].removeprefix("#/$defs/d"))
    with pytest.raises(InvalidRequest, match="which is not a JSON pointer"):
        compiled(guidance, {"$id": "https://x.test/s", **schema, "$ref": spelled.format(0)})


@nightly("compiles hundreds of schemas, some of them as large as may be")
@pytest.mark.parametrize("seed", range(3))
def test_what_is_accepted_takes_little_memory(seed: int) -> None:
    """Whatever else there is on the machine: the process is given 400 MB."""
    program = [sys.executable, "-m", "tests.text.merging_schemas", str(seed), "600", "400"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, accepted = map(int, done.stdout.split())
    assert accepted >= 400
