"""Tuning: settings of the whole process that an engine changes while it runs and restores when it closes.

The loop's thread and the launch thread share one interpreter lock with everything else in the process. Two
mechanisms of the interpreter can then delay a step by more than its own duration:

- A thread that waits for the lock requests it after the *switch interval*, 5 ms by default.
- The *garbage collector* runs after a number of allocations, also in the middle of a step, and from time to
  time traverses all objects. So a started engine collects once and freezes what is left (``gc.freeze``), and
  while steps are in flight it collects only right after a launch and after every 32 new streams. With torch
  and transformers loaded, 512 streams and steps of 6 ms, collections took 1.7 % of the loop's time, the
  longest one 3 ms, instead of 9 % and 134 ms (on two shared cores of a Xeon).

By default this applies only to an asynchronous device (CUDA), the interval also to ``aioinfer serve``, whose
process is its own: six bodies of 60,000 keys, parsed on a thread, delayed others by 0.46 s, and by 0.13 s
with it (on two shared cores of a Xeon). ``switch_interval=0`` together with
``gc="python"`` leaves the process unchanged. Importing changes nothing. Several engines share the settings
and may open and close in any order; the last one restores what the first one found. A setting that other code
has changed meanwhile is left alone. (If other code froze objects or disabled collection while an engine did
so, too, the two cannot be told apart, and closing undoes both.)
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = [
    "AUTOMATIC_GC",
    "FROZEN",
    "SHORT_INTERVAL",
    "SWITCH_INTERVAL",
    "Garbage",
    "Shared",
    "Tuning",
    "frozen",
]

T = TypeVar("T")

#: seconds; long enough that switching costs nothing, short against a step
SHORT_INTERVAL = 3e-4
#: more objects than some Pythons (3.12: 375) freeze when they start, and far fewer than an engine freezes
_FROZEN_AT_START = 2000
#: launches between two collections of the young generations, and at least those between two full collections
_LAUNCHES = 256
_FULL = 16 * _LAUNCHES
#: part of the time that full collections may take: of thousands of streams, one takes a tenth of a second
_FULL_SHARE = 1 / 2000
#: new streams after which the young generations are collected, which takes a few milliseconds for these
_STREAMS = 32


class Shared(Generic[T]):
    """One setting of the process, changed by several holders at a time.

    ``pick`` chooses from the values that they want and the one that was found. Once other code has changed
    the setting, it is left alone until the last holder has released it.
    """

    def __init__(
        self, read: Callable[[], T], write: Callable[[T], object], pick: Callable[[list[T]], T]
    ) -> None:
        self._read = read
        self._write = write
        self._pick = pick
        # Reentrant: collecting garbage, which a change may cause, can release another holder.
        self._lock = threading.RLock()
        self._wanted: dict[object, T] = {}
        self._found: T
        #: its value unless other code has changed it
        self._expected: T

    def hold(self, wanted: T) -> object:
        """Want a value until the returned holder is passed to :meth:`release`."""
        with self._lock:
            if not self._wanted:
                self._found = self._expected = self._read()
            holder = object()
            self._wanted[holder] = wanted
            self._settle()
            return holder

    def release(self, holder: object) -> None:
        """End what :meth:`hold` began. Idempotent."""
        with self._lock:
            if self._wanted.pop(holder, None) is not None:
                self._settle()

    def _settle(self) -> None:
        value = self._pick([self._found, *self._wanted.values()])
        if self._read() == self._expected != value:
            self._write(value)
            self._expected = self._read()


def frozen() -> bool:
    """Objects were frozen after the interpreter had started."""
    return gc.get_freeze_count() > _FROZEN_AT_START


def _freeze(on: bool) -> None:
    if on:
        gc.collect()
        gc.freeze()
    else:
        gc.unfreeze()


def _collect_automatically(on: bool) -> None:
    if on:
        gc.enable()
    else:
        gc.disable()


SWITCH_INTERVAL: Shared[float] = Shared(sys.getswitchinterval, sys.setswitchinterval, min)
#: objects that were frozen before the first engine are not frozen again, and stay frozen
FROZEN: Shared[bool] = Shared(frozen, _freeze, any)
AUTOMATIC_GC: Shared[bool] = Shared(gc.isenabled, _collect_automatically, all)


class Garbage:
    """Collects garbage between steps: automatic collection is off while steps are in flight.

    A collection of the young generations takes about a microsecond for each object that is new since the one
    before, and a full one for each that is not frozen. So the young are also collected when 32 streams
    have arrived, and a full collection waits until it is a small part of the time since the last one.
    """

    __slots__ = ("_clock", "_full_at", "_full_from", "_holder", "_launches", "_new_streams")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._holder: object | None = None
        self._launches = 0
        #: since the last collection
        self._new_streams = 0
        #: the launch from which on a full collection is due, and the time from which on it may be
        self._full_at = _FULL
        self._full_from = -math.inf

    def launched(self) -> None:
        """Call right after a launch, the best moment to collect while the engine is busy."""
        if self._holder is None:
            self._holder = AUTOMATIC_GC.hold(False)
        self._launches += 1
        if self._launches % _LAUNCHES == 0:
            start = self._clock()
            if self._launches >= self._full_at and start >= self._full_from:
                gc.collect(2)
                end = self._clock()
                self._full_at, self._full_from = self._launches + _FULL, end + (end - start) / _FULL_SHARE
            else:
                gc.collect(1)
            self._new_streams = 0

    def arrived(self) -> None:
        """Call for each new stream."""
        self._new_streams += 1
        if self._new_streams >= _STREAMS:
            self._new_streams = 0
            gc.collect(1)

    def rest(self) -> None:
        """Turn automatic collection back on: no step is in flight and none can be launched. Idempotent."""
        if self._holder is not None:
            AUTOMATIC_GC.release(self._holder)
            self._holder = None
            gc.collect(1)


class Tuning:
    """The settings of the process that one running engine holds.

    ``switch_interval`` is in seconds, None to leave it unchanged. ``garbage`` freezes the objects that exist,
    and makes :attr:`garbage` collect while the engine runs.
    """

    def __init__(self, switch_interval: float | None, garbage: bool) -> None:
        self.garbage = Garbage() if garbage else None
        self._interval = None if switch_interval is None else SWITCH_INTERVAL.hold(switch_interval)
        self._frozen = FROZEN.hold(True) if garbage else None

    @classmethod
    def of(cls, switch_interval: float | None, garbage: str, *, asynchronous: bool, thread: bool) -> Tuning:
        """Settings from the options ``switch_interval`` and ``gc`` of a config. ``asynchronous``: the device
        computes while Python does something else; ``thread``: there is a launch thread."""
        if switch_interval is None and asynchronous and thread:
            switch_interval = SHORT_INTERVAL
        return cls(switch_interval or None, garbage == "idle" or (garbage == "auto" and asynchronous))

    def undo(self) -> None:
        """Restore the settings: the engine is closed. Idempotent."""
        if self.garbage is not None:
            self.garbage.rest()
        SWITCH_INTERVAL.release(self._interval)
        FROZEN.release(self._frozen)

    def __del__(self) -> None:
        # An engine that was not closed, for example because its loop died.
        self.undo()
