"""Stop strings: the earliest end wins, no prefix leaks, nothing is held back for longer than needed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.text.stop import StopMatcher
from tests.tiers import scaled


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


@settings(max_examples=scaled(100), deadline=None, derandomize=True)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text("abc", max_size=8),
)
def test_every_chunking_of_a_short_text(stops: list[str], text: str) -> None:
    wanted = naive(stops, text)
    for cuts in range(2 ** max(0, len(text) - 1)):
        matcher = StopMatcher(stops)
        released, hit, chunk = "", None, ""
        for at, character in enumerate(text):
            chunk += character
            if cuts >> at & 1 or at == len(text) - 1:
                safe, found = matcher.push(chunk)
                released, hit, chunk = released + safe, hit or found, ""
        assert (released + matcher.flush(), hit) == wanted


def test_only_a_suffix_that_can_still_match_is_held_back() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("one <") == ("one ", None)
    assert matcher.push("two") == ("<two", None)
    assert matcher.push("<en") == ("", None)
    assert matcher.push("<e") == ("<en", None)
    assert matcher.push("nd") == ("", None)
    assert matcher.push("!<end>x") == ("<end!", "<end>")


def test_the_stop_that_ends_first_wins_and_of_equals_the_longest() -> None:
    assert StopMatcher(["abcde", "bc"]).push("xabcdef") == ("xa", "bc")
    assert StopMatcher(["c", "abc", "bc"]).push("xabcdef") == ("x", "abc")


def test_nothing_is_released_or_found_after_a_match() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xaby") == ("x", "ab")
    assert matcher.push("text") == ("", None)
    assert matcher.push("ab") == ("", None)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_time_is_linear_in_the_text() -> None:
    """A text that almost matches everywhere, which makes naive search quadratic. Counted are the looks at the
    automaton's edges."""
    looks = 0

    class Edges(dict[str, int]):
        def get(self, *arguments: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().get(*arguments)

        def __contains__(self, character: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(character)

    matcher = StopMatcher(["a" * 1000 + "b", "a" * 999 + "c"])
    matcher._edges = [Edges(edges) for edges in matcher._edges]
    released = 0
    for _ in range(200):
        released += len(matcher.push("a" * 100)[0])
        assert len(matcher.held) <= 1000
    assert released == 20_000 - 1000
    # One look finds the way on; each failure link that is followed undoes a character, and is two looks more.
    assert 20_000 <= looks <= 4 * 20_000
