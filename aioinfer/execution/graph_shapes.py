"""GraphShapes: what captured steps have room for, and which of them computes a step.

A captured step has fixed numbers of rows and positions; what a step has fewer of is padding::

    positions   decode decode decode  ·  ·    chunk chunk chunk chunk | chunk chunk  ·  ·  ·  ·
                ├──────── rows ─────────┤    ├──────────────────── tokens ───────────────────┤

``rows`` are those that generate, of a position each (of a block each for a diffusion model); after them are
the positions of at most ``chunks`` rows of any length: chunks of prompts, and rows that verify drafts. So a
step of decodes, a mixed step and a prefill are shapes of one kind. Which there are is decided when an engine
starts; it imports no torch, for the loop's thread asks which one a step takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = ["MAX_CHUNKS", "GraphShape", "GraphShapes", "mixed_shapes"]

#: rows besides decodes, and logits besides theirs, of a captured step: more is rare, and would make every
#: step's attention and head do more of nothing
MAX_CHUNKS = 64
#: fewest positions after the decodes
_FEWEST_TOKENS = 16
#: from here on there are four numbers of positions per doubling: padding is a fifth at most
_FINE = 256
#: decodes that also a step without any computes
_FEWEST_ROWS = 4
#: positions of a row with which it matters little if the row is padding
_TOKENS_PER_ROW = 8


class GraphShape(NamedTuple):
    """Shape of a captured step, or the least shape that a step needs."""

    #: that generate, of a position or a block each
    rows: int
    #: positions after them
    tokens: int = 0
    #: rows that these belong to; as many logits are computed besides those of ``rows``
    chunks: int = 0

    @property
    def logits(self) -> int:
        """Rows of logits; of a diffusion model, in blocks."""
        return self.rows + self.chunks


class GraphShapes:
    """All that are captured."""

    def __init__(self, shapes: Iterable[GraphShape] = ()) -> None:
        self._rows: dict[int, list[int]] = {}
        self._chunks: dict[int, int] = {}
        for rows, tokens, chunks in sorted(shapes):
            self._rows.setdefault(tokens, []).append(rows)
            self._chunks[tokens] = chunks
        self._tokens = sorted(self._rows)

    def __iter__(self) -> Iterator[GraphShape]:
        """The largest, in positions, first."""
        found = [
            GraphShape(rows, tokens, self._chunks[tokens])
            for tokens, sizes in self._rows.items()
            for rows in sizes
        ]
        return iter(sorted(found, key=lambda shape: (shape.rows + shape.tokens, shape), reverse=True))

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def fit(self, need: GraphShape) -> GraphShape | None:
        """The shape with room for this and the fewest positions after its rows; None: there is none."""
        for tokens in self._tokens[bisect_left(self._tokens, need.tokens) :]:
            sizes, chunks = self._rows[tokens], self._chunks[tokens]
            at = bisect_left(sizes, need.rows)
            if need.chunks <= chunks and at < len(sizes):
                return GraphShape(sizes[at], tokens, chunks)
        return None


def mixed_shapes(most_rows: int, most_tokens: int) -> list[GraphShape]:
    """Shapes for steps with up to ``most_tokens`` positions beside up to ``most_rows`` decodes; none if one
    of these is 0. Most of the work is in positions, so there are many numbers of these and few of rows."""
    if not (most_rows and most_tokens):
        return []
    return [
        GraphShape(rows, tokens, min(tokens, MAX_CHUNKS))
        for tokens in _token_sizes(most_tokens)
        for rows in _row_sizes(most_rows, tokens)
    ]


def _token_sizes(most: int) -> list[int]:
    sizes, size, step = [], _FEWEST_TOKENS, _FEWEST_TOKENS
    while size < most:
        sizes.append(size)
        # Doubled at first, then by a half, then by quarters of a power of two.
        step = size if size < _FINE // 2 else _FINE // 4 if size < _FINE else (1 << size.bit_length()) // 8
        size += step
    return [*sizes, most]


def _row_sizes(most: int, tokens: int) -> list[int]:
    """Powers of four, without those for which the next one would do; the smallest of all, and the most."""
    powers = [_FEWEST_ROWS]
    while powers[-1] * 4 < most:
        powers.append(powers[-1] * 4)
    kept = {rows for rows in powers if 4 * rows * _TOKENS_PER_ROW > tokens or rows == _FEWEST_ROWS}
    return sorted({rows for rows in kept if rows < most} | {most})
