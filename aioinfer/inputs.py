"""Plain data from callers: the copies that an engine keeps, and the checks of token ids.

What an engine keeps of a call is copied before the call returns, as values of exactly Python's own types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from aioinfer.errors import InvalidRequest, shown

__all__ = ["PLAIN", "check_ids", "check_range", "entries", "freeze", "keep_plain", "plain"]

#: types of plain values
PLAIN = frozenset((str, int, float, bytes, bool, type(None)))
#: base type -> the method that gives the value of an instance, also of an enumeration's member
_VALUE_OF: tuple[tuple[type, Any], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (bytes, bytes.__bytes__),
)

_MAX_DEPTH = 200
_MAX_PARTS = 200_000


def plain(value: Any) -> Any:
    """The value of an enumeration's member, of another instance of a subclass, or of a NumPy scalar, with a
    type of ``PLAIN``; anything else unchanged."""
    if type(value) in PLAIN:
        return value
    for kind, value_of in _VALUE_OF:
        if isinstance(value, kind):
            return value_of(value)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        element = value.item()
        return element if type(element) in PLAIN else value
    return value


def keep_plain(instance: Any, but: tuple[type, ...] = ()) -> None:
    """Make the fields of a new dataclass instance plain, except those ``but`` of these types."""
    for name in instance.__dataclass_fields__:
        given = getattr(instance, name)
        value = given if type(given) in but else plain(given)
        if value is not given:
            object.__setattr__(instance, name, value)


def entries(field: str, given: Any, most: int, what: str) -> tuple[Any, ...]:
    """The entries of a list, an array or another collection, as plain values; none for None. Raises
    InvalidRequest: it is none, or has more than ``most`` of ``what``."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes, bytearray, memoryview, Mapping)):
        raise InvalidRequest(field, f"must be a list of {what}, got {shown(given)}")
    try:
        count = len(given) if hasattr(given, "__len__") else 0
        if count <= most:
            each = given.tolist() if hasattr(given, "tolist") else given
            found = tuple(map(plain, islice(each, most + 1)))
            count = len(found)
    except TypeError:
        raise InvalidRequest(field, f"must be a list of {what}, got {shown(given)}") from None
    if count > most:
        raise InvalidRequest(field, f"at most {most} {what}")
    return found


def check_ids(field: str, ids: Sequence[Any], vocab_size: int | None = None) -> None:
    """Raise InvalidRequest unless all are token ids of the model; without ``vocab_size``, integers."""
    # The set has one element if all is well: no loop of Python's.
    if set(map(type, ids)) - {int}:
        bad = next(token for token in ids if type(token) is not int)
        raise InvalidRequest(field, f"must be integer token ids, got one of type {type(bad).__name__}")
    if vocab_size is not None:
        check_range(field, ids, vocab_size)


def check_range(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequest unless the model has all of these tokens."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        told = str(bad) if -(1 << 63) <= bad < 1 << 63 else "an integer of more than 64 bits"
        raise InvalidRequest(field, f"{told} is not a token id; the model has {vocab_size}")


def freeze(field: str, value: Any, *, lists: bool = False, kept: tuple[type, ...] = ()) -> Any:
    """A deep copy of plain data (text, numbers, bytes, lists, tuples, mappings, None); callables stay as they
    are, and sets become lists. With ``lists``, so do tuples. Values of the types ``kept``, which nobody can
    change, stay as they are.

    Raises InvalidRequest for other types, and for data that is nested too deeply or has too many parts.
    """
    left = _MAX_PARTS

    def copied(value: Any, depth: int) -> Any:
        nonlocal left
        value = plain(value)
        if type(value) in PLAIN or type(value) in kept or callable(value):
            return value
        if not isinstance(value, (dict, Mapping, list, tuple, set, frozenset)):
            raise refused(value)
        left -= 1 + len(value)
        if depth > _MAX_DEPTH or left < 0:
            raise InvalidRequest(field, "is nested too deeply or has too many parts")
        # One step copies a list or a dict: another thread may change the original at any time.
        if isinstance(value, Mapping):
            return {key(each): copied(item, depth + 1) for each, item in dict(value).items()}
        items = list(value)
        if not PLAIN.issuperset(map(type, items)):
            items = [copied(item, depth + 1) for item in items]
        return tuple(items) if isinstance(value, tuple) and not lists else items

    def key(given: Any) -> Any:
        name = plain(given)
        if type(name) not in PLAIN:
            raise refused(given)
        return name

    def refused(value: Any) -> InvalidRequest:
        kind = type(value).__name__
        return InvalidRequest(field, f"must be text, numbers, lists and mappings, got {kind}")

    return copied(value, 0)
