"""Lookup: what followed the last time that these tokens were there, in a prediction or in the request's own
text.

Prompt lookup decoding (Saxena, 2023), in the text of one request only: nothing is shared between requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioinfer.speculation.drafter import NO_IDS, DraftRequest

__all__ = ["LookupDrafter"]

#: tokens that have to be the same at least, and from which on more of them make no difference
_LEAST, _MOST = 2, 8
#: places that are compared further, the newest of those with the same last token; and the length of text
#: that is searched for them before the rest
_PLACES, _RECENT = 64, 4096

_Ids = npt.NDArray[np.int32]


class LookupDrafter:
    """Looks in the prediction first, then in prompt and output, newest first. See
    :class:`~aioinfer.speculation.drafter.Drafter`."""

    def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
        tokens = request.tokens
        request.predicted = False
        if len(request.prediction):
            found: list[int] = self._predicted(request, tokens, most).tolist()
            if found:
                request.predicted = True
                return found
        place, request.matched = _last_place(tokens, tokens[:-1])
        return () if place is None else _repeated(tokens[place + 1 :], most)

    def _predicted(self, request: DraftRequest, tokens: _Ids, most: int) -> _Ids:
        """The continuation in the prediction, whose tokens the output has used up to a point."""
        prediction = request.prediction
        read, at = request.memory if isinstance(request.memory, tuple) else (request.prompt_length, 0)
        new = tokens[read:]
        if not np.array_equal(prediction[at : at + len(new)], new):
            # The output has left the prediction. It comes back where both have the same tokens again.
            place = _next_place(tokens[request.prompt_length :], prediction, at)
            if place is None:
                return NO_IDS
            at = place + 1
        else:
            at += len(new)
        request.memory = (len(tokens), at)
        return prediction[at : at + most]


def _last_place(tokens: _Ids, text: _Ids) -> tuple[int | None, int]:
    """The last index in ``text`` up to which it has as many of the last ``tokens`` as possible, and how many
    these are."""
    found, length = _longest(tokens, text, _places(text, tokens[-1]))
    return (int(found[-1]), length) if length >= _LEAST else (None, 0)


def _next_place(tokens: _Ids, text: _Ids, at: int) -> int | None:
    """The same, with the first index from ``at`` on, or else the last one before."""
    if not len(tokens):
        return None
    ahead = np.flatnonzero(text[at:] == tokens[-1])[:_PLACES] + at
    found, length = _longest(tokens, text, ahead)
    if length >= _LEAST:
        return int(found[0])
    found, length = _longest(tokens, text, _places(text[:at], tokens[-1]))
    return int(found[-1]) if length >= _LEAST else None


def _places(text: _Ids, token: np.int32) -> npt.NDArray[np.int64]:
    """The places of ``token`` in ``text``, rising; the newest places, if there are many."""
    recent = max(0, len(text) - _RECENT)
    found = np.flatnonzero(text[recent:] == token) + recent
    if recent and len(found) < _PLACES:
        found = np.flatnonzero(text == token)
    return found[-_PLACES:]


def _longest(tokens: _Ids, text: _Ids, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """The ``places``, where ``text`` has the last token, with the longest match of the tokens before; and the
    length of the match."""
    length = min(len(places), 1)
    while length and length < min(_MOST, len(tokens)):
        further = places[places >= length]
        further = further[text[further - length] == tokens[-1 - length]]
        if not len(further):
            break
        places, length = further, length + 1
    return places, length


def _repeated(ids: _Ids, count: int) -> list[int]:
    """The first ``count`` of ``ids``; past its end the text repeats itself."""
    found: list[int] = (ids[:count] if len(ids) >= count else np.resize(ids, count)).tolist()
    return found
