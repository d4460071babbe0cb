"""Stop strings: the earliest end wins, no prefix leaks, nothing is held back for longer than needed."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.errors import InvalidRequest
from aioinfer.params import SamplingParams
from aioinfer.text.output import OutputText
from aioinfer.text.stop import StopMatcher, StopStrings
from tests.counting import no_collection
from tests.text.letters import Letters
from tests.tiers import SECONDS, rest, scaled


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Text before the match that ends first (the longest of equals), and the match."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def must_hold(stops: list[str], text: str) -> str:
    """The longest suffix of the text that is a proper prefix of a stop string."""
    for at in range(len(text)):
        if any(stop.startswith(text[at:]) for stop in stops):
            return text[at:]
    return ""


@settings(max_examples=scaled(500), deadline=None, derandomize=True)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    chunks=st.lists(st.text("abc", max_size=5), max_size=10),
)
def test_the_match_does_not_depend_on_the_chunks(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(stops)
    released, hit, seen = "", None, ""
    for chunk in chunks:
        seen += chunk
        safe, hit = matcher.push(chunk)
        released += safe
        if hit is not None:
            break
        assert released + must_hold(stops, seen) == seen
    assert matcher.push("")[0] == ""
    if hit is None:
        released += matcher.flush()
    assert (released, hit) == naive(stops, "".join(chunks))
    assert matcher.flush() == ""


@pytest.mark.parametrize("field", ["stop", "stop_regex"])
def test_an_unpaired_surrogate_is_refused_by_the_name_of_its_field(field: str) -> None:
    with pytest.raises(InvalidRequest, match="unpaired surrogate") as refused:
        SamplingParams(**{field: ["\U0001f600", "x\ud83d"]})  # type: ignore[arg-type]
    assert refused.value.field == field


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@settings(max_examples=scaled(300), deadline=None, derandomize=True)
@given(
    stops=st.lists(st.text("aab\0é", min_size=1, max_size=9), min_size=1, max_size=9),
    texts=st.lists(st.text("ab\0éc", max_size=12), min_size=2, max_size=4),
)
def test_outputs_that_share_an_automaton_do_not_see_each_other(stops: list[str], texts: list[str]) -> None:
    """The automaton is linked by the texts of all of them, in turns of one character."""
    matchers = [StopMatcher(stops) for _ in texts]
    found: list[tuple[str, str | None]] = [("", None) for _ in texts]
    for at in range(12):
        for number, (matcher, text) in enumerate(zip(matchers, texts, strict=True)):
            released, hit = found[number]
            safe, new = matcher.push(text[at : at + 1])
            found[number] = (released + safe, hit or new)
    for matcher, text, (released, hit) in zip(matchers, texts, found, strict=True):
        assert (released + matcher.flush(), hit) == naive(stops, text)


@rest(SECONDS)
def test_equal_stops_have_one_automaton_while_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    construct = StopStrings.__init__

    def counted(self: StopStrings, stops: Sequence[str]) -> None:
        built.append(stops)
        construct(self, stops)

    monkeypatch.setattr(StopStrings, "__init__", counted)
    stops = [chr(97 + number) * 1024 for number in range(16)]
    outputs = [OutputText(Letters(), list(stops)) for _ in range(128)]
    outputs += [OutputText(Letters(), list(stops), stop_regex=["x+y"]) for _ in range(128)]
    assert len(built) == 1
    kept = weakref.ref(StopStrings.of(stops))
    del outputs
    gc.collect()
    assert kept() is None


def test_an_automaton_is_built_in_a_few_operations_per_string_and_little_memory() -> None:
    """Not one per character: 16 strings of 1,024 characters took 10 ms and 3 MB."""
    stops = [f"{number:02d}" * 512 for number in range(16)]
    lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    with no_collection():
        tracemalloc.start()
        sys.settrace(count)
        try:
            strings = StopStrings(stops)
        finally:
            sys.settrace(None)
            size, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert lines < 150 * len(stops)
    characters = sum(map(len, stops))
    assert size < 8 * characters
    assert strings.advance(0, "xx" + stops[3])[2] == stops[3]


def test_time_is_linear_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that almost matches everywhere, which makes naive search quadratic. Counted are the looks for a
    way on from a node, except those along a string."""
    looks = 0
    child = StopStrings._child

    def counted(self: StopStrings, node: int, character: str) -> int:
        nonlocal looks
        looks += 1
        return child(self, node, character)

    monkeypatch.setattr(StopStrings, "_child", counted)
    matcher = StopMatcher(["a" * 1000 + "b", "a" * 999 + "c", *("a" * n + "d" for n in range(900, 910))])
    released = 0
    for _ in range(200):
        released += len(matcher.push("a" * 100)[0])
        assert len(matcher.held) <= 1000
    assert released == 20_000 - 1000
    # Each failure link that is followed undoes a character, and is one look; each node is linked once.
    assert 19_000 <= looks <= 3 * 20_000
