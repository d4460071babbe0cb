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

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from aioinfer.text.grammar import GrammarState, Matcher

__all__ = ["Answer", "BlockRow", "Path", "PathSearch", "Question", "Search", "Walk"]

#: A proposed token with more confidence than this is not weighed against the others that are allowed.
_SURE = 0.99
#: Beyond positions that are right together with less probability than this, allowed tokens are not weighed:
#: no round would write one for that.
_FLOOR = 0.5


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
    #: of the round before, -1 where it has no token
    path: list[int]


class Path(NamedTuple):
    """Tokens of a block, -1 behind the one that ends the output, and their confidences."""

    tokens: list[int]
    confidence: list[float]


class Question(NamedTuple):
    """Which of the tokens that ``matcher`` allows has position ``at`` of the block?"""

    at: int
    matcher: Matcher


class Answer(NamedTuple):
    """The token, -1 for none, and its confidence among those that are allowed."""

    token: int
    confidence: float


#: A search in steps, so that the questions of all rows of a round are answered at once. None: there is no
#: path.
Search: TypeAlias = Generator[Question, Answer, Path | None]


class PathSearch(Protocol):
    """The grammar of one request, at the first position of its output that is not known."""

    state: GrammarState

    def take(self, start: int, ids: Sequence[int], known: Sequence[bool]) -> None:
        """Move on to the first unknown position of a block."""

    def search(self, row: BlockRow) -> Search:
        """Find a path for a block that :meth:`take` has seen."""


class Walk:
    """A walk from the first unknown position on: the proposed token where the grammar allows it, else the
    likeliest that it allows. A token is as sure as the model is of it, or, if that is more, as the tokens
    from the first unknown position up to it are among those that the grammar allows at theirs.
    """

    __slots__ = ("_at", "_ended", "_ends", "_matcher", "state")

    def __init__(self, state: GrammarState, output_ids: Sequence[int], ends: frozenset[int]) -> None:
        """``output_ids``: the output so far; ``ends``: tokens that end it."""
        self.state = state
        self._ends = ends
        # The state's own matcher stays at the start: rows of a slot that the request has lost go on for a
        # while, and what they write is void.
        self._matcher = state.origin.copy()
        self._at = state.begin
        self._ended = False
        self._accept(output_ids)

    def take(self, start: int, ids: Sequence[int], known: Sequence[bool]) -> None:
        first = at = max(0, self._at - start)
        while at < len(ids) and known[at]:
            at += 1
        self._accept(ids[first:at])

    def _accept(self, tokens: Sequence[int]) -> None:
        for number, token in enumerate(tokens):
            if token in self._ends:
                self._ended = True
                tokens = tokens[:number]
                break
        if tokens and not self._ended and self._matcher.advance(tokens) < len(tokens):
            self.state.failed = self._matcher.error or "its output is none of its grammar"
            self._ended = True
        self._at += len(tokens)

    def search(self, row: BlockRow) -> Search:
        size, at = len(row.ids), self._at - row.start
        tokens, confidence = [-1] * size, [0.0] * size
        if self._ended or not 0 <= at < size:
            return Path(tokens, confidence)
        matcher = self._matcher.copy()
        sure = 1.0
        while at < size:
            run, sures = self._run(row, at, sure)
            count = matcher.advance(run)
            tokens[at : at + count] = run[:count]
            confidence[at : at + count] = row.confidence[at : at + count]
            if count:
                sure = sures[count - 1]
            at += count
            if at == size or (count and run[count - 1] in self._ends):
                break
            if row.known[at]:
                return self._kept(row)
            answer = yield Question(at, matcher)
            if answer.token < 0:
                return self._kept(row)
            sure *= answer.confidence
            tokens[at] = answer.token
            confidence[at] = max(sure, row.confidence[at] * (row.tokens[at] == answer.token))
            if answer.token in self._ends:
                at += 1
                break
            matcher.advance([answer.token])
            at += 1
        return self._kept(row) if any(row.known[at:]) else Path(tokens, confidence)

    def _run(self, row: BlockRow, at: int, sure: float) -> tuple[list[int], list[float]]:
        """Known and proposed tokens from ``at`` on that are taken if they are allowed, up to an end, and how
        sure all up to each are."""
        run: list[int] = []
        sures: list[float] = []
        for token, known, own in zip(_where(row, at), row.known[at:], row.confidence[at:], strict=True):
            if not known:
                if own < _SURE and sure > _FLOOR:
                    break
                sure *= own
            run.append(token)
            sures.append(sure)
            if token in self._ends:
                break
        return run, sures

    def _kept(self, row: BlockRow) -> Path | None:
        """The path of the round before."""
        if all(token < 0 for token in row.path):
            self.state.failed = self._matcher.error or "no token is allowed"
            return None
        own = zip(row.path, row.tokens, row.confidence, strict=True)
        return Path(row.path, [sure * (token == proposed) for token, proposed, sure in own])


def _where(row: BlockRow, at: int) -> list[int]:
    found = zip(row.ids[at:], row.tokens[at:], row.known[at:], strict=True)
    return [token if known else proposed for token, proposed, known in found]
