"""Grammars that would overflow the stack or the memory of native code are refused before it compiles them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.text.grammar_bounds import MOST_LEVELS, MOST_RULES, GrammarBounds
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.guidance import GuidanceBackend
from aioinfer.text.tool_calls import PARSERS
from aioinfer.text.tool_grammar import AnswerGrammar
from tests.text.grammar_shapes import SHAPES, backend, deepest
from tests.text.merging_schemas import BOMBS, JsonSchema
from tests.tiers import SECONDS, nightly, rest, thinned

TOO_DEEP = (
    rf"more than {MOST_RULES} rules and brackets|more than {MOST_LEVELS} levels together"
    "|merges schemas within each other too deeply|more than 500 rules of GBNF|more than 17 times &"
    "|more than 10000 texts and regular expressions|more than 2000 repeats"
    "|more than 65536 characters of GBNF"
)
TOO_LARGE = "parts when its schemas are merged|parts copied to merge|more than 50000 merges"


@pytest.fixture(scope="module")
def guidance() -> GuidanceBackend:
    return backend()


def compiled(guidance: GuidanceBackend, schema: Any) -> None:
    guidance.compile(Grammar("json_schema", json.dumps(schema)))


# -- depth ---------------------------------------------------------------------------------------------


@nightly("compiles and scans many grammars of the largest size")
def test_the_deepest_grammars_are_compiled_on_half_the_stack_of_a_worker() -> None:
    program = [sys.executable, "-m", "tests.text.grammar_shapes"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(lines) == list(SHAPES)
    assert lines.pop("templates").endswith("template usage not supported yet")
    assert lines.pop("schema respelled").endswith("NoExtensionBias")  # it allows nothing
    for name, line in lines.items():
        assert re.fullmatch(r"\d\d+ levels: compiled", line), name


@rest(SECONDS)
@pytest.mark.parametrize("name", thinned(SHAPES, 4))
def test_one_level_more_and_many_more_are_refused(guidance: GuidanceBackend, name: str) -> None:
    levels = deepest(SHAPES[name], guidance)
    # A schema that is merged level by level becomes too large first, a text of many references too long.
    refusal = rf"{TOO_DEEP}|parts when its schemas are merged|may have at most \d+ characters"
    for more in (levels + 1, 3 * levels, 8 * levels):
        with pytest.raises(InvalidRequest, match=refusal) as refused:
            guidance.compile(SHAPES[name](more))
        assert refused.value.field == "grammar"


#: text in which a Lark grammar could hide the rules after it
HIDING = ["// %json {", '/%json {"/', "%json {}", 'x: "%json ["', '%json {"a": "', "%lark {"]


@pytest.mark.parametrize("before", HIDING)
def test_no_text_hides_rules(guidance: GuidanceBackend, before: str) -> None:
    rules = "\n".join(f"r{at}: r{at + 1}" for at in range(MOST_RULES)) + f'\nr{MOST_RULES}: "x"'
    with pytest.raises(InvalidRequest, match=rf"{TOO_DEEP}|has a %json that cannot be read"):
        guidance.compile(Grammar("lark", f"start: r0\n{before}\n{rules}"))


def test_no_way_to_write_a_reference_hides_it(guidance: GuidanceBackend) -> None:
    for form, root, refusal in (
        ("#/%24defs/d{}", {}, TOO_DEEP),
        ("https://x.test/s#/$defs/d{}", {"$id": "https://x.test/s"}, "no JSON pointer"),
        ("#/$defs/d{}", {"items": {"$id": "https://x.test/other"}}, "no JSON pointer"),
        ("#/$defs/d{}", {"$schema": "draft-04", "items": {"id": "other"}}, "no JSON pointer"),
        ("#d{}", {}, "reference '#d0', no JSON pointer"),
        ("#/$defs/missing{}", {}, "no JSON pointer"),
    ):
        definitions: JsonSchema = {
            f"d{at}": {"$anchor": f"d{at}", "type": "array", "items": {"$ref": form.format(at + 1)}}
            for at in range(MOST_LEVELS)
        }
        definitions[f"d{MOST_LEVELS}"] = {}
        with pytest.raises(InvalidRequest, match=refusal):
            compiled(guidance, {"$defs": definitions, "$ref": form.format(0), **root})


@pytest.mark.parametrize("name", PARSERS)
def test_arguments_after_a_long_chain_of_references_are_refused(guidance: GuidanceBackend, name: str) -> None:
    """The rules of an answer are not counted: their builders have the limit of Python's recursion."""
    definitions: JsonSchema = {
        f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(3000)
    }
    definitions["d3000"] = {}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    with pytest.raises(ValueError, match=rf"{TOO_DEEP}|is nested too deeply"):
        guidance.compile(AnswerGrammar(PARSERS[name], {"f": schema}).build())


