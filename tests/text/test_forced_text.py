"""The work for a forced text is bounded in each call, however long the text is."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
import pytest

from aioinfer.text.grammar import GrammarState, Matcher
from aioinfer.text.grammar_spec import Grammar
from tests.text.grammar_shapes import VOCABULARY, backend


class Forced:
    """A matcher that forces the same token ``left`` times, and counts the tokens that it was asked for."""

    error: str | None = None

    def __init__(self, left: int) -> None:
        self.left = left
        self.asked: list[int] = []

    def accept(self, token: int) -> bool:
        self.left -= 1
        return True

    @property
    def stopped(self) -> bool:
        return self.left == 0

    def forced(self) -> list[int]:
        self.asked.append(self.left)
        return [1] * self.left

    def copy(self) -> Matcher:
        return Forced(self.left)

    def compile(self, grammar: Grammar) -> Matcher:
        return self

    def fill(self, matchers: object, masks: list[npt.NDArray[np.int32]]) -> None:
        for mask in masks:
            mask[:] = 2


def advance(state: GrammarState) -> None:
    """As the worker does it."""
    state.accept([1])
    state.backend.fill([state.matcher], [state.mask])
    state.follow(state.mask, 0.0)


@pytest.mark.parametrize("length", [1, 3, 100, 180, 300, 1000, 5000, 10_000])
def test_a_call_asks_for_a_bounded_number_of_forced_tokens(length: int) -> None:
    matcher = Forced(length)
    state = GrammarState(matcher, matcher, 0, 32, least_forced=3).start()
    output = [*state.forced]
    assert len(output) == (0 if length in (1, 10_000) else length) or length >= 180
    assert sum(matcher.asked) <= max(length, 16_384)
    # All of it, as an engine goes on: what is not forced is sampled, by a mask of one token.
    while matcher.left:
        matcher.asked, state.forced = [], []
        advance(state)
        output += [1, *state.forced]
        assert sum(matcher.asked) <= max(length, 16_384)
    assert len(output) == length
    assert state.position == length


def test_a_long_run_is_not_looked_at_again_until_it_is_short() -> None:
    matcher = Forced(50_000)
    state = GrammarState(matcher, matcher, 0, 32, least_forced=3).start()
    while not state.forced:
        advance(state)
    assert matcher.asked[:2] == [50_000, 5461]
    assert sum(matcher.asked[1:]) <= 16_384


def test_forced_tokens_are_not_asked_for_where_their_mask_took_long_or_allows_several() -> None:
    """The mask is made without the interpreter's lock, what comes after it is not."""
    for seconds, mask in ((60.0, [2, 0]), (0.0, [2, 2]), (0.0, [-1, -1])):
        matcher = Forced(100)
        state = GrammarState(matcher, matcher, 0, 64, least_forced=3)
        assert not state.follow(np.asarray(mask, np.int32), seconds)
        assert (state.position, matcher.asked) == (0, [])


CASES = {
    "choice": Grammar("choice", json.dumps(["b", "a" + "b" * 30_000])),
    "escaped choice": Grammar("choice", json.dumps(['"' * 15_000])),
    "regex": Grammar("regex", "a/" * 15_000),
    "constant": Grammar("json_schema", json.dumps({"const": "ab" * 15_000})),
    "key": Grammar("json_schema", json.dumps({"type": "object", "required": ["ab" * 15_000]})),
    "answer": Grammar("answer", "start: %json " + json.dumps({"const": "ab" * 15_000})),
    "repeats": Grammar("regex", "((ab{30}){30}){30}"),
    "repeats of a pattern": Grammar(
        "json_schema", json.dumps({"type": "array", "items": {"pattern": "^(?:ab{60}){60}$"}, "minItems": 1})
    ),
    "least length": Grammar(
        "json_schema", json.dumps({"type": "string", "pattern": "^a*$", "minLength": 30_000})
    ),
    "escaped name": Grammar(
        "json_schema", '{"type": "string", "pattern": "^a*$", "m\\u0069nLength": 30000, "x-guidance": {}}'
    ),
    "repeats of a name": Grammar(
        "json_schema",
        json.dumps({"type": "object", "patternProperties": {"^(a{50}b){50}$": True}, "minProperties": 1}),
    ),
    "repeats of an answer": Grammar("answer", "start: %json " + json.dumps({"pattern": "^(a{99}){99}$"})),
}


@pytest.mark.parametrize("name", CASES)
def test_a_long_text_is_written_in_any_tokens(name: str) -> None:
    """llguidance tokenizes all of a forced text for each of its tokens, and holds the interpreter's lock."""
    guidance = backend()
    state = GrammarState(guidance, guidance.compile(CASES[name]), 0, VOCABULARY, 3).start()
    for _ in range(20):
        assert state.forced == []
        assert state.failed is None
        allowed = [token for token in range(VOCABULARY) if state.mask[token // 32] >> (token % 32) & 1]
        state.accept([allowed[-1]])
        guidance.fill([state.matcher], [state.mask])
        assert state.matcher.forced() == []
