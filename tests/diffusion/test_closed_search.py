"""Paths of closed answers are exactly the best of all completions of a block, and as sure as they are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.diffusion.closed import ALPHABET, END, STOP, Closed, random_closed


def score(closed: Closed, path: tuple[int, ...], values: np.ndarray) -> float:
    """The sum of ``values`` [B, V] at the positions of a path that are not known."""
    return float(sum(values[at, token] for at, token in enumerate(path) if closed.known[at] is None))


@pytest.mark.parametrize("noisy", [False, True])
def test_the_path_is_the_best_completion(noisy: bool) -> None:
    found = none = 0
    for seed in range(400):
        closed = random_closed(seed)
        if closed.search() is None:
            continue
        logprobs = closed.logprobs()
        noise = np.random.default_rng(seed).gumbel(size=logprobs.shape) if noisy else None
        values = logprobs if noise is None else logprobs + noise
        behind = np.zeros(closed.size) if noise is None else values.max(1)
        scores = {
            path: score(closed, path, values) + behind[len(path) :].sum() for path in closed.completions()
        }
        scores = {path: value for path, value in scores.items() if value > -np.inf}
        path = closed.path(noise)
        if not scores:
            assert path is None, seed
            none += 1
            continue
        assert path is not None, seed
        tokens = tuple(token for token in path.tokens if token >= 0)
        assert path.tokens == [*tokens, *[-1] * (closed.size - len(tokens))], seed
        best = min(map(closed.tier, scores))
        among = {path: value for path, value in scores.items() if closed.tier(path) == best}
        assert tokens in among, seed
        assert among[tokens] == pytest.approx(max(among.values()), abs=1e-9), seed
        found += 1
    assert found > 200
    assert none > 5


def test_a_token_is_as_sure_as_it_is_among_all_completions() -> None:
    for seed in range(200):
        closed = random_closed(seed)
        if closed.search() is None or (path := closed.path()) is None:
            continue
        logprobs = closed.logprobs()
        weights = {each: np.exp(score(closed, each, logprobs)) for each in closed.completions()}
        best = min(closed.tier(each) for each, weight in weights.items() if weight)
        weights = {each: weight for each, weight in weights.items() if closed.tier(each) == best}
        total = sum(weights.values())
        for at, token in enumerate(path.tokens):
            if token >= 0:
                mine = sum(weight for each, weight in weights.items() if at < len(each) and each[at] == token)
                assert path.confidence[at] == pytest.approx(mine / total, abs=1e-6), seed


def make(texts: list[str], size: int, left: int = 100, known: dict[int, int] | None = None) -> Closed:
    spellings = ["", "", "", *ALPHABET]
    tokens = [None if known is None else known.get(at) for at in range(size)]
    return Closed(texts, spellings, np.zeros((size, len(spellings))), tokens, [], left)


A, B, C = 3, 4, 5


def test_an_output_that_must_end_in_the_block_takes_the_answer_that_fits() -> None:
    closed = make(["aaaa", "b"], 3, left=0)
    closed.logits[:, A] = 9
    path = closed.path()
    assert path is not None
    assert path.tokens == [B, END, -1]
    closed = make(["aaa", "aaaa"], 3, left=0)
    assert (path := closed.path()) is not None
    assert path.tokens == [A, A, A]


def test_nothing_ends_before_a_known_token() -> None:
    closed = make(["a", "ab", "abc"], 4, known={2: C})
    closed.logits[:, END] = 9
    path = closed.path()
    assert path is not None
    assert path.tokens == [A, B, C, END]
    assert path.confidence == pytest.approx([1, 1, 1, 1])


def test_a_token_that_stops_must_complete_an_answer() -> None:
    closed = make(["ab", "abc"], 3)
    closed.spellings[STOP] = "b"
    closed.logits[:, STOP] = 9
    path = closed.path()
    assert path is not None
    assert path.tokens == [A, STOP, -1]
    closed.texts = ["abc"]
    assert (path := closed.path()) is not None
    assert path.tokens == [A, B, C]


def test_an_output_of_no_answer_has_no_path() -> None:
    closed = make(["ab"], 3)
    closed.output = [C]
    search = closed.search()
    assert search is not None
    assert closed.path() is None
