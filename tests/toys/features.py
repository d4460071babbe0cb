"""ToyFeatures: which units a toy has encoded. A row with another image's features fails, and so does one
whose features are not there."""

from __future__ import annotations

from aioinfer.images.support import ImageSupport
from aioinfer.scheduling.step import EncodeWork, Encoding, Row
from tests.toys.states import TaintError


class ToyFeatures:
    """By number, the key of the unit."""

    def __init__(self, support: ImageSupport) -> None:
        self._support = support
        self.keys: dict[int, bytes] = {}
        #: slices that are computed of units that are not whole
        self.begun: dict[int, int] = {}
        #: by key, how often it was encoded
        self.encoded: dict[bytes, int] = {}

    def encode(self, encoding: Encoding) -> None:
        for number in encoding.dropped:
            self.keys.pop(number, None)
            self.begun.pop(number, None)
        for work in encoding.works:
            self._work(work)

    def _work(self, work: EncodeWork) -> None:
        if work.number in self.keys:
            raise TaintError(f"features {work.number} are encoded twice")
        if self.begun.pop(work.number, 0) != work.part:
            raise LookupError(f"slice {work.part} of features {work.number} does not follow the last one")
        if not work.ends:
            self.begun[work.number] = work.part + 1
            return
        self.keys[work.number] = work.unit.key
        self.encoded[work.unit.key] = self.encoded.get(work.unit.key, 0) + 1

    def spoil(self, encoding: Encoding) -> None:
        """A step of the encoder failed."""
        for work in encoding.works:
            self.keys.pop(work.number, None)
            self.begun.pop(work.number, None)

    def check(self, row: Row) -> None:
        """Raise TaintError unless a row has the features of all its positions that are images'; LookupError:
        they are not there, because a step of the encoder failed."""
        images, given = row.sequence.output.images, {}
        for part in row.features:
            for at in range(part.length):
                given[row.start + part.at + at] = part.number, part.first + at
        for unit in () if images is None else images.units:
            if self._support.two_way and unit.start < row.kv_length < unit.stop:
                raise TaintError(f"{row.sequence}: a row ends within an image")
            for position in range(max(row.start, unit.start), min(row.kv_length, unit.stop)):
                number, at = given.pop(position, (0, 0))
                if number not in self.keys:
                    raise LookupError(f"{row.sequence}: there are no features {number}")
                if self.keys[number] != unit.key or at != position - unit.start:
                    raise TaintError(f"{row.sequence}: position {position} has another image's features")
        if given:
            raise TaintError(f"{row.sequence}: positions of text have features: {sorted(given)}")
