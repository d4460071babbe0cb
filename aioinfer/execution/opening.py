"""Opening: what a launch thread needs to open a device that can be given up."""

from __future__ import annotations

from aioinfer.execution.device import Progress

__all__ = ["Opening", "OpeningCancelled"]


class OpeningCancelled(BaseException):
    """The engine was given up while its device was being opened. Not an Exception: handlers of errors on the
    way do not concern it."""


class Opening:
    """The ``progress`` of a device that is being opened; once it is cancelled, it raises OpeningCancelled.

    Whatever takes long calls it again and again, also when nothing is new: that is not passed on.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._last: tuple[str, int, int] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Raise from the next call on. On any thread."""
        self._cancelled = True

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._cancelled:
            raise OpeningCancelled
        state = (stage, done, total)
        if self._progress is not None and state != self._last:
            self._last = state
            self._progress(stage, done, total)
