"""Steer: a logits processor that an application changes while outputs are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioinfer.errors import InvalidRequest
from aioinfer.inputs import entries
from aioinfer.steering.processors import Ids, Logits

__all__ = ["Steer"]

_MOST, _LONGEST = 4096, 256


class Steer:
    """A logits processor that an application keeps: what it is told holds from the next token that is sampled
    on, in every request that has it::

        steer = Steer()
        stream = engine.generate(prompt, SamplingParams(logits_processors=[steer]))
        async for chunk in stream:
            steer.ban(ids)

    Sequences are lists of token ids. ``engine.tokenizer.encode_part`` gives those of a text; behind a space
    or split in another way it has others. The end of the prompt can begin a sequence. One object may serve
    several requests, and may be told from any thread. Tokens that were sampled already stay;
    ``Stream.rewind`` takes them back, and ``Stream.inject`` forces others.
    """

    __slots__ = ("_banned", "_found")

    def __init__(self) -> None:
        self._banned: frozenset[tuple[int, ...]] = frozenset()
        #: replaced as a whole: the device's thread reads it
        self._found: tuple[npt.NDArray[np.int64], tuple[tuple[int, ...], ...]] = _sorted(self._banned)

    def ban(self, *sequences: Sequence[int]) -> None:
        """None of these is completed from now on. Raises InvalidRequest."""
        self._become(self._banned.union(map(_checked, sequences)))

    def allow(self, *sequences: Sequence[int]) -> None:
        """These are no longer banned; without any, none is. Raises InvalidRequest."""
        self._become(self._banned.difference(map(_checked, sequences)) if sequences else frozenset())

    def __call__(self, ids: Ids, logits: Logits) -> None:
        alone, longer = self._found
        logits[alone[alone < len(logits)]] = -np.inf
        for *before, last in longer:
            if last < len(logits) and ids[-len(before) :].tolist() == before:
                logits[last] = -np.inf

    def _become(self, banned: frozenset[tuple[int, ...]]) -> None:
        if len(banned) > _MOST:
            raise InvalidRequest("sequences", f"are {len(banned)}: {_MOST} at most")
        self._banned, self._found = banned, _sorted(banned)


def _sorted(banned: frozenset[tuple[int, ...]]) -> tuple[npt.NDArray[np.int64], tuple[tuple[int, ...], ...]]:
    """The tokens that are banned alone, and the longer sequences."""
    alone = np.array(sorted(each[0] for each in banned if len(each) == 1), np.int64)
    return alone, tuple(sorted(each for each in banned if len(each) > 1))


def _checked(sequence: Sequence[int]) -> tuple[int, ...]:
    ids = entries("sequences", sequence, _LONGEST, "token ids")
    if not ids or any(type(each) is not int or not 0 <= each < 2**31 for each in ids):
        raise InvalidRequest("sequences", "must be lists of token ids")
    return ids
