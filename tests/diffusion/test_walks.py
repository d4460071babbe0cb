"""Walks: tokens that a grammar allows, around those that are known, and back to the kept path."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from aioinfer.diffusion.paths import Allowed, BlockRow, Path, Walk, WhichToken
from aioinfer.text.grammar import GrammarState

END, ABC = 0, "?abcdefghijklmnopqrstuvwxyz"
START = 10


@dataclass
class Texts:
    """A matcher of some texts, a letter for each token, that ends in an error after so many letters."""

    texts: Sequence[str]
    most: int = 99
    text: str = ""
    stopped: bool = False
    error: str | None = None

    def following(self) -> list[int]:
        """As the mask of llguidance; in an error, the end is left."""
        if self.error or self.stopped:
            return [END]
        count = len(self.text)
        found = {ABC.index(each[count]) for each in self.texts if each.startswith(self.text) and each[count:]}
        return sorted(found | {END} if self.text in self.texts else found)

    def accept(self, token: int) -> bool:
        return self.advance([token]) == 1

    def advance(self, tokens: Sequence[int]) -> int:
        for at, token in enumerate(tokens):
            if self.stopped or self.error or token not in self.following():
                return at
            if token == END:
                self.stopped = True
                continue
            self.text += ABC[token]
            if len(self.text) > self.most:
                self.error = "too long"
                return at
            self.stopped = self.following() == [END]
        return len(tokens)

    def forced(self) -> list[int]:
        return []

    def copy(self) -> Texts:
        return Texts(self.texts, self.most, self.text, self.stopped, self.error)


@dataclass
class Round:
    """A block, what a model thinks of it, and what a search asks."""

    texts: Sequence[str]
    #: known tokens, or ?
    known: str
    proposed: str
    sure: float = 0.1
    kept: str = ""
    output: str = ""
    most: int = 99
    asked: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    failed: str | None = None

    def path(self, rank: npt.NDArray[np.float64] | None = None) -> str | None:
        size = len(self.known)
        matcher = Texts(self.texts, self.most)
        state = GrammarState(None, matcher, START, len(ABC), ends=frozenset([END]))  # type: ignore[arg-type]
        walk = Walk(state, tokens_of(self.output), frozenset([END]))
        known = [token != ABC.index("?") or letter == "." for token, letter in self._known()]
        ids = [token for token, _ in self._known()]
        start = START + len(self.output)
        walk.take(start, ids, known)
        kept = tokens_of(self.kept) + [-1] * (size - len(self.kept))
        tokens = tokens_of(self.proposed)
        row = BlockRow(start, ids, known, tokens, [self.sure] * size, kept, [0.5] * size)
        found = self._drive(walk, row, rank)
        self.failed = state.failed
        if found is None:
            return None
        # What is known before is no part of a path.
        first = next((at for at, there in enumerate(known) if not there), size)
        return self.known[:first] + text_of(found.tokens[first:])

    def _known(self) -> list[tuple[int, str]]:
        return [(END if letter == "." else ABC.index(letter), letter) for letter in self.known]

    def _drive(self, walk: Walk, row: BlockRow, rank: npt.NDArray[np.float64] | None) -> Path | None:
        steps = walk.search(row)
        answer: Allowed | None = None
        try:
            while True:
                question = steps.send(answer)
                answer = None
                if isinstance(question, WhichToken):
                    self.asked.append((question.at, tuple(question.but)))
                    answer = self._answer(question, row, rank)
        except StopIteration as ended:
            path: Path | None = ended.value
            return path

    def _answer(self, question: WhichToken, row: BlockRow, rank: npt.NDArray[np.float64] | None) -> Allowed:
        assert isinstance(question.matcher, Texts)
        allowed = [token for token in question.matcher.following() if token not in question.but]
        if not allowed:
            return Allowed(-1, 0.0)
        if (proposed := row.tokens[question.at]) in allowed:
            return Allowed(proposed, 0.5)
        return Allowed(max(allowed, key=lambda token: 0 if rank is None else rank[question.at, token]), 0.5)


def tokens_of(text: str) -> list[int]:
    return [END if letter == "." else ABC.index(letter) for letter in text]


def text_of(tokens: Sequence[int]) -> str:
    """Without what is behind the end."""
    return "".join("." if token == END else ABC[token] for token in tokens if token >= 0)


@pytest.mark.parametrize("sure", [0.1, 0.999])
def test_what_is_proposed_is_the_path_where_it_is_allowed(sure: float) -> None:
    assert Round(["abcdef", "abc"], "????", "abcd", sure).path() == "abcd"
    assert Round(["abcdef", "abc"], "????", "abc.", sure).path() == "abc."
    assert Round(["abcdef"], "??", "ef", sure, output="abcd").path() == "ef"
    assert Round(["ab"], "????", "ab.z", sure).path() == "ab."


def test_what_is_refused_gives_way_to_what_is_allowed() -> None:
    assert Round(["abcd", "axyz"], "????", "axcd").path() == "axyz"
    assert Round(["ab", "cd"], "????", "zz.z").path() in ("ab.", "cd.")


def test_a_walk_goes_back_where_it_misses_what_is_known() -> None:
    round = Round(["abcd", "abxy", "ebcz"], "???z", "abcd")
    assert round.path() == "ebcz"
    assert (0, (ABC.index("a"), END)) in round.asked
    assert Round(["a", "abc"], "??c", "a..").path() == "abc"
    # An end that is known already is none that refuses.
    assert Round(["abc", "abcde"], "???.", "abcd").path() == "abc."


def test_a_walk_that_leads_nowhere_comes_back_to_the_kept_path() -> None:
    many = ["x" + a + b + "c" for a in "abcdefgh" for b in "abcdefgh"]
    round = Round([*many, "yaaz", "xayz"], "???z", "xaaa", kept="yaaz")
    path = round.path()
    assert path in ("yaaz", "xayz")
    deep = Round([*("p" + text for text in many), "pyaaz"], "????z", "pxaaa", kept="pyaaz")
    assert deep.path() == "pyaaz"
    assert len(deep.asked) < 60


@pytest.mark.parametrize("kept", ["", "ab", "zzzz", "abxz", "cbcd"])
def test_a_kept_path_that_does_not_fit_is_none(kept: str) -> None:
    """``abxz`` is no text, ``cbcd`` none with what is known; the others end too early, or are nothing."""
    round = Round(["abcd", "cbcd"], "??qz", "abcd", kept=kept)
    assert round.path() is None
    assert round.failed is not None


def test_an_error_of_the_grammar_is_no_end() -> None:
    round = Round(["abcdefgh"], "??????", "zzzzzz", most=3)
    assert round.path() is None
    assert round.failed == "too long"
    assert Round(["abcdefgh"], "??", "gh", output="abcdef", most=3).path() is None


def test_random_paths_are_texts_that_agree_with_what_is_known() -> None:
    for seed in range(600):
        rng = random.Random(seed)
        texts = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 7))) for _ in range(4)]
        size = rng.randint(1, 6)
        whole = (rng.choice(texts) + ".")[:size]
        known = "".join(letter if rng.random() < 0.4 else "?" for letter in whole).ljust(size, "?")
        proposed = "".join(rng.choice("ab.") for _ in range(size))
        round = Round(texts, known, proposed, rng.choice([0.1, 0.6, 0.999]), kept=whole)
        path = round.path(np.random.default_rng(seed).random((size, len(ABC))))
        assert path is not None, seed
        assert path.endswith(".") or len(path) == size, seed
        assert any((text + ".").startswith(path) for text in texts), seed
        agreed = [path[at : at + 1] == letter for at, letter in enumerate(known) if letter != "?"]
        assert all(agreed), seed
        assert len(round.asked) <= 2 * size + 17, seed
