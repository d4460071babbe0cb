"""Observers: follow an engine's requests and steps without a part in them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aioinfer.request import Output
    from aioinfer.scheduling.step import Step

__all__ = ["Observer", "Observers"]

_log = logging.getLogger("aioinfer")


class Observer:
    """Base class: methods do nothing. All are called on the engine's loop, :meth:`closed` elsewhere, too, if
    the engine outlived its loop. None may wait, and :meth:`stepped` has to be O(1)."""

    def opened(self, output: Output, *, chat: bool) -> None:
        """A request was accepted, in the task that asked for it. ``chat``: its prompt is messages."""

    def ended(self, output: Output) -> None:
        """The request has its last token and its end, or was refused while it was tokenized. Once each."""

    def rejected(self) -> None:
        """The queue was full before a request was made."""

    def stepped(self, step: Step, lag: float) -> None:
        """A step was computed; the loop reads it ``lag`` seconds after its end."""

    def changed(self) -> None:
        """The engine was given other weights or adapters, or an attempt has failed."""

    def failed(self, cause: BaseException) -> None:
        """The engine is lost, and its streams have ended."""

    def closed(self) -> None:
        """The engine is closed; nothing follows."""


_Kind = TypeVar("_Kind", bound=Observer)


class Observers:
    """The observers of a running engine. One that raises is logged and not called again."""

    __slots__ = ("_each",)

    def __init__(self) -> None:
        self._each: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._each)

    def add(self, observer: Observer) -> None:
        self._each = (*self._each, observer)

    def dismiss(self, *kinds: type[Observer]) -> None:
        """Close those of these classes, and forget them."""
        gone = [each for each in self._each if isinstance(each, kinds)]
        self._each = tuple(each for each in self._each if each not in gone)
        for each in gone:
            each.closed()

    def find(self, kind: type[_Kind]) -> _Kind | None:
        """The first one of a class."""
        return next((each for each in self._each if isinstance(each, kind)), None)

    def opened(self, output: Output, *, chat: bool) -> None:
        self._tell("opened", output, chat=chat)

    def ended(self, output: Output) -> None:
        self._tell("ended", output)

    def rejected(self) -> None:
        self._tell("rejected")

    def stepped(self, step: Step, lag: float) -> None:
        self._tell("stepped", step, lag)

    def changed(self) -> None:
        self._tell("changed")

    def failed(self, cause: BaseException) -> None:
        self._tell("failed", cause)

    def closed(self) -> None:
        self._tell("closed")
        self._each = ()

    def _tell(self, event: str, *what: Any, **named: Any) -> None:
        for each in self._each:
            try:
                getattr(each, event)(*what, **named)
            except Exception:
                _log.exception("%s raised and is switched off", type(each).__name__)
                self._each = tuple(other for other in self._each if other is not each)
