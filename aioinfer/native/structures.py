"""Structures: the arguments of the kernels' entry points, as classes of ctypes with typed fields.

Names, fields and layout are those of ``source/interface.hpp``; :class:`~aioinfer.native.bindings.Kernels`
compares the two when it loads the library. A structure is filled by name: the type checker rejects a field
that is missing or does not exist.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast, dataclass_transform

__all__ = ["ENTRIES", "STRUCTURES", "Address", "Arguments", "Entry", "describe", "structure"]

#: of memory, or of an object that the library made; None is null
Address: TypeAlias = int | None

_KINDS: dict[str, type[Any]] = {
    "Address": ctypes.c_void_p,
    "int": ctypes.c_int64,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
}
#: every structure, in the order of ``layout.hpp``
STRUCTURES: list[type[Arguments]] = []
#: the entry points that take structures
ENTRIES: dict[type[Arguments], Entry] = {}


class Entry(NamedTuple):
    """An entry point of the library: see :func:`structure`."""

    name: str
    makes: bool
    by_number: bool


class Arguments(ctypes.Structure):
    """The arguments of one call. They hold addresses only: the caller keeps the memory alive until the call
    returns."""

    __slots__ = ()

    @classmethod
    def zeros(cls) -> Self:
        """A structure to be filled field by field and used again, which is quicker than to make new ones."""
        return cls.__new__(cls)


_Structure = TypeVar("_Structure", bound=type[Arguments])


@dataclass_transform(kw_only_default=True)
def structure(
    entry: str = "", *, makes: bool = False, by_number: bool = True
) -> Callable[[_Structure], _Structure]:
    """The same class with its annotations as fields, and no others: it has no ``__dict__``.

    Args:
        entry: the name of the entry point that takes it, if there is one.
        makes: whether that returns the handle of a new object.
        by_number: whether there is one for every type of model, which follows in its name.
    """

    def make(cls: _Structure) -> _Structure:
        fields = [(name, _KINDS[kind]) for name, kind in cls.__annotations__.items()]
        namespace = {
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "__slots__": (),
            "_fields_": fields,
        }
        made: Any = type(cls.__name__, cls.__bases__, namespace)
        STRUCTURES.append(made)
        if entry:
            ENTRIES[made] = Entry(entry, makes, by_number)
        return cast(_Structure, made)

    return make


def describe(structure: type[Arguments]) -> str:
    """A structure as ``layout.hpp`` writes it: name, name:kind@offset of every field, and size."""
    kinds = {kind: name.lower() for name, kind in _KINDS.items()}
    fields = [
        f"{name}:{kinds[kind]}@{getattr(structure, name).offset}" for name, kind, *_ in structure._fields_
    ]
    return " ".join([structure.__name__, *fields, f"size:{ctypes.sizeof(structure)}"])
