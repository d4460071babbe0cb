"""Lookup: the tokens after the last place where the newest ones were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from aioinfer.speculation.drafter import NO_IDS, DraftRequest
from aioinfer.speculation.lookup import LookupDrafter
from tests.tiers import scaled


def request(prompt: list[int], output: list[int] = [], prediction: list[int] | None = None) -> DraftRequest:  # noqa: B006
    predicted = NO_IDS if prediction is None else np.asarray(prediction, np.int32)
    made = DraftRequest(np.asarray(prompt, np.int32), predicted)
    made.extend(output)
    return made


def propose(*given: Any, most: int = 4) -> list[int]:
    return list(LookupDrafter().propose(request(*given), most))


def test_matches_beyond_the_recent_text_are_found() -> None:
    far = [1, 2, 3, *range(10, 9000), 1, 2]
    assert propose(far, most=1) == [3]


# -- a prediction --------------------------------------------------------------------------------------


def test_a_prediction_is_proposed_from_its_beginning() -> None:
    assert propose([1, 2], [], [5, 6, 7, 8, 9]) == [5, 6, 7, 8]


def test_a_prediction_goes_on_where_the_output_is() -> None:
    drafter, asked = LookupDrafter(), request([1, 2], [], [5, 6, 7, 8, 9])
    assert drafter.propose(asked, 2) == [5, 6]
    asked.extend([5, 6, 7])
    assert drafter.propose(asked, 4) == [8, 9]
    assert asked.predicted


def test_after_another_token_the_output_comes_back_by_two_equal_ones() -> None:
    drafter, asked = LookupDrafter(), request([1, 2], [], [5, 6, 7, 8, 9])
    asked.extend([5, 6, 40])
    assert list(drafter.propose(asked, 2)) == []
    assert not asked.predicted
    asked.extend([5, 6, 40, 7])
    assert list(drafter.propose(asked, 2)) == []
    asked.extend([5, 6, 40, 7, 8])
    assert drafter.propose(asked, 2) == [9]


def test_the_next_equal_place_ahead_counts_before_those_behind() -> None:
    prediction = [1, 2, 10, 1, 2, 20, 1, 2, 30]
    drafter, asked = LookupDrafter(), request([99], [], prediction)
    asked.extend([1, 2, 10])
    assert drafter.propose(asked, 1) == [1]
    asked.extend([1, 2, 10, 77, 1, 2])
    assert drafter.propose(asked, 1) == [20]


def test_the_own_text_is_looked_at_where_the_prediction_says_nothing() -> None:
    assert propose([1, 2, 3, 1, 2], [], [5]) == [5]
    assert propose([1, 2, 3, 4], [1, 2], [5]) == [3, 4, 1, 2]


# -- both against the plainest search ------------------------------------------------------------------


def plainest(tokens: list[int], most: int) -> list[int]:
    best: tuple[int, int] | None = None
    for at in range(len(tokens) - 1):
        length = 0
        while length < 8 and at - length >= 0 and tokens[at - length] == tokens[-1 - length]:
            length += 1
            if length == len(tokens):
                break
        if length >= 2 and (best is None or (length, at) >= best):
            best = (length, at)
    if best is None:
        return []
    behind = tokens[best[1] + 1 :]
    return [behind[at % len(behind)] for at in range(most)]


@pytest.mark.parametrize("seed", range(scaled(300)))
def test_any_text_gives_what_the_plainest_search_does(seed: int) -> None:
    rng = random.Random(seed)
    vocab = rng.choice([2, 3, 8])
    tokens = [rng.randrange(vocab) for _ in range(rng.randrange(1, 60))]
    cut = rng.randrange(1, len(tokens) + 1)
    assert propose(tokens[:cut], tokens[cut:], most=5) == plainest(tokens, 5)


def test_the_tokens_that_a_request_has_grow_with_its_output() -> None:
    asked = request([1, 2, 3])
    output: list[int] = []
    for token in range(500):
        output.append(token)
        if token % 3 == 0:
            asked.extend(output)
            assert asked.tokens.tolist() == [1, 2, 3, *output]
