"""Beam search by itself equals that of transformers, model by model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioinfer.client.beams import Beam, Beams, Row, most_likely
from tests.engine.beam_oracle import driven, must_equal, random_model, searches
from tests.tiers import SECONDS, grid, rest


def _ids(beam: Beam) -> list[int]:
    return [each.token_id for each in beam.path()]


def check(prefix: str, vocab: int, width: int, count: int) -> None:
    model = random_model(prefix, vocab, seed=width)
    ended = ties = 0
    for search in searches(model, count, width):
        found, _ = driven(model, search)
        ties += not must_equal(model, search, found)
        ended += sum(len(ids) < search.limit for ids, _ in found)
    assert ended, "no beam has met its end token"
    assert ties <= count // 10


@pytest.mark.parametrize("width", [2, 4, 10])
def test_beams_are_those_of_transformers(width: int) -> None:
    check("Qwen3", 131, width, 3)


@rest(SECONDS)
@pytest.mark.parametrize("prefix", grid(["Qwen3"], ["Llama"]))
@pytest.mark.parametrize(("width", "vocab"), [(2, 64), (4, 131), (10, 300)])
def test_beams_are_those_of_transformers_for_fifty_prompts(prefix: str, width: int, vocab: int) -> None:
    check(prefix, vocab, width, 50)


@pytest.mark.parametrize("size", [40, 256, 1000, 5003])
def test_the_most_likely_tokens_are_those_of_a_full_sort(size: int) -> None:
    chance = np.random.default_rng(size)
    # Few values, so that most are equal: the lower id goes first.
    logits = chance.integers(0, 50, size).astype(np.float32)
    logits[chance.integers(0, size, size // 2)] = -np.inf
    found = most_likely(logits, 20)
    order = [int(at) for at in np.argsort(-logits, kind="stable")[:20]]
    assert found.token_ids.tolist() == order
    expected = torch.from_numpy(logits).log_softmax(-1).numpy()[order]
    np.testing.assert_allclose(found.logprobs, expected, rtol=1e-6)


def test_tokens_of_no_probability_are_no_candidates() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[7, 9]] = 0.0, 1.0
    assert most_likely(logits, 8).token_ids.tolist() == [9, 7]
    beams = Beams(4, {7}, 2)
    beams.step([beams.most_likely(logits)])
    assert [beam.token_id for beam in beams.running] == [9]
    beams.step([beams.most_likely(logits)])
    assert beams.done
    assert [_ids(beam) for _, beam in beams.finished] == [[9, 9], [9, 7], [7]]


def test_equal_continuations_are_in_the_order_of_their_beams() -> None:
    beams = Beams(2, (), 9)
    row = Row(np.array([3, 4, 5]), np.array([-1, -1, -1], np.float32))
    beams.step([row])
    assert [_ids(beam) for beam in beams.running] == [[3], [4]]
    beams.step([row, row])
    assert [_ids(beam) for beam in beams.running] == [[3, 3], [3, 4]]
