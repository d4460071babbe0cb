"""ClosedSearch: the path of a closed answer, exactly.

Forward, the states that the tokens before a position can reach; backward, those from which the block can be
completed: what leads from the ones to the others is the mask of the position. Under these masks the path is
that of the greatest product of the model's probabilities at the positions that are not known (Viterbi), and
a token is as sure as it is in the distribution of all paths by that product (forward-backward)::

    known        .   .   s   .  .  .  .          "yes please", "no thanks", "maybe so": the third letter is s
    forward     y n m  e o a  s                  from the start, by the tokens that are known
    backward    y      e      s   ␣p l e ease    only these reach the end of the block
    path        y      e      s   ␣p l e ease    sure: 1, whatever the model has to say

As DINGO (Suresh et al., 2025, arXiv 2505.23061) does for the states of a regular expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.diffusion.paths import BlockRow, Path, PathSearch, Search, Weights, WhichWeights
from aioinfer.text.closed_answers import ClosedAnswers
from aioinfer.text.grammar import GrammarState

__all__ = ["ClosedSearch"]

_NEVER = -np.inf
#: Of a token that a filter leaves out: it is taken where there is no path without such tokens.
_FILTERED = -1e4
_Floats = npt.NDArray[np.float64]


class ClosedSearch(PathSearch):
    """The likeliest completion by a closed answer.

    An output that must end within the block is complete by then, if that is possible: with the token that
    ends it, or else without. Behind that token anything may follow, with probability 1.
    """

    __slots__ = ("_answers", "_max_length", "_node")

    def __init__(
        self,
        state: GrammarState,
        answers: ClosedAnswers,
        output_ids: Sequence[int],
        max_length: int,
    ) -> None:
        """``output_ids``: the output so far; ``max_length``: of the sequence."""
        super().__init__(state)
        self._answers, self._max_length = answers, max_length
        #: None: behind tokens that no answer has
        self._node: int | None = 0
        self._accept(output_ids)

    def _accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._node is not None and self._node != self._answers.ended:
                self._node = self._answers.steps[self._node].get(token)
        self._at += len(tokens)

    def search(self, row: BlockRow) -> Search:
        size = len(row.ids)
        first, last = self._at - row.start, min(size, self._max_length - row.start)
        none = Path([-1] * size, [0.0] * size)
        if self._node is None:
            self.state.failed = "its output is none of its grammar"
            return None
        if self._node == self._answers.ended or not 0 <= first < last:
            return none
        weights = yield WhichWeights(self._answers.tokens)
        assert isinstance(weights, Weights)
        left = self._max_length - row.start - last
        found = _Lattice(self._answers, self._node, row, (first, last), weights).best(left)
        if found is None:
            self.state.failed = "no token is allowed"
            return None
        for at, (token, sure) in enumerate(found, first):
            none.tokens[at], none.confidence[at] = token, sure
        return none


class _Positions(NamedTuple):
    """Edges that may be taken at one position."""

    edges: npt.NDArray[np.int64]
    #: of each, by what it is drawn, and its logprob
    score: _Floats
    logprob: _Floats


class _Lattice:
    """All paths of a block: states at each position, and the edges between them."""

    def __init__(
        self,
        answers: ClosedAnswers,
        node: int,
        row: BlockRow,
        part: tuple[int, int],
        weights: Weights,
    ) -> None:
        self._answers = answers
        self._node = node
        self._row = row
        self._first, self._last = part
        self._weights = weights
        #: no output ends before a position that is known
        known = [at for at in range(*part) if row.known[at]]
        self._not_before = max(known, default=-1)

    def best(self, left: int) -> list[tuple[int, float]] | None:
        """The tokens of the path and how sure they are; ``left``: positions behind the block that the output
        may have."""
        reached = self._forward()
        alive = self._ending(reached[-1], left)
        if not alive.any():
            return None
        positions = self._between(reached, alive)
        path = self._viterbi(positions, alive)
        sure = self._sure(positions, alive)
        answers, found = self._answers, []
        for edges, at_edge, chances in zip(positions, path, sure, strict=True):
            if at_edge is None:
                break
            column = answers.column[edges.edges[at_edge]]
            same = answers.column[edges.edges] == column
            found.append((int(answers.tokens[column]), min(1.0, float(chances[same].sum()))))
        return found

    def _open(self, at: int) -> npt.NDArray[np.bool_]:
        """[E]: the edges that the position may have."""
        answers = self._answers
        if self._row.known[at]:
            tokens = answers.tokens == self._row.ids[at]
        else:
            tokens = self._weights.logprobs[at] > _NEVER
        edges: npt.NDArray[np.bool_] = tokens[answers.column]
        return edges if at >= self._not_before else edges & (answers.target != answers.ended)

    def _forward(self) -> list[npt.NDArray[np.bool_]]:
        """The states that can be reached before each position, and behind the last."""
        answers = self._answers
        reached = np.zeros(answers.ended + 1, np.bool_)
        reached[self._node] = True
        found = [reached]
        for at in range(self._first, self._last):
            following = np.zeros_like(reached)
            following[answers.target[reached[answers.source] & self._open(at)]] = True
            following[answers.ended] |= reached[answers.ended]
            found.append(following)
            reached = following
        return found

    def _ending(self, reached: npt.NDArray[np.bool_], left: int) -> npt.NDArray[np.bool_]:
        """The states in which the block may end."""
        for enough in (self._answers.until_ended <= left, self._answers.left <= left):
            if (reached & enough).any():
                return reached & enough
        return reached

    def _between(
        self, reached: list[npt.NDArray[np.bool_]], alive: npt.NDArray[np.bool_]
    ) -> list[_Positions]:
        """The edges of each position that lie on some path to the states ``alive``."""
        answers, found = self._answers, []
        for at in range(self._last - 1, self._first - 1, -1):
            before = reached[at - self._first]
            edges = np.flatnonzero(before[answers.source] & alive[answers.target] & self._open(at))
            found.append(self._weighed(at, edges))
            sources = np.zeros_like(alive)
            sources[answers.source[edges]] = True
            sources[answers.ended] = alive[answers.ended] & before[answers.ended]
            alive = sources
        return found[::-1]

    def _weighed(self, at: int, edges: npt.NDArray[np.int64]) -> _Positions:
        if self._row.known[at] or not len(edges):
            return _Positions(edges, np.zeros(len(edges)), np.zeros(len(edges)))
        columns = self._answers.column[edges]
        logprobs, weights = self._weights.logprobs[at].copy(), self._weights
        if weights.kept is not None:
            # Filters see what the mask leaves, as everywhere.
            masked = np.full_like(logprobs, _NEVER)
            masked[columns] = logprobs[columns]
            logprobs[~weights.kept(masked)] += _FILTERED
        own = logprobs[columns]
        return _Positions(edges, own if weights.noise is None else own + weights.noise[at][columns], own)

    def _viterbi(self, positions: list[_Positions], alive: npt.NDArray[np.bool_]) -> list[int | None]:
        """By position, the edge of the best path among its edges; None behind its end."""
        answers = self._answers
        scores = np.full(answers.ended + 1, _NEVER)
        scores[self._node] = 0
        steps = [scores]
        for at, (edges, score, _) in enumerate(positions, self._first):
            following = np.full_like(scores, _NEVER)
            np.maximum.at(following, answers.target[edges], scores[answers.source[edges]] + score)
            behind = scores[answers.ended] + self._behind(at)
            following[answers.ended] = max(following[answers.ended], behind)
            steps.append(following)
            scores = following
        state = int(np.argmax(np.where(alive, scores, _NEVER)))
        path: list[int | None] = []
        for at in range(len(positions) - 1, -1, -1):
            edges, score, _ = positions[at]
            into = np.flatnonzero(answers.target[edges] == state)
            chosen: int | None = None
            if len(into):
                values = steps[at][answers.source[edges[into]]] + score[into]
                chosen = int(into[np.argmax(values)])
            if state == answers.ended:
                behind = steps[at][state] + self._behind(self._first + at)
                if chosen is None or behind >= steps[at][answers.source[edges[chosen]]] + score[chosen]:
                    chosen = None
            if chosen is not None:
                state = int(answers.source[edges[chosen]])
            path.append(chosen)
        return path[::-1]

    def _behind(self, at: int) -> float:
        """The score of a position behind the end: what it draws from anything."""
        free = self._weights.free
        return 0.0 if free is None else float(free[at])

    def _sure(self, positions: list[_Positions], alive: npt.NDArray[np.bool_]) -> list[_Floats]:
        """By position, the probability of each edge in the distribution of all paths."""
        answers = self._answers
        forward = np.full(answers.ended + 1, _NEVER)
        forward[self._node] = 0
        ahead = []
        for edges, _, logprob in positions:
            ahead.append(forward)
            following = np.full_like(forward, _NEVER)
            following[answers.ended] = forward[answers.ended]
            np.logaddexp.at(following, answers.target[edges], forward[answers.source[edges]] + logprob)
            forward = following
        total = np.logaddexp.reduce(forward[alive])
        backward, found = np.where(alive, 0.0, _NEVER), []
        for (edges, _, logprob), before in zip(positions[::-1], ahead[::-1], strict=True):
            through = logprob + backward[answers.target[edges]]
            found.append(np.exp(before[answers.source[edges]] + through - total))
            following = np.full_like(backward, _NEVER)
            following[answers.ended] = backward[answers.ended]
            np.logaddexp.at(following, answers.source[edges], through)
            backward = following
        return found[::-1]
