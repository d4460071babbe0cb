"""Grammars of answers with calls, over vocabularies with and without tokens for the tags."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.errors import InvalidRequest
from aioinfer.text.grammar_spec import Grammar
from aioinfer.text.reasoning import REASONING_PARSERS, DeepSeekR1, Harmony, Qwen3, ReasoningParser
from aioinfer.text.tool_calls import PARSERS, Hermes
from aioinfer.text.tool_grammar import AnswerGrammar
from tests.text.call_formats import written
from tests.text.vocabulary import CITY, FUNCTIONS, Vocabulary
from tests.tiers import SECONDS, grid, rest, scaled, thinned

ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {"zone": 1}}\n</tool_call>'
BERN = ROME.replace("Rome", "Bern")


@pytest.fixture(params=[None, False, True], ids=["text", "added", "special"], scope="module")
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param)


@pytest.mark.parametrize("parallel", [False, True])
def test_text_with_or_without_calls(vocabulary: Vocabulary, parallel: bool) -> None:
    options = {"text": True, "parallel": parallel}
    for text in ("", 'Ro\n\n{"me"}', ROME, f"Let me see.\n{ROME}"):
        assert vocabulary.allows(text, **options), text
    for text in (BERN, f"hm {BERN}", "<tool_call>", "<tool_call>\n{}"):
        assert not vocabulary.allows(text, **options), text
    assert vocabulary.allows(f"Let me see.\n{ROME} and {NOW}.", **options) == parallel


#: formats whose calls stand next to text and reasoning in any format
FREE = [name for name in PARSERS if name not in ("harmony", "pythonic")]


def in_format(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    return written(name, [*calls])


@pytest.mark.parametrize("name", FREE)
def test_calls_in_every_format(vocabulary: Vocabulary, name: str) -> None:
    parser = PARSERS[name]
    rome, now = ("weather", {"city": "Rome"}), ("now", {"zone": "1"})
    bern, nothing = ("weather", {"city": "Bern"}), ("whether", {"city": "Rome"})
    one, two, wrong = in_format(name, rome), in_format(name, rome, now), in_format(name, bern)
    for text in (one, in_format(name, now), two):
        assert vocabulary.allows(text, parser=parser), text
        assert vocabulary.allows(text, parser=parser, text=True), text
    for text in ("", "Rome", wrong, in_format(name, nothing), f"x{one}", one[:-1]):
        assert not vocabulary.allows(text, parser=parser), text
    for options in ({"parallel": False}, {"parallel": False, "text": True}):
        assert vocabulary.allows(one, parser=parser, **options)
        assert not vocabulary.allows(two, parser=parser, **options)
        assert vocabulary.allows("", parser=parser, **options) == ("text" in options)
    for text in ("", 'Ro\n\n{"me"}', "{", '{"name', '{"answer": 1}', "[1]"):
        assert vocabulary.allows(text, parser=parser, text=True), text
    assert not vocabulary.allows(wrong, parser=parser, text=True)
    assert not vocabulary.allows(f"Hm. {wrong}", parser=parser, text=True)
    # Without a tag, calls stand alone.
    assert vocabulary.allows(f"Hm. {one}", parser=parser, text=True) == bool(parser.opening)
    assert vocabulary.allows(f"<think>hm</think>{two}", parser=parser, reasoning=Qwen3)
    assert vocabulary.allows("42", parser=parser, answer={"type": "integer"})
    assert vocabulary.allows(two, parser=parser, answer={"type": "integer"})


def test_calls_that_are_the_whole_answer_are_not_constrained_next_to_text(vocabulary: Vocabulary) -> None:
    rome, now = ("weather", {"city": "Rome"}), ("now", {"zone": "1"})
    parser = PARSERS["pythonic"]
    one, two = in_format("pythonic", rome), in_format("pythonic", rome, now)
    assert vocabulary.allows(one, parser=parser)
    assert vocabulary.allows(two, parser=parser)
    assert not vocabulary.allows(two, parser=parser, parallel=False)
    for text in ("", "Rome", one.replace("Rome", "Bern"), f"x{one}", one[:-1], one.replace("city", "town")):
        assert not vocabulary.allows(text, parser=parser), text
    with pytest.raises(ValueError, match="require a call"):
        vocabulary.allows(one, parser=parser, text=True)


CALLED: Any = {"parser": PARSERS["harmony"], "functions": FUNCTIONS}


@rest(SECONDS)
def test_answers_in_messages(vocabulary: Vocabulary) -> None:
    def said(text: str, channel: str = "analysis") -> str:
        return f"<|channel|>{channel}<|message|>{text}<|end|><|start|>assistant"

    def final(text: str) -> str:
        return f"<|channel|>final<|message|>{text}"

    rome, bern = (in_format("harmony", ("weather", {"city": city})) for city in ("Rome", "Bern"))
    both = in_format("harmony", ("weather", {"city": "Rome"}), ("now", {}))
    thoughts = said("Which city?\n{") + said("Rome.")
    plan = said("I ask.", "commentary")
    for reasoning in (None, Harmony):
        options: Any = {"parser": PARSERS["harmony"], "reasoning": reasoning}
        for before in ("", thoughts, plan, thoughts + plan):
            # Without a format of reasoning there is none in front of what is required.
            known = reasoning is not None or not before
            assert vocabulary.allows(before + rome, **options) == known, before
            assert vocabulary.allows(before + both, **options) == known
            assert not vocabulary.allows(before + both, parallel=False, **options)
            assert not vocabulary.allows(before + final("Rome"), **options)
            for text in (rome, final("Rome"), final("")):
                assert vocabulary.allows(before + text, text=True, **options), text
            for text in (bern, "Rome", "", rome[:-1]):
                assert not vocabulary.allows(before + text, text=True, **options), text
        for before, text in itertools.product(("", thoughts), (final("42"), rome)):
            known = reasoning is not None or not before
            assert vocabulary.allows(before + text, answer={"type": "integer"}, **options) == known
        # What is told the user in front of the JSON would be a part of it.
        for text in (final("x"), "42", thoughts, plan + final("42")):
            assert not vocabulary.allows(text, answer={"type": "integer"}, **options)
    within = "hm<|end|><|start|>assistant"
    options = {"parser": None, "functions": {}, "answer": {"type": "integer"}, "reasoning": Harmony}
    assert vocabulary.allows(thoughts + final("42"), **options)
    assert not vocabulary.allows(within + final("42"), **options)
    options["prompt_end"] = "<|channel|>analysis<|message|>"
    assert vocabulary.allows(within + final("42"), **options)
    assert not vocabulary.allows(final("42"), **options)
    assert vocabulary.allows(within + final("42"), **{**options, "parser": Hermes})
    for mixed in ({"parser": Hermes, "reasoning": Harmony}, {**options, "reasoning": Qwen3, **CALLED}):
        with pytest.raises(ValueError, match="both in the format harmony"):
            vocabulary.allows("", **mixed)


def test_calls_of_mistral_may_have_ids_and_spaces(vocabulary: Vocabulary) -> None:
    bare, listed = (
        "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}",
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
    )
    for own, other, name in ((bare, listed, "mistral-v11"), (listed, bare, "mistral")):
        assert vocabulary.allows(own, parser=PARSERS[name])
        assert not vocabulary.allows(other, parser=PARSERS[name])
    assert not vocabulary.allows(bare.replace("4e", "4"), parser=PARSERS["mistral-v11"])


def test_text_has_no_calls_behind_a_further_tag(vocabulary: Vocabulary) -> None:
    text = in_format("granite", ("weather", {"city": "Bern"})).replace("<|tool_call|>", "<tool_call>")
    right = in_format("granite", ("weather", {"city": "Rome"}))
    for parallel in (False, True):
        options: Any = {"parser": PARSERS["granite"], "text": True, "parallel": parallel}
        for each in (text, f"Hm. {text}", f"{text} {right}"):
            assert not vocabulary.allows(each, **options), each
        assert vocabulary.allows(f"Hm. <tool> {right}", **options)


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_called_may_be_any_of_many(vocabulary: Vocabulary, name: str) -> None:
    many = {f"function_{at}": CITY for at in range(128)}
    text = in_format(name, ("function_127", {"city": "Rome"}))
    assert vocabulary.allows(text, parser=PARSERS[name], functions=many)


def test_reasoning_comes_first(vocabulary: Vocabulary) -> None:
    thought = "\nWhich city? { <tool> }\n</think>\n\n"
    for options in ({}, {"text": True}, {"functions": {}, "answer": True}):
        end = "7" if "answer" in options else ROME
        assert vocabulary.allows(end, reasoning=Qwen3, **options)
        assert vocabulary.allows(f"<think>{thought}{end}", reasoning=Qwen3, **options)
        assert vocabulary.allows(f"{thought}{end}", reasoning=DeepSeekR1, **options)
        assert not vocabulary.allows(end, reasoning=DeepSeekR1, **options)
    assert not vocabulary.allows(f"<think>{thought}", reasoning=Qwen3)
    assert not vocabulary.allows(f"<think>{thought}{BERN}", reasoning=Qwen3)


@pytest.mark.parametrize("reasoning", [Qwen3, DeepSeekR1])
def test_reasoning_goes_on_from_the_end_of_the_prompt(
    vocabulary: Vocabulary, reasoning: type[ReasoningParser]
) -> None:
    for options in ({}, {"text": True}, {"functions": {}, "answer": True}):
        end = "7" if "answer" in options else ROME
        opened = {"reasoning": reasoning, "prompt_end": "<think>\n", **options}
        closed = {"reasoning": reasoning, "prompt_end": "<think>\n\n</think>\n\n", **options}
        assert vocabulary.allows(f"hm</think>\n\n{end}", **opened)
        assert not vocabulary.allows(end, **opened)
        assert vocabulary.allows(end, **closed)
        assert "text" in options or not vocabulary.allows(f"<think>hm</think>{end}", **closed)


@pytest.mark.parametrize("name", [name for name in REASONING_PARSERS if name != "harmony"])
def test_thoughts_in_every_format(vocabulary: Vocabulary, name: str) -> None:
    parser = REASONING_PARSERS[name]
    options: Any = {"reasoning": parser, "functions": {}, "answer": {"type": "integer"}}
    thought = f"\nRome? <{parser.closing}\n"
    for end, begin in ((parser.opening, ""), (parser.opening + parser.closing, None), ("", parser.opening)):
        options["prompt_end"] = end
        # Words are tokenized otherwise where they are forced.
        words = " " in parser.opening and begin and not vocabulary.tokens
        known = begin is not None and (end or not parser.opened) and not words
        assert not known or vocabulary.allows(f"{begin}{thought}7", **options)
        assert vocabulary.allows("7", **options) == (parser.opened_by(end) is not True)
        assert not vocabulary.allows(f"{begin}Rome", **options)


def test_white_space_is_bounded_and_arguments_are_json(vocabulary: Vocabulary) -> None:
    def call(space: str) -> str:
        return NOW.replace('{"zone": 1}', f'{{{space}"zone": [{{"<x>": "</tool_call"}}]}}')

    assert vocabulary.allows(call(" \n\t "))
    assert not vocabulary.allows(call(" " * 40))


def test_what_no_grammar_can_be_built_of_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="characters"):
        AnswerGrammar(Hermes, {"f": {"enum": ["x" * 1_100_000]}}).build()
    with pytest.raises(InvalidRequest):
        vocabulary.backend.compile(AnswerGrammar(Hermes, {"f": {"type": "nothing"}}).build())


KEYWORDS = [
    *("a", "type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const"),
    *("anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "$id", "pattern", "minLength", "maxLength"),
    *("minItems", "maxItems", "minimum", "maximum", "multipleOf", "minProperties", "propertyNames"),
]


#: anything where a schema or a part of one is expected
junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.sampled_from(["a", "string", "array"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=12,
)


@rest(SECONDS)
@pytest.mark.parametrize("name", thinned(PARSERS, 3))
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), junk, max_size=5), answer=junk)
@settings(max_examples=scaled(600), deadline=None)
def test_malformed_schemas_are_refused_or_written(name: str, schema: dict[str, Any], answer: Any) -> None:
    for properties in (schema, {**schema, "properties": {"a": answer}}):
        with contextlib.suppress(ValueError):
            AnswerGrammar(PARSERS[name], {"f": {"type": "object", **properties}}).build()
        # The parsers read what no grammar was built from.
        parser = PARSERS[name]({"f": properties})
        parser.push(in_format(name, ("f", {"a": "1", "b": "[1]"})))
        parser.finish()


def schema_of(depth: int) -> str:
    """Brackets in texts and keys do not nest."""
    return '{"[{[{":1,"items":' * (depth - 1) + '{"const":"[{\\"[{["}' + "}" * (depth - 1)


#: every way for a JSON schema to be in a grammar
WITH_SCHEMA: dict[str, Callable[[str], Grammar]] = {
    "schema": lambda schema: Grammar("json_schema", schema),
    "within Lark": lambda schema: Grammar(
        "lark", f'start: "(" %json {{"const": "%json"}} | %json{schema} ")"'
    ),
    "arguments": lambda schema: AnswerGrammar(Hermes, {"f": {}, "g": json.loads(schema)}).build(),
    "answer": lambda schema: AnswerGrammar(None, {}, answer=json.loads(schema), reasoning=Qwen3).build(),
}


@pytest.mark.parametrize("most", [1, 3, 64, 120])
@pytest.mark.parametrize("way", WITH_SCHEMA)
def test_the_nesting_of_every_schema_in_a_grammar_has_one_limit(way: str, most: int) -> None:
    backend = Vocabulary(max_depth=most).backend
    backend.compile(WITH_SCHEMA[way](schema_of(most)))
    for depth in (most + 1, most + 300):
        with pytest.raises(InvalidRequest, match=rf"nested more than {most} levels deep \(max_grammar_depth"):
            backend.compile(WITH_SCHEMA[way](schema_of(depth)))


@rest(SECONDS)
@pytest.mark.parametrize("before", grid(["", 'start: %json ["'], ["[", '{"', "start: %json {"]))
def test_a_schema_of_unpaired_brackets_and_quotes_is_an_error_in_one_pass(before: str) -> None:
    backend = Vocabulary().backend
    for part in ("[", "{", "]", '"', '\\"', '{"', '["",', "%json {", '%json "', "%json [%json ["):
        text = before + part * (200_000 // len(part))
        for grammar in (Grammar("json_schema", text), Grammar("lark", text), Grammar("answer", text)):
            with pytest.raises(InvalidRequest):
                backend.compile(grammar)
