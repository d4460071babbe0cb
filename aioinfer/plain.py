"""Plain values: of what a caller gives, text, numbers and bytes are kept as exactly these types.

An instance of a subclass carries code of the caller's: an ``__eq__`` that raises, say, in a mapping that
requests share. None of it is called, and none of it kept.
"""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["PLAIN", "exactly", "keep_plain", "plain"]

_T = TypeVar("_T")

#: the types of plain values
PLAIN = frozenset((str, int, float, bytes, bool, type(None)))
#: types that can be subclassed -> what makes a plain value of an instance, whatever its class overrides
_EXACT = ((str, str.__str__), (int, int.__int__), (float, float.__float__), (bytes, bytes.__bytes__))


def plain(value: Any) -> Any:
    """The plain value of an instance of a subclass, or of an array's scalar; anything else unchanged."""
    kind = type(value)
    if kind in PLAIN:
        return value
    for base, exact in _EXACT:
        if issubclass(kind, base):
            return exact(value)
    # A scalar of numpy's: of no type above, and tested as its bytes where it is taken for a buffer.
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


def exactly(cls: type[_T], value: _T) -> _T:
    """An instance of a dataclass; of a subclass's instance, only the fields."""
    if type(value) is cls:
        return value
    names: Any = getattr(cls, "__dataclass_fields__", ())
    return cls(**{name: getattr(value, name) for name in names})
