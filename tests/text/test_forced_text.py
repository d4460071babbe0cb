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
        state.accept([1])
        output += [1, *state.forced]
        assert sum(matcher.asked) <= max(length, 16_384)
    assert len(output) == length
    assert state.position == length


def test_a_long_run_is_not_looked_at_again_until_it_is_short() -> None:
    matcher = Forced(50_000)
    state = GrammarState(matcher, matcher, 0, 32, least_forced=3).start()
    while not state.forced:
        state.accept([1])
    assert matcher.asked[:2] == [50_000, 5461]
    assert sum(matcher.asked[1:]) <= 16_384


CASES = {
    "choice": Grammar("choice", json.dumps(["b", "a" + "b" * 30_000])),
    "escaped choice": Grammar("choice", json.dumps(['"' * 15_000])),
    "regex": Grammar("regex", "a/" * 15_000),
    "constant": Grammar("json_schema", json.dumps({"const": "ab" * 15_000})),
    "key": Grammar("json_schema", json.dumps({"type": "object", "required": ["ab" * 15_000]})),
    "answer": Grammar("answer", "start: %json " + json.dumps({"const": "ab" * 15_000})),
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
