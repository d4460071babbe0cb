"""The parser of Qwen3-Coder's format: raw text becomes JSON of the types that a schema names."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.text.tool_calls import Qwen3Coder
from aioinfer.text.tool_calls.raw_values import Signatures
from aioinfer.text.tool_grammar import AnswerGrammar
from tests.counting import calls_of
from tests.text.call_formats import Calls, collect, parse
from tests.text.test_tool_grammar import Vocabulary


def call(*parameters: tuple[str, str], name: str = "f") -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


EMPTY = [("f", "{}")]
COUNT = [("f", '{"count": 1}')]
ONE = call(("count", "1"))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call(), "", EMPTY),
        (f"Let me see.\n\n{ONE}\n{ONE}\n", "Let me see.", COUNT * 2),
        (f"a{ONE}b", "ab", COUNT),
        (call(("text", "1"), ("count", "2")), "", [("f", '{"text": "1", "count": 2}')]),
        ("<tool_call><function=f><parameter=count>1</parameter></function></tool_call>", "", COUNT),
        (call(("text", '\n a\\\n"b"\n')), "", [("f", json.dumps({"text": '\n a\\\n"b"\n'}))]),
        (call(("text", "</tool_call><p></function>")), "", [("f", '{"text": "</tool_call><p></function>"}')]),
        (call(("map", '{"a": "</parameter>"}')), "", [("f", '{"map": {"a": "</parameter>"}}')]),
        # tags that models omit
        (ONE.replace("</function>\n", ""), "", COUNT),
        (ONE.removesuffix("</tool_call>"), "", COUNT),
        # the length is reached
        ("<tool_call>\n<function=f", "<tool_call>\n<function=f", []),
        ("<tool_call>\n<function=f>\n", "", [("f", "")]),
        ("<tool_call>\n<function=f>\n<parameter=co", "", [("f", '{"co')]),
        (ONE[: ONE.index("1") + 3], "", [("f", '{"count": 1')]),
        (call(("text", "ab"))[: -len("er>\n</function>\n</tool_call>")], "", [("f", '{"text": "ab')]),
        (
            call(("list", "[1, 2]"))[: -len("]\n</parameter>\n</function>\n</tool_call>")],
            "",
            [("f", '{"list": [1, 2')],
        ),
        # what is neither a parameter nor an end
        ('<tool_call>\n<function=f>\n{"a": 1}\n</function>', '\n{"a": 1}\n</function>', EMPTY),
        (ONE.replace("</function>", "so </function>"), "\nso </function>\n</tool_call>", COUNT),
        # JSON that does not end with its value
        (call(("list", "[1] 2")), " 2\n</parameter>\n</function>\n</tool_call>", [("f", '{"list": [1]}')]),
        (call(("list", "[1")), "", [("f", '{"list": [1\n}')]),
        # no calls
        ("<tool_call>", "<tool_call>", []),
        ('<tool_call>\n{"name": "f", "arguments": {}}', '<tool_call>\n{"name": "f", "arguments": {}}', []),
        (f"<tool_call>\n<function=>\n{ONE}", "<tool_call>\n<function=>", COUNT),
        ("<function=f>\n</function>", "<function=f>\n</function>", []),
    ],
)
def test_calls_and_text_similar_to_calls(text: str, content: str, calls: Calls) -> None:
    assert parse("qwen3-coder", [text]) == parse("qwen3-coder", list(text)) == (content, calls)


@pytest.mark.parametrize("value", ["[1, 2", "[[1]", "[<"])
def test_arguments_that_are_not_closed_are_unfinished(value: str) -> None:
    schema = {"f": {"properties": {"a": {"type": "array"}}}}
    for told in (call(("a", value)), call(("a", value)) + call()):
        for parts in ([told], list(told)):
            parser = Qwen3Coder(schema)
            _, calls = collect([*(parser.push(part) for part in parts), parser.finish()])
            assert calls
            assert parser.unfinished


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
    told = call(("a", text), ("b", "2"))
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
        _, calls = collect([parser.push(call(("a", digits)))])
        assert calls == [("f", f'{{"a": {digits}}}')]


def test_parameters_without_names_have_the_type_of_further_properties() -> None:
    parser = Qwen3Coder({"f": {"additionalProperties": {"type": "integer"}}})
    _, calls = collect([parser.push(call(("a", "1")) + call(("a", "1"), name="unknown"))])
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
    text = call(*((f"k{at}", "1") for at in range(20))) * 20

    def answer() -> None:
        parser = Qwen3Coder(signatures)
        for at in range(0, len(text), 4096):
            parser.push(text[at : at + 4096])

    assert calls_of(answer) < 40_000


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string"}, ["", "a", "\n", "{}", "</param"], ["</parameter>", "a</parameter>\n"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a/]+$"}, ["a", "a/a"], ["", "ab"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc", "\nb"], ["", "ac"]),
        ({"enum": ["Rome", "New\nYork", 3]}, ["Rome", "New\nYork", "3"], ["Oslo", "4"]),
        ({"type": "integer", "minimum": 0, "maximum": 9}, ["0", "9"], ["10", "a", "None"]),
        ({"type": "boolean"}, ["true"], ["True"]),
        ({"type": "array", "items": {"$ref": "#/$defs/city"}}, ["[]", '["Rome"]'], ['["Bern"]', "Rome"]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", "null"], ["abc"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["12", "null"], ["a"]),
        ({"type": ["integer", "string"], "maxLength": 1}, ["a", "12"], ["ab"]),
        ({"$ref": "#/$defs/city"}, ["Oslo"], ["Bern"]),
        ({"allOf": [{"$ref": "#/$defs/city"}]}, ["Oslo"], ["Bern"]),
        ({"items": {"type": "integer"}}, ["[1]", "[]"], ['["a"]', "a"]),
        ({}, ["anything", "1"], []),
        (True, ["anything", "1"], []),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_obey_their_schema(schema: Any, allowed: list[str], refused: list[str]) -> None:
    vocabulary = Vocabulary(None)
    root = {"type": "object", "properties": {"a": schema}, "required": ["a"], **NAMED}
    for texts, wanted in ((allowed, True), (refused, False)):
        for text in texts:
            told = call(("a", text))
            assert vocabulary.allows(told, parser=Qwen3Coder, functions={"f": root}) == wanted, text
            if wanted:
                # As the parser reads it, it is an instance.
                parser = Qwen3Coder({"f": root})
                _, [(_, arguments)] = collect([parser.push(told)])
                jsonschema.validate(json.loads(arguments), root)


def test_parameters_come_in_the_order_of_the_schema() -> None:
    vocabulary = Vocabulary(None)
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}
    functions = {"f": {"type": "object", "properties": properties, "required": ["b", "d"]}}
    for keys, wanted in (
        ("bd", True),
        ("abcd", True),
        ("bcd", True),
        ("ad", False),
        ("bad", False),
        ("b", False),
    ):
        text = call(*((key, "1") for key in keys))
        assert vocabulary.allows(text, parser=Qwen3Coder, functions=functions) == wanted, keys
    for schema, wanted in (({}, True), ({"additionalProperties": False}, False)):
        functions = {"f": {"type": "object", **schema}}
        assert (
            vocabulary.allows(call(("x", "1"), ("y", "")), parser=Qwen3Coder, functions=functions) == wanted
        )
        assert vocabulary.allows(call(), parser=Qwen3Coder, functions=functions)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"required": ["a"]}]},
        {"properties": {"a>": {}}},
        {"properties": {"a": False}},
        {"properties": {"a": {"enum": ["</parameter>"]}}},
        {"properties": {"a": {"allOf": [{"type": "string"}, {"maxLength": 1}]}}},
        {"required": 1},
    ],
    ids=str,
)
def test_schemas_that_tags_cannot_express_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"express|nothing|not a schema"):
        AnswerGrammar(Qwen3Coder, {"f": {"type": "object", **schema}}).build()


def test_references_that_multiply_take_no_time() -> None:
    twice = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at - 1}"}] * 2} for at in range(1, 100)}
    definitions = {
        "d0": {"type": "string", "maxLength": 2},
        **twice,
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {}]},
    }
    for name, wrong in (("d99", "abc"), ("loop", None)):
        schema = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}}, "$defs": definitions}
        assert Vocabulary(None).allows(call(("a", "ab")), parser=Qwen3Coder, functions={"f": schema})
        if wrong:
            assert not Vocabulary(None).allows(call(("a", wrong)), parser=Qwen3Coder, functions={"f": schema})
    large = {
        "large": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/large"}, {"enum": ["x" * 50_000]}]}}
    }
    many = {f"p{at}": {"type": "array", "items": {"$ref": "#/$defs/large"}} for at in range(10_000)}
    with pytest.raises(ValueError, match="too many references"):
        AnswerGrammar(Qwen3Coder, {"f": {"type": "object", "properties": many, "$defs": large}}).build()


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    backend = Vocabulary(None).backend
    for pattern in ("(", "a\\", "(?=a)", "/ | TEXT"):
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
        grammar = AnswerGrammar(Qwen3Coder, {"f": schema}).build()
        if pattern == "/ | TEXT":
            backend.compile(grammar)
            continue
        with pytest.raises(InvalidRequest):
            backend.compile(grammar)
