"""Checks and copies of what a caller gives, made before a call returns: nothing of it is read later."""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.errors import InvalidRequest

__all__ = ["check_ids", "check_range", "freeze", "thaw"]

_MAX_DEPTH = 200
_MAX_PARTS = 200_000
_ATOMS = (str, int, float, type(None), bytes)


def check_ids(field: str, ids: Sequence[Any], vocab_size: int) -> None:
    """Raise InvalidRequest unless all are token ids of the model. Takes about 60 ns per id."""
    # The set has one element if all is well: no loop of Python's.
    if set(map(type, ids)) - {int}:
        bad = next(token for token in ids if type(token) is not int)
        raise InvalidRequest(field, f"must be integer token ids, got one of type {type(bad).__name__}")
    check_range(field, ids, vocab_size)


def check_range(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest unless the model has all of these tokens."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        shown = str(bad) if -(1 << 63) <= bad < 1 << 63 else "an integer of more than 64 bits"
        raise InvalidRequest(field, f"{shown} is not a token id; the model has {vocab_size}")


def freeze(field: str, value: list[Any] | dict[str, Any]) -> Any:
    """A deep copy of plain data (text, numbers, lists, tuples, mappings, None), for :func:`thaw`; callables
    stay as they are.

    Raises InvalidRequest for other types and for data that is nested too deeply.
    """
    try:
        # Without running any Python, so that no other thread can change the data meanwhile.
        return marshal.dumps(value)
    except ValueError:
        return _Copier(field).copy(value, 0)  # other mappings, callables, or too deep


def thaw(frozen: Any) -> Any:
    """What was given to :func:`freeze`."""
    return marshal.loads(frozen) if isinstance(frozen, bytes) else frozen


class _Copier:
    """Copies what :mod:`marshal` does not know."""

    __slots__ = ("_field", "_left")

    def __init__(self, field: str) -> None:
        self._field = field
        self._left = _MAX_PARTS

    def copy(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise InvalidRequest(self._field, "is nested too deeply or has too many parts")
        if isinstance(value, str):
            return str.__str__(value)  # the text of an instance of a subclass
        if isinstance(value, _ATOMS) or callable(value):
            return value
        if isinstance(value, Mapping):
            # dict() first: while it is copied, other threads can change a mapping between two elements.
            return {
                self.copy(key, depth + 1): self.copy(item, depth + 1) for key, item in dict(value).items()
            }
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.copy(item, depth + 1) for item in list(value)]
        kind = type(value).__name__
        raise InvalidRequest(self._field, f"must be text, numbers, lists and mappings, got {kind}")
