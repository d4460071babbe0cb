"""Closed answers on small vocabularies, and their paths by enumeration."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.diffusion.closed_search import ClosedSearch
from aioinfer.diffusion.paths import BlockRow, Path, Weights, WhichWeights
from aioinfer.text.closed_answers import ClosedAnswers
from aioinfer.text.grammar import GrammarState

END, STOP = 0, 1
ALPHABET = "abc"


class Matchless:
    """What a search of closed answers needs of a matcher: nothing."""

    def copy(self) -> Matchless:
        return self


@dataclass
class Closed:
    """Texts, the tokens to write them with, and the logits of a block."""

    texts: list[str]
    spellings: list[str]
    logits: np.ndarray
    known: list[int | None]
    output: list[int]
    left: int

    @property
    def size(self) -> int:
        return len(self.known)

    def search(self) -> ClosedSearch | None:
        spelled: dict[bytes, list[int]] = {}
        for token, text in enumerate(self.spellings):
            if text:
                spelled.setdefault(text.encode(), []).append(token)
        answers = ClosedAnswers.build(self.texts, spelled, [END], [STOP])
        if answers is None:
            return None
        state = GrammarState(None, Matchless(), 10, len(self.spellings))  # type: ignore[arg-type]
        length = 10 + len(self.output) + self.size + self.left
        return ClosedSearch(state, answers, self.output, length)

    def path(self, noise: np.ndarray | None = None) -> Path | None:
        search = self.search()
        assert search is not None
        return drive(search, self.row(), self.logprobs(), noise)

    def row(self) -> BlockRow:
        ids = [-1 if token is None else token for token in self.known]
        known = [token is not None for token in self.known]
        none = [-1] * self.size
        tokens = [int(token) for token in self.logprobs().argmax(1)]
        return BlockRow(10 + len(self.output), ids, known, tokens, [0.5] * self.size, none, [0.0] * self.size)

    def logprobs(self) -> np.ndarray:
        return np.asarray(torch.from_numpy(self.logits).log_softmax(1).numpy())

    def completions(self) -> Iterator[tuple[int, ...]]:
        """All tokens of the block that go on with an answer, up to the one that ends it."""
        return self._completed((), "".join(self.spellings[token] for token in self.output))

    def _completed(self, path: tuple[int, ...], text: str) -> Iterator[tuple[int, ...]]:
        at = len(path)
        if at == self.size:
            if self.least(text) < np.inf:
                yield path
            return
        for token in range(len(self.spellings)):
            if self.known[at] not in (None, token):
                continue
            longer = text + self.spellings[token]
            if token == END or (token == STOP and self.spellings[STOP]):
                if longer in self.texts and all(each is None for each in self.known[at + 1 :]):
                    yield (*path, token)
            elif self.spellings[token] and any(each.startswith(longer) for each in self.texts):
                yield from self._completed((*path, token), longer)

    def least(self, before: str, *, ended: bool = False) -> float:
        """The fewest tokens to the end of an answer, or of the output."""
        least = np.inf
        if before in self.texts:
            least = 1 if ended else 0
        for token, text in enumerate(self.spellings):
            longer = before + text
            if not text or not any(each.startswith(longer) for each in self.texts):
                continue
            if token == STOP:
                least = min(least, 1 if longer in self.texts else np.inf)
            else:
                least = min(least, 1 + self.least(longer, ended=ended))
        return least

    def tier(self, path: Sequence[int]) -> int:
        """How well the output can end behind it: 0 with its end token, 1 without, 2 not at all."""
        if path[-1] in (END, STOP):
            return 0
        text = "".join(self.spellings[token] for token in (*self.output, *path))
        if self.least(text, ended=True) <= self.left:
            return 0
        return 1 if self.least(text) <= self.left else 2


def drive(
    search: ClosedSearch, row: BlockRow, logprobs: np.ndarray, noise: np.ndarray | None = None
) -> Path | None:
    """Answer what a search asks."""
    steps = search.search(row)
    try:
        question = next(steps)
        assert isinstance(question, WhichWeights)
        mine = question.tokens
        noised = None if noise is None else noise[:, mine]
        free = None if noise is None else (logprobs + noise).max(1)
        steps.send(Weights(logprobs[:, mine], noised, free, None))
    except StopIteration as ended:
        path: Path | None = ended.value
        return path
    raise AssertionError("one question is enough")


def random_closed(seed: int) -> Closed:
    rng = random.Random(seed)
    texts = [_text(rng, 1, 5) for _ in range(rng.randint(1, 5))]
    parts = {*ALPHABET, *(_text(rng, 2, 3) for _ in range(rng.randint(0, 3)))}
    spellings = ["", rng.choice(["", "a", "b"]), "", *sorted(parts)]
    if rng.random() < 0.3:
        spellings.append(rng.choice(ALPHABET))
    size, vocab = rng.randint(1, 4), len(spellings)
    draws = np.random.default_rng(seed)
    logits = draws.normal(0, rng.choice([0.3, 2, 8]), (size, vocab))
    if rng.random() < 0.3:
        logits[draws.random(logits.shape) < 0.2] = -np.inf
        logits[:, 2] = 0
    left = rng.choice([0, 1, 2, 100])
    closed = Closed(texts, spellings, logits, [None] * size, [], left)
    _begin(closed, rng)
    return closed


def _begin(closed: Closed, rng: random.Random) -> None:
    """Some output before the block, and some known tokens in it, of one of the answers."""
    for text in rng.sample(closed.texts, 1):
        tokens = [closed.spellings.index(letter, 3) for letter in text] + [END]
        before = rng.choice([0, 0, 1, 2])
        closed.output = tokens[: min(before, len(text) - 1)]
        rest = tokens[len(closed.output) :]
        for at in range(min(closed.size, len(rest))):
            if rng.random() < 0.3:
                closed.known[at] = rest[at]


def _text(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randint(low, high)))
