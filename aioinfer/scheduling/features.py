"""Features: which units of images are encoded, and which are next.

A prompt's images are encoded when its first chunk reaches them, and not at all if the prefix cache has their
positions. The features of a unit stay on the device under a number, least recently used first out, and are
pinned for each request from when they are encoded for it until the row with the unit's last position::

    chunk        chunk ends here                encode step          chunk
    |── text ───|■■■■ unit ■■■■|── text ...      (no rows)     |■■■■ unit ■■■■|── text ...
                 not encoded: wanted             number 7       Row.features: number 7

Steps reach the device in order, so a number that a step drops is one that no later step has. Nothing is read
back from it.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from typing import TYPE_CHECKING

from aioinfer.scheduling.step import EncodeWork, Encoding, RowFeatures

if TYPE_CHECKING:
    from aioinfer.images.prompt import ImageUnit
    from aioinfer.scheduling.sequence import Sequence
    from aioinfer.scheduling.step import Step

__all__ = ["FeatureCache"]


class _Entry:
    """The features of a unit."""

    __slots__ = ("length", "number", "parts", "pins", "through")

    def __init__(self, number: int, length: int, parts: int) -> None:
        self.number = number
        self.length = length
        #: slices in which it is encoded, and how many are launched
        self.parts = parts
        self.through = 0
        #: keys of the requests that need it
        self.pins: set[int] = set()

    @property
    def encoded(self) -> bool:
        return self.through == self.parts


class FeatureCache:
    """The features of one device, as the loop knows them. A part of
    :class:`~aioinfer.scheduling.memory.Memory`."""

    __slots__ = ("_dropped", "_entries", "_lost", "_next", "_step_patches", "_wanted", "capacity", "encoded",
                 "positions", "two_way")  # fmt: skip

    def __init__(self, capacity: int, step_patches: int, *, two_way: bool = False) -> None:
        """
        Args:
            capacity: positions whose features are kept; more only for a unit that does not fit alone.
            step_patches: positions that the encoder computes in a step at most; a unit with more is
                encoded in slices of its layers.
            two_way: no chunk ends within a unit.
        """
        self.capacity = capacity
        self.two_way = two_way
        self._step_patches = step_patches
        #: by :func:`_name`, the least recently used first
        self._entries: OrderedDict[tuple[str, bytes], _Entry] = OrderedDict()
        #: positions of these
        self.positions = 0
        self._next = 1
        self._dropped: list[int] = []
        #: numbers that steps of the encoder which failed were to make, and the last step that may read them
        self._lost: dict[int, int] = {}
        #: by the keys of requests whose next chunk stopped in front of a unit: the first such unit, and where
        #: the chunk would have ended
        self._wanted: OrderedDict[int, tuple[Sequence, int, int]] = OrderedDict()
        #: units that were encoded
        self.encoded = 0

    # -- chunks ---------------------------------------------------------------------------------

    def stop(self, sequence: Sequence, start: int, stop: int) -> int:
        """The position up to ``stop`` before which a chunk from ``start`` on has all it needs; what is
        missing is wanted from now on."""
        self._wanted.pop(sequence.key, None)
        for index, unit in _overlapping(sequence, start, stop):
            entry = self._entries.get(_name(sequence, unit))
            if entry is None or not entry.encoded:
                self._wanted[sequence.key] = sequence, index, stop
                return max(start, unit.start)
            entry.pins.add(sequence.key)
        return stop

    def whole(self, sequence: Sequence, start: int, stop: int, most: int) -> int:
        """The end of a chunk that would end at ``stop``, if units are not cut: in front of the unit or, where
        nothing is in front of it, behind it, as far as the chunk may have ``most`` positions."""
        if not self.two_way or stop <= start:
            return stop
        for _, unit in _overlapping(sequence, stop - 1, stop):
            if unit.stop > stop:
                behind = unit.stop if unit.stop - start <= most else start
                return unit.start if unit.start > start else behind
        return stop

    def take(self, sequence: Sequence, start: int, stop: int) -> list[RowFeatures]:
        """The features of a row of positions [start, stop), which is planned now."""
        found = []
        for _, unit in _overlapping(sequence, start, stop):
            name = _name(sequence, unit)
            entry = self._entries[name]
            self._entries.move_to_end(name)
            first, last = max(start, unit.start), min(stop, unit.stop)
            found.append(RowFeatures(first - start, entry.number, first - unit.start, last - first))
            if last == unit.stop:
                entry.pins.discard(sequence.key)
        return found

    def release(self, sequence: Sequence) -> None:
        """No chunk of the request is computed any more, or until it goes on."""
        self._wanted.pop(sequence.key, None)
        for unit in _units(sequence):
            entry = self._entries.get(_name(sequence, unit))
            if entry is not None:
                entry.pins.discard(sequence.key)
                if not (entry.pins or entry.encoded):
                    self._drop(_name(sequence, unit))  # its state between two layers is larger than features

    # -- encoding -------------------------------------------------------------------------------

    def encode(self) -> Encoding | None:
        """The next step of the encoder, for the first request that waits for it; None if nothing is wanted.

        It has the units of one request only: what raises is that request's. Where one finds no room, those
        behind it begin no unit, so that it gets the room of those in front."""
        crowded = False
        for sequence, index, stop in self._wanted.values():
            works, short = self._works(sequence, index, stop, begins=not crowded)
            if works:
                dropped, self._dropped = tuple(self._dropped), []
                return Encoding(tuple(works), dropped, sequence)
            crowded = crowded or short
        return None

    def _works(
        self, sequence: Sequence, index: int, stop: int, *, begins: bool
    ) -> tuple[list[EncodeWork], bool]:
        """What a step may do for a request, and whether there is no room for its next unit."""
        works: list[EncodeWork] = []
        left = self._step_patches
        for unit in _units(sequence)[index:]:
            if unit.start >= stop:
                break
            entry = self._entries.get(_name(sequence, unit))
            if entry is None and begins:
                entry = self._make(sequence, unit)
            if entry is None:
                return works, True
            entry.pins.add(sequence.key)
            while not entry.encoded:
                cost = -(-unit.patches // entry.parts)
                if cost > left and works:
                    return works, False
                works.append(EncodeWork(entry.number, unit, entry.through, entry.parts))
                entry.through += 1
                self.encoded += entry.encoded
                left -= cost
        return works, False

    def _make(self, sequence: Sequence, unit: ImageUnit) -> _Entry | None:
        """An entry for a unit; None while there is no room beside what is pinned."""
        room = self.capacity - unit.length
        if self.positions > room:
            for key, entry in list(self._entries.items()):
                if not entry.pins:
                    self._drop(key)
                    if self.positions <= room:
                        break
            if self.positions > max(0, room):
                return None
        entry = _Entry(self._next, unit.length, max(1, -(-unit.patches // self._step_patches)))
        self._next += 1
        self._entries[_name(sequence, unit)] = entry
        self.positions += entry.length
        return entry

    def _drop(self, key: tuple[str, bytes]) -> None:
        entry = self._entries.pop(key)
        self.positions -= entry.length
        self._dropped.append(entry.number)

    # -- failures -------------------------------------------------------------------------------

    def failed(self, step: Step, newest: int) -> bool:
        """A step of the encoder raised: its units are not there; ``newest``: the last launched step. Returns
        whether that was its own fault, and not that of an earlier slice."""
        encoding = step.encoding
        assert encoding is not None, "it was a step of rows"
        numbers = {work.number for work in encoding.works}
        self._lost = {number: last for number, last in self._lost.items() if last >= step.id}
        own = not numbers & self._lost.keys()
        self._lost |= dict.fromkeys(numbers, newest)
        for key in [key for key, entry in self._entries.items() if entry.number in numbers]:
            self._drop(key)
        self._dropped += [number for number in encoding.dropped if number not in self._dropped]
        return own

    def distrust(self, sequence: Sequence) -> None:
        """The features that a request reads are not to be read again."""
        for unit in _units(sequence):
            if (name := _name(sequence, unit)) in self._entries:
                self._drop(name)

    def lacked(self, step: Step) -> bool:
        """Whether a step that raised had rows whose features were never made: the fault of none of them."""
        return any(each.number in self._lost for row in step.prefilling for each in row.features)

    def forget(self) -> None:
        """Other weights encode from now on; no request runs."""
        for key in list(self._entries):
            self._drop(key)

    # -- checks ---------------------------------------------------------------------------------

    def audit(self, prefilling: abc.Collection[Sequence]) -> None:
        """Assert by walking that what is pinned is needed."""
        needed = {
            (_name(sequence, unit), sequence.key)
            for sequence in prefilling
            for unit in _units(sequence)
            if unit.stop > sequence.cursor.computed
        }
        pinned = {(name, key) for name, entry in self._entries.items() for key in entry.pins}
        assert pinned <= needed, "features are pinned for a request that does not need them"
        keys = {sequence.key for sequence in prefilling}
        assert self._wanted.keys() <= keys, "features are wanted for a request that is not prefilling"
        assert self.positions == sum(entry.length for entry in self._entries.values())


def _units(sequence: Sequence) -> tuple[ImageUnit, ...]:
    images = sequence.output.images
    return () if images is None else images.units


def _name(sequence: Sequence, unit: ImageUnit) -> tuple[str, bytes]:
    """Names features. How soon an answer comes tells nobody which images those with other salts have sent."""
    return sequence.namespace.salt, unit.key


def _overlapping(sequence: Sequence, start: int, stop: int) -> abc.Iterator[tuple[int, ImageUnit]]:
    """The units with positions in [start, stop), and their indices. O(units of the request)."""
    for index, unit in enumerate(_units(sequence)):
        if unit.start >= stop:
            return
        if unit.stop > start:
            yield index, unit
