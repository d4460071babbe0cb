"""Drafter: what proposes the next tokens of a sequence.

A draft changes speed and nothing else. The row that verifies drafts samples at each of its positions what
plain decoding would sample there, and goes on while that is the drafted token::

    input      last token   d1    d2    d3        k + 1 positions of one row
    samples    s1           s2    s3    s4        by the same sampler, (seed, position) and masks
    output     s1           s2    s3              s1 = d1, s2 = d2, s3 is not d3: it is the right token there

A sampled token is a function of logits, seed and position here (:mod:`aioinfer.sampling.noise`), so equality
is all that has to be checked, at any temperature. (Drafter-invariant speculative decoding: Daliri, Musco and
Suresh, arXiv 2408.07978.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["NO_IDS", "DraftRequest", "Drafter"]

#: no token ids, int32 [0]; read-only
NO_IDS: npt.NDArray[np.int32] = np.empty(0, np.int32)
NO_IDS.flags.writeable = False


class Drafter(Protocol):
    """Proposes tokens. Called on the thread that plans steps, for most steps of a request: it must take
    microseconds. An exception of it ends its proposals for that request, and nothing else."""

    def propose(self, request: DraftRequest, most: int) -> Sequence[int]:
        """The tokens that may follow ``request.tokens``, at most ``most`` of them; perhaps none. More tokens,
        and those from the first id on that the model does not have, are dropped."""


class DraftRequest:
    """A request as a drafter sees it."""

    __slots__ = (
        *("_buffer", "_length", "matched", "memory", "name", "predicted", "prediction", "prompt_length"),
    )

    def __init__(
        self,
        prompt_ids: npt.NDArray[np.int32],
        prediction_ids: npt.NDArray[np.int32] = NO_IDS,
        name: str = "",
    ) -> None:
        #: the caller's name for the request
        self.name = name
        self.prompt_length = len(prompt_ids)
        #: int32 [P]: what the caller expects the output to be
        self.prediction = _frozen(prediction_ids) if len(prediction_ids) else NO_IDS
        #: of the drafter's own
        self.memory: object = None
        #: the latest proposal came from the prediction
        self.predicted = False
        #: number of tokens that matched the text of the latest proposal; 0: not known
        self.matched = 0
        self._buffer = prompt_ids
        self._length = len(prompt_ids)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [n], prompt and output as far as they are known. A view that cannot be written to."""
        return _frozen(self._buffer[: self._length])

    def extend(self, output_ids: Sequence[int]) -> None:
        """``output_ids`` is the whole output, which only ever grows."""
        known = self._length - self.prompt_length
        count = len(output_ids) - known
        if count <= 0:
            return
        if self._length + count > len(self._buffer):
            larger = np.empty(max(64, 2 * (self._length + count)), np.int32)
            larger[: self._length] = self._buffer[: self._length]
            self._buffer = larger
        self._buffer[self._length : self._length + count] = output_ids[known:]
        self._length += count


def _frozen(array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    view = array.view()
    view.flags.writeable = False
    return view
