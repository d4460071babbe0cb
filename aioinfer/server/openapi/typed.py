"""Schemas of typed dictionaries: the objects of answers, as declared in Python."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

__all__ = ["schema_of"]

_PLAIN: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}
_AT = "#/components/schemas/"


def schema_of(hint: Any, components: dict[str, Any], *, closed: bool = False) -> dict[str, Any]:
    """The JSON schema of a type: of plain values, lists, dictionaries, unions, literals and TypedDicts.

    TypedDicts are entered into ``components`` by their names, and referred to. ``closed``: their instances
    have no further keys. A mapping is a schema already. Raises TypeError for any other type.
    """
    if isinstance(hint, Mapping):
        return dict(hint)
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    if is_typeddict(hint):
        return _object(hint, components, closed)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return {**schema_of(arguments[0], components, closed=closed), "description": arguments[1]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": schema_of(arguments[0], components, closed=closed)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], components, closed=closed)}
    if origin in (Union, types.UnionType):
        parts = [schema_of(each, components, closed=closed) for each in arguments]
        if all(part.keys() == {"type"} for part in parts):
            return {"type": [part["type"] for part in parts]}
        return {"anyOf": parts}
    raise TypeError(f"no schema for {hint!r}")


def _object(kind: Any, components: dict[str, Any], closed: bool) -> dict[str, Any]:
    name = kind.__name__
    if name not in components:
        components[name] = {}  # an object may contain itself
        properties: dict[str, Any] = {}
        required: list[str] = []
        # Not __required_keys__, which Python 3.11 makes from annotations that are text.
        for key, hint in get_type_hints(kind, include_extras=True).items():
            optional = get_origin(hint) is NotRequired
            if not optional:
                required.append(key)
            given = get_args(hint)[0] if optional else hint
            properties[key] = schema_of(given, components, closed=closed)
        components[name] = {
            "type": "object",
            **({"description": " ".join(kind.__doc__.split())} if kind.__doc__ else {}),
            "properties": properties,
            "required": required,
            **({"additionalProperties": False} if closed else {}),
        }
    return {"$ref": f"{_AT}{name}"}
