"""OutputText: released pieces, held text and stops."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from aioinfer.text.detokenizer import DecodeStreamDetokenizer
from aioinfer.text.output import UNKNOWN, OutputText
from aioinfer.text.stop import StopMatcher
from tests.text.letters import Letters
from tests.tiers import scaled


def feed(output: OutputText, ids: list[int]) -> list[str]:
    """Push all, and finish; returns the stops that were reported."""
    hits = []
    for token in ids:
        hit = output.push(token)
        if hit is not None:
            hits.append(hit)
    hit = output.finish()
    return hits if hit is None else [*hits, hit]


STOPS: list[Any] = [{"stop": ["fgh", "cd"]}, {"stop": ["fgh"], "stop_regex": ["c[de]"]}]


@pytest.mark.parametrize("stops", STOPS, ids=["strings", "patterns"])
@pytest.mark.parametrize(("include", "text"), [(False, "b"), (True, "bcd")])
def test_the_stop_is_cut_or_kept_and_nothing_follows(stops: Any, include: bool, text: str) -> None:
    output = OutputText(Letters(tail="!"), include_stop=include, **stops)
    assert feed(output, [1, 2, 3, 4, 5, 2, 3]) == [[*stops.values()][-1][-1]]
    assert output.text == text


@pytest.mark.parametrize("stops", STOPS, ids=["strings", "patterns"])
def test_held_back_text_is_released_at_the_end_once(stops: Any) -> None:
    output = OutputText(Letters(), **stops)
    assert output.push(1) is None
    assert output.push(2) is None
    assert output.pieces == ["b"]
    for _ in range(2):
        output.finish()
        assert output.pieces == ["b", "c"]
    assert output.push(3) is None
    assert output.text == "bc"


def test_the_tail_of_the_detokenizer_goes_through_the_matcher() -> None:
    completes, does_not = OutputText(Letters(tail="d!"), ["cd"]), OutputText(Letters(tail="!d"), ["cd"])
    assert feed(completes, [1, 2]) == ["cd"]
    assert completes.text == "b"
    assert feed(does_not, [1, 2]) == []
    assert does_not.text == "bc!d"


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = OutputText(None)
    assert output.push(1) is None
    output.finish()
    assert output.text == ""
    assert output.pieces == []
    assert not output.enabled


@pytest.mark.parametrize("include", [False, True])
def test_pieces_join_to_the_decoded_text_up_to_the_stop(byte_level: Tokenizer, include: bool) -> None:
    tokens = st.lists(st.integers(0, byte_level.get_vocab_size() - 1), max_size=40)
    stops = st.lists(st.sampled_from(["e", "th", "the", " the q", "o w", "本", "\ufffd", "😀😀"]), max_size=3)

    @settings(max_examples=scaled(300), deadline=None, derandomize=True)
    @given(tokens, stops)
    def run(ids: list[int], stop: list[str]) -> None:
        output = OutputText(DecodeStreamDetokenizer(byte_level, [], skip_special_tokens=True), stop, include)
        hits, released = [], ""
        for token in ids:
            hits.append(output.push(token))
            assert output.text.startswith(released)
            released = output.text
        hits.append(output.finish())
        assert output.text.startswith(released)
        assert all(output.pieces)
        safe, hit = StopMatcher(stop).push(byte_level.decode(ids)) if stop else (byte_level.decode(ids), None)
        if hit is None and stop:
            safe = byte_level.decode(ids)
        assert output.text == safe + (hit or "" if include else "")
        assert [found for found in hits if found] == ([hit] if hit else [])

    run()


def test_ahead_returns_held_text_and_next_tokens_without_a_change() -> None:
    output = OutputText(Letters(), ["cd"])
    for token in (1, 2):
        output.push(token)
    before = output.pieces.copy()
    assert output.ahead([]) == "c"
    assert output.ahead([3, 4, None, None, 5, None]) == "cde" + 2 * UNKNOWN + "f" + UNKNOWN
    assert output.ahead([None, 3]) == "c" + UNKNOWN + "d"
    assert output.pieces == before
    assert output.push(4) is None, "the stop that was shown ahead has not been met"
    assert OutputText(None).ahead([1, None]) == ""


def test_an_incomplete_character_ahead_is_a_placeholder(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("𝄞").ids
    output = OutputText(DecodeStreamDetokenizer(byte_level, [], skip_special_tokens=True))
    output.push(first)
    assert output.ahead([]) == UNKNOWN
    assert output.ahead(rest) == "𝄞"
    letter = byte_level.encode("x").ids
    assert set(output.ahead([None, *rest, *letter])) == {UNKNOWN, "x"}
    assert output.pieces == []


def test_words_ahead_keep_their_spaces_behind_a_gap(metaspace: Tokenizer) -> None:
    prompt, world = [metaspace.token_to_id("▁Hello")], metaspace.token_to_id("▁world")
    output = OutputText(DecodeStreamDetokenizer(metaspace, prompt, skip_special_tokens=True))
    assert output.ahead([world, None, world, 2]) == f" world{UNKNOWN} world"


def test_ahead_includes_text_held_for_stop_patterns() -> None:
    output = OutputText(Letters(), ["bcd"], stop_regex=["c+e"])
    for token in (0, 2, 2):
        output.push(token)
    assert output.text + output.ahead([4]) == "acce"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", STOPS, ids=["strings", "patterns"])
@pytest.mark.parametrize(
    ("least", "end", "text"),
    [(0, 4, "ab"), (3, 4, "ab"), (4, 8, "abcdab"), (7, 8, "abcdab"), (8, None, "abcdabcde")],
)
def test_a_stop_of_the_first_tokens_is_text(
    stops: Any, include: bool, least: int, end: int | None, text: str
) -> None:
    """One that begins in them and is complete behind them ends the output."""
    output = OutputText(Letters(), include_stop=include, **stops, min_tokens=least)
    ids = [0, 1, 2, 3, 0, 1, 2, 3, 4]
    found = next((at for at, token in enumerate(ids, 1) if output.push(token) is not None), None)
    output.finish()
    assert found == end
    assert output.text == text + ("cd" if include and end else "")


@pytest.mark.parametrize(
    "stops", [{"stop": ["c", "cd"]}, {"stop_regex": ["c|x"]}], ids=["strings", "patterns"]
)
def test_a_piece_with_many_early_stops_is_released_as_it_is(stops: Any) -> None:
    output = OutputText(Words(["acbc", "cccccb", "bc", "acb"]), **stops, min_tokens=2)
    assert [output.push(at) is not None for at in range(4)] == [False, False, True, False]
    assert output.text == "acbccccccbb"


def test_a_stop_that_the_tail_of_a_short_output_completes_is_text() -> None:
    output = OutputText(Letters(tail="d!"), ["cd"], min_tokens=2)
    assert feed(output, [1, 2]) == []
    assert output.text == "bcd!"


class Words(Letters):
    """Token n is the n-th word."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self._words = words

    def push(self, token_id: int) -> str:
        return self._words[token_id]
