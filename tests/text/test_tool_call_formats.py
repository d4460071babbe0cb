"""What the parsers of tool calls have in common, whatever the format."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.text.tool_calls import PARSERS
from tests.counting import most_kept
from tests.text.call_formats import FORMATS, MARK, SCHEMAS, collect, cut, parse, written
from tests.tiers import SECONDS, nightly, rest, scaled

every_format = pytest.mark.parametrize("name", PARSERS)
LONG = "x" * 2000
#: of all pairs of places, one in so many: 5 nightly, 41 else
EVERY = 125 // scaled(25)


def test_every_parser_has_a_format_here() -> None:
    assert [*FORMATS] == [*PARSERS]


#: the tags of a format cannot be in its keys
keys = st.characters(exclude_characters="<", exclude_categories=["Cs"])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(keys), inner, max_size=4),
    max_leaves=20,
)
arguments_of_f = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(),
        "count": st.integers(-(2**64), 2**64),
        "size": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "list": st.lists(values, max_size=4),
        "map": st.dictionaries(st.text("abc §{}'", min_size=1), values, max_size=4),
        "maybe": st.none() | st.text("xyz \n"),
    },
)


@every_format
@given(
    calls=st.lists(st.tuples(st.sampled_from("fg"), arguments_of_f), max_size=4),
    ascii_only=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    data=st.data(),
)
@settings(max_examples=scaled(100, 20), deadline=None)
def test_any_arguments_come_back(
    name: str,
    calls: list[tuple[str, dict[str, Any]]],
    ascii_only: bool,
    indent: int | None,
    data: st.DataObject,
) -> None:
    before = "" if FORMATS[name].alone else "Hm."
    text = before + written(name, calls, ensure_ascii=ascii_only, indent=indent)
    content, found = parse(name, cut(text, data))
    assert content == before
    assert [(function, json.loads(arguments)) for function, arguments in found] == calls
    if not PARSERS[name].reads_schemas and name not in ("lfm2", "pythonic"):  # as they were written
        assert all(text.count(arguments) for _, arguments in found)


@rest(SECONDS)
@every_format
@given(data=st.data())
@settings(max_examples=scaled(1000), deadline=None)
def test_whatever_comes_nothing_is_lost_and_the_cuts_do_not_matter(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    text = "".join(data.draw(st.lists(st.sampled_from(form.pieces), max_size=20)))
    content, calls = got = parse(name, cut(text, data))
    assert got == parse(name, list(text)) == parse(name, [text])
    seen = Counter(content + "".join(function + arguments for function, arguments in calls))
    assert seen[MARK] == text.count(MARK)
    if not calls:
        assert content == text
    # All text but the frame of a call is returned.
    assert set(Counter(text) - seen) <= set(form.frame)


@rest(SECONDS)
@every_format
def test_a_text_may_be_cut_at_any_two_places(name: str) -> None:
    calls = [("f", {"text": '"}\\', "list": [{"a": "]"}]}), ("g", {})]
    texts = [written(name, calls), written(name, calls[:1])[:-3] + "x", written(name, calls)[:-1] + " b"]
    for text in texts:
        text = text if FORMATS[name].alone else f"Hm.\n{text} so"
        wanted = parse(name, [text])
        assert wanted[1]
        cuts = itertools.combinations_with_replacement(range(len(text) + 1), 2)
        for first, second in itertools.islice(cuts, None, None, EVERY):
            assert parse(name, [text[:first], text[first:second], text[second:]]) == wanted


@every_format
def test_a_call_is_unfinished_until_its_arguments_are(name: str) -> None:
    text = written(name, [("f", {"map": {"a": 1}})])
    unfinished = []
    for end in range(len(text) + 1):
        parser = PARSERS[name](SCHEMAS)
        content, calls = collect([parser.push(text[:end]), parser.finish()])
        unfinished.append(parser.unfinished)
        if calls and not parser.unfinished:
            assert (content, json.loads(calls[0][1])) == ("", {"map": {"a": 1}})
        if not calls:
            assert (content, parser.unfinished) == (text[:end], False)
    # It begins and ends once.
    assert [key for key, _ in itertools.groupby(unfinished)] == [False, True, False]


@every_format
def test_a_parser_tells_where_text_is_not_of_a_call(name: str) -> None:
    parser = PARSERS[name](SCHEMAS)
    assert parser.outside
    if not FORMATS[name].alone:
        parser.push("Hm. ")
        assert parser.outside
        assert any(written(name, [("f", {})]).startswith(opening) for opening in parser.openings)
    text = written(name, [("f", {"text": "a Roman city"})])
    at = text.index("f", len(parser.opening)) + 1
    parser.push(text[:at])
    for character in text[at : text.index("city")]:
        parser.push(character)
        assert not parser.outside


@every_format
def test_text_is_passed_on_as_it_arrives(name: str) -> None:
    parser = PARSERS[name](SCHEMAS)
    text = written(name, [("f", {"text": "a Roman city"})])
    at = text.index("Ro")
    parser.push(text[:at])
    for piece in ("R", "om", "an"):
        parsed = parser.push(piece)
        assert (parsed.content, [delta.arguments for delta in parsed.calls]) == ("", [piece])
    plain = PARSERS[name](SCHEMAS)
    assert [plain.push(piece).content for piece in ("I ", "see", ".")] == ["I ", "see", "."]


@nightly(SECONDS)
@every_format
def test_long_arguments_are_not_kept_so_that_no_piece_reads_them_again(name: str) -> None:
    arguments = {"text": LONG * 30, "list": ["<[{"] * 5_000}
    text = written(name, [("f", arguments)])
    parts = [text[at : at + 5] for at in range(0, len(text), 5)]
    _, [(_, found)] = parse(name, parts)
    assert json.loads(found) == arguments
    assert most_kept(PARSERS[name](SCHEMAS).push, parts) < 20_000


@every_format
def test_what_is_nearly_a_call_is_not_held_back_for_ever(name: str) -> None:
    text = written(name, [(LONG, {})])
    parser = PARSERS[name](SCHEMAS)
    held = 0
    seen = ""
    for at, character in enumerate(text * 3):
        seen += parser.push(character).content
        held = max(held, at + 1 - len(seen))
    assert held <= 1200
    assert seen + parser.finish().content == text * 3
