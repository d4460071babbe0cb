"""Bad words: banned tokens, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioinfer import errors
from aioinfer.params import SamplingParams
from aioinfer.text.bad_words import BadWordsBackend, BadWordsMatcher, spell
from tests.toys.device import ToyTokenizer

TOKENS = st.integers(0, 3)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6)


@given(WORDS, st.lists(TOKENS, max_size=30))
def test_a_token_is_banned_exactly_where_it_would_complete_a_word(
    words: list[list[int]], output: list[int]
) -> None:
    matcher = BadWordsMatcher(words, None, None)
    for at in range(len(output) + 1):
        expected = {
            token
            for token in range(4)
            if any(([*output[:at], token])[-len(word) :] == word for word in words)
        }
        assert set(matcher.banned()) == expected
        mask = np.zeros(2, np.int32)
        BadWordsBackend().fill([matcher], [mask])
        assert {token for token in range(64) if not mask[token // 32] >> (token % 32) & 1} == expected
        if at < len(output):
            twin = matcher.copy()
            assert matcher.accept(output[at])
            assert set(twin.banned()) == expected, "a copy shares nothing that changes"


def test_a_text_is_tokenized_at_the_start_and_behind_a_space() -> None:
    tokenizer = ToyTokenizer()
    words = spell(["ab", " ab", [5, 6]], tokenizer)
    ab, spaced = tokenizer.encode("ab"), tokenizer.encode(" ab")
    assert sorted(map(tuple, words)) == sorted(map(tuple, [ab, spaced, spaced, [5, 6]]))


def test_without_a_tokenizer_words_are_ids() -> None:
    assert spell([(5, 6)], None) == [(5, 6)]
    with pytest.raises(errors.InvalidRequest, match="bad_words"):
        spell(["word"], None)


@pytest.mark.parametrize(
    "words", ["word", [""], [[]], [3], [None], {"a": 1}, [[-1]], [[1.5]], ["x" * 300], ["\ud83d"]]
)
def test_malformed_bad_words_are_refused(words: object) -> None:
    with pytest.raises(errors.InvalidRequest, match="bad_words"):
        SamplingParams(bad_words=words)  # type: ignore[arg-type]


def test_none_means_no_bad_words() -> None:
    assert not SamplingParams(bad_words=None).masked  # type: ignore[arg-type]