def test_grammars_that_are_large_and_not_deep_are_accepted(guidance: GuidanceBackend) -> None:
    definitions: JsonSchema = {f"d{at}": {"type": "array", "items": {"$ref": "#"}} for at in range(150)}
    several = {f"p{at}": {"$ref": f"#/$defs/d{at}"} for at in range(150)}
    several |= {f"any{at}": {"$ref": f"#/$defs/any{at}"} for at in range(150)}
    definitions |= {f"any{at}": True for at in range(150)}
    compiled(guidance, {"type": "object", "properties": several, "$defs": definitions})
    flat = "\n".join(f'r{at}: "x{at}" (start | T) | "y"' for at in range(900))
    choices = " | ".join(f"r{at}" for at in range(900))
    guidance.compile(Grammar("lark", f'start: {choices}\nT: "t"\n{flat}'))


@pytest.mark.parametrize(
    "text", ['start: "', "start: (((", 'start: "a"\n%json [', "root ::= (((", "root ::= a", 'root ::= "', ":"]
)
def test_what_ends_too_early_is_an_error_of_its_own(guidance: GuidanceBackend, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        guidance.compile(Grammar("lark", text))
    assert refused.value.field == "grammar"


# -- merges --------------------------------------------------------------------------------------------


@rest(SECONDS)
@pytest.mark.parametrize("name", thinned(BOMBS, 2))
def test_what_grows_without_bound_is_refused_and_little_of_it_is_not(
    guidance: GuidanceBackend, name: str
) -> None:
    GrammarBounds(64).check_schema(BOMBS[name](4))
    for size in (30, 60) if "reference" in name else (40,) if "product" in name else (11, 12):
        schema = BOMBS[name](size)
        with pytest.raises(InvalidRequest, match=rf"{TOO_LARGE}|{TOO_DEEP}") as refused:
            compiled(guidance, schema)
        assert refused.value.field == "grammar"
        # The same where it is within something else, or after what is still small enough.
        for lark in ("start: %json {0}", "start: a b\na: %json {1}\nb: %json {0}"):
            text = lark.replace("{0}", json.dumps(schema)).replace("{1}", json.dumps(BOMBS[name](4)))
            with pytest.raises(InvalidRequest, match=rf"{TOO_LARGE}|{TOO_DEEP}"):
                guidance.compile(Grammar("lark", text))


@rest(SECONDS)
def test_the_schemas_of_one_grammar_count_together(guidance: GuidanceBackend) -> None:
    schema = json.dumps(BOMBS["references in allOf"](10))
    guidance.compile(Grammar("lark", f"start: %json {schema}"))
    rules = "\n".join(f"r{at}: %json {schema}" for at in range(40))
    names = " ".join(f"r{at}" for at in range(40))
    with pytest.raises(InvalidRequest, match=TOO_LARGE):
        guidance.compile(Grammar("lark", f"start: {names}\n{rules}"))


ORDINARY: dict[str, JsonSchema] = {
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
                    "right": {"allOf": [{"$ref": "#/$defs/node"}], "title": "right"},
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
    "constants": {"allOf": [{"anyOf": [{"const": {"a": [1, 2]}}, {"type": "null"}]}, {"anyOf": [True, {}]}]},
    "no references": {"const": {"$ref": "#x"}, "examples": [{"$ref": "https://x.test"}]},
    "many names": {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(2000)}},
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
    GrammarBounds(64).check_schema(schema)


def test_a_merge_that_never_ends_is_refused() -> None:
    trees = {
        name: {"type": "object", "properties": {"child": {"$ref": f"#/$defs/{name}"}}}
        for name in ("one", "two")
    }
    schema = {"$defs": trees, "allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]}
    with pytest.raises(ValueError, match=f"too deeply|{TOO_LARGE}"):
        GrammarBounds(64).check_schema(schema)


@nightly("compiles hundreds of schemas, some of them as large as may be")
@pytest.mark.parametrize("seed", range(3))
def test_what_is_accepted_takes_little_memory(seed: int) -> None:
    """Whatever else there is on the machine: the process is given 400 MB."""
    program = [sys.executable, "-m", "tests.text.merging_schemas", str(seed), "600", "400"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, accepted = map(int, done.stdout.split())
    assert accepted >= 400
