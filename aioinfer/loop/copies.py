"""Checks and copies of what a caller gives, made before a call returns: nothing of it is read later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.errors import InvalidRequest
from aioinfer.plain import PLAIN, plain

__all__ = ["check_ids", "check_range", "freeze"]

_MAX_DEPTH = 200
_MAX_PARTS = 200_000


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


def freeze(field: str, value: Any, *, lists: bool = False) -> Any:
    """A deep copy of plain data (text, numbers, bytes, lists, tuples, mappings, None); callables stay as they
    are, and sets become lists. With ``lists``, so do tuples.

    Raises InvalidRequest for other types, and for data that is nested too deeply or has too many parts.
    """
    return _Copier(field, lists).copy(value, 0)


class _Copier:
    """Copies containers one by one, each in one step if it is a list or a dict, so that another thread cannot
    change it meanwhile; from then on the copy is read."""

    __slots__ = ("_field", "_left", "_lists")

    def __init__(self, field: str, lists: bool) -> None:
        self._field = field
        self._lists = lists
        self._left = _MAX_PARTS

    def copy(self, value: Any, depth: int) -> Any:
        value = plain(value)
        if type(value) in PLAIN or callable(value):
            return value
        if isinstance(value, (dict, Mapping)):
            return self._copy_mapping(value, depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            self._enter(len(value), depth)
            items = list(value)
            if not PLAIN.issuperset(map(type, items)):
                items = [self.copy(item, depth + 1) for item in items]
            return tuple(items) if isinstance(value, tuple) and not self._lists else items
        raise self._refused(value)

    def _copy_mapping(self, value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        self._enter(len(value), depth)
        known = dict(value)
        if not PLAIN.issuperset(map(type, known)):
            known = {self._key(key): item for key, item in known.items()}
        if not PLAIN.issuperset(map(type, known.values())):
            known = {key: self.copy(item, depth + 1) for key, item in known.items()}
        return known

    def _key(self, given: Any) -> Any:
        key = plain(given)
        if type(key) not in PLAIN:
            raise self._refused(given)
        return key

    def _enter(self, parts: int, depth: int) -> None:
        """A container, before it is copied."""
        self._left -= 1 + parts
        if depth > _MAX_DEPTH or self._left < 0:
            raise InvalidRequest(self._field, "is nested too deeply or has too many parts")

    def _refused(self, value: Any) -> InvalidRequest:
        kind = type(value).__name__
        return InvalidRequest(self._field, f"must be text, numbers, lists and mappings, got {kind}")
