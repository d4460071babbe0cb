"""Keywords that llguidance does not know: the grammar allows what the schema allows, or names the keyword."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from datetime import date
from itertools import permutations, product
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from aioinfer.errors import InvalidRequest
from aioinfer.text.formats import PARTS
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.patterns import without_lookahead
from aioinfer.text.schema_rewrites import UnsupportedKeyword, rewritten
from tests.text.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


class Grammars:
    """The grammar of one schema."""

    def __init__(self, vocabulary: Vocabulary, schema: Any) -> None:
        self._vocabulary = vocabulary
        self.matcher = vocabulary.backend.compile(Grammar("json_schema", json.dumps(schema)))

    def allows(self, instance: Any) -> bool:
        """In any order of the properties: grammars have one."""
        texts = (json.dumps(each, ensure_ascii=False) for each in orders(instance))
        return any(self._vocabulary.follows(self.matcher.copy(), text) for text in texts)


def orders(instance: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for keys in permutations(instance):
            yield {key: instance[key] for key in keys}
    else:
        yield instance


SMALL: list[Any] = [None, True, False, 0, 1, 1.5, "", "a", "b", "ab", []]
LISTS = [list(each) for count in range(4) for each in product([1, 2, "a"], repeat=count)]
OBJECTS = [
    {name: 1 for name, there in zip("abc", given, strict=True) if there}
    for given in product([0, 1], repeat=3)
] + [{"aa": 1}, {"a": "x"}, {"a": 1, "aa": 2}]
INSTANCES = [*SMALL, *LISTS, *OBJECTS]

EXACT: dict[str, Any] = {
    "a set of an enum": {"type": "array", "items": {"enum": [1, "a"]}, "uniqueItems": True},
    "a set of a reference": {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True,
                             "$defs": {"e": {"enum": [1, 2, "a"]}}},
    "a bounded set": {"type": "array", "items": {"enum": [1, 2, "a"]}, "uniqueItems": True, "maxItems": 2,
                      "minItems": 1},
    "a set of one": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    "no set": {"type": "array", "items": {"enum": [1]}, "uniqueItems": False, "maxItems": 3},
    "a set or anything else": {"items": {"enum": [1, 2]}, "uniqueItems": True},
    "names of an enum": {"type": "object", "propertyNames": {"enum": ["a", "c"]},
                         "additionalProperties": {"type": "integer"}},
    "names of a reference": {"type": "object", "propertyNames": {"$ref": "#/$defs/n"},
                             "additionalProperties": {"type": "integer"}, "$defs": {"n": {"const": "a"}}},
    "names beside properties": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["a"],
                                "properties": {"a": {"type": "integer"}, "c": {"type": "integer"}}},
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^a+$"},
                           "additionalProperties": {"type": "integer"}},
    "names of a length": {"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": True},
    "any names": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": False},
    "names of anything": {"propertyNames": {"enum": ["a"]}},
    "binary": {"type": "string", "format": "binary"},
    "path": {"type": ["string", "null"], "format": "path"},
    "lookahead": {"type": "string", "pattern": "^(?=.*b)a.*$"},
    "two lookaheads": {"type": "string", "pattern": "^(?=.*b)(?=a)"},
    "contains": {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxItems": 3},
    "contains or anything else": {"contains": {"type": "string"}, "maxItems": 2},
    "contains perhaps": {"type": "array", "contains": {"const": 2}, "minContains": 0, "maxItems": 2},
    "contains within nothing": {"contains": {"const": 2}, "maxItems": 0},
    "not text": {"not": {"type": "string"}},
    "not numbers": {"not": {"type": ["number", "array", "object"]}},
    "integers but not numbers": {"type": ["string", "integer"], "not": {"type": "number"}},
    "not of an enum": {"enum": [1, 2, "a", True], "not": {"enum": [1.0, "a"]}},
    "not required": {"type": "object", "additionalProperties": {"type": "integer"},
                     "not": {"required": ["a"]}},
    "not both required": {"additionalProperties": {"type": "integer"}, "not": {"required": ["a", "b"]}},
    "dependent": {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"},
                  "additionalProperties": False, "dependentRequired": {"a": ["b"], "b": ["c"]}},
    "dependent or anything else": {"dependentRequired": {"a": ["b", "c"]}},
    "in a property": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}, "required": ["a"],
                      "additionalProperties": False},
    "in alternatives": {"anyOf": [{"type": "array", "items": {"enum": [1]}, "uniqueItems": True},
                                  {"type": "string", "format": "binary"}]},
    "behind a reference": {"$ref": "#/$defs/s", "$defs": {"s": {"items": {"enum": [1, 2]}, "type": "array",
                                                               "uniqueItems": True}}},
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_the_grammar_allows_what_the_schema_allows(vocabulary: Vocabulary, name: str) -> None:
    schema = EXACT[name]
    grammar, validator = Grammars(vocabulary, schema), Draft202012Validator(schema)
    wrong = {json.dumps(each) for each in INSTANCES if grammar.allows(each) != validator.is_valid(each)}
    assert not wrong
    assert len({validator.is_valid(each) for each in INSTANCES}) == 2 or schema.keys() <= {"type", "format"}


@pytest.mark.parametrize("text", ["YWI=", "YQ==", "YWJj", "", "YWI", "Y===", "YW I="])
def test_base64(vocabulary: Vocabulary, text: str) -> None:
    allowed = re.fullmatch("([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?", text) is not None
    assert Grammars(vocabulary, {"type": "string", "format": "base64"}).allows(text) == allowed


DATES = {
    "leap years": (["2024-02-29", "2000-02-29", "0004-02-29"], ["2021-02-29", "2100-02-29", "0100-02-29"]),
    "days of months": (
        ["1999-01-31", "1999-12-31", "1999-04-30"],
        ["1999-04-31", "1999-11-31", "1999-02-30"],
    ),
    "months": (["1999-10-10"], ["1999-00-10", "1999-13-10", "1999-1-10", "99-01-01", "1999-01-00"]),
}


@pytest.mark.parametrize("name", DATES)
def test_dates_are_days_that_there_are(vocabulary: Vocabulary, name: str) -> None:
    right, wrong = DATES[name]
    dates = Grammars(vocabulary, {"type": "string", "format": "date"})
    moments = Grammars(vocabulary, {"type": "string", "format": "date-time"})
    for day, allowed in [*((each, True) for each in right), *((each, False) for each in wrong)]:
        assert dates.allows(day) == allowed, day
        assert moments.allows(f"{day}T12:30:00Z") == allowed, day


def test_a_date_is_a_day_of_the_calendar_and_any_such_day_is_one() -> None:
    pattern = re.compile(PARTS["date"][0]["pattern"])
    for year, month, day in product([1999, 2000, 2001, 2004, 2100, 2400], range(14), range(33)):
        try:
            there = bool(date(year, month, day))
        except ValueError:
            there = False
        assert bool(pattern.fullmatch(f"{year}-{month:02}-{day:02}")) == there


@pytest.mark.parametrize(
    ("time", "allowed"),
    [
        *((each, True) for each in ("00:00:00Z", "23:59:59.123z", "12:00:00+05:45", "12:00:00-23:59")),
        *((each, True) for each in ("23:59:60Z", "23:59:60.5z", "23:59:60-00:00")),
        *((each, False) for each in ("22:59:60Z", "23:58:60Z", "23:59:60+01:00", "23:59:61Z", "12:00:60Z")),
        *((each, False) for each in ("24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+24:00", "12:00:00.Z")),
    ],
)
def test_times_have_leap_seconds_at_the_end_of_a_day_only(
    vocabulary: Vocabulary, time: str, allowed: bool
) -> None:
    assert Grammars(vocabulary, {"type": "string", "format": "time"}).allows(time) == allowed
    moments = Grammars(vocabulary, {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]})
    assert moments.allows(f"2016-12-31T{time}") == allowed


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        *((each, True) for each in ("a", "1", "ab", "a-b", "a--b", "a1.b2.c3", "a" * 63, "A-1-B")),
        (".".join(["a" * 63] * 3 + ["a" * 61]), True),
        (".".join(["a" * 63] * 3 + ["a" * 62]), False),
        *((each, False) for each in ("", "a" * 64, "-a", "a-", "a..b", "a.", "a_b", "a.-b", "é")),
        # Whether these are names, only a decoder of Punycode and the tables of Unicode can tell.
        *((each, False) for each in ("xn--a", "XN--9t4b11yi5a", "ab--", "ab--c", "a.ab--c")),
    ],
)
def test_names_of_hosts_have_a_length(vocabulary: Vocabulary, name: str, allowed: bool) -> None:
    assert Grammars(vocabulary, {"type": "string", "format": "hostname"}).allows(name) == allowed


@pytest.mark.parametrize("pattern", [r"^\s$", r"^[\s]$", r"^[^\S]$", r"^(\s|\\s)$"])
def test_white_space_of_patterns_is_that_of_ecmascript(vocabulary: Vocabulary, pattern: str) -> None:
    spaces = Grammars(vocabulary, {"type": "string", "pattern": pattern})
    others = Grammars(vocabulary, {"patternProperties": {pattern: True}, "additionalProperties": False})
    for text, space in {" ": True, "\u00a0": True, "\ufeff": True, "\u0085": False, "a": False}.items():
        assert spaces.allows(text) == space
        assert others.allows({text: 1}) == space


@pytest.mark.parametrize("name", ["a", "é", "🐲", 'a"', "a\\b", "a\n"])
def test_a_name_has_one_spelling(vocabulary: Vocabulary, name: str) -> None:
    """Another one would be a property that the schema does not know, and of any type."""
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {name: {"type": "integer"}}},
        {"type": "object", "patternProperties": {f"^{re.escape(name)}$": {"type": "integer"}}},
    ]
    for schema in schemas:
        grammar = Grammars(vocabulary, schema)
        assert grammar.allows({name: 1})
        assert grammar.allows({"other": "x"})
        units = name.encode("utf-16-be").hex()
        escaped = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
        assert json.loads(f'{{"{escaped}": "x"}}') == {name: "x"}
        for value in ("1", '"x"'):
            assert not vocabulary.follows(grammar.matcher.copy(), f'{{"{escaped}": {value}}}')


def test_control_characters_are_written_by_their_numbers(vocabulary: Vocabulary) -> None:
    for schema in ({"const": "a\u0001b"}, {"type": "string", "pattern": "^a\\x01b$"}, {"enum": ["a\x7f"]}):
        grammar = Grammars(vocabulary, schema)
        assert not grammar.allows("ab")
        assert not grammar.allows("a")
    assert Grammars(vocabulary, {"const": "a\u0001b"}).allows("a\u0001b")


REFUSED: dict[str, tuple[Any, str]] = {
    "sets of texts": ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    "large sets": ({"items": {"enum": [*range(6)]}, "uniqueItems": True}, "uniqueItems"),
    "sets of a tuple": ({"prefixItems": [{}], "items": {"enum": [1]}, "uniqueItems": True}, "uniqueItems"),
    "formats of names": ({"propertyNames": {"format": "email"}}, "propertyNames"),
    "a format of pydantic": ({"type": "string", "format": "regex"}, "format"),
    "a format of no one": ({"type": "string", "format": "colour"}, "format"),
    "negative lookahead": ({"type": "string", "pattern": "^(?!a)"}, "pattern"),
    "lookahead inside": ({"type": "string", "pattern": "a(?=b)"}, "pattern"),
    "lookbehind": ({"type": "string", "pattern": "(?<=a)b"}, "pattern"),
    "an optional lookahead": ({"type": "string", "pattern": "^(?=a)?b"}, "pattern"),
    "lookahead of one of two": ({"type": "string", "pattern": "^(?=a).|b"}, "pattern"),
    "lookahead of names": ({"patternProperties": {"^(?=a)": True}}, "patternProperties"),
    "contains without end": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "contains several": ({"contains": {"const": 1}, "minContains": 2, "maxItems": 3}, "contains"),
    "at most so many": ({"contains": {"const": 1}, "maxContains": 2, "maxItems": 3}, "maxContains"),
    "not a schema": ({"not": {"properties": {"a": {"type": "string"}}}}, "not"),
    "not anything": ({"not": {}}, "not"),
    "not integers": ({"not": {"type": "integer"}}, "not"),
    "nothing left": ({"enum": [1], "not": {"const": 1}}, "not"),
    "conditions": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "dependent schemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "overlapping": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "oneOf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_grammar_can_say_is_named(vocabulary: Vocabulary, name: str) -> None:
    schema, keyword = REFUSED[name]
    for whole, place in ((schema, ""), ({"type": "object", "properties": {"p": schema}}, "/properties/p")):
        with pytest.raises(InvalidRequest, match=f"the keyword '{keyword}'") as caught:
            vocabulary.backend.compile(Grammar("json_schema", json.dumps(whole)))
        assert place in caught.value.message or keyword == "oneOf"


def test_pairs_that_differ_in_kind_are_no_duplicates(vocabulary: Vocabulary) -> None:
    grammar = Grammars(vocabulary, {"type": "array", "items": {"enum": [1, True, "1"]}, "uniqueItems": True})
    assert grammar.allows([True, "1", 1])
    assert not grammar.allows([1, 1])


def test_schemas_without_such_keywords_stay_as_they_are() -> None:
    for schema in (True, {}, {"type": "object", "properties": {"not": {"enum": [{"uniqueItems": True}]}}},
                   {"anyOf": [{"const": {"not": 1}}, {"type": "array", "items": {"format": "uuid"}}]},
                   {"items": [{"type": "string"}], "allOf": 3, "properties": [], "$ref": 5}):  # fmt: skip
        before = copy.deepcopy(schema)
        assert rewritten(schema) is schema
        assert schema == before


def test_what_is_given_is_not_changed() -> None:
    for schema in EXACT.values():
        before = copy.deepcopy(schema)
        rewritten(schema)
        assert schema == before


def test_rewriting_has_a_bound() -> None:
    one = {"items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True}
    with pytest.raises(UnsupportedKeyword, match="more than 50000 parts"):
        rewritten({"prefixItems": [one] * 60})


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("abc", ["abc"]),
        (r"^\(?=a", [r"^\(?=a"]),
        ("[(?=]a", ["[(?=]a"]),
        ("(?:a|b)", ["(?:a|b)"]),
        ("^(?=a(b|c))d", ["^d", "^(a(b|c))"]),
        (r"^(?=[)])(?=\))x", ["^x", "^([)])", r"^(\))"]),
    ],
)
def test_lookaheads_become_patterns(pattern: str, parts: list[str]) -> None:
    assert without_lookahead(pattern) == parts


def test_the_decimals_of_pydantic_lose_their_lookahead_and_nothing_else() -> None:
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    (other,) = without_lookahead(pattern)
    for text in map("".join, (each for count in range(7) for each in product("+0.5", repeat=count))):
        assert bool(re.search(pattern, text)) == bool(re.search(other, text)), text


def test_the_number_of_lookaheads_has_a_bound() -> None:
    assert len(without_lookahead("^" + "(?=a)" * 16)) == 17
    with pytest.raises(ValueError, match="more than 16 lookaheads"):
        without_lookahead("^" + "(?=a)" * 9000)
