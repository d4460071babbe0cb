"""Tuning: what an engine changes in the whole process while it runs, and puts back when it is closed.

Two threads per engine, the loop's and the launch thread, share one interpreter lock with everything else in
the process. Two habits of the interpreter then cost whole steps:

- A thread that wants the lock back asks for it after the *switch interval*, 5 ms by default: longer than many
  a step on a GPU.
- The *garbage collector* runs when enough was allocated, in the middle of a step as soon as anywhere, and now
  and then walks over all there is: hundreds of milliseconds with torch and transformers loaded. So an engine
  freezes what is there once it has started (``gc.freeze``: it is not walked over again; what can be freed is
  collected before), and while steps are in flight nothing is collected but every so many steps, right after
  a launch, when the device has something to do.

This is on by default only with an asynchronous device (CUDA), and ``switch_interval=0`` together with
``garbage="python"`` leaves the process alone. Importing changes nothing. Several engines share the settings,
in whatever order they open and close; the last one restores what the first one found. What somebody else has
changed meanwhile is left as it is. (What somebody froze or switched off as well, while an engine had it so,
cannot be told apart, and is undone with it.)
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["AUTOMATIC_GC", "FROZEN", "SWITCH_INTERVAL", "Garbage", "Shared", "Tuning", "frozen"]

T = TypeVar("T")

#: seconds; long enough that switching costs nothing, short against a step
_SHORT = 3e-4
#: more than what some Pythons (3.12: 375) freeze when they start; anybody's process has many times as much
_FROZEN_AT_START = 2000
#: launches between two collections of what is young, and young ones between two of everything
_LAUNCHES = 256
_YOUNG = 16


class Shared(Generic[T]):
    """One setting of the process that several holders want to have otherwise.

    Of what they want and what was found ``pick`` chooses. Once somebody else has changed it, it is left alone
    until the last holder is gone.
    """

    def __init__(
        self, read: Callable[[], T], write: Callable[[T], object], pick: Callable[[list[T]], T]
    ) -> None:
        self._read = read
        self._write = write
        self._pick = pick
        # Collecting garbage, which is one of the settings, may end another holder.
        self._lock = threading.RLock()
        self._wanted: dict[object, T] = {}
        self._found: T
        #: what it must be unless somebody else changed it
        self._expected: T

    def hold(self, wanted: T) -> object:
        """Have it so until what this returns is handed to :meth:`release`."""
        with self._lock:
            if not self._wanted:
                self._found = self._expected = self._read()
            holder = object()
            self._wanted[holder] = wanted
            self._settle()
            return holder

    def release(self, holder: object) -> None:
        """Want nothing any more. Idempotent."""
        with self._lock:
            if self._wanted.pop(holder, None) is not None:
                self._settle()

    def _settle(self) -> None:
        value = self._pick([self._found, *self._wanted.values()])
        if self._read() == self._expected != value:
            self._write(value)
            self._expected = self._read()


def frozen() -> bool:
    """Somebody froze what was there."""
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
#: what somebody froze before is neither frozen again nor thawed
FROZEN: Shared[bool] = Shared(frozen, _freeze, any)
AUTOMATIC_GC: Shared[bool] = Shared(gc.isenabled, _collect_automatically, all)


class Garbage:
    """Collects between steps, not within them: automatic collection is off while steps are in flight."""

    __slots__ = ("_holder", "_launches")

    def __init__(self) -> None:
        self._holder: object | None = None
        self._launches = 0

    def launched(self) -> None:
        """A step has just been launched: now is the best moment of a busy engine."""
        if self._holder is None:
            self._holder = AUTOMATIC_GC.hold(False)
        self._launches += 1
        if self._launches % _LAUNCHES == 0:
            gc.collect(2 if self._launches % (_LAUNCHES * _YOUNG) == 0 else 1)

    def rest(self) -> None:
        """No step is in flight and none can be: from here on it is as it was. Idempotent."""
        if self._holder is not None:
            AUTOMATIC_GC.release(self._holder)
            self._holder = None
            gc.collect(1)


class Tuning:
    """What one running engine wants of the process.

    ``switch_interval``: seconds, None to leave it. ``garbage``: freeze what is there, and have
    :attr:`garbage` collect for as long as the engine runs.
    """

    def __init__(self, switch_interval: float | None, garbage: bool) -> None:
        self.garbage = Garbage() if garbage else None
        self._interval = None if switch_interval is None else SWITCH_INTERVAL.hold(switch_interval)
        self._frozen = FROZEN.hold(True) if garbage else None

    @classmethod
    def of(cls, switch_interval: float | None, garbage: str, *, asynchronous: bool, thread: bool) -> Tuning:
        """What a config's two options mean for an engine whose device is ``asynchronous`` or not, with a
        launch ``thread`` or without."""
        if switch_interval is None and asynchronous and thread:
            switch_interval = _SHORT
        return cls(switch_interval or None, garbage == "idle" or (garbage == "auto" and asynchronous))

    def undo(self) -> None:
        """The engine is closed. Idempotent."""
        if self.garbage is not None:
            self.garbage.rest()
        SWITCH_INTERVAL.release(self._interval)
        FROZEN.release(self._frozen)

    def __del__(self) -> None:
        # An engine that nobody closed, say because its loop died.
        self.undo()
