"""The parser of Gemma's format: its notation becomes JSON."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from aioinfer.text.tool_calls import Gemma4
from aioinfer.text.tool_grammar import AnswerGrammar
from tests.text.call_formats import Calls, collect, parse
from tests.text.test_tool_grammar import Vocabulary


def call(arguments: str, name: str = "f") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def text(value: str) -> str:
    return f'<|"|>{value}<|"|>'


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        (f"a:{text('b')}", {"a": "b"}),
        (f"a:{text('')},b:{text('{}[],:' + chr(10) + chr(34))}", {"a": "", "b": '{}[],:\n"'}),
        ("a:1,b:-2.5e3,c:true,d:false,e:null", {"a": 1, "b": -2500.0, "c": True, "d": False, "e": None}),
        ("a:True,b:False,c:None", {"a": True, "b": False, "c": None}),
        (f"a:{{b:{{c:{text('d')}}},e:{{}}}},f:[]", {"a": {"b": {"c": "d"}, "e": {}}, "f": []}),
        (f"a:[1,{text('b')},[true],{{c:2}}]", {"a": [1, "b", [True], {"c": 2}]}),
        (f"{text('a b')}:1,{text('c')}:2", {"a b": 1, "c": 2}),
        (" a : 1 ,\n b : [ 1 , 2 ] , ", {"a": 1, "b": [1, 2]}),
        ("a:hello there", {"a": "hello there"}),
        ('a:"b"', {"a": "b"}),
        ("a:[1,]", {"a": [1]}),
        ("a:x<y,b:<,c:[1<2,<|]", {"a": "x<y", "b": "<", "c": ["1<2", "<|"]}),
    ],
)
def test_arguments_become_json(arguments: str, value: Any) -> None:
    for parts in ([call(arguments)], list(call(arguments))):
        content, [(_, found)] = parse("gemma4", parts)
        assert (content, json.loads(found)) == ("", value)


@pytest.mark.parametrize(
    ("output", "content", "calls"),
    [
        (f"Hm.\n{call('a:1')}{call('', 'g')} so", "Hm. so", [("f", '{"a": 1}'), ("g", "{}")]),
        (call("a:1").removesuffix("<tool_call|>"), "", [("f", '{"a": 1}')]),
        (call("a:1").removesuffix("l|>"), "", [("f", '{"a": 1}')]),
        # the length is reached
        ("<|tool_call>call:f", "<|tool_call>call:f", []),
        ("<|tool_call>call:f{ke", "", [("f", '{"ke')]),
        ('<|tool_call>call:f{<|"|>[ke', "", [("f", '{"[ke')]),
        ("<|tool_call>call:f{a:1,b", "", [("f", '{"a": 1, "b')]),
        ("<|tool_call>call:f{a:12", "", [("f", '{"a": 12')]),
        ('<|tool_call>call:f{a:[1,<|"|>b<|', "", [("f", '{"a": [1, "b')]),
        # brackets that do not fit, and what is no value
        ("<|tool_call>call:f{a:[1}<tool_call|>", "}<tool_call|>", [("f", '{"a": [1')]),
        ("<|tool_call>call:f{a:}<tool_call|>", "}<tool_call|>", [("f", '{"a": ')]),
        (call("a:1") + "}", "}", [("f", '{"a": 1}')]),
        # no calls
        ("<|tool_call>", "<|tool_call>", []),
        ('<|tool_call>{"name": "f"}', '<|tool_call>{"name": "f"}', []),
        (f"<|tool_call>call:{call('')}", "<|tool_call>call:", [("f", "{}")]),
        ("call:f{a:1}", "call:f{a:1}", []),
    ],
)
def test_calls_and_text_similar_to_calls(output: str, content: str, calls: Calls) -> None:
    assert parse("gemma4", [output]) == parse("gemma4", list(output)) == (content, calls)


@pytest.mark.parametrize("arguments", ["a:[1}", "a:", "a:1<|tool_call>", f"a:{text('b')}c", "a"])
def test_arguments_that_are_not_closed_are_unfinished(arguments: str) -> None:
    for told in (call(arguments), call(arguments) + call("")):
        for parts in ([told], list(told)):
            parser = Gemma4()
            _, calls = collect([*(parser.push(part) for part in parts), parser.finish()])
            assert calls
            assert parser.unfinished


NAMED = {
    "$defs": {
        "city": {"enum": ["Rome", 3, ["a", {"b": "c"}]]},
        "tree": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/tree"}},
            "additionalProperties": False,
        },
    }
}


@pytest.fixture(params=[None, True], ids=["text", "special"], scope="module")
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string"}, [text(""), text("a,}\n")], ["a", "1", '"a"']),
        (
            {"type": "string", "maxLength": 2, "pattern": "^a"},
            [text("a"), text("ab")],
            [text("abc"), text("b")],
        ),
        ({"type": "integer", "minimum": 0, "maximum": 9}, ["0", "9"], ["10", "-1", "1.5", text("1")]),
        ({"type": ["boolean", "null"]}, ["true", "false", "null"], ["True", text("true")]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[]", "[1]", "[1,2]"], ["[1,2,3]"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, ["[1]", "[1,2,3]"], ["[]", "[a]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "object"}, ["{}", f"{{a:1,b:[{text('x')}]}}", "{a:{b:true}}"], ["{a:b}", "[]"]),
        ({"type": "object", "additionalProperties": False}, ["{}"], ["{a:1}"]),
        (
            {"$ref": "#/$defs/city"},
            [text("Rome"), "3", f"[{text('a')},{{b:{text('c')}}}]"],
            [text("Bern"), "4"],
        ),
        ({"$ref": "#/$defs/tree"}, ["{}", "{left:{left:{}}}"], ["{right:{}}", "1"]),
        ({"anyOf": [{"type": "integer"}, {"allOf": [{"const": "x"}]}]}, ["1", text("x")], [text("y")]),
        ({}, ["1", text("x"), "[{a:null}]"], ["x"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_obey_their_schema(
    vocabulary: Vocabulary, schema: Any, allowed: list[str], refused: list[str]
) -> None:
    root = {"type": "object", "properties": {"a": schema}, "required": ["a"], **NAMED}
    for values, wanted in ((allowed, True), (refused, False)):
        for value in values:
            told = call(f"a:{value}")
            options: Any = {"parser": Gemma4, "functions": {"f": root}, "tokens": vocabulary.tokens}
            assert vocabulary.allows(told, **options) == wanted, value
            if wanted:
                _, [(_, arguments)] = collect([Gemma4().push(told)])
                jsonschema.validate(json.loads(arguments), root)


def test_properties_come_in_the_order_of_the_schema(vocabulary: Vocabulary) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}
    for required, allowed, refused in (
        (["b", "d"], ["bd", "abcd", "bcd"], ["", "ad", "bad", "b"]),
        ([], ["", "a", "b", "c", "ab", "ac", "abc"], ["ba", "d", "aa"]),
    ):
        functions = {"f": {"type": "object", "properties": properties, "required": required}}
        for keys in (*allowed, *refused):
            told = call(",".join(f"{key}:1" for key in keys))
            assert vocabulary.allows(told, parser=Gemma4, functions=functions) == (keys in allowed), keys
    assert not vocabulary.allows(call("a:1,"), parser=Gemma4, functions=functions)


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {}},
        {"properties": {"a:": {}}},
        {"properties": {"a": False}},
        {"properties": {"a": 1}},
        {"properties": {"a": {"enum": [text("x")]}}},
        {"properties": {"a": {"type": "real"}}},
        {"properties": {"a": {"allOf": [{}, {}]}}},
        {"required": 1},
    ],
    ids=str,
)
def test_schemas_that_the_notation_cannot_express_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"express|nothing|not a schema|unknown type"):
        AnswerGrammar(Gemma4, {"f": {"type": "object", **schema}}).build()


def test_references_that_multiply_take_no_time(vocabulary: Vocabulary) -> None:
    twice = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at - 1}"}] * 2} for at in range(1, 50)}
    definitions = {"d0": {"type": "integer"}, **twice}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d49"}}, "$defs": definitions}
    assert vocabulary.allows(call("a:1"), parser=Gemma4, functions={"f": schema})
    assert not vocabulary.allows(call("a:x"), parser=Gemma4, functions={"f": schema})
