"""Small grammars that would cost much are refused before they are built or built so that they cost little."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from aioinfer.config import EngineConfig
from aioinfer.errors import InvalidRequest
from aioinfer.ledger import LEDGER
from aioinfer.params import SamplingParams
from aioinfer.text import costs, grammar_bounds, grammar_spec, patterns, schema_rewrites
from aioinfer.text import guidance as guidance_module
from aioinfer.text.costs import MOST_NODES, common_multiple, multiple_of, remainders, written_out
from aioinfer.text.grammar import GrammarState
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.guidance import GuidanceBackend
from aioinfer.text.patterns import without_lookahead
from aioinfer.text.schema_rewrites import UnsupportedKeyword, rewritten
from aioinfer.text.stop_regex import check_pattern
from tests.docs.pages import read
from tests.text.vocabulary import Vocabulary

#: characters of the largest grammar
MOST = 1 << 20
#: seconds of this thread that tell linear time from more
SOON = 20.0
PRIMES = [1009, 1013, 1019, 1021]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary()


@pytest.fixture(scope="module")
def guidance(vocabulary: Vocabulary) -> GuidanceBackend:
    return vocabulary.backend


def compiled(guidance: GuidanceBackend, schema: Any) -> Any:
    return guidance.compile(Grammar("json_schema", json.dumps(schema)))


# -- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "multiple", [0.01, 0.5, 2.5, 1e-9, 5, 100, 360, 1440, 65536, 86400, 100_000, 10**6, 3_600_000, 10**9]
)
def test_usual_multiples_are_accepted(guidance: GuidanceBackend, multiple: float) -> None:
    compiled(guidance, {"type": "number", "multipleOf": multiple})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9_999_991},
        {"multipleOf": 1.048577},
        {"properties": {"a": {"items": {"type": ["number", "null"], "multipleOf": 499_979}}}},
        {"allOf": [{"type": "integer", "multipleOf": each} for each in PRIMES]},
        {"multipleOf": 1009, "anyOf": [{"multipleOf": 1013}, {"type": "string"}]},
        {"$defs": {"a": {"multipleOf": 1009}}, "$ref": "#/$defs/a", "multipleOf": 1013},
        {"anyOf": [{"type": "integer", "multipleOf": each} for each in PRIMES]},
        {"anyOf": [{"anyOf": [{"multipleOf": each}, {"type": "string"}]} for each in PRIMES]},
        {"not": {"type": "null"}, "multipleOf": 777_777},
    ],
)
def test_multiples_with_many_remainders_are_refused(guidance: GuidanceBackend, schema: Any) -> None:
    refusal = "'multipleOf' needs more than 100000 remainders"
    with pytest.raises(InvalidRequest, match=refusal):
        compiled(guidance, schema)
    with pytest.raises(InvalidRequest, match=refusal):
        guidance.compile(Grammar("lark", f"start: %json {json.dumps(schema)}"))


def test_the_remainders_of_all_numbers_count_together(guidance: GuidanceBackend) -> None:
    schema = {"properties": {f"p{at}": {"type": "integer", "multipleOf": 99_991 - at} for at in range(4)}}
    with pytest.raises(InvalidRequest, match="more than 250000 parts"):
        compiled(guidance, schema)


def test_multiples_are_read_as_decimals() -> None:
    assert multiple_of({"multipleOf": 0.25}) == (25, 2)
    assert [multiple_of({"multipleOf": odd}) for odd in (0, -1, True, "1", 1e300, 10**400)] == [None] * 6
    assert common_multiple([(1, 2), (5, 0), None]) == (500, 2)
    assert [remainders(each) for each in (None, (7, 0), (3_000_000, 0), (864_00, 0))] == [0, 7, 3000, 86400]


# -- repeats -------------------------------------------------------------------------------------------

REPEATS = [
    ("regex", "(((a{100}){100}){100})"),
    ("regex", "a{1000000}"),
    ("lark", "start: /(((a{100}){100}){100})/"),
    ("lark", 'start: A\nA: (("a"{1000}){1000})'),
    ("lark", 'start: a{1000}\na: b{1000}\nb: "x"'),
    ("json_schema", {"type": "string", "pattern": "^(((a{100}){100}){100})$"}),
    ("json_schema", {"type": "string", "pattern": "^a*$", "minLength": 1_000_000}),
    ("json_schema", {"pattern": "^(?x)a{ 1000000 }$", "type": "string"}),
    ("json_schema", {"type": "object", "patternProperties": {"^a{1000000}$": {}}, "minProperties": 1}),
    (
        "json_schema",
        {
            "x-guidance": {"whitespace_flexible": False},
            "items": {"const": 1},
            "minItems": 10**6,
            "type": "array",
        },
    ),
]


@pytest.mark.parametrize(("kind", "source"), REPEATS)
def test_no_grammar_forces_a_long_text(vocabulary: Vocabulary, kind: Any, source: Any) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    matcher = vocabulary.backend.compile(Grammar(kind, text))
    mask = np.zeros(-(-vocabulary.size // 32), np.int32)
    for _ in range(3):
        assert len(matcher.forced()) <= MOST_NODES
        assert matcher.error is None
        vocabulary.backend.fill([matcher], [mask])
        first = np.unpackbits(mask.view(np.uint8), bitorder="little").argmax()
        assert matcher.accept(int(first))


def test_nested_repeats_count_multiplicatively() -> None:
    assert written_out("(((a{100}){100}){100})") > MOST_NODES
    assert written_out("a{ 100000 }") > MOST_NODES
    assert written_out(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T\d{2}(:\d{2})?") < 200


# -- what is compared with all else --------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": f"x.{{{at}}}y"} for at in range(20)]},
        {"allOf": [{"pattern": f"x.{{{at}}}y", "format": "email"} for at in range(9)]},
        {"type": "string", "pattern": "^" + "(?=.*a)" * 16 + "b", "format": "date"},
    ],
)
def test_many_patterns_of_one_text_are_refused(guidance: GuidanceBackend, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="more than 17 patterns"):
        compiled(guidance, schema)


def test_many_terminals_that_hold_together_are_refused(guidance: GuidanceBackend) -> None:
    parts = [f"/.*x.{{{at}}}y.*/" for at in range(20)]
    split = f"start: A\nA: B & C\nB: {' & '.join(parts[:10])}\nC: {' & '.join(parts[10:])}"
    for source in (f"start: A\nA: {' & '.join(parts)}", split):
        with pytest.raises(InvalidRequest, match="more than 17 times &"):
            guidance.compile(Grammar("lark", source))
    guidance.compile(
        Grammar(
            "lark", 'start: A | "&&&&&&&&&&&&&&&&&&&&" /&{20}/\nA: /a.*/ & /.*b/  // &&&&&&&&&&&&&&&&&&&&'
        )
    )


@pytest.mark.parametrize(
    ("kind", "source", "refusal"),
    [
        ("regex", "a?" * 5000, "more than 4096 repeats and classes"),
        ("json_schema", {"pattern": "(a?|b)*" * 2100}, "more than 4096 repeats and classes"),
        (
            "json_schema",
            {"items": [{"pattern": f"^a{at}" + "b?" * 99} for at in range(99)]},
            "more than 4096 repeats",
        ),
        ("lark", "start: A\nA: /" + "a*" * 5000 + "/", "more than 4096 repeats and classes"),
        ("lark", "start: A\nA: " + "B? " * 3000 + '\nB: "b"', "more than 2000 repeats"),
        ("lark", "start: " + " | ".join(f'"{at}"' for at in range(20_000)), "more than 10000 texts"),
        ("json_schema", {"required": [f"p{at}" for at in range(9000)]}, "parts copied"),
    ],
)
def test_what_takes_the_square_of_its_length_is_refused(
    guidance: GuidanceBackend, kind: Any, source: Any, refusal: str
) -> None:
    with pytest.raises(InvalidRequest, match=refusal):
        guidance.compile(Grammar(kind, source if isinstance(source, str) else json.dumps(source)))


def test_many_choices_values_and_equal_patterns_are_accepted(guidance: GuidanceBackend) -> None:
    values = [f"value {at * 7919}" for at in range(5000)]
    compiled(guidance, {"enum": values})
    guidance.compile(Grammar("choice", json.dumps(values)))
    date = {"type": "string", "format": "date-time"}
    compiled(guidance, {"properties": {f"p{at}": date for at in range(500)}})
    compiled(guidance, {"type": "array", "maxItems": 1000, "items": {"type": "string", "maxLength": 4000}})


@pytest.mark.parametrize(
    ("keyword", "reason"), [("properties", "parts copied"), ("patternProperties", "too many patterns")]
)
def test_names_and_patterns_of_one_object_are_bounded(
    guidance: GuidanceBackend, keyword: str, reason: str
) -> None:
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match=reason):
        compiled(guidance, {"type": "object", keyword: {f"^n{at}": {} for at in range(8000)}})
    assert soon(begin)


# -- linear time ---------------------------------------------------------------------------------------


def soon(begin: float) -> bool:
    return time.thread_time() - begin < SOON


@pytest.mark.parametrize("source", ['root ::= "a"', "", " \t", "start", "start\r: "])
def test_blank_lines_are_read_once(guidance: GuidanceBackend, source: str) -> None:
    begin = time.thread_time()
    for blank in ("\n", "\r\n", " \n", "\n\t", "\x0c\n"):
        with pytest.raises(InvalidRequest, match=r"GBNF|empty"):
            guidance.compile(Grammar("lark", source.strip(" :\r") + blank * (MOST // len(blank) - 20)))
    assert soon(begin)


def test_large_gbnf_is_refused(guidance: GuidanceBackend) -> None:
    for source in ("root ::= " + '"a" | ' * 20_000 + '"a"', 'root ::= "' + "a" * 100_000 + '"'):
        with pytest.raises(InvalidRequest, match="more than 65536 characters of GBNF"):
            guidance.compile(Grammar("lark", source))
    guidance.compile(Grammar("lark", "root ::= " + '"a" | ' * 5000 + '"a"'))


@pytest.mark.parametrize("part", ["(?=a)", "(?=", "(?=(", "(?=a|", "(?=[", "(?=a)?", "(?!a)", "(?<=a)"])
def test_lookaheads_are_split_in_one_pass(part: str) -> None:
    begin = time.thread_time()
    with pytest.raises(ValueError, match="with"):
        without_lookahead("^" + part * (MOST // len(part)))
    assert soon(begin)


def test_places_are_written_out_for_errors_only() -> None:
    begin = time.thread_time()
    name = "n" * 400_000
    many = {f"p{at}": {"type": "string"} for at in range(20_000)}
    rewritten({"properties": {name: {"properties": many}}})
    with pytest.raises(UnsupportedKeyword, match=r"'if' at /properties/nnn"):
        rewritten({"properties": {name: {"properties": {**many, "x": {"if": {}}}}}})
    assert soon(begin)


def test_values_nested_deeply_are_compared_in_linear_time() -> None:
    value: Any = 1.0
    for _ in range(60):
        value = {'"': [value]}
    begin = time.thread_time()
    assert rewritten({"enum": [value, 2], "not": {"const": value}})["allOf"] == [{"enum": [2]}]
    assert soon(begin)


def test_values_that_many_references_lead_to_count_each_time() -> None:
    long = {"enum": list(range(20_000))}
    schema = {"$defs": {"a": long}, "items": [{"propertyNames": {"$ref": "#/$defs/a"}}] * 5000}
    with pytest.raises(UnsupportedKeyword, match="more than 50000 parts"):
        rewritten(schema)
    long_texts = {"items": {"enum": ["x" * 100_000, "y" * 100_000, 1, 2]}, "uniqueItems": True}
    with pytest.raises(UnsupportedKeyword, match="more than 50000 parts"):
        rewritten(long_texts)


def test_names_and_patterns_are_merged_in_linear_time(guidance: GuidanceBackend) -> None:
    names = {f"n{at}": True for at in range(15_000)}
    patterns = {f"^p{at}$": True for at in range(300)}
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"more than 50000 merges|parts copied"):
        compiled(guidance, {"allOf": [{"properties": names}, {"patternProperties": patterns}]})
    assert soon(begin)


# -- stop patterns -------------------------------------------------------------------------------------


def test_stop_patterns_are_kept_in_a_bounded_number_of_bytes() -> None:
    kept = check_pattern("a{9000}b")
    assert check_pattern("a{9000}b") is kept
    for at in range(40):
        check_pattern(f"{at:03}c{{9000}}d")
    assert check_pattern("a{9000}b") is not kept
    entry = LEDGER.entries()["stop patterns"]
    assert entry.taken <= (entry.bound or 0)


def test_the_stop_patterns_of_a_request_count_together() -> None:
    SamplingParams(stop_regex=["x{4000}y", "z{4000}y"])
    with pytest.raises(InvalidRequest, match="more than 10000 nodes"):
        SamplingParams(stop_regex=[f"{each}{{2000}}y" for each in "abcdefgh"])


# -- patterns of names, and schemas within grammars ------------------------------------------------------


def _named(patterns: list[str]) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {each: {"type": "integer"} for each in patterns}}


@pytest.mark.parametrize(
    "schema",
    [
        _named([f"^prop{at}$" for at in range(350)]),
        _named([f"^a{{{at}}}b.*{at}$" for at in range(1, 300)]),
        _named([f"^{'ab' * 200}{at:03}$" for at in range(100)]),
        {"allOf": [_named([f"^a{{{at + 100 * part}}}$" for at in range(60, 100)]) for part in range(6)]},
        {"allOf": [_named([f"^a{at}$" for at in range(100)]), *({"minProperties": at} for at in range(200))]},
        {"items": [_named([f"^{part}a{{{at}}}$" for at in range(60, 100)]) for part in range(40)]},
    ],
    ids=["many", "counted", "long", "merged", "merged with others", "in many objects"],
)
def test_patterns_of_names_that_are_long_to_compare_are_refused(
    guidance: GuidanceBackend, schema: Any
) -> None:
    with pytest.raises(InvalidRequest, match="'patternProperties' has too many patterns"):
        compiled(guidance, schema)


def test_usual_patterns_of_names_are_accepted(guidance: GuidanceBackend) -> None:
    compiled(guidance, _named([f"^([a-z0-9]+-)+{at:03}(x|y)?$" for at in range(30)]))
    compiled(guidance, _named([f"^x-item-{at:03}$" for at in range(100)]))


def _failure(vocabulary: Vocabulary, lark: str, text: str) -> str | None:
    """Why a grammar ends an output that begins with the text."""
    state = GrammarState(
        vocabulary.backend, vocabulary.backend.compile(Grammar("lark", lark)), 0, vocabulary.size, 0
    ).start()
    for token in vocabulary.tokenizer.encode(text, add_special_tokens=False).ids:
        state.accept([token])
    return state.failed


@pytest.mark.parametrize("count", [60, 200])
def test_schemas_within_grammars_may_have_many_optional_properties(
    vocabulary: Vocabulary, count: int
) -> None:
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(count)}}
    assert _failure(vocabulary, f'start: "=" %json {json.dumps(schema)}', '={"p1": "') is None


def test_grammars_without_large_schemas_have_narrow_rows(vocabulary: Vocabulary) -> None:
    rules = "".join(f'\nr{at}: "a" r{at} | "{at}"' for at in range(250))
    wide = "start: " + " | ".join(f"r{at}" for at in range(250)) + rules + '\nj: %json {"type": "null"}'
    assert "max is 20" in (_failure(vocabulary, wide, "aaa") or "")


def test_the_bounds_are_those_that_the_documentation_states() -> None:
    bounds = grammar_bounds
    stated = [
        (grammar_spec._MAX_GRAMMAR, EngineConfig().max_grammar_depth, bounds.MOST_LEVELS),
        (bounds.MOST_RULES, bounds._MOST_QUOTED),
        (guidance_module._MOST_GBNF_RULES, guidance_module._MOST_GBNF),
        (bounds._MOST_OPERATORS, patterns._MOST_HEADS),
        (bounds._MOST_TOGETHER, costs._MOST_REMAINDERS),
        (bounds._MOST_MERGES, bounds._MOST_COPIED, bounds._MOST_PARTS),
        (schema_rewrites._MOST_ADDED,),
        (bounds._MOST_COMPARED,),
        (guidance_module._WIDEST, guidance_module._WIDEST_LARK),
        (costs.MOST_NODES,),
    ]
    table = read("SECURITY.md").partition("**Bounds of grammars**")[2].partition("## ")[0]
    told = [row.rsplit("|", 2)[1].strip() for row in table.splitlines() if row.startswith("|")][2:]
    assert told == ["; ".join(f"{most:,}" for most in row) for row in stated]
