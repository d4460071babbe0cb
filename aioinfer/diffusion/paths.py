"""Paths: tokens for all positions of a block that agree with the known ones and that a grammar allows.

The tokens that a round proposes under a grammar are those of one path. Whatever part of them is written, the
rest of the path completes it: an output can always go on, and positions are written in any order. A path is
kept with its block. Where the next search finds none, the kept one, which agrees with all that was written,
takes its place.

::

    known       { "  .  .  .  "  .  .           a position of the prompt, or written by a round
    proposed    { "  n  a  m  e  :  "           refused at the sixth position: "e" where a quote is known
    path        { "  i  d  "  "  ...            what the search finds, or the path of the round before
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from aioinfer.text.grammar import GrammarState, Matcher

__all__ = [
    *("Allowed", "BlockRow", "Path", "PathSearch", "Search", "Walk", "Weights", "WhichToken"),
    "WhichWeights",
]

#: A proposed token with more confidence than this is not weighed against the others that are allowed. At 0.99
#: the bundled model's JSON takes 0.2 % fewer rounds and 2.8 times the questions.
_SURE = 0.95
#: Beyond positions that are right together with less probability than this, allowed tokens are not weighed:
#: no round would write one for that.
_FLOOR = 0.5
#: Tokens that are asked for, at most, after the first that did not lead to what is known.
_MOST_RETRIES = 16
#: Places where a walk that led nowhere tries to come back to the kept path.
_MOST_RETURNS = 8
#: Tokens that a matcher takes at once, of a grammar whose masks are quick and of others: more may take long,
#: with the interpreter's lock held.
_QUICK_PIECE, _PIECE = 64, 8


@dataclass(slots=True)
class BlockRow:
    """One row of a round, on the host; lists of B positions."""

    #: position of the block in its sequence
    start: int
    ids: list[int]
    known: list[bool]
    #: what the model proposes, and its confidence
    tokens: list[int]
    confidence: list[float]
    #: of the round before, -1 where it has no token; and how likely the model finds each now
    path: list[int]
    likely: list[float]


class Path(NamedTuple):
    """Tokens of a block, -1 behind the one that ends the output, and their confidences."""

    tokens: list[int]
    confidence: list[float]


class WhichToken(NamedTuple):
    """Which of the tokens that ``matcher`` allows, without ``but``, has position ``at`` of the block?"""

    at: int
    matcher: Matcher
    but: Sequence[int] = ()


class Allowed(NamedTuple):
    """The token, -1 for none, and its confidence among those that are allowed."""

    token: int
    confidence: float


class WhichWeights(NamedTuple):
    """What are these tokens worth, at each position?"""

    #: [T] int64
    tokens: npt.NDArray[np.int64]


class Weights(NamedTuple):
    """What tokens are worth at B positions."""

    #: [B, T]: logprobs by the model, after the temperature, if there is one
    logprobs: npt.NDArray[np.float64]
    #: [B, T]: of a row with a temperature, what is added to draw from them
    noise: npt.NDArray[np.float64] | None
    #: [B]: the sum of both for the token that is proposed
    free: npt.NDArray[np.float64] | None
    #: which tokens filters keep, [T] bool, by the logprobs of those that are allowed; None: there are none
    kept: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]] | None


#: A search in steps, so that the questions of all rows of a round are answered at once. None as its question:
#: it has none, but goes on later if it has taken long. None in the end: there is no path.
Search: TypeAlias = Generator[WhichToken | WhichWeights | None, Allowed | Weights | None, Path | None]


class PathSearch(ABC):
    """The grammar of one request, at the first position of its output that is not known."""

    __slots__ = ("_at", "state")

    def __init__(self, state: GrammarState) -> None:
        self.state = state
        self._at = state.begin

    def take(self, start: int, ids: Sequence[int], known: Sequence[bool]) -> None:
        """Move on to the first unknown position of a block."""
        first = at = max(0, self._at - start)
        while at < len(ids) and known[at]:
            at += 1
        self._accept(ids[first:at])

    @abstractmethod
    def _accept(self, tokens: Sequence[int]) -> None:
        """These are the next tokens of the output."""

    @abstractmethod
    def search(self, row: BlockRow) -> Search:
        """Find a path for a block that :meth:`take` has seen. Nothing else uses the grammar meanwhile."""


class Walk(PathSearch):
    """A walk from the first unknown position on: the proposed token where the grammar allows it, else the
    likeliest that it allows. A token is as sure as the model is of it, or, if that is more, as the tokens
    from the first unknown position up to it are among those that the grammar allows at theirs.

    Where it does not lead to a token that is known, it goes back to the last position before that is not, and
    takes the next likely one there. What it does not find in a few such steps, it leaves to the kept path: it
    returns to that as late as it can.
    """

    __slots__ = ("_ended", "_ends", "_matcher", "_taken", "_walked")

    def __init__(self, state: GrammarState, output_ids: Sequence[int], ends: frozenset[int]) -> None:
        """``output_ids``: the output so far; ``ends``: tokens that end it."""
        super().__init__(state)
        self._ends = ends
        # The state's own matcher stays at the start: rows of a slot that the request has lost go on for a
        # while, and what they write is void.
        self._matcher = state.origin.copy()
        #: tokens before ``_at`` that the matcher has still to take
        self._taken: list[int] = []
        #: tokens that the newest walk has taken after those, and its matcher behind them
        self._walked: tuple[list[int], Matcher] | None = None
        self._ended = False
        self._accept(output_ids)

    def _accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._at += 1
            if token in self._ends:
                self._ended = True
            elif not self._ended:
                self._taken.append(token)

    def search(self, row: BlockRow) -> Search:
        size = len(row.ids)
        first = self._at - row.start
        if self._ended or not 0 <= first < size:
            return Path([-1] * size, [0.0] * size)
        most = _QUICK_PIECE if self.state.quick else _PIECE
        if self._walked is not None and self._walked[0] == self._taken:
            # All of it was written: mostly so, where a round fills the block.
            self._matcher, self._taken = self._walked[1], []
        self._walked = None
        while self._taken:
            piece = self._taken[:most]
            if self._matcher.advance(piece) < len(piece):
                self.state.failed = self._matcher.error or "its output is none of its grammar"
                return None
            del self._taken[:most]
            yield None
        way = _Way(self._matcher, row, (first, size), self._ends, self.state.ends, most)
        found = yield from way.explore()
        if not found and not way.come_back():
            self.state.failed = way.error or "no token is allowed"
            return None
        if found:
            self._walked = way.walked
        return Path(way.tokens, way.confidence)


class _Way:
    """A walk through positions [first, last) of a block."""

    def __init__(
        self,
        origin: Matcher,
        row: BlockRow,
        part: tuple[int, int],
        ends: frozenset[int],
        complete: frozenset[int],
        most: int,
    ) -> None:
        """``ends``: tokens that end the output; ``complete``: those that may follow a complete one; ``most``:
        tokens that are taken at once."""
        self._origin = origin
        self._matcher = origin.copy()
        self._row = row
        self._first, self._last = part
        self._ends = ends
        self._complete = complete
        self._most = most
        self._at = self._first
        #: how sure all tokens before each position are
        self._sure = [1.0] * (len(row.ids) + 1)
        #: by position, tokens that do not lead on from those before
        self._tried: dict[int, list[int]] = {}
        self._retries = 0
        #: the longest that did not lead on, with its confidences
        self._longest: tuple[list[int], list[float]] = [], []
        #: no output ends before it
        self._last_known = max((at for at in range(*part) if row.known[at]), default=-1)
        self.tokens = [-1] * len(row.ids)
        self.confidence = [0.0] * len(row.ids)
        self.error: str | None = None

    @property
    def walked(self) -> tuple[list[int], Matcher]:
        """The tokens of the walk, and the matcher that has taken them."""
        return self.tokens[self._first : self._at], self._matcher

    def explore(self) -> Generator[WhichToken | None, Allowed | Weights | None, bool]:
        """Walk to the end of the block or of the output; False if that is not found."""
        while self._at < self._last:
            if self._run():
                yield None
            elif self._row.known[self._at]:
                if not self._go_back():
                    return False
            else:
                answer = yield WhichToken(self._at, self._matcher, self._but())
                assert isinstance(answer, Allowed)
                if not self._step(answer) and not self._go_back():
                    return False
            if self._at > self._first and self.tokens[self._at - 1] in self._ends:
                break
        return True

    def _run(self) -> int:
        """Take known and proposed tokens that need not be weighed, if they are allowed; returns how many."""
        first, row = self._at, self._row
        run: list[int] = []
        for at in range(first, min(first + self._most, self._last)):
            known, own, sure = row.known[at], row.confidence[at], self._sure[at]
            token = row.ids[at] if known else row.tokens[at]
            doubted = not known and own < _SURE and sure > _FLOOR
            if doubted or at in self._tried or (token in self._ends and at < self._last_known):
                break
            run.append(token)
            self._sure[at + 1] = sure if known else sure * own
            if token in self._ends:
                break
        count = self._advance(self._matcher, run)
        self.tokens[first : first + count] = run[:count]
        self.confidence[first : first + count] = row.confidence[first : first + count]
        self._at += count
        return count

    def _but(self) -> Sequence[int]:
        tried = self._tried.get(self._at, ())
        return (*tried, *self._ends) if self._at < self._last_known else tried

    def _step(self, answer: Allowed) -> bool:
        """Take a token that was asked for."""
        at, row = self._at, self._row
        # An error leaves the tokens allowed that end the output.
        if self._failed(self._matcher) or answer.token < 0:
            return False
        if not self._advance(self._matcher, [answer.token]):
            return False
        sure = self._sure[at + 1] = self._sure[at] * answer.confidence
        self.tokens[at] = answer.token
        self.confidence[at] = max(sure, row.confidence[at] * (row.tokens[at] == answer.token))
        self._at += 1
        return True

    def _advance(self, matcher: Matcher, tokens: Sequence[int]) -> int:
        """A matcher whose output is complete refuses the end, though nothing else may follow."""
        count = matcher.advance(tokens) if tokens else 0
        complete = not self._failed(matcher) and matcher.stopped
        return count + (count < len(tokens) and tokens[count] in self._complete and complete)

    def _failed(self, matcher: Matcher) -> bool:
        error = matcher.error
        self.error = self.error or error
        return error is not None

    def _go_back(self) -> bool:
        """To the last position that is not known, to take another token there."""
        if self._at - self._first > len(self._longest[0]):
            part = slice(self._first, self._at)
            self._longest = self.tokens[part], self.confidence[part]
        at = self._at - 1
        while at >= self._first and self._row.known[at]:
            at -= 1
        self._retries += 1
        if at < self._first or self._retries > _MOST_RETRIES or self.error is not None:
            return False
        self._tried = {place: tokens for place, tokens in self._tried.items() if place <= at}
        self._tried.setdefault(at, []).append(self.tokens[at])
        self._matcher = self._origin.copy()
        self._advance(self._matcher, self.tokens[self._first : at])
        self._at = at
        return True

    def come_back(self) -> bool:
        """Go on from some position of the longest walk on the kept path; False if there is none that fits:
        it is verified, as it may come from anywhere."""
        row, first, last = self._row, self._first, self._last
        kept = row.path[first:last]
        end = next((at for at, token in enumerate(kept) if token in self._ends), len(kept) - 1) + 1
        kept = kept[:end]
        known = [(at, row.ids[first + at]) for at in range(last - first) if row.known[first + at]]
        if min(kept) < 0 or any(at >= end or kept[at] != token for at, token in known):
            return False
        walked, sure = self._longest
        turns = range(min(len(walked), end), 0, -1)
        for turn in (*[at for at in turns if not row.known[first + at - 1]][:_MOST_RETURNS], 0):
            tokens = [*walked[:turn], *kept[turn:]]
            if self._advance(self._origin.copy(), tokens) < len(tokens):
                continue
            self.tokens[first:last] = [*tokens, *[-1] * (last - first - end)]
            self.confidence[first : first + end] = [*sure[:turn], *row.likely[first + turn : first + end]]
            return True
        return False
