"""Grammars of calls whose arguments are not JSON: values between tags, and the notation of Gemma 4."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jsonschema
import pytest

from aioinfer.errors import InvalidRequest
from aioinfer.text.rules import Rules
from aioinfer.text.tool_calls import PARSERS, Qwen3Coder
from aioinfer.text.tool_grammar import AnswerGrammar
from tests.counting import calls_of
from tests.text.call_formats import collect
from tests.text.test_calls import coder, gemma, quoted
from tests.text.test_tagged_calls import call as tagged
from tests.text.vocabulary import Vocabulary
from tests.tiers import SECONDS, rest, thinned

MARKED = ("qwen3-coder", "gemma4")
#: further formats with values between tags, and the tag behind these
CLOSINGS = {"seed-oss": "</parameter>", "glm45": "</arg_value>", "minimax-m2": "</parameter>"}
every_format = pytest.mark.parametrize("name", MARKED)
DEFINITIONS = {
    "city": {"enum": ["Rome", "Oslo"]},
    "any": {"enum": ["Rome", 3, ["a", {"b": "c"}]]},
    "tree": {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/tree"}},
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def vocabularies() -> list[Vocabulary]:
    return [Vocabulary(), Vocabulary(True)]


def call(name: str, **arguments: str) -> str:
    """A call with values as the format writes them."""
    if name == "gemma4":
        return gemma(",".join(f"{key}:{value}" for key, value in arguments.items()))
    return coder(*arguments.items()) if name == "qwen3-coder" else tagged(name, *arguments.items())


#: by format, schemas of the value ``a``, texts that they allow, and others
VALUES: dict[str, list[tuple[Any, list[str], list[str]]]] = {
    "qwen3-coder": [
        ({"type": "string"}, ["", "a", "\n", "{}", "</param"], ["</parameter>", "a</parameter>\n"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a/]+$"}, ["a", "a/a"], ["", "ab"]),
        ({"type": "string", "pattern": "b"}, ["b", "abc", "\nb"], ["", "ac"]),
        ({"enum": ["Rome", "New\nYork", 3]}, ["Rome", "New\nYork", "3"], ["Oslo", "4"]),
        ({"type": "integer", "minimum": 0, "maximum": 9}, ["0", "9"], ["10", "a", "None"]),
        ({"type": "boolean"}, ["true"], ["True"]),
        ({"type": "array", "items": {"$ref": "#/$defs/city"}}, ["[]", '["Rome"]'], ['["Bern"]', "x"]),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["ab", "null"], ["abc"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["12", "null"], ["a"]),
        ({"type": ["integer", "string"], "maxLength": 1}, ["a", "12"], ["ab"]),
        ({"$ref": "#/$defs/city"}, ["Oslo"], ["Bern"]),
        ({"allOf": [{"$ref": "#/$defs/city"}]}, ["Oslo"], ["Bern"]),
        ({"items": {"type": "integer"}}, ["[1]", "[]"], ['["a"]', "a"]),
        ({}, ["anything", "1"], []),
        (True, ["anything", "1"], []),
    ],
    "gemma4": [
        ({"type": "string"}, [quoted(""), quoted("a,}\n")], ["a", "1", '"a"']),
        ({"type": "string", "maxLength": 2, "pattern": "^a"}, [quoted("ab")], [quoted("abc"), quoted("b")]),
        ({"type": "integer", "minimum": 0, "maximum": 9}, ["0", "9"], ["10", "-1", "1.5", quoted("1")]),
        ({"type": ["boolean", "null"]}, ["true", "false", "null"], ["True", quoted("true")]),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ["[]", "[1,2]"], ["[1,2,3]"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, ["[1]", "[1,2,3]"], ["[]", "[a]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "object"}, ["{}", f"{{a:1,b:[{quoted('x')}]}}", "{a:{b:true}}"], ["{a:b}", "[]"]),
        ({"type": "object", "additionalProperties": False}, ["{}"], ["{a:1}"]),
        (
            {"$ref": "#/$defs/any"},
            [quoted("Rome"), "3", f"[{quoted('a')},{{b:{quoted('c')}}}]"],
            [quoted("x"), "4"],
        ),
        ({"$ref": "#/$defs/tree"}, ["{}", "{left:{left:{}}}"], ["{right:{}}", "1"]),
        ({"anyOf": [{"type": "integer"}, {"allOf": [{"const": "x"}]}]}, ["1", quoted("x")], [quoted("y")]),
        ({}, ["1", quoted("x"), "[{a:null}]"], ["x"]),
    ],
}


for _name, _closing in CLOSINGS.items():
    _text = {"type": "string"}, ["", "a", "\n", "{}", _closing[:-1]], [_closing, f"a{_closing}\n"]
    VALUES[_name] = [_text, *VALUES["qwen3-coder"][1:]]


@pytest.mark.parametrize(
    ("name", "schema", "allowed", "refused"),
    [(name, *each) for name in VALUES for each in VALUES[name]],
    ids=lambda value: str(value)[:60],
)
def test_values_obey_their_schema(
    vocabularies: list[Vocabulary], name: str, schema: Any, allowed: list[str], refused: list[str]
) -> None:
    root = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFINITIONS}
    options: Any = {"parser": PARSERS[name], "functions": {"f": root}}
    for vocabulary in vocabularies:
        assert [value for value in allowed if not vocabulary.allows(call(name, a=value), **options)] == []
        assert [value for value in refused if vocabulary.allows(call(name, a=value), **options)] == []
    for value in allowed:
        # As the parser reads it, it is an instance.
        _, [(_, arguments)] = collect([PARSERS[name]({"f": root}).push(call(name, a=value))])
        jsonschema.validate(json.loads(arguments), root)


@every_format
def test_properties_come_in_the_order_of_the_schema(vocabularies: list[Vocabulary], name: str) -> None:
    properties = {key: {"type": "integer"} for key in "abc"}
    for required, allowed, refused in (
        (["b", "d"], ["bd", "abcd", "bcd"], ["", "ad", "bad", "b"]),
        ([], ["", "a", "b", "c", "ab", "ac", "abc"], ["ba"]),
    ):
        schema = {"type": "object", "properties": properties, "required": required}
        for keys in (*allowed, *refused):
            told = call(name, **dict.fromkeys(keys, "1"))
            found = vocabularies[0].allows(told, parser=PARSERS[name], functions={"f": schema})
            assert found == (keys in allowed), keys
    for more, wanted in (({}, True), ({"additionalProperties": False}, False)):
        functions = {"f": {"type": "object", **more}}
        told = call(name, x="1", y="2")
        assert vocabularies[0].allows(told, parser=PARSERS[name], functions=functions) == wanted
        assert vocabularies[0].allows(call(name), parser=PARSERS[name], functions=functions)


#: formats, a schema, and a part of the error
REFUSED: list[tuple[tuple[str, ...], Any, str]] = [
    (MARKED, {"properties": {"a": False}}, "nothing"),
    (MARKED, {"required": 1}, "not a schema"),
    (MARKED, {"required": [["a"]]}, "is not a"),
    (MARKED, {"properties": {"a": {"type": "string", "minLength": "x"}}}, "is not a"),
    (MARKED, {"properties": {"a": {"type": "string", "maxLength": [1]}}}, "is not a"),
    (MARKED[:1], {"anyOf": [{"required": ["a"]}]}, "express"),
    (MARKED[:1], {"properties": {"a>": {}}}, "express"),
    (MARKED[:1], {"properties": {"a": {"enum": ["</parameter>"]}}}, "express"),
    (MARKED[:1], {"properties": {"a": {"allOf": [{"type": "string"}, {"maxLength": 1}]}}}, "express"),
    (MARKED[1:], {"patternProperties": {}}, "express"),
    (MARKED[1:], {"properties": {"a:": {}}}, "express"),
    (MARKED[1:], {"properties": {"a": 1}}, "not a schema"),
    (MARKED[1:], {"properties": {"a": {"enum": [quoted("x")]}}}, "express"),
    (MARKED[1:], {"properties": {"a": {"type": "real"}}}, "unknown type"),
    (MARKED[1:], {"properties": {"a": {"type": 5}}}, "is not a"),
    (MARKED[1:], {"properties": {"a": {"allOf": [{}, {}]}}}, "express"),
    (MARKED[1:], {"properties": {"a": {"type": "array", "minItems": None, "maxItems": "y"}}}, "is not a"),
]


@pytest.mark.parametrize(("names", "schema", "message"), REFUSED, ids=str)
def test_schemas_that_a_format_cannot_express_are_refused(
    names: tuple[str, ...], schema: Any, message: str
) -> None:
    for name in names:
        with pytest.raises(ValueError, match=message):
            AnswerGrammar(PARSERS[name], {"f": {"type": "object", **schema}}).build()


@every_format
def test_references_that_multiply_take_no_time(vocabularies: list[Vocabulary], name: str) -> None:
    definitions: dict[str, Any] = {
        f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at - 1}"}] * 2} for at in range(1, 50)
    }
    definitions |= {"d0": {"type": "integer"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {}]}}
    for target, wrong in (("d49", "x"), ("loop", None)):
        schema = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{target}"}}, "$defs": definitions}
        options: Any = {"parser": PARSERS[name], "functions": {"f": schema}}
        assert vocabularies[0].allows(call(name, a="1"), **options)
        assert wrong is None or not vocabularies[0].allows(call(name, a=wrong), **options)


def test_many_references_to_a_large_definition_are_refused() -> None:
    large = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/large"}, {"enum": ["x" * 50_000]}]}}
    many = {f"p{at}": {"type": "array", "items": {"$ref": "#/$defs/large"}} for at in range(10_000)}
    schema = {"type": "object", "properties": many, "$defs": {"large": large}}
    with pytest.raises(ValueError, match="too many references"):
        AnswerGrammar(Qwen3Coder, {"f": schema}).build()


@pytest.mark.parametrize("pattern", ["(", "a\\", "(?=a)", "/ | TEXT"])
def test_a_pattern_that_is_no_regular_expression_is_refused(
    vocabularies: list[Vocabulary], pattern: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    grammar = AnswerGrammar(Qwen3Coder, {"f": schema}).build()
    if pattern == "/ | TEXT":  # it is one, whatever it would be in the grammar
        vocabularies[0].backend.compile(grammar)
        return
    with pytest.raises(InvalidRequest):
        vocabularies[0].backend.compile(grammar)


@rest(SECONDS)
@pytest.mark.parametrize("name", thinned(MARKED, 2))
def test_many_properties_take_linear_work(name: str) -> None:
    count = 10_000
    properties = {f"p{at}": {"type": "integer"} for at in range(count)}
    functions = {"f": {"type": "object", "properties": properties, "required": [*properties]}}

    def work() -> None:
        with contextlib.suppress(InvalidRequest):  # some formats write too long a grammar
            AnswerGrammar(PARSERS[name], functions).build()

    assert calls_of(work) < 150 * count


def test_line_breaks_of_glm_may_be_left_out(vocabularies: list[Vocabulary]) -> None:
    options: Any = {
        "parser": PARSERS["glm45"],
        "functions": {"f": {"properties": {"a": {}, "b": {"type": "integer"}}}},
    }
    told = tagged("glm45", ("a", "x"), ("b", "1"))
    for text in (told, told.replace("\n", "", 1), told.replace("\n", "")):
        assert all(vocabulary.allows(text, **options) for vocabulary in vocabularies)


@pytest.mark.parametrize("name", ["qwen3-coder", "seed-oss", "minimax-m2"])
def test_text_has_no_calls_without_their_opening_tag(vocabularies: list[Vocabulary], name: str) -> None:
    functions = {"f": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    options: Any = {"parser": PARSERS[name], "functions": functions, "text": True}
    right, wrong = tagged(name, ("a", "1")), tagged(name, ("a", "x"))
    for vocabulary in vocabularies:
        assert vocabulary.allows(f"Hm. {right}", **options)
        for text in (wrong, wrong.partition("\n")[2], f"Hm. {right} {wrong.partition(chr(10))[2]}"):
            assert not vocabulary.allows(text, **options)


def test_calls_of_minimax_are_between_the_same_tags(vocabularies: list[Vocabulary]) -> None:
    one, end = tagged("minimax-m2", ("a", "x")).split("\n</minimax")
    two = f"{one}\n{one[one.index('<invoke') :]}\n</minimax{end}"
    options: Any = {"parser": PARSERS["minimax-m2"], "functions": {"f": {}}}
    for vocabulary in vocabularies:
        assert vocabulary.allows(two, **options)
        assert not vocabulary.allows(two, parallel=False, **options)


@every_format
def test_a_grammar_is_not_built_beyond_its_limit(name: str) -> None:
    written = []

    class Counted(Rules):
        def add(self, name: str, form: str) -> str:
            written.append(len(form))
            return super().add(name, form)

    properties = {f"p{at}": {"type": "string", "minLength": at} for at in range(40_000)}
    with pytest.raises(InvalidRequest, match="characters"):
        PARSERS[name].write("f", {"type": "object", "properties": properties}, Counted({}))
    assert sum(written) <= 1 << 20
    assert len(written) < len(properties)
