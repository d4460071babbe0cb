"""Calls as JSON in the shapes that models write besides the one they are told."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import pytest

from aioinfer.text.tool_calls import PARSERS
from aioinfer.text.tool_calls.base import LONGEST_EARLY, LONGEST_HEAD
from tests.text.call_formats import Calls, collect, parse
from tests.tiers import SECONDS, rest, scaled, thinned

#: of all pairs of places, one in so many
EVERY = 35 // scaled(7)
NONE, ONE = [("f", "{}")], [("f", '{"a": 1}')]
#: what precedes and follows objects
TAGS = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "granite": ("<|tool_call|>", ""),
    "apriel": ("<tool_calls>", "</tool_calls>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "functools": ("functools", ""),
    "mistral": ("[TOOL_CALLS]", ""),
    "mistral-v11": ("[TOOL_CALLS]", ""),
    "llama3": ("", ""),
}
every_format = pytest.mark.parametrize("name", TAGS)


def pairs(texts: Iterable[str], every: int) -> list[Any]:
    """Each text in several formats, and each format with several texts: one in so many of all pairs, or all
    of them nightly."""
    found = [pytest.param(name, text) for name, text in itertools.product(TAGS, texts)]
    assert math.gcd(every, len(found) // len(TAGS)) == 1
    return thinned(found, every)


SHAPES: dict[str, tuple[str, Calls]] = {
    "no arguments": ('{"name": "f"}', NONE),
    "no arguments, an id": ('{"id": "1", "name": "f", "type": "function"}', NONE),
    "null as text": ('{"name": "f", "arguments": "null"}', NONE),
    "null": ('{"name": "f", "arguments": null}', NONE),
    "an empty text": ('{"name": "f", "arguments": ""}', NONE),
    "a blank text": ('{"arguments": " ", "name": "f"}', NONE),
    "an empty list": ('{"name": "f", "parameters": []}', NONE),
    "a text": ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ONE),
    "a text first": ('{"parameters": "\\n{\\"a\\": 1}\\n", "name": "f"}', ONE),
    "a text with what it escapes": (
        '{"name": "f", "arguments": "{\\"a\\": \\"\\\\n\\u00fc}\\"}"}',
        [("f", '{"a": "\\nü}"}')],
    ),
    "null, and the other key": ('{"name": "f", "parameters": null, "arguments": {"a": 1}}', ONE),
    "arguments": ('{"name": "f", "arguments": {"a": 1}}', ONE),
    "parameters": ('{"name": "f", "parameters": {"a": 1}}', ONE),
    "arguments first": ('{"arguments": {"a": 1}, "name": "f"}', ONE),
    "an id first": ('{"id": "a1", "name": "f", "arguments": {"a": 1}}', ONE),
    "a number first": ('{"index": 0, "type": "function", "name": "f", "arguments": {"a": 1}}', ONE),
    "an id between": ('{"name": "f", "id": 1.5e3, "arguments": {"a": 1}}', ONE),
    "an id last": ('{"name": "f", "arguments": {"a": 1}, "id": "a1", "type": "function"}', ONE),
    "an id behind the name": ('{"arguments": {"a": 1}, "name": "f", "id": null}', ONE),
    "nested": ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', ONE),
    "nested, arguments first": ('{"function": {"arguments": {"a": 1}, "name": "f"}, "id": "1"}', ONE),
    "nested text": ('{"id": "1", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}', ONE),
    "nested without arguments": ('{"function": {"name": "f"}, "type": "function"}', NONE),
    "function for name": ('{"function": "f", "arguments": {"a": 1}}', ONE),
    "a list": (
        '[{"name": "f", "arguments": {"a": 1}}, {"parameters": {"a": 1}, "name": "f"}, {"name": "f"}]',
        ONE * 2 + NONE,
    ),
    "lines": ('{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {"a": 1}}', ONE * 2),
    "commas": ('{"name": "f", "arguments": {"a": 1}}, {"arguments": {"a": 1}, "name": "f"}', ONE * 2),
    "a comma too many": ('[{"name": "f", "arguments": {"a": 1},},]', ONE),
    "a comma too few": ('[{"name": "f" "arguments": {"a": 1}} {"name": "f"}]', ONE + NONE),
    "a brace too many": ('{"name": "f", "arguments": {"a": 1}}}', ONE),
    "a brace too many in a list": ('[{"name": "f", "arguments": {"a": 1}}}, {"name": "f"}}]', ONE + NONE),
    "a brace too few in a list": ('[{"name": "f", "arguments": {"a": 1}, {"name": "f"}]', ONE + NONE),
    "a brace too few at the end": ('[{"name": "f", "arguments": {"a": 1}]', ONE),
    "a fence": ('```json\n{"name": "f", "arguments": {"a": 1}}\n```', ONE),
    "spread out": ('[\n  {\n    "name" : "f" ,\n    "arguments" :\n    {"a": 1}\n  }\n]', ONE),
}  # fmt: skip


def enclosed(name: str, text: str) -> str:
    return text.join(TAGS[name])


@pytest.mark.parametrize(("name", "shape"), pairs(SHAPES, 4))
def test_calls_are_found_in_any_shape(name: str, shape: str) -> None:
    objects, calls = SHAPES[shape]
    text = enclosed(name, objects)
    assert parse(name, [text]) == parse(name, list(text)) == ("", calls)
    parser = PARSERS[name]({"f": {}})
    collect([parser.push(text), parser.finish()])
    assert not parser.unfinished


@rest(SECONDS)
@pytest.mark.parametrize(("name", "shape"), pairs(SHAPES, 6))
def test_any_shape_may_be_cut_at_any_two_places(name: str, shape: str) -> None:
    objects, calls = SHAPES[shape]
    text = enclosed(name, objects)
    cuts = itertools.combinations(range(len(text) + 1), 2)
    for low, high in itertools.islice(cuts, None, None, EVERY):
        assert parse(name, [text[:low], text[low:high], text[high:]]) == ("", calls)


@pytest.mark.parametrize(("name", "shape"), pairs(SHAPES, 4))
def test_what_the_end_of_the_output_cuts_off_is_no_complete_call(name: str, shape: str) -> None:
    """Of no prefix come calls, complete as far as the parser tells, that are not those of the whole."""
    objects, calls = SHAPES[shape]
    text = enclosed(name, objects)
    for end in range(len(text)):
        parser = PARSERS[name]({"f": {}})
        content, found = collect([parser.push(text[:end]), parser.finish()])
        complete = found[:-1] if parser.unfinished else found
        assert complete == calls[: len(complete)], text[:end]
        if not found:
            assert content == text[:end]


#: what is no call wherever it is
NOT_CALLS = [
    # arguments that are none: none are made up
    '{"name": "f", "a": 1}',
    '{"name": "f", "arguments": 1}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": "Rome"}',
    '{"name": "f", "arguments": "{\\"a\\": 1"}',
    '{"name": "f", "arguments": "{\\"a\\": 1}}"}',
    '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
    '{"name": "f", {"a": 1}}',
    '{"name": "f", ["a"]}',
    '{"name": "f", "arguments"}',
    '{"name": "f", "arguments": }',
    # no name
    '{"arguments": {"a": 1}}',
    '{"name": "", "arguments": {"a": 1}}',
    '{"name": null, "arguments": {"a": 1}}',
    '{"name": ["f"], "arguments": {"a": 1}}',
    '{"name": "\\ud800", "arguments": {}}',
    '{"function": {}, "arguments": {"a": 1}}',
    "{}",
    "[]",
    "[[]]",
]


@pytest.mark.parametrize(("name", "text"), pairs(NOT_CALLS, 3))
def test_what_lacks_a_name_or_arguments_is_content(name: str, text: str) -> None:
    text = enclosed(name, text)
    assert parse(name, [text]) == parse(name, list(text)) == (text, [])


@every_format
def test_arguments_behind_other_keys_are_passed_on_as_they_arrive(name: str) -> None:
    for before in ('{"name": "f", ', '{"id": "1", "name": "f", ', '{"function": {"name": "f", '):
        parser = PARSERS[name]({"f": {}})
        parser.push(TAGS[name][0] + before + '"arguments": {"text": "')
        for piece in ("R", "om", "an"):
            assert [delta.arguments for delta in parser.push(piece).calls] == [piece]


@every_format
def test_long_texts_are_read_whole_up_to_a_limit(name: str) -> None:
    for length, found in ((LONGEST_EARLY // 2, 1), (LONGEST_EARLY, 0)):
        arguments = json.dumps({"text": "x" * length})
        text = enclosed(name, json.dumps({"arguments": arguments, "name": "f"}))
        content, calls = parse(name, [text[at : at + 100] for at in range(0, len(text), 100)])
        assert (content, calls) == (("", [("f", arguments)]) if found else (text, []))


@pytest.mark.parametrize("name", [name for name, (opening, _) in TAGS.items() if opening])
def test_tags_may_be_repeated_or_missing(name: str) -> None:
    opening, closing = (tag.strip() for tag in TAGS[name])
    call = '{"name": "f", "arguments": {"a": 1}}'
    more = [(f"{opening}\n{opening}{call}{closing}", "", 1), (f"{opening}{call}", "", 1)]
    more.append((f"{opening}{call}\n{opening}{call}{closing} so", " so", 2))
    if closing:
        more.append((f"{opening}{call}{closing}{closing}\n{closing}\nSo", "So", 1))
        more.append((f"{opening}{call}{closing} <b>", " <b>", 1))
        # a brace is missing
        more.append((f'{opening}{{"name": "f", "arguments": "{{\\"a\\": 1}}"{closing}', "", 1))
        more.append((f"{opening}{call}{closing}\n{closing[:-1]}", closing[:-1], 1))
    for text, content, count in more:
        assert parse(name, [text]) == parse(name, list(text)) == (content, ONE * count), text


@every_format
def test_calls_of_earlier_turns_are_told_as_they_are_read(name: str) -> None:
    for calls in (ONE, NONE + ONE):
        told = PARSERS[name].told(calls)
        assert told is not None
        assert parse(name, [told]) == ("", calls)


@every_format
@pytest.mark.parametrize("before", ['{"name": "f"}', '{"name": "f", "arguments": {}', '{"name": "f"'])
def test_white_space_is_skipped_up_to_a_limit_wherever_it_is_cut(name: str, before: str) -> None:
    opening, closing = TAGS[name]
    for length in range(LONGEST_HEAD - 20, LONGEST_HEAD + 3, 2):
        space = " " * length
        for tag in (opening.strip() or '{"name": "f"}', closing.strip() or "]"):
            text = f"{opening}{before}{space}{tag}"
            at = len(text) - len(tag)
            pieces = [text[:at], *text[at:]]
            assert parse(name, pieces) == parse(name, [text])


@pytest.mark.parametrize("name", ["granite", "apriel"])
def test_lists_are_found_between_other_tags(name: str) -> None:
    text = '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>\nSo'
    assert parse(name, [text]) == parse(name, list(text)) == ("So", ONE)


LLAMA = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (f"Let me look.\n{LLAMA}", "Let me look.", 1),
        (f"The result: {LLAMA} Shall I go on?", "The result:  Shall I go on?", 1),
        (f"So:\n[{LLAMA}, {LLAMA}]\nDone {LLAMA}.", "So:Done .", 3),
        (f"So:\n```json\n{LLAMA}\n```", "So:", 1),
        (f"Hm.<|python_tag|>{LLAMA}; {LLAMA}", "Hm.", 2),
        (f"Hm.<|python_tag|>{LLAMA}".replace('"f"', '"h"'), "Hm.", 1),
        ('I try {"name": "f", "parameters": {...}} and {"name": "f", "x": 1}.', None, 0),
        (f"No function: {LLAMA}".replace('"f"', '"h"'), None, 0),
        (f"Cut off: {LLAMA[:-1]}", None, 0),
        ('{"name": "h"}', None, 0),
        ('{"a": {"b": [{"name": "Ada", "type": "x"}, 1]}, "c": "{"}', None, 0),
        ("for (x) { return [x[0], {y: 1}]; } if [ {", None, 0),
    ],
)
def test_behind_text_known_functions_are_called_without_a_tag(
    text: str, content: str | None, count: int
) -> None:
    calls = [("h" if '"h"' in text else "f", '{"a": 1}')] * count
    wanted = (text if content is None else content, calls)
    assert parse("llama3", [text]) == parse("llama3", list(text)) == wanted


def test_functions_that_are_not_known_need_arguments_to_be_called_without_a_tag() -> None:
    assert collect([PARSERS["llama3"]().push(LLAMA)]) == ("", ONE)
    parser = PARSERS["llama3"]()
    assert collect([parser.push('{"name": "f"}'), parser.finish()]) == ('{"name": "f"}', [])


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [TOOL_CALLS] f[ARGS]{"a": 1}',
        '[TOOL_CALLS]f [CALL_ID]a1B2c3D4e [ARGS] {"a": 1}',
        '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e{"a": 1}',
        '[TOOL_CALLS]f\n{"a": 1}',
    ],
)
def test_tags_of_mistral_may_be_missing_or_apart(text: str) -> None:
    for name in ("mistral", "mistral-v11"):
        assert parse(name, [text]) == parse(name, list(text)) == ("", ONE)
