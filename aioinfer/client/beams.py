"""Beam search without a model: which tokens the beams go on with, and which hypotheses are kept.

As ``generate(num_beams=width)`` of transformers 5 does it for one prompt, in float32 as well. It looks at the
most likely continuations of all beams: ``width`` times one more than there are end tokens, and at least
twice ``width``. Those of the first ``width`` that end are hypotheses; their score is ``logprob / length **
length_penalty``, and the best ``width`` are kept. The first ``width`` that do not end are the next beams. A
length counts the tokens of the output with the end token. Equals are in the order of beams, then of ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aioinfer.steering.processors import Ids, Logits

__all__ = ["Beam", "Beams", "EarlyStopping", "Row", "most_likely"]

EarlyStopping: TypeAlias = "bool | Literal['never']"
#: logits of which the largest is looked at first
_BLOCK = 256
_ZERO = np.float32(0.0)


class Row(NamedTuple):
    """The most likely tokens after a beam, best first, and their logprobs in float32."""

    token_ids: Ids
    logprobs: Logits


def most_likely(logits: Logits, count: int) -> Row:
    """The ``count`` most likely tokens, those of no probability left out. Sorts few of a large vocabulary.
    Raises ValueError: no token has a probability."""
    largest = logits.max()
    if not np.isfinite(largest):
        raise ValueError("a logits processor left no finite maximum of the logits")
    whole = len(logits) - len(logits) % _BLOCK
    peaks = logits[:whole].reshape(-1, _BLOCK).max(axis=1)
    # As many blocks have a logit that is as large, so at least `count` are.
    least = np.partition(peaks, -count)[-count] if len(peaks) >= count else -np.inf
    found = np.flatnonzero((logits >= least) & (logits > -np.inf))
    found = found[np.argsort(-logits[found], kind="stable")[:count]]
    shifted: npt.NDArray[np.float32] = logits - largest
    return Row(found, shifted[found] - np.log(np.exp(shifted).sum()))


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A token after those of a parent; the first one, without a parent, is the prompt."""

    parent: Beam | None = None
    token_id: int = -1
    logprob: float = 0.0
    length: int = 0
    #: the sum of the logprobs
    total: np.float32 = _ZERO

    def path(self) -> list[Beam]:
        """One for each token of the output."""
        found, at = [self], self
        while at.parent is not None:
            found.append(at := at.parent)
        return found[-2::-1]


class Beams:
    """The beams of one prompt: hand :meth:`step` a row for each of ``running`` until :attr:`done`."""

    def __init__(
        self,
        width: int,
        end: Collection[int],
        limit: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        """``end``: ids of tokens that end an output. ``limit``: tokens of an output at most."""
        self.width = width
        #: continuations that are looked at, of all beams and so of each
        self.count = max(2, 1 + len(end)) * width
        self.running = [Beam()]
        #: hypotheses and their scores, best first
        self.finished: list[tuple[float, Beam]] = []
        self._end, self._limit = end, limit
        self._penalty, self._early = length_penalty, early_stopping

    def most_likely(self, logits: Logits) -> Row:
        """What :meth:`step` has to know of what may follow a beam."""
        return most_likely(logits, self.count)

    def step(self, rows: Sequence[Row]) -> None:
        """Choose the next beams. ``rows``: the most likely tokens after each running one."""
        totals = np.concatenate(
            [beam.total + row.logprobs for beam, row in zip(self.running, rows, strict=True)]
        )
        each = [
            (beam, *pair)
            for beam, row in zip(self.running, rows, strict=True)
            for pair in zip(*row, strict=True)
        ]
        going: list[Beam] = []
        for rank, at in enumerate(np.argsort(-totals, kind="stable")[: self.count]):
            parent, token, logprob = each[at]
            beam = Beam(parent, int(token), float(logprob), parent.length + 1, totals[at])
            if beam.token_id not in self._end and beam.length < self._limit:
                going.append(beam)
            elif rank < self.width:
                self.finished.append((float(self._score(beam, beam.length)), beam))
        self.finished = sorted(self.finished, key=itemgetter(0), reverse=True)[: self.width]
        self.running = going[: self.width]

    def _score(self, beam: Beam, length: int) -> np.float32:
        return beam.total / np.float32(length**self._penalty)

    @property
    def done(self) -> bool:
        """No beam goes on, or enough have ended and none seems to become better than these."""
        if not self.running or len(self.finished) < self.width:
            return not self.running
        best = self.running[0]
        longest = self._early == "never" and self._penalty > 0.0
        hoped = self._score(best, self._limit if longest else best.length)
        return self._early is True or bool(hoped <= self.finished[-1][0])
