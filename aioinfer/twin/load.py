"""Load: what arrives at an engine, and when, as far as a simulation needs it.

A prompt is known by its *pieces*: (content, tokens) pairs, where equal contents are equal tokens. So prompts
share a prefix in a simulation where they did in reality, and no text is needed::

    turn 1   (system, 400) (question 1, 60)                                       ──► answer of 120 tokens
    turn 2   (system, 400) (question 1, 60) (ANSWER, 120) (question 2, 35)        ──► ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ANSWER", "CONTENTS", "Load", "Pieces", "Session", "Turn", "single", "tokens_of"]

#: (content, tokens): content is a number from 1 on and below CONTENTS
Pieces: TypeAlias = tuple[tuple[int, int], ...]
#: the content of all outputs; what precedes it tells them apart
ANSWER = 0
#: contents are token ids of the simulated model
CONTENTS = 1 << 30


class Turn(NamedTuple):
    """One request of a session."""

    #: seconds from the end of the turn before; of the first turn, from the session's beginning
    think: float
    #: what the prompt has behind the conversation so far
    pieces: Pieces
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow one another; most have one turn.

    ``at`` is in seconds from the beginning of the load. ``name`` is the routing key of policies that look at
    one, ``priority`` that of each request.
    """

    at: float
    turns: Sequence[Turn]
    name: str | None = None
    priority: int = 0
    #: further keyword arguments of :meth:`aioinfer.Engine.generate`, such as ``deadline``
    options: tuple[tuple[str, float], ...] = ()


#: sessions in the order of their beginnings; made while they are simulated, where it is a generator
Load: TypeAlias = Iterable[Session]


def single(at: float, pieces: Pieces, output_tokens: int) -> Session:
    """A session of one request."""
    return Session(at, (Turn(0.0, pieces, output_tokens),))


def tokens_of(pieces: Pieces, vocabulary: int = CONTENTS) -> npt.NDArray[np.int32]:
    """The token ids of a prompt, int32 [tokens]: the contents, or what stands for them in a smaller
    ``vocabulary``."""
    if not pieces:
        return np.empty(0, np.int32)
    contents, lengths = (np.asarray(each, np.int64) for each in zip(*pieces, strict=True))
    ids = np.repeat(contents, lengths)
    if vocabulary < CONTENTS:
        within = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        ids = (ids * 7919 + within * 31) % vocabulary
    return ids.astype(np.int32)
